// List the dead letters of each model; open, retry and drop dead letters.

import { Table, byId, count, cut, el, fetchJson, setText } from "./dom.js";

export class Letters {
  constructor(allowChanges) {
    this.allowChanges = allowChanges;
    this.models = new Map();
    this.place = byId("letters");
  }

  // Update the lists of dead letters from the models of a frame; read a list again when its length has changed.
  update(models) {
    const dead = new Map(models.filter((model) => model.dead).map((model) => [model.name, model.dead]));
    for (const [name, list] of this.models) {
      if (!dead.has(name)) {
        list.place.remove();
        this.models.delete(name);
      }
    }
    for (const [name, number] of dead) {
      const list = this.models.get(name) ?? this.add(name);
      if (list.number !== number) {
        list.number = number;
        this.read(name);
      }
    }
    const total = [...dead.values()].reduce((sum, number) => sum + number, 0);
    setText(byId("dead-count"), total ? count(total) : "none");
  }

  add(model) {
    const table = el("table");
    const notice = el("p", { class: "notice", role: "status" });
    const place = el("div", { class: "letters" },
      el("h3", { dir: "auto" }, cut(model, 120)), el("div", { class: "scroll" }, table), notice);
    const list = { place, notice, number: 0, table: new Table(table, this.columns(model), (letter) => letter.id) };
    this.models.set(model, list);
    this.place.append(place);
    return list;
  }

  columns(model) {
    return [
      { title: "given up", left: true, text: (letter) => letter.given_up },
      { title: "error", left: true, text: (letter) => letter.error },
      { title: "reason", long: true, text: (letter) => cut(letter.reason || letter.fault, 120),
        title_of: (letter) => letter.reason || letter.fault },
      { title: "tokens", wide: true, text: (letter) => count(letter.tokens) },
      { title: "request", long: true, wide: true, text: (letter) => cut(letter.asked, 60) },
      { title: "adapter", long: true, wide: true, text: (letter) => cut(letter.adapter, 40) },
      { title: "", left: true, node: (letter) => this.buttons(model, letter) },
    ];
  }

  buttons(model, letter) {
    const change = (action) => () => this.change(model, action, [letter.id]);
    const note = this.allowChanges ? null : "start lmpool web with --allow-changes to use this";
    const off = { disabled: !this.allowChanges, title: note };
    return el("span", { class: "buttons" },
      el("button", { type: "button", onclick: () => this.open(model, letter.id) }, "open"),
      el("button", { type: "button", ...off, onclick: change("retry") }, "retry"),
      el("button", { type: "button", ...off, onclick: change("drop") }, "drop"));
  }

  async read(model) {
    const list = this.models.get(model);
    try {
      const { letters, count: number } = await fetchJson(`api/dead?model=${encodeURIComponent(model)}`);
      list.table.update(letters);
      if (number > letters.length) this.say(model, `and ${count(number - letters.length)} older ones`);
    } catch (error) {
      this.say(model, error.message);
    }
  }

  async change(model, action, ids) {
    try {
      const outcome = await fetchJson(`api/dead/${action}`, { model, ids });
      const refused = Object.values(outcome.refused ?? {});
      this.say(model, refused[0] ?? (action === "drop" ? "dropped" : "queued again"));
    } catch (error) {
      this.say(model, error.message);
    }
    await this.read(model);
  }

  async open(model, id) {
    const dialog = byId("letter");
    const close = el("button", { type: "button", autofocus: true, onclick: () => dialog.close() }, "close");
    try {
      const letter = await fetchJson(`api/dead/show?model=${encodeURIComponent(model)}&id=${encodeURIComponent(id)}`);
      const fields = Object.entries(letter).filter(([, value]) => value !== "" && value != null);
      dialog.replaceChildren(el("h2", {}, "Dead letter"), el("dl", {}, ...fields.flatMap(([name, value]) => [
        el("dt", {}, name.replace("_", " ")),
        el("dd", {}, Array.isArray(value) ? value.join(", ") : String(value)),
      ])), close);
    } catch (error) {
      dialog.replaceChildren(el("p", {}, error.message), close);
    }
    dialog.showModal();
  }

  say(model, text) {
    const list = this.models.get(model);
    if (list) setText(list.notice, text);
  }
}
