"""Twenty short prompts of many kinds, for proofs and benches on a machine that has no others."""

PROMPTS = (
    "Explain in three sentences why a kettle gets louder before the water boils.",
    "Write a Python function that returns the second largest number of a list.",
    "Translate into French: The bakery at the corner opens at six in the morning.",
    "A farmer has 17 sheep and buys twice as many goats. How many animals does he have now?",
    "List five things to check before a long bicycle tour.",
    "Write the first paragraph of a story about a lighthouse keeper who cannot sleep.",
    "Summarize in one sentence: The meeting was moved from Monday to Thursday because two of the five engineers were ill, "
    "and the room was already taken on Wednesday.",
    "What is the difference between weather and climate?",
    'Write a JSON object with the keys "name", "age" and "hobbies" for a person of your invention.',
    "Repeat this sentence four times: The quick tests run first.",
    "Schreibe zwei Sätze über den Herbst.",
    "Give me a shopping list for a vegetable soup for four people.",
    "Write a polite e-mail that asks a landlord to repair a dripping tap.",
    "Which is heavier, a kilogram of iron or a kilogram of cotton? Explain.",
    "Write an SQL query that counts the orders of each customer in the year 2023.",
    "Name the planets of the solar system, one per line, with one fact about each.",
    "Correct the spelling: Tomorow we wil definitly recieve the pakage.",
    "Write a short poem about rain on a tin roof.",
    "Count from one to twenty in words, separated by commas.",
    "Explain to a ten-year-old what a computer program is. Use an emoji or two. 🙂",
)
