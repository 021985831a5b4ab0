// The numbers of an answer while it is written, from the steps and the clock; the server's own sums replace them in the end.

import { CREATORS, classOf, nameOf } from "/static/creators.js";
import { element } from "/static/dom.js";
import { short } from "/static/format.js";

const SHOWN = [
  ["rate", "tokens/s", "Tokens per second, after the first ones came"],
  ["tau", "tokens/step", "Tokens per step: what one pass of the target yields"],
  ["delta", "forwards/step", "Draft forwards per verification"],
  ["draft", "draft ms/step", "Milliseconds of drafting per step"],
  ["verify", "verify ms/step", "Milliseconds of the target's pass per step"],
  ["tokens", "tokens", "Tokens written so far"],
];

/** Sums over the steps of one answer. */
export class Tally {
  constructor() {
    this.tokens = this.steps = this.forwards = this.draftMs = this.verifyMs = 0;
    this.creators = {};
    this.began = null; // {ms, tokens} when the first tokens were there
    this.lastMs = 0;
  }

  /** What came with one event at `ms`: its steps with the creators of what they wrote, or bare tokens where trees ended. */
  count(steps, tokens, ms) {
    for (const { step, creators } of steps) {
      this.steps += 1;
      this.draftMs += step.draft_ms;
      this.verifyMs += step.verify_ms;
      for (const count of Object.values(step.forwards)) this.forwards += count;
      this.add(creators);
    }
    if (!steps.length) this.add(tokens.map((token) => token.creator));
    if (this.tokens) this.began ??= { ms, tokens: this.tokens };
    this.lastMs = ms;
  }

  add(creators) {
    this.tokens += creators.length;
    for (const creator of creators) this.creators[creator] = (this.creators[creator] ?? 0) + 1;
  }

  /** The server's sums: right also where the trace was cut. */
  finish(graft) {
    const drafters = Object.values(graft.drafters);
    const sum = (name) => drafters.reduce((total, one) => total + one[name], 0);
    this.steps = graft.num_steps;
    this.draftMs = graft.draft_ms;
    this.verifyMs = graft.verify_ms;
    this.forwards = sum("forwards");
    this.tokens = graft.num_steps + sum("accepted") - (graft.trimmed > 0 ? 1 : 0);
  }

  /** Tokens per second after the first ones came; null until more have come. */
  get rate() {
    const seconds = this.began ? (this.lastMs - this.began.ms) / 1000 : 0;
    return seconds > 0 ? (this.tokens - this.began.tokens) / seconds : null;
  }

  get values() {
    const perStep = (sum) => short(this.steps ? sum / this.steps : null);
    return {
      tokens: this.tokens ? String(this.tokens) : "–",
      rate: short(this.rate),
      tau: perStep(this.tokens),
      delta: perStep(this.forwards),
      draft: perStep(this.draftMs),
      verify: perStep(this.verifyMs),
    };
  }
}

/** A row of figures and a legend with counts. */
export class CountersView {
  constructor(list, legend) {
    this.figures = {};
    for (const [name, label, title] of SHOWN) {
      const value = element("dd", { "data-counter": name }, "–");
      list.append(element("div", { title }, value, element("dt", {}, label)));
      this.figures[name] = value;
    }
    this.legend = legend;
    this.counts = {};
    CREATORS.forEach((creator) => this.entry(creator));
  }

  show(tally) {
    for (const [name, text] of Object.entries(tally.values)) {
      if (this.figures[name].textContent !== text) this.figures[name].textContent = text;
    }
    for (const creator of Object.keys(tally.creators)) if (!(creator in this.counts)) this.entry(creator);
    for (const [creator, place] of Object.entries(this.counts)) place.textContent = String(tally.creators[creator] ?? 0);
  }

  entry(creator) {
    const count = element("span", { class: "count" }, "0");
    const swatch = element("span", { class: `token ${classOf(creator)}` }, nameOf(creator));
    this.counts[creator] = count;
    this.legend.append(element("li", { "data-creator": creator }, swatch, count));
  }
}
