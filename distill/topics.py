"""What the target is asked to write about: openings of a user's message, and topics to put into them.

Left alone, a model starts its user turns with the same few questions. The beginning of each message is therefore given to it;
the rest of the message, and the answer, are its own. The openings cover the kinds of work that people bring to a chat model,
so that the text a drafter learns from looks like the text it will meet.
"""

from __future__ import annotations

import random

OPENINGS = (
    # nothing given: the model asks what it likes
    "", "", "", "", "", "", "I", "I am", "My", "We", "Can you", "Could you please", "Is it", "Please", "How", "What", "Why",
    "When", "Who", "Which", "Where", "Tell me", "Give me", "Help me", "You are", "Imagine", "If", "In",
    # knowledge
    "What is {topic}", "Explain {topic}", "Explain how {topic}", "Why does {topic}", "How does {topic} work",
    "What are the main causes of {topic}", "Who was the first person to", "When did {topic} begin",
    "Compare {topic} and", "What is the difference between {topic} and", "List five facts about {topic}",
    "Describe {topic} to a ten-year-old", "What are the advantages and disadvantages of {topic}",
    "Is it true that {topic}", "In which year did", "What is the name of the", "How many", "Where is the",
    # writing
    "Write a short story about {topic}", "Write a poem about {topic}", "Write an email to my manager about {topic}",
    "Write a blog post on {topic}", "Write a speech about {topic}", "Write a product description for {topic}",
    "Write a letter to a friend about {topic}", "Write a news report about {topic}", "Draft a cover letter for",
    "Come up with ten names for", "Suggest a title for an essay on {topic}", "Write a dialogue between two people on {topic}",
    "Write a review of a book about {topic}", "Continue this story:", "Rewrite the following sentence:",
    "Make this paragraph more formal:", "Correct the grammar of this text:",
    # given text
    "Summarize the following article about {topic}:\n\n", "Read this passage and answer the question.\n\nPassage: ",
    "Summarize this text in three sentences:\n\n", "Extract the names and dates from this text:\n\n",
    "Classify the sentiment of this review:", "Here is a report on {topic}. What are its key points?\n\n",
    "Answer the question from the documents below.\n\nDocument 1: ", "Turn this text into bullet points:\n\n",
    "Give a headline for this article:\n\nBy ",
    # languages
    "Translate this sentence into French:", "Translate the following German sentence into English:",
    "Translate into Spanish:", "How do you say {topic} in Italian", "What does this sentence mean in English:",
    # mathematics and logic
    "Solve this problem step by step. {name} has", "{name} buys", "A train leaves", "{name} earns $", "If 3x + 5 =",
    "A farmer has", "There are 24 students in a class.", "A shop sells {topic} at $", "{name} reads", "Every day {name}",
    "What is the sum of", "Calculate the area of", "A recipe needs", "How many ways are there to", "{name} is twice as old as",
    "What is the probability that", "Find the value of",
    # code
    "Write a Python function that", "Write a Python function to compute", "Write a SQL query that",
    "Complete this function:\n\ndef ", "Complete the following code:\n\n```python\ndef ",
    "Fix the bug in this code:\n\n```python\n", "What does this code do?\n\n```python\n",
    "Write a JavaScript function that", "Write a class in Python for {topic}",
    "from typing import List\n\n\ndef ", "Write unit tests for a function that", "Explain recursion with",
    "Write a shell script that", "Write an HTML page about {topic}", "Implement a function which takes a list of",
    # plans and advice
    "How can I improve my", "Give me advice on {topic}", "Plan a three-day trip to", "Create a weekly plan for {topic}",
    "What should I cook with", "Give me a recipe for", "How do I start with {topic}", "What are some tips for {topic}",
    "Help me decide whether", "Design a lesson on {topic}", "Make a list of ideas for {topic}",
    "What are good questions about {topic}",
    # roles
    "You are a teacher of {topic}.", "Pretend to be a doctor and", "Act as a travel guide.",
    "Imagine you are writing about {topic}", "Let us play a game about {topic}.", "You are an expert in {topic}. ",
)  # fmt: skip

