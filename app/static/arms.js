// The rows of a new experiment: one arm each, the first one being what the others are compared with.

import { element } from "/static/dom.js";

const LEAST = 2;

export class ArmForm {
  constructor(box, add) {
    this.box = box;
    this.names = [];
    add.addEventListener("click", () => this.add().querySelector("input").focus());
  }

  /** Schedules to choose from; begins with two arms. */
  offer(schedules) {
    this.names = schedules.map((schedule) => schedule.name);
    const usual = schedules.find((schedule) => schedule.default)?.name ?? this.names[0];
    this.box.replaceChildren();
    this.add("control", "ar");
    this.add("candidate", usual);
  }

  /** As the API takes them. */
  get value() {
    return [...this.box.children].map((row) => {
      const [name, budget, weight] = row.querySelectorAll("input");
      const arm = { name: name.value.trim(), schedule: row.querySelector("select").value, weight: Number(weight.value) };
      return budget.value === "" ? arm : { ...arm, budget: Number(budget.value) };
    });
  }

  add(name = "", schedule = this.names[0]) {
    const picker = element("select", {}, ...this.names.map((one) => new Option(one, one, false, one === schedule)));
    const remove = element("button", { type: "button", "aria-label": "Remove this arm" }, "×");
    const row = element(
      "div",
      { class: "arm-row" },
      labeled("Arm", element("input", { value: name, required: true, spellcheck: "false" })),
      labeled("Schedule", picker),
      labeled("Budget", element("input", { type: "number", min: 1, step: 1, placeholder: "its own" })),
      labeled("Weight", element("input", { type: "number", min: 0, step: "any", value: 1, required: true })),
      remove,
    );
    remove.addEventListener("click", () => this.box.children.length > LEAST && row.remove());
    this.box.append(row);
    return row;
  }
}

function labeled(text, control) {
  return element("label", { class: "field" }, text, control);
}
