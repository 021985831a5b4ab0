// All steps of an answer: a strip with a block for every token in its creator's color, and a slider that goes back to a step.

import { classOf } from "/static/creators.js";
import { svg } from "/static/dom.js";

const TALL = 9; // tokens of a step that the strip has room for; longer blocks are cut

export class Timeline {
  /** `onStep(index)` is called when somebody goes to a step, not when the newest is followed. */
  constructor({ strip, slider, previous, next }, onStep) {
    Object.assign(this, { strip, slider, previous, next });
    this.count = 0;
    this.follows = true;
    const go = (index) => {
      this.follows = index === this.count - 1;
      slider.value = index;
      this.buttons();
      onStep(index);
    };
    slider.addEventListener("input", () => go(Number(slider.value)));
    previous.addEventListener("click", () => go(Math.max(Number(slider.value) - 1, 0)));
    next.addEventListener("click", () => go(Math.min(Number(slider.value) + 1, this.count - 1)));
    this.clear();
  }

  get index() {
    return Number(this.slider.value);
  }

  clear() {
    this.count = 0;
    this.follows = true;
    this.marker = svg("rect", { class: "marker", y: 0, width: 1, height: TALL, x: -1 });
    this.strip.replaceChildren(this.marker);
    this.strip.setAttribute("viewBox", `0 0 60 ${TALL}`);
    this.slider.max = 0;
    this.slider.value = 0;
    this.buttons();
  }

  /** One more step, by the creators of the tokens it wrote. */
  add(creators) {
    const blocks = creators.slice(0, TALL).map((creator, place) =>
      svg("rect", { class: classOf(creator), x: this.count + 0.08, y: TALL - place - 0.94, width: 0.84, height: 0.88 }),
    );
    this.strip.append(...blocks);
    this.count += 1;
    this.strip.setAttribute("viewBox", `0 0 ${Math.max(this.count, 60)} ${TALL}`);
    this.slider.max = this.count - 1;
    if (this.follows) this.slider.value = this.count - 1;
    this.buttons();
  }

  buttons() {
    const at = this.index;
    this.slider.disabled = this.count === 0;
    this.previous.disabled = at <= 0;
    this.next.disabled = at >= this.count - 1;
    this.marker.setAttribute("x", this.count ? at : -1);
    this.slider.setAttribute("aria-valuetext", `step ${at + 1} of ${this.count}`);
  }
}
