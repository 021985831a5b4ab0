// Numbers and tokens as people read them.

/** A probability from its natural logarithm: "62 %", "0.4 %", "< 0.01 %". */
export function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  if (value >= 99.95 || value === 0) return `${Math.round(value)} %`;
  if (value >= 10) return `${value.toFixed(0)} %`;
  if (value >= 0.01) return `${value.toPrecision(2)} %`;
  return "< 0.01 %";
}

/** Few digits: 1234, 123, 12.3, 1.23. */
export function short(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (Math.abs(value) >= 99.95) return value.toFixed(0);
  return value.toFixed(Math.abs(value) >= 9.995 ? 1 : 2);
}

/** A token with its spaces and line ends to be seen. */
export function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍");
}

/** At most so many characters, none of them cut in two. */
export function clipped(text, length) {
  const letters = [...text];
  return letters.length <= length ? text : `${letters.slice(0, length - 1).join("")}…`;
}
