// One schedule's side of the playground: its choice, and the answer, numbers and trees of its last run.

import { Answer } from "/static/answer.js";
import { events } from "/static/api.js";
import { CountersView, Tally } from "/static/counters.js";
import { Timeline } from "/static/timeline.js";
import { TreeView, said } from "/static/tree.js";

const TREE_MS = 90; // between two pictures of a tree that grows
let made = 0;

export class Pane {
  constructor(template) {
    this.root = template.content.firstElementChild.cloneNode(true);
    const find = (name) => this.root.querySelector(name);
    made += 1;
    for (const [name, id] of [[".schedule", `schedule-${made}`], [".budget", `budget-${made}`]]) {
      find(name).id = id;
      find(name).previousElementSibling.htmlFor = id;
    }
    this.schedule = find(".schedule");
    this.budget = find(".budget");
    this.about = find(".about");
    this.hint = find(".hint");
    this.error = find(".error");
    this.label = find(".step-label");
    this.unverified = find(".unverified");
    this.counters = new CountersView(find(".counters"), find(".legend"));
    this.answer = new Answer(find(".answer"), (index) => this.describe(index));
    this.tree = new TreeView(find(".tree-box"));
    const parts = { strip: find(".strip"), slider: find(".slider"), previous: find(".previous"), next: find(".next") };
    this.timeline = new Timeline(parts, () => this.draw());
    this.unverified.addEventListener("change", () => this.draw());
    this.schedule.addEventListener("change", () => this.chosen());
    this.clear();
  }

  /** Fill the picker; `preferred` is the name to begin with. */
  offer(schedules, preferred) {
    const before = this.schedule.value;
    this.known = new Map(schedules.map((schedule) => [schedule.name, schedule]));
    this.schedule.replaceChildren(...schedules.map(({ name }) => new Option(name, name)));
    this.schedule.value = this.known.has(before) ? before : preferred;
    this.schedule.disabled = false;
    this.chosen();
  }

  chosen() {
    const schedule = this.known.get(this.schedule.value);
    this.budget.placeholder = schedule.auto ? "auto" : String(schedule.budget);
    this.budget.title = schedule.auto ? `As many nodes as pay, ${schedule.budget} at most` : "";
    this.budget.disabled = schedule.budget === 1;
    if (this.budget.disabled) this.budget.value = "";
    this.about.textContent = schedule.description;
  }

  clear() {
    this.tally = new Tally();
    this.steps = [];
    this.tokens = [];
    this.logprobs = [];
    this.truncated = false;
    this.drawn = null;
    clearTimeout(this.later);
    this.later = null;
    this.answer.clear();
    this.tree.clear();
    this.timeline.clear();
    this.counters.show(this.tally);
    this.label.textContent = "no step yet";
    this.error.hidden = true;
    this.hint.hidden = false;
  }

  /** Ask, and show the answer as it comes. Returns the finish reason; throws ApiError and AbortError. */
  async run(path, body, signal) {
    this.clear();
    this.hint.hidden = true;
    this.root.setAttribute("aria-busy", "true");
    const speculative = { schedule: this.schedule.value, trace: true };
    if (this.budget.value !== "") speculative.budget = Number(this.budget.value);
    let reason = null;
    try {
      for await (const event of events(path, { ...body, stream: true, speculative }, signal)) {
        for (const choice of event.choices) {
          this.take(choice);
          reason = choice.finish_reason ?? reason;
        }
        if (event.metrics) this.tally.finish(event.metrics.graft);
      }
      return reason;
    } catch (error) {
      if (error.name !== "AbortError") {
        this.error.textContent = error.message;
        this.error.hidden = false;
      }
      throw error;
    } finally {
      this.root.removeAttribute("aria-busy");
      this.answer.flush();
      this.counters.show(this.tally);
      clearTimeout(this.later);
      this.later = null;
      this.draw();
    }
  }

  take(choice) {
    const { graft, logprobs } = choice;
    if (logprobs) this.logprobs.push(...likeliest(logprobs));
    if (!graft) return;
    for (const token of graft.tokens) this.tokens[token.index] ??= token;
    this.answer.add(graft.tokens);
    const steps = graft.steps.map((step) => ({ step, creators: writers(step) }));
    this.tally.count(steps, graft.tokens, performance.now());
    for (const { step, creators } of steps) {
      this.steps.push(step);
      this.timeline.add(creators);
    }
    this.truncated ||= graft.truncated;
    this.later ??= setTimeout(() => {
      this.later = null;
      this.counters.show(this.tally);
      if (this.timeline.follows) this.draw();
      else this.caption();
    }, TREE_MS);
  }

  draw() {
    const step = this.steps[this.timeline.index];
    if (!step) return;
    this.caption();
    const { checked } = this.unverified;
    if (this.drawn?.step === step && this.drawn.checked === checked) return;
    this.drawn = { step, checked };
    this.tree.draw(step, { unverified: checked });
  }

  caption() {
    const step = this.steps[this.timeline.index];
    const cut = this.truncated ? ", trees end here" : "";
    this.label.textContent = `step ${this.timeline.index + 1} of ${this.steps.length}${cut}: ${said(step)}`;
  }

  /** What is known of the token at a place of the answer. */
  describe(index) {
    const creator = this.tokens[index]?.creator ?? "target";
    const step = this.steps.find((one) => one.first_token <= index && index < one.first_token + one.num_tokens);
    const node = step?.nodes.filter((one) => one.accepted)[index - step.first_token + 1];
    const own = this.logprobs[index];
    return {
      creator,
      drafted: Object.entries(node?.logprobs ?? {}),
      target: own?.logprob ?? node?.target_logprob ?? null,
      others: own?.others ?? [],
    };
  }
}

/** Who wrote each token of a step: the accepted path, then the target; cut where the answer ended. */
function writers(step) {
  const accepted = step.nodes.slice(1).filter((node) => node.accepted);
  return [...accepted.map((node) => node.creator), "target"].slice(0, step.num_tokens);
}

/** The two shapes of log-probabilities that the endpoints have, as `[{logprob, others: [[text, logprob]]}]`. */
function likeliest(logprobs) {
  if (logprobs.content) {
    return logprobs.content.map((one) => ({
      logprob: one.logprob,
      others: one.top_logprobs.filter((other) => other.token !== one.token).map((other) => [other.token, other.logprob]),
    }));
  }
  return logprobs.tokens.map((token, place) => ({
    logprob: logprobs.token_logprobs[place],
    others: Object.entries(logprobs.top_logprobs[place]).filter(([text]) => text !== token),
  }));
}
