// What the explorer shows, as the part of the address behind "#": a link that reproduces the view.

export const BLANK = { model: "", beside: "", text: "", ids: null, at: null, temperature: 1, topP: 1, under: "" };

// A model and its adapter as one value of a select.
export const choice = (model, adapter) => JSON.stringify([model, adapter]);

export function readChoice(value) {
  try {
    const [model, adapter] = JSON.parse(value);
    return typeof model === "string" && typeof adapter === "string" ? { model, adapter } : null;
  } catch {
    return null;
  }
}

const numberOr = (text, otherwise) => {
  const value = Number.parseFloat(text);
  return Number.isFinite(value) ? value : otherwise;
};

export function readIds(text) {
  const parts = text.split(/[\s,]+/).filter(Boolean);
  return parts.every((part) => /^\d{1,10}$/.test(part)) ? parts.map(Number) : null;
}

export function readView(hash) {
  const asked = new URLSearchParams(hash.replace(/^#/, ""));
  const ids = asked.has("ids") ? readIds(asked.get("ids")) : null;
  return {
    model: asked.get("model") ?? "",
    beside: asked.get("beside") ?? "",
    text: asked.get("text") ?? "",
    ids: ids?.length ? ids : null,
    at: asked.has("at") ? numberOr(asked.get("at"), null) : null,
    temperature: numberOr(asked.get("temperature"), 1),
    topP: numberOr(asked.get("top_p"), 1),
    under: /^([0-9a-f]{2})*$/.test(asked.get("under") ?? "") ? asked.get("under") ?? "" : "",
  };
}

export function hashOf(view) {
  const told = new URLSearchParams();
  if (view.model) told.set("model", view.model);
  if (view.beside) told.set("beside", view.beside);
  if (view.ids) told.set("ids", view.ids.join(","));
  else if (view.text) told.set("text", view.text);
  if (view.at != null) told.set("at", view.at);
  if (view.temperature !== 1) told.set("temperature", view.temperature);
  if (view.topP !== 1) told.set("top_p", view.topP);
  if (view.under) told.set("under", view.under);
  return `#${told}`;
}
