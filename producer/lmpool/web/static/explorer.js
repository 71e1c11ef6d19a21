// The explorer page. The address describes the view, so a link reproduces the view, and the Back button works.

import { byId, cut, el, fetchJson, setText } from "./dom.js";
import { Pane } from "./pane.js";
import { BLANK, choice, hashOf, readChoice, readIds, readView } from "./view.js";

let view = { ...BLANK };
let panes = [];
let depth = 0;
let shown = "";

function say(text) {
  byId("trouble").hidden = !text;
  setText(byId("trouble"), text);
}

// Change the view. A change of settings replaces the current step of the browser's history; other changes add a step.
function go(change, { isStep = true } = {}) {
  const hash = hashOf({ ...view, ...change });
  if (hash === location.hash) return show();
  if (isStep) {
    depth += 1;
    history.pushState({ depth }, "", hash);
  } else {
    history.replaceState({ depth }, "", hash);
  }
  return show();
}

const page = {
  // Continue with the token ids of another branch of the text. A branch in the second pane swaps the two models, unless
  // both panes show the same tokens.
  branch(pane, ids) {
    const isFirst = pane === panes[0];
    if (isFirst || sameTokens()) return go({ ids, text: "", at: null, under: "" });
    return go({ model: view.beside, beside: view.model, ids, text: "", at: null, under: "" });
  },
  select(at, under) {
    go({ at, under }, { isStep: false });
  },
};

const sameTokens = () => readChoice(view.beside)?.model === readChoice(view.model)?.model;

function fillForm() {
  byId("model").value = view.model;
  byId("beside").value = view.beside;
  byId("temperature").value = view.temperature;
  byId("top-p").value = view.topP;
  byId("back").disabled = depth === 0;
}

async function show() {
  view = readView(location.hash);
  depth = history.state?.depth ?? 0;
  if (!readChoice(view.model)) view.model = byId("model").options[0]?.value ?? "";
  fillForm();
  if (!view.ids && !view.text) {
    panes = [];
    shown = "";
    byId("panes").replaceChildren();
    return;
  }
  const wanted = JSON.stringify([view.model, view.beside, view.ids, view.text]);
  if (wanted !== shown) await load(wanted);
  else await details();
}

async function load(wanted) {
  shown = wanted;
  say("");
  setText(byId("state"), "loading");
  const chosen = [view.model, view.beside].map(readChoice).filter(Boolean);
  const fresh = chosen.map((one) => new Pane(page, one));
  panes = fresh;
  byId("panes").replaceChildren(...panes.map((pane) => pane.element));
  const given = view.ids ? { ids: view.ids } : { text: view.text };
  const first = panes[0]?.load(given, view.at);
  // Adapters of one model have the same token ids, but a second pane with another model needs the text.
  const second = view.ids && !sameTokens() ? first.then((response) => ({ text: response?.text ?? "" })) : given;
  const responses = await Promise.all([first, panes[1]?.load(await second, view.at)]);
  if (panes !== fresh) return; // The user opened another view during the requests.
  setText(byId("state"), responses[0] ? "ready" : "");
  if (responses[0]) fillText(responses[0]);
  await details();
}

function fillText(response) {
  const areIds = response.text == null;
  if (areIds) byId("are-ids").checked = true;
  byId("text").value = byId("are-ids").checked ? response.ids.join(", ") : response.text;
}

const settings = () => ({ temperature: byId("temperature").valueAsNumber, topP: byId("top-p").valueAsNumber });

// A setting is incomplete while the user types it, so wait until the typing pauses.
let pausing = 0;
function settle() {
  clearTimeout(pausing);
  pausing = setTimeout(() => (wrongSetting() ? say(wrongSetting()) : go(settings(), { isStep: false })), 200);
}

// Return the error of the typed settings, or "". All numbers in a field's range are valid, even between its steps.
function wrongSetting() {
  const isIn = (input) => input.valueAsNumber >= Number(input.min) && input.valueAsNumber <= Number(input.max);
  const wrong = [byId("temperature"), byId("top-p")].find((input) => !isIn(input));
  return wrong ? `${wrong.labels[0].textContent.trim()}: type a number from ${wrong.min} to ${wrong.max}.` : "";
}

async function details() {
  const wrong = wrongSetting();
  say(wrong);
  if (wrong) return;
  await Promise.all(panes.map((pane) => pane.response && pane.showDetails(view.at, view, view.under)));
}

function submit(event) {
  event?.preventDefault();
  clearTimeout(pausing);
  if (wrongSetting()) return say(wrongSetting());
  const text = byId("text").value;
  const chosen = { model: byId("model").value, beside: byId("beside").value, at: null, under: "", ...settings() };
  if (!text) return say("Type a text.");
  if (!byId("are-ids").checked) return go({ ...chosen, text, ids: null });
  const ids = readIds(text);
  if (!ids?.length) return say("These are not token ids: type numbers such as 1, 2, 3, or untick “token ids”.");
  return go({ ...chosen, ids, text: "" });
}

function listModels(models) {
  const options = () => models.flatMap(({ name, adapters }) => [
    el("option", { value: choice(name, "") }, cut(name)),
    ...adapters.map(([adapter]) => el("option", { value: choice(name, adapter) }, cut(`${name} + ${adapter}`))),
  ]);
  byId("model").replaceChildren(...options());
  byId("beside").replaceChildren(el("option", { value: "" }, "nothing"), ...options());
}

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    setText(byId("state"), "link copied");
  } catch {
    setText(byId("state"), "copy the address bar");
  }
}

async function start() {
  byId("form").addEventListener("submit", submit);
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
  });
  for (const id of ["temperature", "top-p"]) byId(id).addEventListener("input", settle);
  for (const id of ["model", "beside"]) {
    byId(id).addEventListener("change", () => { if (view.ids || view.text) submit(); });
  }
  byId("back").addEventListener("click", () => history.back());
  byId("copy").addEventListener("click", copyLink);
  addEventListener("popstate", show);
  const { models } = await fetchJson("api/models");
  listModels(models);
  if (!models.length) say("No model is served: start a worker with lmpool up MODEL, then reload this page.");
  await show();
}

start().catch((error) => say(error.message));
