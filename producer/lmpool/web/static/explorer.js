// The explorer: what the address says is what is shown, so a link reproduces it, and going back is going back.

import { ask, byId, cut, el, setText } from "./dom.js";
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

// A step that one can go back from, or, with a setting, a change of what is there.
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
  // Another token at some place: the text ends there. A branch of what stands beside is of the same ids, or text.
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
  const asked = JSON.stringify([view.model, view.beside, view.ids, view.text]);
  if (asked !== shown) await load(asked);
  else await details();
}

async function load(asked) {
  shown = asked;
  say("");
  setText(byId("state"), "asking");
  const chosen = [view.model, view.beside].map(readChoice).filter(Boolean);
  const fresh = chosen.map((one) => new Pane(page, one));
  panes = fresh;
  byId("panes").replaceChildren(...panes.map((pane) => pane.element));
  const given = view.ids ? { ids: view.ids } : { text: view.text };
  const first = panes[0]?.load(given, view.at);
  // Ids mean the same to the adapters of one model; to another model the text is told.
  const told = view.ids && !sameTokens() ? first.then((answer) => ({ text: answer?.text ?? "" })) : given;
  const answers = await Promise.all([first, panes[1]?.load(await told, view.at)]);
  if (panes !== fresh) return; // Another view has come meanwhile.
  setText(byId("state"), answers[0] ? "ready" : "");
  if (answers[0]) fillText(answers[0]);
  await details();
}

function fillText(answer) {
  const areIds = answer.text == null;
  if (areIds) byId("are-ids").checked = true;
  byId("text").value = byId("are-ids").checked ? answer.ids.join(", ") : answer.text;
}

const settings = () => ({ temperature: byId("temperature").valueAsNumber, topP: byId("top-p").valueAsNumber });

// While they are typed, settings have values that are not meant: wait until the typing pauses.
let resting = 0;
function settle() {
  clearTimeout(resting);
  resting = setTimeout(() => (wrongSetting() ? say(wrongSetting()) : go(settings(), { isStep: false })), 200);
}

// Why the settings as they are typed cannot be asked about; any number between the steps can.
function wrongSetting() {
  const isIn = (input) => input.valueAsNumber >= Number(input.min) && input.valueAsNumber <= Number(input.max);
  const wrong = [byId("temperature"), byId("top-p")].find((input) => !isIn(input));
  return wrong ? `${wrong.labels[0].textContent.trim()}: type a number from ${wrong.min} to ${wrong.max}.` : "";
}

async function details() {
  const wrong = wrongSetting();
  say(wrong);
  if (wrong) return;
  await Promise.all(panes.map((pane) => pane.answer && pane.showDetails(view.at, view, view.under)));
}

function submit(event) {
  event?.preventDefault();
  clearTimeout(resting);
  if (wrongSetting()) return say(wrongSetting());
  const text = byId("text").value;
  const chosen = { model: byId("model").value, beside: byId("beside").value, at: null, under: "", ...settings() };
  if (!text) return say("Type a text.");
  if (!byId("are-ids").checked) return go({ ...chosen, text, ids: null });
  const ids = readIds(text);
  if (!ids?.length) return say("These are no token ids: type numbers such as 1, 2, 3, or untick “token ids”.");
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
    setText(byId("state"), "copy the address");
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
  const { models } = await ask("api/models");
  listModels(models);
  if (!models.length) say("No model is served: start a worker with lmpool up MODEL, and load this page again.");
  await show();
}

start().catch((error) => say(error.message));
