// One model's view of a text: its tokens, the most likely tokens at each position, and one whole row with the byte trie.

import { count, cut, el, fetchJson, percent, setText } from "./dom.js";

const LEVELS = 7; // Number of background shades for a token's surprisal, as in style.css.
const BITS_PER_LEVEL = 2;
const LEAVING_MS = 300; // Milliseconds for the pointer to move from a token to its list.
let panes = 0;

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
const inText = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t") || "∅";
const probability = (logprob) => (logprob == null ? 0 : Math.exp(logprob));

function level(logprob) {
  if (logprob == null) return 0;
  return Math.min(LEVELS - 1, Math.floor(-logprob / Math.LN2 / BITS_PER_LEVEL));
}

function describe(logprob) {
  return logprob == null ? "the first token" : `${percent(probability(logprob))}, ${(-logprob / Math.LN2).toFixed(1)} bits`;
}

export class Pane {
  // `page` has the functions branch(pane, ids) and select(at, under).
  constructor(page, chosen) {
    this.page = page;
    this.chosen = chosen;
    this.number = panes += 1;
    this.tokens = el("div", { class: "tokens", role: "group", "aria-label": "Tokens" });
    this.popup = el("div", { class: "popup", role: "menu", "aria-label": "Most likely tokens at this position", hidden: true });
    this.notice = el("p", { class: "notice", role: "status" });
    this.row = el("div", { class: "row" });
    this.trie = el("div", { class: "trie" });
    const name = chosen.adapter ? `${chosen.model} + ${chosen.adapter}` : chosen.model;
    this.bits = el("span", { class: "soft" });
    this.element = el("section", { class: "pane", "aria-label": cut(name) },
      el("h2", { dir: "auto" }, cut(name), " ", this.bits), this.notice, this.tokens, this.popup,
      el("div", { class: "details" }, this.row, this.trie));
    // Hide the list only for a mouse: browsers also send mouse events after each tap of a finger.
    this.element.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.hide(); });
    // Hide the list after a delay, because the pointer may cross other elements on its way from a token to the list.
    this.element.addEventListener("pointerover", (event) => {
      clearTimeout(this.leaving);
      if (event.pointerType === "mouse" && !event.target.closest(".token, .popup")) this.leaving = setTimeout(() => this.hide(), LEAVING_MS);
    });
    this.element.addEventListener("focusout", (event) => {
      if (!this.element.contains(event.relatedTarget)) this.hide();
    });
    this.tokens.addEventListener("keydown", (event) => this.walk(event));
    this.popup.addEventListener("keydown", (event) => this.walkPopup(event));
  }

  // Show the tokens of `wanted`, {text} or {ids}. Returns the response, or null after an error.
  async load(wanted, at) {
    setText(this.notice, "loading…");
    try {
      this.response = await fetchJson("api/text", { ...this.chosen, ...wanted });
    } catch (error) {
      this.response = null;
      this.tokens.replaceChildren();
      setText(this.notice, error.message);
      return null;
    }
    setText(this.notice, "");
    this.show(at);
    return this.response;
  }

  show(at) {
    const { tokens } = this.response;
    const scored = tokens.filter((token) => token.logprob != null);
    const bits = -scored.reduce((total, token) => total + token.logprob, 0) / Math.LN2;
    setText(this.bits, scored.length ? `${count(tokens.length)} tokens, ${(bits / scored.length).toFixed(2)} bits each` : "");
    // Use span elements: browsers show a button element as a block, which would break the lines of the text.
    const buttons = tokens.map((token) => el("span", {
      role: "button", class: `token s${level(token.logprob)}`, "aria-label": `${visible(token.text)}, ${describe(token.logprob)}`,
    }, inText(token.text)));
    buttons.push(el("span", { role: "button", class: "token next", "aria-label": "the next token" }, "…"));
    buttons.forEach((button, i) => {
      let isTouched = false;
      let wasOpen = false;
      button.addEventListener("pointerdown", (event) => {
        isTouched = event.pointerType !== "mouse";
        wasOpen = this.at === i;
      });
      button.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") this.open(i); });
      button.addEventListener("focus", () => this.open(i));
      button.addEventListener("click", () => {
        // A mouse opened the list before the click, so hide the list, which would cover the token's details. A finger
        // does not hover: the first tap on a token opens the list, and the second tap closes the list.
        if (isTouched && !wasOpen) this.open(i);
        else this.hide();
        this.page.select(i, "");
      });
      // The Tab key stops at only one token; the arrow keys move from this token to other tokens.
      button.tabIndex = i === (at ?? buttons.length - 1) ? 0 : -1;
    });
    this.tokens.replaceChildren(...buttons);
    this.mark(at);
  }

  mark(at) {
    [...this.tokens.children].forEach((button, i) => button.classList.toggle("chosen", i === at));
  }

  // Open the list of the most likely tokens at a position.
  open(at) {
    const button = this.tokens.children[at];
    if (!this.response || !button) return;
    const token = this.response.tokens[at];
    const listed = token ? token.top : this.response.next;
    if (this.at === at && !this.popup.hidden) return;
    this.at = at;
    const here = this.response.ids[at];
    const head = token ? describe(token.logprob) : "the next token";
    this.popup.replaceChildren(el("p", { class: "soft" }, head), ...listed.map(([id, text, logprob]) => {
      const bar = el("meter", { min: 0, max: 1, value: probability(logprob), "aria-hidden": "true" });
      return el("button", {
        type: "button", role: "menuitem", tabindex: -1, class: id === here && token ? "here" : null,
        // If a key chose the token (detail 0), move the focus to the end of the new text.
        onclick: (event) => this.branch(at, id, event.detail === 0),
      }, el("span", { class: "text" }, visible(text)), bar, el("span", { class: "number" }, percent(probability(logprob))));
    }));
    if (!listed.length) this.popup.append(el("p", { class: "soft" }, "no token precedes it"));
    this.popup.hidden = false;
    // Set the styles by script, because the page's Content-Security-Policy forbids style attributes.
    const [rect, box] = [[...button.getClientRects()].at(-1), this.element.getBoundingClientRect()];
    const left = Math.max(0, Math.min(rect.left - box.left, box.width - this.popup.offsetWidth));
    this.popup.style.left = `${left}px`;
    this.popup.style.top = `${rect.bottom - box.top}px`;
  }

  hide() {
    this.popup.hidden = true;
    this.at = null;
  }

  async branch(at, id, isByKey) {
    const ids = [...this.response.ids.slice(0, at), id];
    this.hide();
    await this.page.branch(this, ids);
    if (isByKey) document.querySelector(".token.next")?.focus();
  }

  walk(event) {
    const buttons = [...this.tokens.children];
    const at = buttons.indexOf(document.activeElement);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (to !== undefined && buttons[to]) {
      buttons.forEach((button, i) => { button.tabIndex = i === to ? 0 : -1; });
      buttons[to].focus();
    } else if (event.key === "Enter" || event.key === " ") {
      buttons[at]?.click();
    } else if (event.key === "ArrowDown") {
      this.open(at);
      this.popup.querySelector("button")?.focus();
    } else if (event.key === "Escape") {
      this.hide();
    } else {
      return;
    }
    event.preventDefault();
  }

  walkPopup(event) {
    const buttons = [...this.popup.querySelectorAll("button")];
    const at = buttons.indexOf(document.activeElement);
    if (event.key === "ArrowDown") buttons[Math.min(at + 1, buttons.length - 1)]?.focus();
    else if (event.key === "ArrowUp" && at > 0) buttons[at - 1].focus();
    else if (event.key === "Escape" || event.key === "ArrowUp") {
      const token = this.tokens.children[this.at];
      token?.focus();
      if (event.key === "Escape") this.hide();
    } else return;
    event.preventDefault();
  }

  // Show the whole row at a position, before and after temperature and top-p, and the trie below a prefix.
  async showDetails(at, { temperature, topP }, under) {
    const ids = this.response?.ids.slice(0, at ?? this.response.ids.length) ?? [];
    const request = (this.request = {}); // Responses to earlier requests are ignored.
    this.mark(at);
    this.row.replaceChildren();
    this.trie.replaceChildren();
    if (at == null || !ids.length) return;
    const prompt = { ...this.chosen, ids };
    await Promise.all([
      this.showRow(request, fetchJson("api/row", { ...prompt, temperature, top_p: topP, token: this.response.ids[at] ?? null })),
      this.showTrie(request, fetchJson("api/trie", { ...prompt, under }), at, under),
    ]);
  }

  async showRow(request, response) {
    try {
      const row = await response;
      if (request !== this.request) return;
      const max = Math.max(...row.tokens.map(([, , before, after]) => Math.max(before, after)));
      const bar = (value, name) => el("meter", { min: 0, max, value, class: name, "aria-hidden": "true" });
      this.row.replaceChildren(
        el("h3", {}, "Next token here"),
        el("p", { class: "soft" }, `${count(row.kept)} of ${count(row.vocab_size)} tokens can be drawn; ` +
          `${row.entropy[0].toFixed(2)} bits before, ${row.entropy[1].toFixed(2)} after`),
        el("table", {}, el("thead", {}, el("tr", {}, ...["token", "before", "", "after", ""].map((title, i) =>
          el("th", { scope: "col", class: i % 2 === 0 ? "left" : null }, title)))),
        el("tbody", {}, ...row.tokens.map(([id, text, before, after]) => el("tr", {
          class: [id === row.token?.id && "here", after ? "" : "out"].filter(Boolean).join(" ") || null,
        },
          el("td", { class: "left text" }, visible(text),
            id === row.token?.id ? el("span", { class: "soft" }, ` here, rank ${count(row.token.rank)}`) : ""),
          el("td", {}, percent(before)), el("td", { class: "left" }, bar(before, "before")),
          el("td", {}, after ? percent(after) : "–"), el("td", { class: "left" }, bar(after, "after")))))));
    } catch (error) {
      if (request === this.request) this.row.replaceChildren(el("h3", {}, "Next token here"), el("p", { class: "notice" }, error.message));
    }
  }

  async showTrie(request, response, at, under) {
    const title = el("h3", {}, "Byte trie");
    const go = (hex) => () => this.page.select(at, hex);
    try {
      const trie = await response;
      if (request !== this.request) return;
      if (trie.note) return this.trie.replaceChildren(title, el("p", { class: "soft" }, trie.note));
      const up = el("button", { type: "button", disabled: !under, onclick: go(under.slice(0, -2)) }, "↑ one byte less");
      this.trie.replaceChildren(title,
        el("p", { class: "soft" }, `${percent(trie.mass)} for all tokens that begin with `, el("code", {}, visible(trie.prefix)),
          trie.ends > 5e-7 ? `; ${percent(trie.ends)} for the tokens that end there` : ""), up,
        el("div", { class: "bytes" }, ...trie.children.map(([hex, text, mass]) => el("button", {
          type: "button", onclick: go(hex), "aria-label": `${visible(text)}, ${percent(mass)}`,
        }, el("span", { class: "text" }, visible(text)),
        el("meter", { min: 0, max: trie.mass || 1, value: mass, "aria-hidden": "true" }), el("span", { class: "number" }, percent(mass))))),
        trie.left_out ? el("p", { class: "soft" }, `and ${count(trie.left_out)} more`) : "");
    } catch (error) {
      if (request === this.request) this.trie.replaceChildren(title, el("p", { class: "soft" }, error.message));
    }
  }
}
