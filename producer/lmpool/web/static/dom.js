// Helpers of all pages: elements, number formats, tables that are updated in place, signing in, and requests.
//
// Other programs choose names and prompts, so the pages insert texts as text nodes only, never as markup.

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

// Number formats; an unknown value is shown as a dash.

const whole = new Intl.NumberFormat("en");
const UNKNOWN = "–";

export function count(value) {
  if (value == null) return UNKNOWN;
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  return whole.format(Math.round(value));
}

export const counted = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

export function rate(value) {
  if (value == null) return UNKNOWN;
  return value >= 100 || value === 0 ? count(value) : value.toFixed(1);
}

export function seconds(value) {
  if (value == null) return UNKNOWN;
  if (value >= 1000) return `${(value / 60).toFixed(0)} min`;
  if (value >= 1) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value >= 1e-3) return `${(value * 1e3).toFixed(value < 1e-2 ? 1 : 0)} ms`;
  return value === 0 ? "0 s" : `${(value * 1e6).toFixed(0)} µs`;
}

export function bytes(value) {
  if (value == null) return UNKNOWN;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; value >= 1000 && at < units.length - 1; at += 1) value /= 1000;
  return `${value.toFixed(value < 10 && at ? 1 : 0)} ${units[at]}`;
}

export function percent(value) {
  if (value == null) return UNKNOWN;
  if (value > 0 && value < 0.0005) return "<0.1 %";
  return `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
}

export const cut = (text, max = 80) => (text.length > max ? `${text.slice(0, max - 1)}…` : text);

// A table that keeps a row's element as long as the row's key exists, so that focus and scrolling survive updates.
//
// Fields of a column: {title, help: explanation of the title, text(row) or node(row), wide: hidden on small screens,
// left: aligned left, long: aligned left and may break anywhere, title_of(row), mark(row)}
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

// A list of column explanations that the user can open, because a phone does not show tooltips of titles.
export function legendOf(columns) {
  return el("details", { class: "soft note" }, el("summary", {}, "What the columns mean"),
    el("dl", {}, ...columns.filter((column) => column.help).flatMap((column) => [
      el("dt", {}, column.title), el("dd", {}, column.help)])));
}

// Sessions. A browser that signs in with a token gets a cookie, which scripts cannot read, and a key, which pages on other
// ports of this host cannot read. Each request needs both the cookie and the key.

const KEY_NAME = `lmpool-key ${new URL(".", location.href).pathname}`;
const RETRY_MS = 1000; // Milliseconds until the page connects to a lost stream again.

async function fetchWithKey(path, options = {}) {
  const headers = { "X-Lmpool-Key": localStorage.getItem(KEY_NAME) ?? "", ...options.headers };
  try {
    return await fetch(path, { ...options, headers });
  } catch {
    throw new Error("lmpool web does not respond: is it still running?");
  }
}

async function beginSession(secret) {
  const response = await fetchWithKey("api/session", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(secret),
  });
  localStorage.setItem(KEY_NAME, (await readJson(response)).key);
}

// The address that `lmpool web` prints signs in once. Remove the token from the address bar before signing in.
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

// Ask the user for the token in a dialog. All requests that are refused while the dialog is open wait for the sign-in.
function signIn(why) {
  signingIn ??= new Promise((resolve) => {
    // Show no reason to a browser that has never signed in.
    const notice = el("p", { class: "notice", role: "alert" }, linkTrouble || (localStorage.getItem(KEY_NAME) ? why : ""));
    const field = el("input", { type: "password", name: "token", autocomplete: "off", required: true, autofocus: true });
    const form = el("form", {}, el("h2", {}, "Sign in"),
      el("p", { class: "soft" }, "Use the token that ", el("code", {}, "lmpool web"), " printed, or the value of ",
        el("code", {}, "LMPOOL_WEB_TOKEN"), " or ", el("code", {}, "--token"), "."),
      el("label", {}, "Token ", field), notice, el("button", { type: "submit", class: "main" }, "Sign in"));
    const dialog = el("dialog", { id: "sign-in", "aria-label": "Sign in" }, form);
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    const proceed = (event) => {
      if (event && (event.key !== KEY_NAME || !event.newValue)) return;
      removeEventListener("storage", proceed);
      dialog.remove();
      signingIn = null;
      linkTrouble = "";
      resolve();
    };
    // Another tab of this browser may sign in while the dialog is open.
    addEventListener("storage", proceed);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      try {
        await beginSession({ token: field.value.trim() });
        proceed();
      } catch (error) {
        setText(notice, error.message);
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
    const response = await fetchWithKey(path, options);
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

// Requests return the JSON of a response, or throw an Error with the response's text.

async function readJson(response) {
  const text = await response.text();
  let value = null;
  try {
    value = JSON.parse(text);
  } catch {
    // The response is no JSON, but a proxy's page or a refusal in plain text.
  }
  if (!response.ok) throw new Error(value?.error ?? cut(text, 300) ?? response.statusText);
  return value;
}

export async function fetchJson(path, body) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  };
  return readJson(await request(path, options));
}

// Read server-sent events with fetch until the page closes: an EventSource cannot send the key of the session.
export async function watch(path, onMessage, onLost) {
  for (;;) {
    try {
      const reader = (await checked(await request(path))).body.pipeThrough(new TextDecoderStream()).getReader();
      let unread = "";
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        const events = (unread + part.value).split("\n\n");
        unread = events.pop();
        // Use a microtask, so that an error in `onMessage` does not count as a lost connection.
        for (const event of events) queueMicrotask(() => onMessage(JSON.parse(event.replace(/^data: /, ""))));
      }
    } catch (error) {
      onLost(error.message);
    }
    await new Promise((resolve) => { setTimeout(resolve, RETRY_MS); });
  }
}

async function checked(response) {
  if (!response.ok) await readJson(response);
  return response;
}
