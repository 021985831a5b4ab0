// The text of one answer, a span per token. Spans are appended, once per frame; nothing that is there is touched again.

import { classOf, nameOf } from "/static/creators.js";
import { element } from "/static/dom.js";
import { percent, visible } from "/static/format.js";
import { hideTip, lines, showTip } from "/static/tip.js";

const NEAR = 40; // pixels from the end within which the box follows the text

export class Answer {
  /** `describe(index)` gives what is known of the token at that place: `{creator, drafted, target, others}`. */
  constructor(box, describe) {
    this.box = box;
    this.describe = describe;
    this.queue = [];
    this.frame = null;
    this.current = null; // the token that the keyboard is at
    box.addEventListener("pointerover", (event) => this.point(event.target));
    box.addEventListener("pointerout", (event) => hideTip(event.target));
    box.addEventListener("focusin", (event) => this.point(event.target));
    box.addEventListener("focusout", (event) => hideTip(event.target));
    box.addEventListener("keydown", (event) => this.move(event));
  }

  get text() {
    return this.box.textContent + this.queue.map((token) => token.text).join("");
  }

  clear() {
    this.queue = [];
    this.current = null;
    this.box.replaceChildren();
    this.box.tabIndex = 0;
  }

  /** Add tokens `[{index, text, creator}]`. */
  add(tokens) {
    this.queue.push(...tokens);
    this.frame ??= requestAnimationFrame(() => this.flush());
  }

  /** Draw what waits, now. */
  flush() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.frame = null;
    if (!this.queue.length) return;
    const { box } = this;
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;
    const fragment = document.createDocumentFragment();
    for (const { index, text, creator } of this.queue) {
      fragment.append(element("span", { class: `token ${classOf(creator)}`, "data-index": index }, text));
    }
    this.queue = [];
    box.append(fragment);
    if (follows) box.scrollTop = box.scrollHeight;
  }

  point(target) {
    if (!target.classList.contains("token")) return;
    const known = this.describe(Number(target.dataset.index));
    const facts = [["drafted by", nameOf(known.creator)]];
    for (const [drafter, logprob] of known.drafted) facts.push([nameOf(drafter), percent(logprob)]);
    if (known.target !== null) facts.push(["target", percent(known.target)]);
    for (const [text, logprob] of known.others) facts.push([`or ${visible(text)}`, percent(logprob)]);
    showTip(target, [element("strong", { class: `token ${classOf(known.creator)}` }, visible(target.textContent)), lines(facts)]);
  }

  move(event) {
    const { box } = this;
    const tokens = box.children;
    if (!tokens.length) return;
    const at = this.current ? [...tokens].indexOf(this.current) : -1;
    const places = { ArrowRight: at + 1, ArrowLeft: Math.max(at - 1, 0), Home: 0, End: tokens.length - 1 };
    const next = tokens[places[event.key]];
    if (!next) return;
    event.preventDefault();
    // One token at a time is a stop of the Tab key; thousands of stops would wall off the rest of the page.
    this.current?.removeAttribute("tabindex");
    this.current = next;
    box.tabIndex = -1;
    next.tabIndex = 0;
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
    this.point(next);
  }
}
