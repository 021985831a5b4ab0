// One experiment as a card: arms with their figures, intervals as a picture, and the buttons for who may press them.

import { intervals } from "/static/chart.js";
import { element } from "/static/dom.js";
import { short } from "/static/format.js";

const signed = (value) => (value === 0 ? "0 %" : `${value > 0 ? "+" : ""}${(100 * value).toFixed(Math.abs(value) < 0.0995 ? 1 : 0)} %`);
const share = (value) => `${Math.round(100 * value)} %`;

/** `act(name, action, body, said)` does something to it; null: only looking. */
export function experimentCard(experiment, act) {
  const { name, state, arms, control } = experiment;
  const reported = new Map((experiment.report?.arms ?? arms).map((arm) => [arm.name, arm]));
  const differences = experiment.report?.differences ?? experiment.differences;
  const card = element("article", { class: "card", "data-experiment": name });
  card.append(
    element(
      "header",
      { class: "card-head" },
      element("h2", {}, name),
      element("span", { class: `badge ${state}` }, state),
      element("span", { class: "facts" }, facts(experiment)),
    ),
    element("div", { class: "scroll" }, table(experiment, reported, act !== null && state === "running")),
    element(
      "div",
      { class: "charts" },
      figure(
        "Tokens per second, by arm",
        intervals(
          arms.map((arm) => ({
            name: arm.name,
            interval: reported.get(arm.name).tokens_per_s,
            kind: arm.name === control ? "control" : "",
          })),
          { label: "Tokens per second", text: short },
        ),
      ),
      figure(
        `Speed against ${control}; thick where it is decided`,
        intervals(
          differences.map((one) => ({ name: one.arm, interval: one.tokens_per_s, kind: one.decided ? "decided" : "" })),
          { label: `Speed against ${control}`, zero: 0, text: signed },
        ),
      ),
    ),
  );
  if (act) card.append(actions(experiment, card, act));
  return card;
}

function facts(experiment) {
  const parts = [];
  if (experiment.mode === "bandit") parts.push("weights follow the winner");
  if (experiment.alpha) parts.push(`chance of any error ${share(experiment.alpha)}`);
  if (experiment.guard) parts.push(`arms surely ${share(experiment.guard)} slower are stopped`);
  if (experiment.winner) parts.push(`winner: ${experiment.winner}`);
  if (experiment.promoted) parts.push(`promoted: ${experiment.promoted}`);
  return parts.join(" · ");
}

function table(experiment, reported, isEditable) {
  const full = Boolean(experiment.report);
  const head = ["Arm", "Schedule", "Share", ...(full ? ["Weight", "Requests", "Tokens/step", "Forwards/step", "Tokens"] : []), "Tokens/s"];
  const rows = experiment.arms.map((arm) => {
    const figures = reported.get(arm.name);
    const weight = element("input", {
      type: "number",
      min: 0,
      step: "any",
      value: arm.weight,
      "aria-label": `Weight of ${arm.name}`,
      "data-arm": arm.name,
    });
    const mark = arm.name === experiment.control ? " (control)" : arm.stopped ? " (stopped)" : "";
    const cells = [
      element("th", { scope: "row" }, arm.name + mark),
      element("td", {}, arm.schedule + (arm.budget ? ` / ${arm.budget}` : "")),
      element("td", {}, share(arm.share)),
    ];
    if (full) {
      cells.push(
        element("td", {}, isEditable && !arm.stopped ? weight : short(arm.weight)),
        element("td", {}, String(figures.num_requests)),
        element("td", {}, short(figures.tau)),
        element("td", {}, short(figures.delta)),
        element("td", {}, String(figures.num_output_tokens)),
      );
    }
    cells.push(element("td", {}, figures.tokens_per_s ? short(figures.tokens_per_s.estimate) : "–"));
    return element("tr", {}, ...cells);
  });
  return element(
    "table",
    {},
    element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, ...rows),
  );
}

function actions({ name, state, arms, winner }, card, act) {
  const row = element("div", { class: "actions" });
  const button = (text, go, needsYes) => {
    const made = element("button", { type: "button" }, text);
    let isAsking = false;
    made.addEventListener("click", () => {
      if (needsYes && !isAsking) {
        isAsking = true;
        made.textContent = `${text}: sure?`;
        return;
      }
      go();
    });
    made.addEventListener("blur", () => {
      isAsking = false;
      made.textContent = text;
    });
    row.append(made);
  };
  if (state === "running") {
    button("Set weights", () => {
      const fields = [...card.querySelectorAll("input[data-arm]")];
      const weights = Object.fromEntries(fields.map((field) => [field.dataset.arm, Number(field.value)]));
      act(name, "weights", { weights }, `${name}: new weights.`);
    });
    button("Stop", () => act(name, "stop", {}, `${name} has been stopped.`), true);
  }
  const picker = element("select", { "aria-label": "Arm to promote" }, ...arms.map((arm) => new Option(arm.name, arm.name)));
  if (winner) picker.value = winner;
  button("Promote", () => act(name, "promote", { arm: picker.value }, `${picker.value} is the server's default now.`), true);
  row.append(element("span", { class: "promoted" }, picker));
  return row;
}

function figure(caption, picture) {
  return element("figure", {}, element("figcaption", {}, caption), picture);
}
