// One step's draft tree as SVG: the accepted path bold, rescored edges with a mark in the color of who rescored them.

import { classOf, nameOf } from "/static/creators.js";
import { element, svg } from "/static/dom.js";
import { clipped, percent, visible } from "/static/format.js";
import { BOX, layout } from "/static/layout.js";
import { hideTip, lines, showTip } from "/static/tip.js";

const MOST = 160; // nodes drawn; the unlikeliest unverified ones are left out beyond
const LETTERS = 14; // of a token

export class TreeView {
  constructor(box) {
    this.box = box;
    this.shown = null;
    this.items = new Map(); // node -> its group
    box.addEventListener("pointerover", (event) => this.point(event.target.closest?.(".node")));
    box.addEventListener("pointerout", (event) => hideTip(event.target.closest?.(".node")));
    box.addEventListener("focusin", (event) => this.point(event.target.closest?.(".node")));
    box.addEventListener("focusout", (event) => hideTip(event.target.closest?.(".node")));
    box.addEventListener("keydown", (event) => this.move(event));
  }

  clear() {
    this.shown = null;
    this.items.clear();
    this.box.replaceChildren();
  }

  /** Draw a step of a trace; without `unverified`, only what the target has seen. */
  draw(step, { unverified }) {
    const nodes = chosen(step, unverified);
    const { places, width, height } = layout(nodes);
    const hadFocus = this.box.contains(document.activeElement);
    const picture = svg("svg", { class: "tree", width, height, viewBox: `0 0 ${width} ${height}`, role: "tree" });
    picture.setAttribute("aria-label", `Draft tree of step ${step.step + 1}: ${said(step)}`);
    const edges = svg("g", {});
    const boxes = svg("g", {});
    this.items.clear();
    for (const node of nodes) {
      const place = places.get(node.id);
      if (places.has(node.parent)) edges.append(...edge(node, places.get(node.parent), place));
      const group = box(node, place);
      this.items.set(node.id, { node, group });
      boxes.append(group);
    }
    picture.append(edges, boxes);
    this.shown = nodes;
    this.box.replaceChildren(picture);
    const root = this.items.get(0).group;
    root.setAttribute("tabindex", "0");
    if (hadFocus) root.focus({ preventScroll: true });
  }

  point(group) {
    if (!group) return;
    const { node } = this.items.get(Number(group.dataset.node));
    showTip(group, [element("strong", { class: `token ${classOf(node.creator)}` }, visible(node.text)), lines(facts(node))]);
  }

  move(event) {
    const group = event.target.closest?.(".node");
    if (!group) return;
    const id = Number(group.dataset.node);
    const { node } = this.items.get(id);
    const column = this.shown.filter((other) => other.depth === node.depth).sort((a, b) => this.y(a) - this.y(b));
    const at = column.indexOf(node);
    const targets = {
      ArrowLeft: node.parent,
      ArrowRight: this.shown.filter((other) => other.parent === id).sort((a, b) => this.y(a) - this.y(b))[0]?.id,
      ArrowUp: column[at - 1]?.id,
      ArrowDown: column[at + 1]?.id,
      Home: 0,
    };
    const next = this.items.get(targets[event.key]);
    if (!next) return;
    event.preventDefault();
    group.setAttribute("tabindex", "-1");
    next.group.setAttribute("tabindex", "0");
    next.group.focus();
    next.group.scrollIntoView({ block: "nearest", inline: "nearest" });
    this.point(next.group);
  }

  y(node) {
    return Number(this.items.get(node.id).group.dataset.y);
  }
}

