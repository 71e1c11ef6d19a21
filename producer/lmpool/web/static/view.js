// Convert the explorer's view to the part of an address after "#", and back, so that a link reproduces the view.

export const BLANK = { model: "", beside: "", text: "", ids: null, at: null, temperature: 1, topP: 1, under: "" };

// A model and its adapter, encoded as one value of a select element.
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
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const ids = given.has("ids") ? readIds(given.get("ids")) : null;
  return {
    model: given.get("model") ?? "",
    beside: given.get("beside") ?? "",
    text: given.get("text") ?? "",
    ids: ids?.length ? ids : null,
    at: given.has("at") ? numberOr(given.get("at"), null) : null,
    temperature: numberOr(given.get("temperature"), 1),
    topP: numberOr(given.get("top_p"), 1),
    under: /^([0-9a-f]{2})*$/.test(given.get("under") ?? "") ? given.get("under") ?? "" : "",
  };
}

export function hashOf(view) {
  const params = new URLSearchParams();
  if (view.model) params.set("model", view.model);
  if (view.beside) params.set("beside", view.beside);
  if (view.ids) params.set("ids", view.ids.join(","));
  else if (view.text) params.set("text", view.text);
  if (view.at != null) params.set("at", view.at);
  if (view.temperature !== 1) params.set("temperature", view.temperature);
  if (view.topP !== 1) params.set("top_p", view.topP);
  if (view.under) params.set("under", view.under);
  return `#${params}`;
}
