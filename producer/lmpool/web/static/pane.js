// One model's view of a text: its tokens, what else might stand at each, and one row in full with the byte trie.

import { ask, count, cut, el, percent, setText } from "./dom.js";

const LEVELS = 7;
const BITS_A_LEVEL = 2;
const LEAVING_MS = 300;
let panes = 0;

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
const inText = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t") || "∅";
const probability = (logprob) => (logprob == null ? 0 : Math.exp(logprob));

function level(logprob) {
  if (logprob == null) return 0;
  return Math.min(LEVELS - 1, Math.floor(-logprob / Math.LN2 / BITS_A_LEVEL));
}

function told(logprob) {
  return logprob == null ? "the first token" : `${percent(probability(logprob))}, ${(-logprob / Math.LN2).toFixed(1)} bits`;
}

export class Pane {
  // page: {branch(pane, ids), select(at, under)}
  constructor(page, chosen) {
    this.page = page;
    this.chosen = chosen;
    this.number = panes += 1;
    this.tokens = el("div", { class: "tokens", role: "group", "aria-label": "Tokens" });
    this.popup = el("div", { class: "popup", role: "menu", "aria-label": "What else might stand here", hidden: true });
    this.said = el("p", { class: "said", role: "status" });
    this.row = el("div", { class: "row" });
    this.trie = el("div", { class: "trie" });
    const name = chosen.adapter ? `${chosen.model} + ${chosen.adapter}` : chosen.model;
    this.bits = el("span", { class: "soft" });
    this.element = el("section", { class: "pane", "aria-label": cut(name) },
      el("h2", { dir: "auto" }, cut(name), " ", this.bits), this.said, this.tokens, this.popup,
      el("div", { class: "details" }, this.row, this.trie));
    // Of mice alone: browsers send mouse events after each tap of a finger, too.
    this.element.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.hide(); });
    // From a token to its list the pointer may cross what is between them.
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

  // asked: {text} or {ids}. Returns the answer, or null when there is none.
  async load(asked, at) {
    setText(this.said, "asking…");
    try {
      this.answer = await ask("api/text", { ...this.chosen, ...asked });
    } catch (error) {
      this.answer = null;
      this.tokens.replaceChildren();
      setText(this.said, error.message);
      return null;
    }
    setText(this.said, "");
    this.show(at);
    return this.answer;
  }

  show(at) {
    const { tokens } = this.answer;
    const scored = tokens.filter((token) => token.logprob != null);
    const bits = -scored.reduce((total, token) => total + token.logprob, 0) / Math.LN2;
    setText(this.bits, scored.length ? `${count(tokens.length)} tokens, ${(bits / scored.length).toFixed(2)} bits each` : "");
    // No button elements: browsers show the text of one as a block, which no line of the text goes through.
    const buttons = tokens.map((token) => el("span", {
      role: "button", class: `token s${level(token.logprob)}`, "aria-label": `${visible(token.text)}, ${told(token.logprob)}`,
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
        // By mouse the list was open before the click, and would lie over what the click opens. A finger does not hover:
        // its first tap opens the list, its second one closes it.
        if (isTouched && !wasOpen) this.open(i);
        else this.hide();
        this.page.select(i, "");
      });
      // One stop for Tab; arrows go on from there.
      button.tabIndex = i === (at ?? buttons.length - 1) ? 0 : -1;
    });
    this.tokens.replaceChildren(...buttons);
    this.mark(at);
  }

  mark(at) {
    [...this.tokens.children].forEach((button, i) => button.classList.toggle("chosen", i === at));
  }

  // The list of what else might stand at a place.
  open(at) {
    const button = this.tokens.children[at];
    if (!this.answer || !button) return;
    const token = this.answer.tokens[at];
    const listed = token ? token.top : this.answer.next;
    if (this.at === at && !this.popup.hidden) return;
    this.at = at;
    const here = this.answer.ids[at];
    const head = token ? told(token.logprob) : "what comes next";
    this.popup.replaceChildren(el("p", { class: "soft" }, head), ...listed.map(([id, text, logprob]) => {
      const bar = el("meter", { min: 0, max: 1, value: probability(logprob), "aria-hidden": "true" });
      return el("button", {
        type: "button", role: "menuitem", tabindex: -1, class: id === here && token ? "here" : null,
        // Who has pressed a key is to find the focus where it goes on.
        onclick: (event) => this.branch(at, id, event.detail === 0),
      }, el("span", { class: "text" }, visible(text)), bar, el("span", { class: "number" }, percent(probability(logprob))));
    }));
    if (!listed.length) this.popup.append(el("p", { class: "soft" }, "nothing comes before it"));
    this.popup.hidden = false;
    // By the script's own access to styles, which the page's policy allows.
    const [place, box] = [[...button.getClientRects()].at(-1), this.element.getBoundingClientRect()];
    const left = Math.max(0, Math.min(place.left - box.left, box.width - this.popup.offsetWidth));
    this.popup.style.left = `${left}px`;
    this.popup.style.top = `${place.bottom - box.top}px`;
  }

  hide() {
    this.popup.hidden = true;
    this.at = null;
  }

  async branch(at, id, isByKey) {
    const ids = [...this.answer.ids.slice(0, at), id];
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

  // The whole row at a place, before and after temperature and top-p, and the trie below a prefix.
  async showDetails(at, { temperature, topP }, under) {
    const ids = this.answer?.ids.slice(0, at ?? this.answer.ids.length) ?? [];
    this.mark(at);
    this.row.replaceChildren();
    this.trie.replaceChildren();
    if (at == null || !ids.length) return;
    const prompt = { ...this.chosen, ids };
    await Promise.all([
      this.showRow(ask("api/row", { ...prompt, temperature, top_p: topP, token: this.answer.ids[at] ?? null })),
      this.showTrie(ask("api/trie", { ...prompt, under }), at, under),
    ]);
  }

  async showRow(asking) {
    try {
      const row = await asking;
      const most = Math.max(...row.tokens.map(([, , before, after]) => Math.max(before, after)));
      const bar = (value, name) => el("meter", { min: 0, max: most, value, class: name, "aria-hidden": "true" });
      this.row.replaceChildren(
        el("h3", {}, "What comes here"),
        el("p", { class: "soft" }, `${count(row.kept)} of ${count(row.vocab_size)} tokens can be drawn; ` +
          `${row.entropy[0].toFixed(2)} bits before, ${row.entropy[1].toFixed(2)} after`),
        el("table", {}, el("thead", {}, el("tr", {}, ...["token", "before", "", "after", ""].map((title, i) =>
          el("th", { scope: "col", class: i % 2 === 0 ? "left" : null }, title)))),
        el("tbody", {}, ...row.tokens.map(([id, text, before, after]) => el("tr", {
          class: [id === row.token?.id && "here", after ? "" : "out"].filter(Boolean).join(" ") || null,
        },
          el("td", { class: "left text" }, visible(text),
            id === row.token?.id ? el("span", { class: "soft" }, ` here, no. ${count(row.token.rank)}`) : ""),
          el("td", {}, percent(before)), el("td", { class: "left" }, bar(before, "before")),
          el("td", {}, after ? percent(after) : "–"), el("td", { class: "left" }, bar(after, "after")))))));
    } catch (error) {
      this.row.replaceChildren(el("h3", {}, "What comes here"), el("p", { class: "said" }, error.message));
    }
  }

  async showTrie(asking, at, under) {
    const title = el("h3", {}, "By its bytes");
    const go = (hex) => () => this.page.select(at, hex);
    try {
      const trie = await asking;
      if (trie.note) return this.trie.replaceChildren(title, el("p", { class: "soft" }, trie.note));
      const up = el("button", { type: "button", disabled: !under, onclick: go(under.slice(0, -2)) }, "↑ one byte less");
      this.trie.replaceChildren(title,
        el("p", { class: "soft" }, `${percent(trie.mass)} for all tokens that begin with `, el("code", {}, visible(trie.prefix)),
          trie.ends > 5e-7 ? `; ${percent(trie.ends)} for those that end there` : ""), up,
        el("div", { class: "bytes" }, ...trie.children.map(([hex, text, mass]) => el("button", {
          type: "button", onclick: go(hex), "aria-label": `${visible(text)}, ${percent(mass)}`,
        }, el("span", { class: "text" }, visible(text)),
        el("meter", { min: 0, max: trie.mass || 1, value: mass, "aria-hidden": "true" }), el("span", { class: "number" }, percent(mass))))),
        trie.left_out ? el("p", { class: "soft" }, `and ${count(trie.left_out)} more`) : "");
    } catch (error) {
      this.trie.replaceChildren(title, el("p", { class: "soft" }, error.message));
    }
  }
}