/** The nodes to draw, the target's own token included, each with an id, a label and a weight among its siblings. */
function chosen(step, unverified) {
  const all = step.nodes.map((node, id) => ({ ...node, id, label: clipped(visible(node.text), LETTERS), weight: weigh(node) }));
  let kept = all.filter((node) => node.verified || unverified);
  if (kept.length > MOST) {
    const worst = kept.filter((node) => !node.verified).sort((a, b) => a.path_logprob - b.path_logprob);
    const gone = new Set(worst.slice(0, kept.length - MOST).map((node) => node.id));
    for (const node of kept) if (gone.has(node.parent)) gone.add(node.id); // parents come first
    kept = kept.filter((node) => !gone.has(node.id));
  }
  const path = all.filter((node) => node.accepted);
  const last = path[path.length - 1];
  kept.push({
    ...step.bonus,
    id: all.length,
    parent: last.id,
    depth: last.depth + 1,
    label: clipped(visible(step.bonus.text), LETTERS),
    weight: 4,
    creator: "target",
    scorer: "target",
    logprobs: {},
    path_logprob: null,
    rescored: false,
    verified: true,
    accepted: true,
    bonus: true,
    unwritten: step.num_tokens < path.length, // the answer ended before it
  });
  return kept;
}

/** Accepted ones come first, then verified ones, then the likeliest. */
const weigh = (node) => (node.accepted ? 4 : node.verified ? 2 : 0) + Math.exp(node.logprobs[node.scorer] ?? -99);

function edge(node, from, to) {
  const x1 = from.x + from.width;
  const middle = (x1 + to.x) / 2;
  const kind = node.unwritten ? "unverified" : node.accepted ? "accepted" : node.verified ? "" : "unverified";
  const path = svg("path", { class: `edge ${kind}`, d: `M${x1} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${to.x} ${to.y}` });
  if (!node.rescored) return [path];
  const y = (from.y + to.y) / 2;
  const mark = `M${middle} ${y - 5}l5 5-5 5-5-5z`;
  return [path, svg("path", { class: `mark ${classOf(node.scorer)}`, d: mark })];
}

function box(node, { x, y, width }) {
  const kind = node.unwritten ? "unwritten" : node.bonus ? "bonus" : node.accepted ? "accepted" : node.verified ? "" : "unverified";
  const logprob = node.bonus ? node.target_logprob : node.logprobs[node.scorer];
  return svg(
    "g",
    {
      class: `node ${classOf(node.creator)} ${kind}`,
      role: "treeitem",
      "aria-level": node.depth + 1,
      "aria-label": `${visible(node.text)}: ${facts(node).map((pair) => pair.join(" ")).join(", ")}`,
      "data-node": node.id,
      "data-y": y,
      tabindex: "-1",
    },
    svg("rect", { x, y: y - BOX / 2, width, height: BOX, rx: 6 }),
    svg("text", { class: "word", x: x + width / 2, y: logprob === undefined ? y + 4 : y - 2, "text-anchor": "middle" }, node.label),
    logprob === undefined
      ? null
      : svg("text", { class: "odds", x: x + width / 2, y: y + 12, "text-anchor": "middle" }, percent(logprob)),
  );
}

function facts(node) {
  if (node.bonus) {
    return [["target", percent(node.target_logprob)], ["", node.unwritten ? "not written: the answer ended" : "the target's own token"]];
  }
  if (node.parent === -1) return [["root", "the text's last token"]];
  const found = [["drafted by", nameOf(node.creator)]];
  for (const [drafter, logprob] of Object.entries(node.logprobs)) {
    found.push([nameOf(drafter) + (node.rescored && drafter === node.scorer ? " (rescored)" : ""), percent(logprob)]);
  }
  found.push(["path", percent(node.path_logprob)]);
  if (node.target_logprob !== null) found.push(["target", percent(node.target_logprob)]);
  found.push(["", node.accepted ? "accepted" : node.verified ? "verified, not accepted" : "not verified"]);
  return found;
}

/** A step in words. */
export function said(step) {
  const drafted = step.nodes.length - 1;
  const verified = step.nodes.filter((node) => node.verified).length - 1;
  const accepted = step.nodes.filter((node) => node.accepted).length - 1;
  if (!drafted) return "nothing drafted, 1 token written";
  return `${drafted} drafted, ${verified} verified, ${accepted} accepted`;
}
