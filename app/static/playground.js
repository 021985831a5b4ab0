// The playground page: the request, one or two panes, and what became of the run.

import { apiKey, call } from "/static/api.js";
import { element } from "/static/dom.js";
import { short } from "/static/format.js";
import { KeyDialog } from "/static/key.js";
import { Pane } from "/static/pane.js";

const EXAMPLES = [
  ["Rewrite", "Repeat this list and add two animals at the end:\n1. a red fox\n2. a grey wolf\n3. a brown bear\n4. a white owl"],
  ["Code", "Write a Python function that adds two numbers, then the same function for subtraction, multiplication and division."],
  ["Question", "Why is the sky blue? Answer in three sentences."],
  ["Count", "Count from one to twenty in words, separated by commas."],
];
const RETRY_MS = 1500; // between two looks at a server that is still loading

const find = (id) => document.getElementById(id);
const panes = [new Pane(find("pane")), new Pane(find("pane"))];
const keys = new KeyDialog(apiKey, find, start);
let running = null; // AbortController of the run

find("panes").append(panes[0].root);
for (const [label, text] of EXAMPLES) {
  const button = element("button", { type: "button", class: "quiet" }, label);
  button.addEventListener("click", () => {
    find("prompt").value = text;
    find("prompt").focus();
  });
  find("examples").append(button);
}
find("prompt").value = EXAMPLES[1][1];

find("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
find("stop").addEventListener("click", () => running?.abort());
find("compare").addEventListener("change", arrange);
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    find("form").requestSubmit();
  } else if (event.key === "Escape" && running) {
    running.abort();
  }
});
arrange();
start();

/** Ask what is served; again and again while it loads. */
async function start() {
  try {
    const [models, schedules] = [await call("/v1/models"), await call("/v1/schedules")];
    find("model-name").textContent = models.data[0].id;
    find("model").dataset.state = "ready";
    const names = schedules.data.map((schedule) => schedule.name);
    const usual = schedules.data.find((schedule) => schedule.default)?.name ?? names[0];
    panes[0].offer(schedules.data, usual);
    panes[1].offer(schedules.data, usual === "ar" ? names.find((name) => name !== "ar") ?? "ar" : "ar");
  } catch (error) {
    find("model").dataset.state = "waiting";
    if (error.status === 401) {
      find("model-name").textContent = "needs an API key";
      keys.open(apiKey.value ? error.message : null);
    } else {
      find("model-name").textContent = error.status === 503 ? "loading" : "not reachable";
      setTimeout(start, RETRY_MS);
    }
  }
}

function arrange() {
  const two = find("compare").checked;
  find("order").hidden = !two;
  find("verdict").hidden = !two;
  find("panes").classList.toggle("two", two);
  if (two) find("panes").append(panes[1].root);
  else panes[1].root.remove();
  find("verdict").replaceChildren("Run to compare the two schedules on the same prompt.");
}

async function run() {
  if (running) return;
  if (panes[0].schedule.disabled) {
    tell("The server is not ready yet.");
    return;
  }
  const two = find("compare").checked;
  const atOnce = two && document.querySelector("[name=order]:checked").value === "at-once";
  const used = two ? panes : panes.slice(0, 1);
  const [path, body] = request();
  running = new AbortController();
  busy(true);
  // On a narrow screen the answer is below the form.
  if (find("results").getBoundingClientRect().top > innerHeight / 2) find("results").scrollIntoView({ block: "start" });
  if (two) find("verdict").replaceChildren("…");
  used.slice(1).forEach((pane) => pane.clear());
  const began = performance.now();
  try {
    const ask = (pane) => pane.run(path, body, running.signal);
    const reasons = atOnce ? await together(used.map(ask)) : await inTurn(used, ask);
    const seconds = ((performance.now() - began) / 1000).toFixed(1);
    const ends = reasons.includes("length") ? " Cut at max tokens." : "";
    tell(`Finished in ${seconds} s.${ends}`);
    if (two) judge(body, atOnce);
  } catch (error) {
    tell(error.name === "AbortError" ? "Stopped." : `Failed: ${error.message}`);
    if (two) find("verdict").replaceChildren("No comparison: a run did not finish.");
    if (error.status === 401) keys.open(error.message);
  } finally {
    running = null;
    busy(false);
  }
}

async function inTurn(used, ask) {
  const reasons = [];
  for (const pane of used) {
    tell(`${pane.schedule.value} is answering…`);
    reasons.push(await ask(pane));
  }
  return reasons;
}

/** Both to their end; the first failure of the two counts. */
async function together(runs) {
  tell("Both are answering…");
  const results = await Promise.allSettled(runs);
  const failed = results.find((result) => result.status === "rejected");
  if (failed) throw failed.reason;
  return results.map((result) => result.value);
}

/** Path and body, without what the panes add. */
function request() {
  const number = (id) => (find(id).value === "" ? undefined : Number(find(id).value));
  const body = { temperature: number("temperature"), max_tokens: number("max-tokens"), seed: number("seed") };
  // Two schedules can be compared only if both draw the same random numbers.
  if (body.seed === undefined && body.temperature !== 0) body.seed = crypto.getRandomValues(new Uint32Array(1))[0];
  if (document.querySelector("[name=format]:checked").value === "text") {
    return ["/v1/completions", { ...body, prompt: find("prompt").value, logprobs: 3 }];
  }
  const messages = [{ role: "user", content: find("prompt").value }];
  if (find("system").value.trim()) messages.unshift({ role: "system", content: find("system").value });
  return ["/v1/chat/completions", { ...body, messages, logprobs: true, top_logprobs: 3 }];
}

/** Say whether both wrote the same, and who was faster. */
function judge(body, atOnce) {
  const [a, b] = panes;
  const [left, right] = [a.answer.text, b.answer.text];
  const words = [];
  if (left === right) {
    words.push(element("strong", {}, "Same text. "));
  } else {
    let at = 0;
    while (at < left.length && left[at] === right[at]) at += 1;
    const why = "Where two tokens are equally likely up to rounding, either may win. ";
    words.push(element("strong", {}, `The texts part at character ${at + 1}. `), why);
  }
  const [fast, slow] = a.tally.rate >= b.tally.rate ? [a, b] : [b, a];
  const times = fast.tally.rate / slow.tally.rate;
  if (times < 1.02) {
    words.push("Both were about equally fast. ");
  } else if (Number.isFinite(times)) {
    words.push(`${fast.schedule.value} wrote ${short(times)} times as many tokens per second as ${slow.schedule.value}. `);
  }
  if (atOnce) words.push(element("em", {}, "They shared the machine, so neither time is what it would be alone."));
  else words.push(element("em", {}, "One run each; whoever goes second may find caches warm."));
  find("verdict").replaceChildren(...words);
}

function busy(is) {
  find("run").disabled = is;
  find("stop").disabled = !is;
  find("compare").disabled = is;
}

function tell(text) {
  find("status").textContent = text;
}
