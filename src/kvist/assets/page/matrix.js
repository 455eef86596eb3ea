// The drawings beside the colour map, lane by lane: names with role marks and a bracket a shared KV; window, rows and sink as
// a stacked bar; overlap; experts; Engram's gate. SVG and text. Owns their columns; told which layer is chosen.

import { drawing, element } from "./dom.js";
import { count, isNumber, percent } from "./figures.js";
import { describes, roleName, served } from "./reads.js";

const GUTTER = 12;
const MARK = 9;

/** The colour of a layer's KV as a CSS value; a window layer has none. */
export function kvColour(layer, colours) {
  const number = colours.get(layer.source);
  return number ? `var(--kv-${((number - 1) % 8) + 1})` : "var(--near)";
}

/** Role as a shape: Full is filled, Reindex half filled, Reuse an outline, window only a dash. */
export function roleMark(role, colour) {
  const square = (fill, properties = {}) => drawing("rect", { x: 0.75, y: 0.75, width: MARK - 1.5, height: MARK - 1.5, rx: 1.5, style: { fill, stroke: colour }, ...properties });
  const shapes = {
    full: () => [square(colour)],
    reindex: () => [square("none"), drawing("path", { d: `M1 1h${MARK / 2 - 1}v${MARK - 2}h-${MARK / 2 - 1}z`, style: { fill: colour } })],
    reuse: () => [square("none")],
  };
  const shape = shapes[role]?.() ?? [drawing("path", { d: `M1 ${MARK / 2}h${MARK - 2}`, style: { stroke: colour } })];
  return drawing("svg", { class: "mark", viewBox: `0 0 ${MARK} ${MARK}`, width: MARK, height: MARK, "aria-hidden": "true" }, shape);
}

/** Names of the layers; a click chooses one. Keyboards choose in the select and the map, so these are no tab stops. */
export function labels(layers, { placed, captions, height }, colours, choose) {
  const column = element("div", { class: "labels", "aria-hidden": "true", style: { height: `${height}px` } });
  const gutter = drawing("svg", { class: "gutter", width: GUTTER, height });
  for (const { source, readers } of served(layers)) {
    const rows = readers.map((number) => placed[layers.findIndex((layer) => layer.layer === number)]);
    const colour = `var(--kv-${((colours.get(source) - 1) % 8) + 1})`;
    const middle = ({ top, height: tall }) => top + tall / 2;
    gutter.append(drawing("path", { d: `M4 ${middle(rows[0])}V${middle(rows.at(-1))}`, style: { stroke: colour } }));
    for (const row of rows) gutter.append(drawing("path", { d: `M4 ${middle(row)}h6`, style: { stroke: colour } }));
  }
  column.append(gutter);
  for (const { top, name } of captions) column.append(element("span", { class: "half", style: { top: `${top}px` } }, `${name} half`));
  layers.forEach((layer, at) => {
    const { top, height: tall } = placed[at];
    const name = element("span", { class: "lane-name", data: { at }, style: { top: `${top}px`, height: `${tall}px` }, onclick: () => choose(at) });
    name.append(roleMark(layer.role, kvColour(layer, colours)), element("b", {}, String(layer.layer)), roleName(layer));
    column.append(name);
  });
  return column;
}

/** A column that narrow screens may squeeze. */
function column(width, { height }) {
  return drawing("svg", { viewBox: `0 0 ${width} ${height}`, width, height, preserveAspectRatio: "none", "aria-hidden": "true" });
}

/** Shares of window, rows and sink. */
export function masses(layers, places, colours, width = 96) {
  const svg = column(width, places);
  layers.forEach((layer, at) => {
    const { top, height } = places.placed[at];
    const parts = [
      [layer.window_mass, "var(--near)", "window"],
      [layer.row_mass, kvColour(layer, colours), "rows"],
      [layer.sink_mass, "var(--sink)", "sink"],
    ];
    let left = 0;
    for (const [mass, fill, name] of parts) {
      if (!isNumber(mass) || mass <= 0) continue;
      const wide = mass * width;
      const title = drawing("title", {}, `Layer ${layer.layer}: ${name} ${percent(mass)}`);
      svg.append(drawing("rect", { x: left, y: top + 3, width: Math.max(0, wide - 0.75), height: height - 7, style: { fill } }, title));
      left += wide;
    }
  });
  return svg;
}

/** A share a layer as a short bar on a ground; nothing where there is none. */
export function shares(layers, places, pick, name, width = 40) {
  const svg = column(width, places);
  layers.forEach((layer, at) => {
    const value = pick(layer);
    if (!isNumber(value)) return;
    const { top, height } = places.placed[at];
    const bar = { x: 0, y: top + height / 2 - 2.5, height: 4 };
    svg.append(
      drawing("rect", { ...bar, width, style: { fill: "var(--lane)" } }),
      drawing("rect", { ...bar, width: Math.max(1, Math.min(1, value) * width), style: { fill: "var(--soft-ink)" } }, drawing("title", {}, `Layer ${layer.layer}: ${name} ${percent(value)}`)),
    );
  });
  return svg;
}

/** Which experts acted: a tick at each one's number, as tall as its weight. */
export function experts(layers, places, width = 84) {
  const svg = column(width, places);
  const last = Math.max(0, ...layers.flatMap((layer) => (layer.experts ?? []).map(([id]) => id)));
  const step = width / (last + 1);
  layers.forEach((layer, at) => {
    const { top, height } = places.placed[at];
    const base = top + height - 4;
    if (layer.experts?.length) svg.append(drawing("rect", { x: 0, y: base, width, height: 1, style: { fill: "var(--line)" } }));
    const heaviest = Math.max(1e-9, ...(layer.experts ?? []).map(([, weight]) => weight));
    for (const [id, weight] of layer.experts ?? []) {
      const tall = Math.max(2, (weight / heaviest) * (height - 7));
      const title = drawing("title", {}, `Layer ${layer.layer}: expert ${id}, weight ${count(weight)}`);
      svg.append(drawing("rect", { x: id * step, y: base - tall, width: Math.max(1.5, step - 1), height: tall, style: { fill: "var(--soft-ink)" } }, title));
    }
  });
  return svg;
}

/** All numbers as a table, for those who do not see the drawings, and for checking. */
export function table(answer, layers, mostRead) {
  const heads = ["Layer", "Half", "What it does", "Window", "Rows", "Sink", "Overlap", "Engram", "Experts (weight)", "Most read"];
  const rows = layers.map((layer) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, String(layer.layer)),
      [
        layer.half ?? "",
        describes(layer),
        percent(layer.window_mass),
        percent(layer.row_mass),
        percent(layer.sink_mass),
        percent(layer.overlap),
        percent(layer.engram),
        (layer.experts ?? []).map(([id, weight]) => `${id} (${count(weight)})`).join(", "),
        mostRead(layer),
      ].map((text) => element("td", {}, text)),
    ),
  );
  const head = element("tr", {}, heads.map((text) => element("th", { scope: "col" }, text)));
  const caption = element("caption", {}, `What position ${count(answer.position)} read, layer by layer`);
  return element("table", {}, caption, element("thead", {}, head), element("tbody", {}, rows));
}
