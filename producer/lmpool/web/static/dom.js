// Elements, numbers for people, tables that are updated in place, signing in, and requests.
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
// columns: {title, help: what the title means, text(row) or node(row), wide: left out on small screens, left: aligned left,
// long: aligned left and may break anywhere, title_of(row)}
export class Table {
  constructor(table, columns, keyOf) {
    this.columns = columns;
    this.keyOf = keyOf;
    this.rows = new Map();
    this.body = el("tbody");
    table.append(el("thead", {}, el("tr", {}, ...columns.map((column) =>
      el("th", { scope: "col", class: classOf(column), title: column.help }, column.title)))), this.body);
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

const classOf = (column) => ["wide", "left", "long"].filter((name) => column[name]).join(" ") || null;

// What the titles of a table mean, to be opened: a title's tooltip cannot be seen on a phone.
export function legendOf(columns) {
  return el("details", { class: "soft note" }, el("summary", {}, "What the columns mean"),
    el("dl", {}, ...columns.filter((column) => column.help).flatMap((column) => [
      el("dt", {}, column.title), el("dd", {}, column.help)])));
}

// Sessions. A browser signs in with a token and is given a cookie, which no script reads, and a key, which other ports
// of this host do not read. Each request needs both.

const KEY_NAME = `lmpool-key ${new URL(".", location.href).pathname}`;
const RETRY_MS = 1000;

async function fetchOurs(path, options = {}) {
  const headers = { "X-Lmpool-Key": localStorage.getItem(KEY_NAME) ?? "", ...options.headers };
  try {
    return await fetch(path, { ...options, headers });
  } catch {
    throw new Error("lmpool web does not answer: has it ended?");
  }
}

async function beginSession(secret) {
  const response = await fetchOurs("api/session", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(secret),
  });
  const answer = await readAnswer(response);
  localStorage.setItem(KEY_NAME, answer.key);
}

// The address that lmpool web prints signs in once. Its token leaves the address bar before anything else happens.
const address = new URL(location.href);
const linkToken = address.searchParams.get("token");
let linkTrouble = "";
let linked = Promise.resolve();
if (linkToken !== null) {
  address.searchParams.delete("token");
  history.replaceState(history.state, "", address);
  linked = beginSession({ link_token: linkToken }).catch((error) => { linkTrouble = error.message; });
}

let signingIn = null;

// Ask for the token in a dialog; all requests that are refused while it is open wait for it.
function signIn(why) {
  signingIn ??= new Promise((resolve) => {
    // A browser that has never signed in needs no reason.
    const said = el("p", { class: "said", role: "alert" }, linkTrouble || (localStorage.getItem(KEY_NAME) ? why : ""));
    const field = el("input", { type: "password", name: "token", autocomplete: "off", required: true, autofocus: true });
    const form = el("form", {}, el("h2", {}, "Sign in"),
      el("p", { class: "soft" }, "with the token that ", el("code", {}, "lmpool web"), " has printed, or that was set by ",
        el("code", {}, "LMPOOL_WEB_TOKEN"), " or ", el("code", {}, "--token"), "."),
      el("label", {}, "Token ", field), said, el("button", { type: "submit", class: "main" }, "Sign in"));
    const dialog = el("dialog", { id: "sign-in", "aria-label": "Sign in" }, form);
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    const goOn = (event) => {
      if (event && (event.key !== KEY_NAME || !event.newValue)) return;
      removeEventListener("storage", goOn);
      dialog.remove();
      signingIn = null;
      linkTrouble = "";
      resolve();
    };
    // Another tab of this browser has signed in.
    addEventListener("storage", goOn);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      try {
        await beginSession({ token: field.value.trim() });
        goOn();
      } catch (error) {
        setText(said, error.message);
        field.select();
      }
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return signingIn;
}

async function request(path, options) {
  await linked;
  for (;;) {
    const response = await fetchOurs(path, options);
    if (response.status !== 401) return response;
    await signIn(cut(await response.text(), 300));
  }
}

function signOutBy(id, path) {
  byId(id)?.addEventListener("click", async () => {
    await request(path, { method: "DELETE" });
    localStorage.removeItem(KEY_NAME);
    location.reload();
  });
}
signOutBy("sign-out", "api/session");
signOutBy("sign-out-all", "api/sessions");

// Requests: the JSON of an answer, or an Error with what it says.

async function readAnswer(response) {
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

export async function ask(path, body) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  };
  return readAnswer(await request(path, options));
}

// Server-sent events by fetch, for an EventSource sends no key. Goes on until the page is closed.
export async function watch(path, onMessage, onLost) {
  for (;;) {
    try {
      const reader = (await okay(await request(path))).body.pipeThrough(new TextDecoderStream()).getReader();
      let unread = "";
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        const events = (unread + part.value).split("\n\n");
        unread = events.pop();
        // An error of the page itself is not a lost connection.
        for (const event of events) queueMicrotask(() => onMessage(JSON.parse(event.replace(/^data: /, ""))));
      }
    } catch (error) {
      onLost(error.message);
    }
    await new Promise((resolve) => { setTimeout(resolve, RETRY_MS); });
  }
}

async function okay(response) {
  if (!response.ok) await readAnswer(response);
  return response;
}
