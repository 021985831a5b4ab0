// The experiments page: everything for who has the admin key, names and intervals for everybody else.

import { adminKey, call } from "/static/api.js";
import { ArmForm } from "/static/arms.js";
import { experimentCard } from "/static/card.js";
import { element } from "/static/dom.js";
import { KeyDialog } from "/static/key.js";

const EVERY_MS = 5000; // between two looks
const ADMIN = "/admin/experiments";

const find = (id) => document.getElementById(id);
const arms = new ArmForm(find("new-arms"), find("add-arm"));
let isAdmin = false;
let isRefused = false; // with the key that is set now; asking again would only fill logs
let seen = ""; // what is drawn, so that nothing is touched while nothing changes

new KeyDialog(adminKey, find, () => {
  isRefused = false;
  refresh();
});
find("open-new").addEventListener("click", () => openForm(true));
find("cancel-new").addEventListener("click", () => openForm(false));
find("new").addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
begin();

async function begin() {
  await refresh();
  setInterval(() => document.hidden || refresh(), EVERY_MS);
}

/** Look again; draws only what changed, and never under somebody's hands. */
async function refresh() {
  let overview = null;
  try {
    await learnNames();
    overview = await look();
  } catch (error) {
    find("model").dataset.state = "waiting";
    notice(error.status === 404 ? "This server offers no experiments." : error.message, true);
    return;
  }
  if (find("notice").dataset.from === "look") notice("");
  find("open-new").hidden = !isAdmin || !find("new").hidden;
  const now = JSON.stringify([isAdmin, overview]);
  if (now === seen || find("list").contains(document.activeElement?.closest("input, select"))) return;
  seen = now;
  find("summary").textContent = summary(overview);
  const cards = overview.data.map((experiment) => experimentCard(experiment, isAdmin ? act : null));
  find("list").replaceChildren(...(cards.length ? cards : [element("p", { class: "empty" }, "No experiments yet.")]));
}

/** The admin's view, or the public one where the server does not take us for an admin. */
async function look() {
  if (isRefused) return call("/v1/experiments");
  try {
    const overview = await call(ADMIN, { key: adminKey.value ? adminKey : undefined });
    isAdmin = true;
    return overview;
  } catch (error) {
    if (error.status !== 401 && error.status !== 403) throw error;
    isAdmin = false;
    isRefused = true;
    if (error.status === 401 && adminKey.value) notice(error.message, true);
    return call("/v1/experiments");
  }
}

async function learnNames() {
  if (find("model").dataset.state === "ready") return;
  const [models, schedules] = [await call("/v1/models"), await call("/v1/schedules")];
  find("model-name").textContent = models.data[0].id;
  find("model").dataset.state = "ready";
  arms.offer(schedules.data);
}

function summary(overview) {
  if (!isAdmin) return "Names and intervals. Starting and stopping needs the admin key.";
  const { default: usual, running, persistent } = overview;
  const parts = [running ? `${running} is running.` : "None is running."];
  if (usual?.schedule) parts.push(`Requests outside of experiments get ${usual.schedule}.`);
  if (!persistent) parts.push("Nothing outlives a restart: the server has no state_dir.");
  return parts.join(" ");
}

/** Do something to an experiment and look again. */
async function act(name, action, body, done) {
  try {
    await call(`${ADMIN}/${encodeURIComponent(name)}/${action}`, { body: body ?? {}, key: adminKey.value ? adminKey : undefined });
    notice(done);
    document.activeElement?.blur();
    await refresh();
  } catch (error) {
    notice(error.message, true);
  }
}

async function start() {
  const guard = find("new-guard").value;
  const body = {
    name: find("new-name").value.trim(),
    mode: find("new-mode").value,
    alpha: Number(find("new-alpha").value),
    guard: guard === "" ? null : Number(guard),
    arms: arms.value,
  };
  try {
    await call(ADMIN, { body, key: adminKey.value ? adminKey : undefined });
    openForm(false);
    notice(`${body.name} is running.`);
    await refresh();
  } catch (error) {
    notice(error.message, true);
  }
}

function openForm(is) {
  find("new").hidden = !is;
  find("open-new").hidden = is || !isAdmin;
  find("open-new").setAttribute("aria-expanded", String(is));
  (is ? find("new-name") : find("open-new")).focus();
}

function notice(text, isBad = false) {
  const place = find("notice");
  place.textContent = text;
  place.hidden = !text;
  place.classList.toggle("bad", isBad);
  place.dataset.from = isBad ? "look" : "";
}
