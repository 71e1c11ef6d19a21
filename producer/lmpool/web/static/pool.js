// The pool page: shows the frames of api/stream, one per survey, as tiles, graphs and tables.

import { Charts } from "./charts.js";
import { Table, byId, bytes, count, counted, cut, el, fetchJson, legendOf, percent, rate, seconds, setText, watch } from "./dom.js";
import { Letters } from "./letters.js";

// Whether a model's error text is about its queue, not about its adapters.
const isQueueTrouble = (model) => model.trouble.startsWith("the queue");

const notReady = (model) => model.states.filter(([state]) => state !== "ready").map(([state, workers]) =>
  `${count(workers)} ${state}`).join(", ");

const MODELS = [
  { title: "model", long: true, text: (model) => cut(model.name), title_of: (model) => model.name },
  { title: "backend", left: true, wide: true, text: (model) => model.backend ?? "" },
  { title: "V", wide: true, text: (model) => count(model.vocab_size), help: "length of a row: one value per token of the vocabulary" },
  { title: "rows as", left: true, wide: true, text: (model) => [model.dtype, model.encoding].filter(Boolean).join(" / "),
    help: "number format of the computation / of the rows that are sent" },
  { title: "workers", text: (model) => count(model.workers), help: "processes that compute rows of the model" },
  { title: "not ready", left: true, wide: true, text: notReady, help: "workers in other states than ready" },
  { title: "busy", wide: true, text: (model) => percent(model.occupancy),
    help: "prompts that ready workers hold, in relation to the prompts that they compute at once. Above 100 %, workers hold their next batches already" },
  { title: "release", left: true, wide: true, text: (model) => model.versions.map(([name, workers]) =>
    (model.versions.length > 1 ? `${name} (${count(workers)})` : name)).join(", "), help: "releases of lmpool that the workers run" },
  { title: "queued", text: (model) => count(model.queued), mark: (model) => (isQueueTrouble(model) ? "bad" : ""),
    title_of: (model) => (isQueueTrouble(model) ? model.trouble : ""), help: "prompts that wait or are in flight" },
  { title: "oldest", text: (model) => (model.queued ? seconds(model.age_s) : "–"), help: "time since the oldest queued prompt was submitted" },
  { title: "rows/s", text: (model) => rate(model.rows_per_s), help: "rows that all workers together compute per second" },
  { title: "p50", wide: true, text: (model) => seconds(model.p50_s), help: "half of the prompts got their row within this time after submission" },
  { title: "p99", text: (model) => seconds(model.p99_s), help: "99 of 100 prompts got their row within this time after submission" },
  { title: "dead", text: (model) => count(model.dead), mark: (model) => (model.dead ? "bad" : ""),
    help: "dead letters: prompts that workers gave up" },
  { title: "adapters", long: true, wide: true, mark: (model) => (model.trouble && !isQueueTrouble(model) ? "bad" : ""),
    text: (model) => (model.trouble && !isQueueTrouble(model) ? "cannot be read" : cut(model.adapters.map(([name]) => name).join(", ") || "–", 60)),
    title_of: (model) => model.trouble || model.adapters.map(([name, revision]) => `${name}@${revision}`).join("\n") },
];

const WORKERS = [
  { title: "worker", long: true, text: (worker) => worker.id, title_of: (worker) => worker.id },
  { title: "model", long: true, wide: true, text: (worker) => cut(worker.model, 40) },
  { title: "state", left: true, text: (worker) => worker.state, mark: (worker) => worker.state,
    help: "ready: computes prompts. loading: loads its model. draining: finishes the prompts that it holds, then ends. silent: its last two heartbeats are missing, so it may have crashed" },
  { title: "rows/s", text: (worker) => rate(worker.rows_per_s), help: "rows per second between the last two heartbeats" },
  { title: "rows", wide: true, text: (worker) => count(worker.rows), help: "rows computed since the worker started" },
  { title: "lane", text: (worker) => count(worker.lane), help: "prompts in the worker's own queue, waiting or in flight" },
  { title: "in flight", wide: true, text: (worker) => count(worker.in_flight), help: "prompts that the worker holds" },
  { title: "batch", wide: true, text: (worker) => rate(worker.batch), help: "mean number of prompts per step of the model" },
  { title: "reuse", text: (worker) => (worker.tokens ? percent(worker.reused / worker.tokens) : "–"),
    help: "share of the prompts' tokens that were found in a prefix cache and not computed again" },
  { title: "homed", wide: true, text: (worker) => count(worker.homed),
    help: "prompts that were sent to the worker that had computed their prefix" },
  { title: "stolen", wide: true, text: (worker) => count(worker.stolen),
    help: "prompts that the worker took from the lanes of other workers while it was idle" },
  { title: "shared", wide: true, text: (worker) => count(worker.shared),
    help: "rows that programs on the worker's host read from shared memory" },
  { title: "p50", wide: true, text: (worker) => seconds(worker.p50_s), help: "half of the prompts got their row within this time after submission" },
  { title: "p99", wide: true, text: (worker) => seconds(worker.p99_s), help: "99 of 100 prompts got their row within this time after submission" },
  { title: "failed", wide: true, text: (worker) => count(worker.failures), mark: (worker) => (worker.failures ? "bad" : ""),
    help: "prompts that ended in an error" },
  { title: "devices", left: true, wide: true, text: (worker) => cut(worker.devices, 30),
    title_of: (worker) => (worker.devices ? `${counted(worker.ranks, "rank")}: ${worker.devices}` : ""),
    help: "devices that hold a part of the model each; empty for a model on one device" },
  { title: "heartbeat", wide: true, text: (worker) => seconds(worker.silent_s), help: "time since the last heartbeat" },
];