TOPICS = tuple(
    """
    volcanoes|the water cycle|photosynthesis|black holes|gravity|electricity|magnets|climate change|earthquakes|the moon|
    the solar system|dinosaurs|whales|bees|ants|elephants|wolves|birds|cats|dogs|horses|sharks|coral reefs|rain forests|deserts|
    rivers|mountains|the ocean|glaciers|weather|tornadoes|the human heart|the brain|the immune system|vaccines|sleep|exercise|
    nutrition|vitamins|mental health|stress|memory|learning languages|reading|music|jazz|the piano|the guitar|painting|
    photography|sculpture|film|theater|dance|poetry|novels|fairy tales|mythology|ancient Rome|ancient Egypt|Greek philosophy|
    the Middle Ages|the Renaissance|the Industrial Revolution|the French Revolution|the Second World War|the Cold War|democracy|
    human rights|elections|taxes|inflation|banking|the stock market|saving money|small businesses|marketing|advertising|
    leadership|teamwork|job interviews|remote work|time management|public speaking|negotiation|education|universities|
    homework|mathematics|algebra|geometry|statistics|probability|calculus|prime numbers|logic|chess|puzzles|board games|
    video games|football|basketball|swimming|running|cycling|climbing|yoga|the Olympic Games|cooking|bread|pasta|coffee|tea|
    chocolate|cheese|spices|gardening|trees|flowers|farming|recycling|plastic waste|solar panels|wind power|nuclear energy|
    electric cars|trains|airplanes|ships|bridges|skyscrapers|cities|public transport|traffic|tourism|museums|libraries|
    the internet|computers|programming|databases|operating systems|artificial intelligence|machine learning|robots|
    smartphones|social media|privacy|passwords|encryption|open source|sorting algorithms|binary search|data structures|
    web design|testing software|spreadsheets|space travel|Mars|satellites|telescopes|atoms|chemical reactions|acids|metals|
    crystals|light|sound|heat|energy|time|evolution|genes|cells|bacteria|viruses|plants|insects|fungi|medicine|hospitals|
    surgery|dentists|allergies|first aid|aging|childhood|parenting|friendship|love|marriage|families|happiness|fear|courage|
    honesty|patience|creativity|curiosity|humor|dreams|ethics|religion|festivals|holidays|weddings|birthdays|gifts|fashion|
    shoes|jewelry|furniture|houses|kitchens|tools|carpentry|knitting|pottery|camping|fishing|hiking|sailing|beaches|islands|
    Japan|India|Brazil|Kenya|Canada|Italy|Mexico|China|Australia|Norway|Egypt|Paris|London|New York|Tokyo|Istanbul|
    the Amazon|the Alps|the Sahara|the Arctic|immigration|languages|alphabets|writing systems|grammar|spelling|journalism|
    newspapers|television|radio|podcasts|law|courts|police|prisons|contracts|insurance|real estate|accounting|supply chains|
    shopping|restaurants|hotels|customer service|charity|volunteering|pollution|endangered animals|zoos|clean water|hunger|
    poverty|health care|retirement|a lost key|an old lighthouse|a talking cat|a secret garden|a long journey|a broken clock|
    a rainy day|a new neighbor|the last library|a small village|a forgotten letter|a storm at sea|a school play|a lonely robot
    """.replace("\n", "").split("|")
)
TOPICS = tuple(topic.strip() for topic in TOPICS)

NAMES = (
    "Anna", "Ben", "Clara", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kim", "Lucas", "Maria", "Nora",
    "Omar", "Paula", "Rosa", "Sam", "Tara", "Victor", "Wendy", "Yusuf", "Zoe",
)  # fmt: skip


def opening(rng: random.Random) -> str:
    """The first words of a user's message; empty for one that is free from its first word."""
    return rng.choice(OPENINGS).format(topic=rng.choice(TOPICS), name=rng.choice(NAMES))
