// Graphs of the last hour, drawn by uPlot: one line per model, and a second line for p99.

import { bytes, count, cut, rate, seconds } from "./dom.js";

const HOUR = 3600; // Max samples kept: one hour at one sample per second.
const MIN_SPAN_S = 120; // Min seconds that a graph shows.
const MAX_LINES = 8; // Max models drawn: one per colour.
const MIN_GAP_S = 5; // Min seconds without samples that count as a gap.
const MAX_PAUSE_S = 5; // Max seconds between two drawings.
const PIXELS = 250; // Approximate width of a graph, in pixels: one drawing per pixel is enough.
const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Kind of graph -> the columns of a model's samples that the graph draws, and the format of the values.
const CHARTS = {
  rows: { fields: [["rows_per_s", ""]], format: rate },
  queued: { fields: [["queued", ""]], format: count, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6] },
  latency: { fields: [["p50_s", " p50"], ["p99_s", " p99"]], format: seconds },
  memory: { fields: null, format: bytes },
};

// Insert a missing value wherever samples are missing, so that uPlot draws no line across the gap. A gap arises while
// the page is disconnected or the service is suspended. The service may take samples rarely, so only a pause that is
// much longer than the previous pause counts as a gap.
export function withGaps([at, ...columns]) {
  const isGap = (i) => i > 0 && at[i] - at[i - 1] > Math.max(MIN_GAP_S, 3 * (at[i - 1] - (at[i - 2] ?? at[i - 1])));
  const gaps = at.map((_, i) => i).filter(isGap);
  if (!gaps.length) return [at, ...columns];
  const insert = (column, value) => {
    const parts = gaps.map((gap, i) => [...column.slice(gaps[i - 1] ?? 0, gap), value(gap)]);
    return [...parts.flat(), ...column.slice(gaps.at(-1))];
  };
  return [insert(at, (gap) => (at[gap - 1] + at[gap]) / 2), ...columns.map((column) => insert(column, () => null))];
}

const missing = (length) => new Array(length).fill(null);

export class Charts {
  // `history` is the response of api/history.
  constructor(history) {
    this.at = [];
    this.memory = [];
    this.models = new Map();
    this.load(history);
    this.plots = new Map();
    this.drawn = "";
    this.drawnAt = 0;
    const redraw = () => { this.drawn = ""; this.draw(); };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    addEventListener("resize", () => this.resize());
  }

  // Keep this page's samples that are older than the service's samples, and append the service's samples.
  load(history) {
    this.series = history.series;
    const kept = this.at.filter((at) => at < (history.at[0] ?? Infinity)).length;
    const after = (old, fresh) => [...(old?.slice(0, kept) ?? missing(kept)), ...(fresh ?? missing(history.at.length))];
    const names = new Set([...this.models.keys(), ...Object.keys(history.models)]);
    this.models = new Map([...names].map((name) => [name, Object.fromEntries(this.series.map((field, i) =>
      [field, after(this.models.get(name)?.[field], Object.hasOwn(history.models, name) ? history.models[name][i] : null)]))]));
    this.memory = after(this.memory, history.memory);
    this.at = after(this.at, history.at);
    while (this.at.length > HOUR) this.removeOldest();
  }

  add(frame) {
    if (frame.at <= (this.at.at(-1) ?? 0)) return;
    this.at.push(frame.at);
    this.memory.push(frame.memory?.used_bytes ?? null);
    const models = new Map(Object.entries(frame.drawn ?? {}));  // Name of a model -> its values, in the order of series.
    for (const name of models.keys()) {
      if (!this.models.has(name)) {
        this.models.set(name, Object.fromEntries(this.series.map((field) => [field, missing(this.at.length - 1)])));
      }
    }
    for (const [name, columns] of this.models) {
      this.series.forEach((field, i) => columns[field].push(models.get(name)?.[i] ?? null));
    }
    if (this.at.length > HOUR) this.removeOldest();
    // In a graph of one hour a pixel stands for several seconds, so drawing every second would change nothing.
    const drawnFor = frame.at - this.drawnAt;
    if (drawnFor >= Math.min(MAX_PAUSE_S, (frame.at - this.at[0]) / PIXELS)) this.draw();
  }

  removeOldest() {
    this.at.shift();
    this.memory.shift();
    for (const columns of this.models.values()) for (const field of this.series) columns[field].shift();
  }

  draw() {
    if (document.hidden) return;
    this.drawnAt = this.at.at(-1) ?? 0;
    const names = [...this.models.keys()].sort().slice(0, MAX_LINES);
    const wanted = JSON.stringify(names);
    if (wanted !== this.drawn) {
      for (const plot of this.plots.values()) plot.destroy();
      for (const [kind, chart] of Object.entries(CHARTS)) this.plots.set(kind, this.plot(kind, chart, names));
      this.drawn = wanted;
    }
    for (const [kind, chart] of Object.entries(CHARTS)) this.plots.get(kind).setData(this.data(chart, names));
  }

  data(chart, names) {
    if (!chart.fields) return withGaps([this.at, this.memory]);
    return withGaps([this.at, ...names.flatMap((name) => chart.fields.map(([field]) => this.models.get(name)[field]))]);
  }

  plot(kind, chart, names) {
    const parent = document.getElementById(`chart-${kind}`);
    const soft = colour("--soft");
    const grid = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: soft, grid, ticks: { show: false }, font: "11px system-ui" };
    const clock = (plot, values) => values.map((value) => new Date(1000 * value).toTimeString().slice(0, 5));
    const labels = (plot, values) => values.map((value) => chart.format(value));
    const line = (label, index, dash) => ({
      label, stroke: colour(COLOURS[index]), width: 1.5, dash, points: { show: false },
      value: (plot, value) => chart.format(value),
    });
    const lines = chart.fields
      ? names.flatMap((name, i) => chart.fields.map(([, more], j) => line(cut(name, 24) + more, i, j ? [4, 3] : null)))
      : [line("used", 0)];
    return new uPlot({
      width: parent.clientWidth, height: 150,
      series: [{ value: "{HH}:{mm}:{ss}" }, ...lines],
      axes: [
        { ...axis, size: 24, space: 60, values: clock, incrs: [60, 120, 300, 600, 900, 1800] },
        { ...axis, size: 56, space: 34, values: labels, ...(chart.incrs && { incrs: chart.incrs }) },
      ],
      scales: {
        x: { range: (plot, first, last) => [Math.max(Math.min(first, last - MIN_SPAN_S), last - HOUR), last] },
        y: { range: (plot, low, high) => [0, high > 0 ? high * 1.1 : 1] },
      },
      // Show the dashes of a line in the legend too, because p50 and p99 of a model have the same colour.
      legend: { show: lines.length > 1, markers: { dash: (plot, index) => (plot.series[index].dash ? "dashed" : "solid") } },
      cursor: { y: false, sync: { key: "pool" } },
    }, this.data(chart, names), parent);
  }

  resize() {
    for (const [kind, plot] of this.plots) {
      plot.setSize({ width: document.getElementById(`chart-${kind}`).clientWidth, height: 150 });
    }
  }
}