// Kind of outlier -> the format of the value that shows how much a worker is affected.
const AFFECTED = {
  silent: (value) => `last heartbeat ${seconds(value)} ago`, failing: (value) => `${count(value)} failed`,
  slow: (value) => `p99 ${seconds(value)}`,
};

function namedOutliers({ kind, count: all, most }) {
  const named = most.map(([id, value]) => (value != null && AFFECTED[kind] ? `${id} (${AFFECTED[kind](value)})` : id));
  return [...named, ...(all > most.length ? [`${count(all - most.length)} more`] : [])].join(", ");
}

const OUTLIERS = [
  { title: "kind", left: true, text: (outlier) => outlier.kind,
    help: "silent: the last two heartbeats are missing. changed files: the files of the model have changed since the worker loaded them. failing: prompts ended in an error. slow: the worker's p99 is more than four times the median of its model's workers. draining: the worker finishes its prompts, then ends. loading: the worker loads its model" },
  { title: "model", long: true, wide: true, text: (outlier) => outlier.model },
  { title: "workers", text: (outlier) => count(outlier.count), help: "number of workers of this kind" },
  { title: "such as", long: true, text: namedOutliers, help: "the five most affected workers of this kind" },
];

const models = new Table(byId("models"), MODELS, (model) => model.name);
const workers = new Table(byId("workers"), WORKERS, (worker) => `${worker.model}\n${worker.id}`);
const outliers = new Table(byId("outliers"), OUTLIERS, (outlier) => `${outlier.model}\n${outlier.kind}`);
const events = new Table(byId("events"), [
  { title: "time", left: true, text: (event) => new Date(1000 * event.at).toTimeString().slice(0, 8) },
  { title: "worker", long: true, text: (event) => event.worker },
  { title: "model", long: true, wide: true, text: (event) => event.model },
  { title: "event", left: true, text: (event) => event.what, mark: (event) => (event.what === "died" ? "bad" : "") },
], (event) => event.number);
byId("models-legend").append(legendOf(MODELS));
byId("outliers-legend").append(legendOf(OUTLIERS));
byId("workers-legend").append(legendOf(WORKERS));

const sum = (items, value) => items.reduce((total, item) => total + (value(item) ?? 0), 0);
const max = (items, value) => items.map(value).filter((found) => found != null).sort((a, b) => b - a)[0] ?? null;

const tiles = new Map();

function tile(name, value, more = "", mark = "") {
  if (!tiles.has(name)) {
    const [number, below] = [el("dd"), el("dd", { class: "soft" })];
    byId("tiles").append(el("div", {}, el("dt", {}, name), number, below));
    tiles.set(name, [number, below]);
  }
  const [number, below] = tiles.get(name);
  setText(number, value);
  setText(below, more);
  number.dataset.mark = mark;
}

