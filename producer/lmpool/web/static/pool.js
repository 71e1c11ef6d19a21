// The pool page: shows the frames of api/stream, one per second, as tiles, graphs and tables.

import { Charts } from "./charts.js";
import { Table, byId, bytes, count, counted, cut, el, fetchJson, legendOf, percent, rate, seconds, setText, watch } from "./dom.js";
import { Letters } from "./letters.js";

const MAX_WORKERS = 100; // Max workers listed until the user requests all workers: more rows slow a page down.

// Whether a model's error text is about its queue, not about its adapters.
const isQueueTrouble = (model) => model.trouble.startsWith("the queue");

const MODELS = [
  { title: "model", long: true, text: (model) => cut(model.name), title_of: (model) => model.name },
  { title: "backend", left: true, wide: true, text: (model) => model.backend ?? "" },
  { title: "V", wide: true, text: (model) => count(model.vocab_size), help: "length of a row: one value per token of the vocabulary" },
  { title: "rows as", left: true, wide: true, text: (model) => [model.dtype, model.encoding].filter(Boolean).join(" / "),
    help: "number format of the computation / of the rows that are sent" },
  { title: "workers", text: (model) => count(model.workers.length), help: "processes that compute rows of the model" },
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
  { title: "heard", wide: true, text: (worker) => seconds(worker.silent_s), help: "time since the last heartbeat" },
];

const models = new Table(byId("models"), MODELS, (model) => model.name);
const workers = new Table(byId("workers"), WORKERS, (worker) => `${worker.model}\n${worker.id}`);
const events = new Table(byId("events"), [
  { title: "time", left: true, text: (event) => new Date(1000 * event.at).toTimeString().slice(0, 8) },
  { title: "worker", long: true, text: (event) => event.worker },
  { title: "model", long: true, wide: true, text: (event) => event.model },
  { title: "event", left: true, text: (event) => event.what, mark: (event) => (event.what === "died" ? "bad" : "") },
], (event) => event.number);
byId("models-legend").append(legendOf(MODELS));
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

function showTiles(frame, all) {
  const served = frame.models;
  const [queued, dead] = [sum(served, (model) => model.queued), sum(served, (model) => model.dead)];
  const [tokens, reused, homed, rows] = ["tokens", "reused", "homed", "rows"].map((name) =>
    sum(all, (worker) => worker[name]));
  const memory = frame.memory;
  tile("rows/s", rate(sum(served, (model) => model.rows_per_s)), counted(served.length, "model"));
  const inState = (state) => all.filter((worker) => worker.state === state).length;
  const silent = inState("silent");
  tile("workers", count(all.length), `${count(inState("ready"))} ready${silent ? `, ${count(silent)} silent` : ""}`, silent ? "bad" : "");
  tile("queued", count(queued), queued ? `oldest ${seconds(max(served, (model) => model.age_s))}` : "queue empty");
  tile("p50", seconds(max(served, (model) => model.p50_s)), "submission to row");
  tile("p99", seconds(max(served, (model) => model.p99_s)), "of the slowest model");
  tile("prefix reuse", tokens ? percent(reused / tokens) : "–", "of tokens");
  tile("homed", rows ? percent(Math.min(1, homed / rows)) : "–", `${count(sum(all, (worker) => worker.shared))} shared`);
  tile("dead letters", count(dead), dead ? "see below" : "none", dead ? "bad" : "");
  tile("memory", bytes(memory?.used_bytes),
    memory?.limit_bytes ? `of ${bytes(memory.limit_bytes)}` : "no limit known", memory?.doubt ? "bad" : "");
}

let newest = null;
let showsAll = false;

function showWorkers() {
  const all = newest.models.flatMap((model) => model.workers.map((worker) => ({ ...worker, model: model.name })));
  const wanted = byId("filter").value.toLowerCase();
  const matching = wanted
    ? all.filter((worker) => `${worker.id} ${worker.model} ${worker.state}`.toLowerCase().includes(wanted)) : all;
  workers.update(showsAll ? matching : matching.slice(0, MAX_WORKERS));
  setText(byId("workers-count"), wanted ? `${count(matching.length)} of ${count(all.length)}` : count(all.length));
  byId("all-workers").hidden = showsAll || matching.length <= MAX_WORKERS;
  setText(byId("all-workers"), `show all ${count(matching.length)}`);
  return all;
}

function say(state, text) {
  byId("state").dataset.state = state;
  setText(byId("state"), state);
  byId("trouble").hidden = !text;
  setText(byId("trouble"), text);
}

function noticesOf(frame) {
  const changed = frame.models.flatMap((model) => model.workers).filter((worker) => worker.changed_files);
  return changed.map((worker) => `Files of the model have changed since ${worker.id} loaded them (${worker.changed_files}). `
    + "The worker continues with the weights in its memory.");
}

function show(frame, letters) {
  if (frame.trouble) {
    const since = frame.seen_at ? ` (below: state at ${new Date(1000 * frame.seen_at).toTimeString().slice(0, 8)})` : "";
    say("server unreachable", frame.trouble + since);
    return;
  }
  newest = frame;
  say("live", [frame.memory?.doubt, ...noticesOf(frame)].filter(Boolean).join(" "));
  setText(byId("server"), frame.server);
  byId("no-models").hidden = frame.models.length > 0;
  models.update(frame.models);
  showTiles(frame, showWorkers());
  events.update(frame.events);
  byId("no-events").hidden = frame.events.length > 0;
  letters.update(frame.models);
}

async function start() {
  const [history, settings] = await Promise.all([fetchJson("api/history"), fetchJson("api/settings")]);
  const charts = new Charts(history);
  const letters = new Letters(settings.allow_changes);
  charts.draw();
  byId("filter").addEventListener("input", () => newest && showWorkers());
  byId("all-workers").addEventListener("click", () => { showsAll = true; showWorkers(); });
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
