// Intervals drawn one below the other: a point for the estimate, a line from bound to bound.

import { svg } from "/static/dom.js";

const WIDTH = 460;
const LEFT = 110;
const RIGHT = 14;
const ROW = 30;
const FOOT = 26;

/**
 * The picture of rows `[{name, interval: {estimate, low, high} | null, kind}]`; `kind` is a class of style.css.
 * `zero` is a value with a dashed line, always in view; `text` makes the words of a number.
 */
export function intervals(rows, { label, zero = null, text }) {
  const known = rows.map((row) => row.interval).filter(Boolean);
  const ends = known.flatMap((one) => [one.low, one.high]).concat(zero === null ? [] : [zero]);
  const [low, high] = range(ends);
  const place = (value) => LEFT + ((clamp(value, low, high) - low) / (high - low)) * (WIDTH - LEFT - RIGHT);
  const height = rows.length * ROW + FOOT;
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": said(rows, label, text) });
  for (const tick of ticks(low, high)) {
    const x = place(tick);
    picture.append(
      svg("line", { class: "grid", x1: x, x2: x, y1: 0, y2: height - FOOT }),
      svg("text", { x, y: height - 9, "text-anchor": "middle" }, text(tick)),
    );
  }
  if (zero !== null) picture.append(svg("line", { class: "zero", x1: place(zero), x2: place(zero), y1: 0, y2: height - FOOT }));
  rows.forEach(({ name, interval, kind }, row) => {
    const y = row * ROW + ROW / 2;
    const group = svg("g", { class: kind }, svg("text", { class: "name", x: 0, y: y + 4 }, name.length > 16 ? `${name.slice(0, 15)}…` : name));
    if (interval) {
      group.append(
        svg("line", { class: "bar", x1: place(interval.low), x2: place(interval.high), y1: y, y2: y }),
        svg("circle", { class: "point", cx: place(interval.estimate), cy: y, r: 5 }),
        svg("title", {}, `${name}: ${text(interval.estimate)} (${text(interval.low)} to ${text(interval.high)})`),
      );
    } else {
      group.append(svg("text", { x: LEFT, y: y + 4 }, "not enough requests yet"));
    }
    picture.append(group);
  });
  return picture;
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/** What is in view: all bounds with some air; a bound that is far out is cut rather than squeezing the others. */
function range(ends) {
  if (!ends.length) return [0, 1];
  const low = Math.min(...ends);
  const high = Math.max(...ends);
  const air = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low - air, high + air];
}

function ticks(low, high) {
  const step = 10 ** Math.floor(Math.log10((high - low) / 3));
  const wide = [1, 2, 5, 10].map((times) => times * step).find((size) => (high - low) / size <= 5);
  const found = [];
  for (let tick = Math.ceil(low / wide) * wide; tick <= high; tick += wide) found.push(Math.abs(tick) < wide / 1e6 ? 0 : tick);
  return found;
}

function said(rows, label, text) {
  const one = ({ name, interval }) =>
    interval ? `${name} ${text(interval.estimate)}, between ${text(interval.low)} and ${text(interval.high)}` : `${name} not known yet`;
  return `${label}: ${rows.map(one).join("; ")}`;
}
