// The one tooltip of a page: shown beside what is pointed at or focused, never in the way of the pointer.

import { element } from "/static/dom.js";

const tip = element("div", { class: "tip", role: "tooltip", id: "tip", hidden: true });
document.body.append(tip);
let owner = null;

/** Show `children` beside `anchor`. */
export function showTip(anchor, children) {
  hideTip();
  owner = anchor;
  anchor.setAttribute("aria-describedby", "tip");
  tip.replaceChildren(...children);
  tip.hidden = false;
  const box = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const above = box.top - height - 8;
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
  tip.style.top = `${above >= 8 ? above : Math.min(box.bottom + 8, innerHeight - height - 8)}px`;
}

/** Hide it; with an anchor, only if it is that one's. */
export function hideTip(anchor = owner) {
  if (owner === null || anchor !== owner) return;
  owner.removeAttribute("aria-describedby");
  owner = null;
  tip.hidden = true;
}

addEventListener("scroll", () => hideTip(), { capture: true, passive: true });
addEventListener("keydown", (event) => event.key === "Escape" && hideTip());

/** `[["label", "value"], …]` as lines of a tooltip. */
export function lines(pairs) {
  return element("dl", {}, ...pairs.flatMap(([label, value]) => [element("dt", {}, label), element("dd", {}, value)]));
}