function showTiles(frame) {
  const served = frame.models;
  const [queued, dead] = [sum(served, (model) => model.queued), sum(served, (model) => model.dead)];
  const [tokens, reused, homed, rows] = ["tokens", "reused", "homed", "rows"].map((name) =>
    sum(served, (model) => model[name]));
  const memory = frame.memory;
  tile("rows/s", rate(sum(served, (model) => model.rows_per_s)), counted(served.length, "model"));
  const inState = (wanted) => sum(served, (model) => sum(model.states, ([state, workers]) => (state === wanted ? workers : 0)));
  const silent = inState("silent");
  tile("workers", count(sum(served, (model) => model.workers)), `${count(inState("ready"))} ready${silent ? `, ${count(silent)} silent` : ""}`, silent ? "bad" : "");
  tile("queued", count(queued), queued ? `oldest ${seconds(max(served, (model) => model.age_s))}` : "queue empty");
  tile("p50", seconds(max(served, (model) => model.p50_s)), "submission to row");
  tile("p99", seconds(max(served, (model) => model.p99_s)), "of the slowest model");
  tile("prefix reuse", tokens ? percent(reused / tokens) : "–", "of tokens");
  tile("homed", rows ? percent(Math.min(1, homed / rows)) : "–", `${count(sum(served, (model) => model.shared))} shared`);
  tile("dead letters", count(dead), dead ? "see below" : "none", dead ? "bad" : "");
  tile("memory", bytes(memory?.used_bytes),
    memory?.limit_bytes ? `of ${bytes(memory.limit_bytes)}` : "no limit known", memory?.doubt ? "bad" : "");
}

let newest = null;
let offset = 0; // Index of the first worker that the user wants to see.
let shownOffset = 0;
let requested = 0; // Number of requests for pages of workers, to ignore responses to all but the last request.
let isPending = false; // Whether the last request is in flight.

// Show the page of workers in the frame, or request another page from the service, which keeps the last survey.
async function refreshWorkers() {
  const wanted = byId("filter").value;
  const number = requested += 1;
  isPending = Boolean(wanted || offset);
  try {
    const page = isPending
      ? await fetchJson(`api/workers?${new URLSearchParams({ filter: wanted, offset })}`) : newest.workers;
    if (number === requested) showPage(page, wanted);
  } catch (error) {
    say("disconnected", error.message);
  } finally {
    if (number === requested) isPending = false;
  }
}

function showPage(page, wanted) {
  const last = page.offset + page.listed.length;
  shownOffset = page.offset;
  workers.update(page.listed);
  setText(byId("workers-count"), wanted ? `${count(page.matching)} of ${count(page.total)}` : count(page.total));
  byId("pager").hidden = page.listed.length === page.matching;
  setText(byId("range"), `${count(page.offset + 1)} to ${count(last)} of ${count(page.matching)}, the most urgent first`);
  byId("previous").disabled = page.offset === 0;
  byId("next").disabled = last === page.matching;
}

function turn(pages) {
  offset = Math.max(0, shownOffset + pages * newest.workers.listed.length);
  refreshWorkers();
}

function say(state, text) {
  byId("state").dataset.state = state;
  setText(byId("state"), state);
  byId("trouble").hidden = !text;
  setText(byId("trouble"), text);
}

function show(frame, letters) {
  if (frame.trouble) {
    const since = frame.seen_at ? ` (below: state at ${new Date(1000 * frame.seen_at).toTimeString().slice(0, 8)})` : "";
    say("server unreachable", frame.trouble + since);
    return;
  }
  newest = frame;
  say("live", [frame.memory?.doubt, ...frame.notices].filter(Boolean).map((text) => `${text}.`).join(" "));
  setText(byId("server"), frame.server);
  byId("no-models").hidden = frame.models.length > 0;
  models.update(frame.models);
  outliers.update(frame.outliers);
  byId("outliers-section").hidden = !frame.outliers.length;
  showTiles(frame);
  // On a slow link a response takes longer than the next frame: let a frame replace no request.
  if (!isPending) refreshWorkers();
  events.update(frame.events);
  byId("no-events").hidden = frame.events.length > 0;
  letters.update(frame.models);
}

async function start() {
  const [history, settings] = await Promise.all([fetchJson("api/history"), fetchJson("api/settings")]);
  const charts = new Charts(history);
  const letters = new Letters(settings.allow_changes);
  charts.draw();
  byId("filter").addEventListener("input", () => {
    offset = 0;
    if (newest) refreshWorkers();
  });
  byId("previous").addEventListener("click", () => turn(-1));
  byId("next").addEventListener("click", () => turn(1));
  document.addEventListener("visibilitychange", () => charts.draw());
  let wasLost = false;
  await watch("api/stream", async (frame) => {
    show(frame, letters);
    if (wasLost) {
      // Load the samples that this page missed while it was disconnected.
      wasLost = false;
      charts.load(await fetchJson("api/history"));
    }
    charts.add(frame);
  }, (why) => {
    wasLost = true;
    say("disconnected", `${why} This page retries every second.`);
  });
}

start().catch((error) => say("disconnected", error.message));
