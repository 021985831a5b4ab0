// Who drafts: names, order and the classes that give each its color and its line, so that color is never the only sign.

const KNOWN = { ngram: "n-gram", small: "small", medium: "medium", target: "target" };

/** In the order of legends; a drafter that this page does not know comes with the others' look. */
export const CREATORS = Object.keys(KNOWN);

export const nameOf = (creator) => KNOWN[creator] ?? creator;

export const classOf = (creator) => (creator in KNOWN ? creator : "other");
