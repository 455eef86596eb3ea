// What the microscope's answer says, in the forms that drawings need: spans of mass by layer, colours by shared KV, lanes.
// Pure functions; knows nothing of elements. A role that is not known draws as a window layer.

/** Layers with `spans`: [first, last, mass, isWindow], in order of position, and `peak`, the largest mass a position. */
export function prepared(answer) {
  return answer.layers.map((layer) => {
    const near = (layer.window_positions ?? []).map(([at, mass]) => [at, at, mass, true]);
    const far = (layer.rows ?? []).map(([first, last, mass]) => [first, last, mass, false]);
    const spans = [...far, ...near].sort((one, other) => one[0] - other[0]);
    return { ...layer, spans };
  });
}

/** Number (from 1) of the colour of each shared KV source, in order of layers. */
export function sourceColours(layers) {
  const colours = new Map();
  for (const { source } of layers) if (source !== null && source !== undefined && !colours.has(source)) colours.set(source, colours.size + 1);
  return colours;
}

/** Mass by bin of `bins` equal parts of positions from..to: `far` (rows), `near` (window). */
export function binned(spans, from, to, bins) {
  const far = new Float64Array(bins);
  const near = new Float64Array(bins);
  const scale = bins / (to - from);
  for (const [first, last, mass, isWindow] of spans) {
    if (last < from || first >= to) continue;
    const into = isWindow ? near : far;
    const begin = (Math.max(first, from) - from) * scale;
    const end = (Math.min(last + 1, to) - from) * scale;
    const dense = mass / ((last + 1 - first) * scale);
    for (let bin = Math.floor(begin); bin < Math.min(bins, Math.ceil(end)); bin += 1) {
      into[bin] += dense * (Math.min(end, bin + 1) - Math.max(begin, bin));
    }
  }
  return { far, near };
}

/** Mass that each position of from..to got in a layer. */
export function massByPosition(spans, from, to) {
  const { far, near } = binned(spans, from, to, to - from);
  return far.map((mass, at) => mass + near[at]);
}

const CAPTION_PX = 17;

/** Lanes: a layer's top and height in px; before each half's first a line for its name (`captions`); `height` is all of it. */
export function lanes(layers) {
  const height = layers.length <= 16 ? 22 : layers.length <= 28 ? 17 : 14;
  const captions = [];
  let top = 0;
  const placed = layers.map((layer, at) => {
    if (layer.half !== layers[at - 1]?.half) {
      captions.push({ top, name: layer.half });
      top += CAPTION_PX;
    }
    const lane = { top, height };
    top += height;
    return lane;
  });
  return { placed, captions, height: top };
}

/** "Layers 2 to 5" for each source, with how many layers read it. */
export function served(layers) {
  const by = new Map();
  for (const { layer, source } of layers) if (source !== null && source !== undefined) by.set(source, [...(by.get(source) ?? []), layer]);
  return [...by].map(([source, readers]) => ({ source, readers, first: readers[0], last: readers.at(-1) }));
}

const ROLES = { window: "window", full: "Full", reindex: "Reindex", reuse: "Reuse" };

export const roleName = (layer) => ROLES[layer.role] ?? String(layer.role);

/** "Full, its own KV", "Reuse of the KV of layer 6": what a layer does. */
export function describes(layer) {
  if (layer.source === null || layer.source === undefined) return "reads its window only";
  const candidates = layer.candidates_from ?? null;
  const pool = candidates === null || candidates === layer.layer ? "" : `, from candidates of layer ${candidates}`;
  if (layer.source === layer.layer) return `${roleName(layer)}: makes KV and an index${layer.keeps_pool ? ", keeps a pool of candidates" : ""}`;
  const chosen = layer.selection_from ?? layer.layer;
  const choice = chosen === layer.layer ? "its own choice" : `the choice of layer ${chosen}`;
  return `${roleName(layer)}: KV of layer ${layer.source}, ${choice}${pool}`;
}

/** A control token's name without its marks; other tokens as they are. */
export const shown = (token) => (isControl(token) ? ` ${token.slice(2, -2).replaceAll("▁", " ")} ` : token);

export const isControl = (token) => token.length > 4 && token.startsWith("<｜") && token.endsWith("｜>");

/** The text of positions first..last, cut in the middle of long ones. */
export function textOf(tokens, first, last) {
  const text = tokens.slice(first, last + 1).map(shown).join("");
  return text.length > 60 ? `${text.slice(0, 28)} … ${text.slice(-28)}` : text;
}
