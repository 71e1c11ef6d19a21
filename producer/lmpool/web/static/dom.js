// Elements, numbers for people, tables that are updated in place, and requests.
//
// Names and prompts are written by others: texts enter a page as text nodes only, never as markup.

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export const byId = (id) => document.getElementById(id);

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Numbers for people; nothing for what is not known.

const whole = new Intl.NumberFormat("en");
const NOTHING = "–";

export function count(value) {
  if (value == null) return NOTHING;
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  return whole.format(Math.round(value));
}

export const counted = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

export function rate(value) {
  if (value == null) return NOTHING;
  return value >= 100 || value === 0 ? count(value) : value.toFixed(1);
}

export function seconds(value) {
  if (value == null) return NOTHING;
  if (value >= 1000) return `${(value / 60).toFixed(0)} min`;
  if (value >= 1) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value >= 1e-3) return `${(value * 1e3).toFixed(value < 1e-2 ? 1 : 0)} ms`;
  return value === 0 ? "0 s" : `${(value * 1e6).toFixed(0)} µs`;
}

export function bytes(value) {
  if (value == null) return NOTHING;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; value >= 1000 && at < units.length - 1; at += 1) value /= 1000;
  return `${value.toFixed(value < 10 && at ? 1 : 0)} ${units[at]}`;
}

export function percent(value) {
  if (value == null) return NOTHING;
  if (value > 0 && value < 0.0005) return "<0.1 %";
  return `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
}

export const cut = (text, most = 80) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// A table whose rows stay the same elements as long as their keys do: focus, selection and scrolling survive updates.
//
// columns: {title, text(row) or node(row), wide: left out on small screens, left: aligned left, title_of(row)}
export class Table {
  constructor(table, columns, keyOf) {
    this.columns = columns;
    this.keyOf = keyOf;
    this.rows = new Map();
    this.body = el("tbody");
    table.append(el("thead", {}, el("tr", {}, ...columns.map((column) =>
      el("th", { scope: "col", class: classOf(column) }, column.title)))), this.body);
  }

  update(items) {
    const seen = new Set();
    let before = null;
    for (const item of items) {
      const key = this.keyOf(item);
      if (seen.has(key)) continue;
      seen.add(key);
      const row = this.rows.get(key) ?? this.add(key, item);
      this.columns.forEach((column, at) => {
        if (!column.text) return;
        const cell = row.cells[at];
        setText(cell, column.text(item));
        if (column.title_of) cell.title = column.title_of(item);
        if (column.mark) cell.dataset.mark = column.mark(item);
      });
      const place = before ? before.nextSibling : this.body.firstChild;
      if (row !== place) this.body.insertBefore(row, place);
      before = row;
    }
    for (const [key, row] of this.rows) {
      if (!seen.has(key)) {
        row.remove();
        this.rows.delete(key);
      }
    }
  }

  add(key, item) {
    const row = el("tr", {}, ...this.columns.map((column) =>
      el("td", { class: classOf(column) }, column.node ? column.node(item) : null)));
    this.rows.set(key, row);
    return row;
  }
}

const classOf = (column) => [column.wide && "wide", column.left && "left"].filter(Boolean).join(" ") || null;

// Requests: the JSON of an answer, or an Error with what it says.

export async function ask(path, body) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  };
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("lmpool web does not answer: has it ended?");
  }
  const text = await response.text();
  let answer = null;
  try {
    answer = JSON.parse(text);
  } catch {
    // Not ours: a proxy's page, or a plain refusal.
  }
  if (!response.ok) throw new Error(answer?.error ?? cut(text, 300) ?? response.statusText);
  return answer;
}
