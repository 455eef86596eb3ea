// The colour map: positions from left to right, a lane a layer, mass as opacity, one colour a shared KV. Owns the canvas, the
// zoom and the cursor. Tells by events: `at` {layer, first, last} as the cursor moves, `pick` as a person chooses a place.

import { binned, lanes, sourceColours } from "./reads.js";

const AXIS = 20;
const FAINTEST = 0.32;
const GAMMA = 0.42;
const SMALLEST_VIEW = 24;

/** A CSS colour variable as the theme resolves it now. */
export function themed(name) {
  const probe = document.getElementById("scope");
  probe.style.setProperty("outline-color", `var(${name})`);
  const colour = getComputedStyle(probe).outlineColor;
  probe.style.removeProperty("outline-color");
  return colour;
}

export class Heatmap extends EventTarget {
  constructor(holder) {
    super();
    this.holder = holder;
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    holder.append(this.canvas);
    new ResizeObserver(() => this.draw()).observe(holder);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("click", (event) => {
      this.point(event);
      this.dispatchEvent(new Event("pick"));
    });
    holder.addEventListener("keydown", (event) => this.onKey(event));
    holder.addEventListener("focus", () => this.move(0, 0));
    holder.addEventListener("blur", () => this.draw());
  }

  show(answer, layers) {
    Object.assign(this, { answer, layers, lanes: lanes(layers), colours: sourceColours(layers) });
    this.view = { from: 0, to: answer.position + 1 };
    this.cursor = { lane: layers.length - 1, at: answer.position };
    this.draw();
  }

  get bins() {
    return Math.max(1, Math.min(Math.floor(this.width), this.view.to - this.view.from));
  }

  /** The cell under the cursor: first and last position. */
  get cell() {
    const { from, to } = this.view;
    const wide = (to - from) / this.bins;
    const bin = Math.min(this.bins - 1, Math.floor((this.cursor.at - from) / wide));
    const first = Math.floor(from + bin * wide);
    return { layer: this.cursor.lane, bin, first, last: Math.max(first, Math.ceil(from + (bin + 1) * wide) - 1) };
  }

  point(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const lane = this.lanes.placed.findIndex((one) => event.clientY - top < one.top + one.height);
    const share = Math.max(0, Math.min(0.999999, (event.clientX - left) / this.width));
    if (lane < 0) return;
    this.cursor = { lane, at: Math.floor(this.view.from + share * (this.view.to - this.view.from)) };
    this.moved();
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const far = event.shiftKey ? 10 : 1;
    const acts = {
      ArrowLeft: () => this.move(-far, 0),
      ArrowRight: () => this.move(far, 0),
      ArrowUp: () => this.move(0, -1),
      ArrowDown: () => this.move(0, 1),
      Home: () => this.move(-Infinity, 0),
      End: () => this.move(Infinity, 0),
      PageUp: () => this.jump(-1),
      PageDown: () => this.jump(1),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.zoom(Infinity),
      Enter: () => this.dispatchEvent(new Event("pick")),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  move(cells, down) {
    const wide = Math.max(1, (this.view.to - this.view.from) / this.bins);
    const at = Math.round(this.cursor.at + cells * wide);
    this.cursor = {
      lane: Math.max(0, Math.min(this.layers.length - 1, this.cursor.lane + down)),
      at: Math.max(this.view.from, Math.min(this.view.to - 1, at)),
    };
    this.moved();
  }

  /** To the next span that this layer read. */
  jump(way) {
    const firsts = this.layers[this.cursor.lane].spans.map(([first]) => first);
    const { first, last } = this.cell;
    const next = way > 0 ? firsts.find((at) => at > last) : firsts.findLast((at) => at < first);
    if (next === undefined) return;
    if (next < this.view.from || next >= this.view.to) this.zoom(Infinity);
    this.cursor.at = next;
    this.moved();
  }

  moved() {
    this.draw();
    this.dispatchEvent(new CustomEvent("at", { detail: this.cell }));
  }

  zoom(factor) {
    const end = this.answer.position + 1;
    const span = Math.min(end, Math.max(SMALLEST_VIEW, (this.view.to - this.view.from) * factor));
    const share = (this.cursor.at - this.view.from) / (this.view.to - this.view.from);
    const from = Math.max(0, Math.min(end - span, this.cursor.at - share * span));
    this.view = { from: Math.floor(from), to: Math.min(end, Math.floor(from) + Math.round(span)) };
    this.moved();
  }

  /** Show positions from..to only. */
  look(from, to) {
    const end = this.answer.position + 1;
    const first = Math.max(0, Math.min(from, end - SMALLEST_VIEW));
    this.view = { from: first, to: Math.max(Math.min(end, to), Math.min(end, first + SMALLEST_VIEW)) };
    this.move(0, 0);
  }

  draw() {
    if (!this.answer) return;
    const ratio = devicePixelRatio || 1;
    this.width = this.holder.clientWidth;
    const height = this.lanes.height + AXIS;
    this.holder.style.setProperty("height", `${height}px`);
    if (this.width < 1) return;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const bins = this.layers.map((layer) => binned(layer.spans, this.view.from, this.view.to, this.bins));
    const peak = Math.max(1e-9, ...bins.map(({ far, near }) => Math.max(Math.max(...far), Math.max(...near))));
    this.peak = peak;
    this.drawGround(pen);
    this.layers.forEach((layer, at) => this.drawLane(pen, layer, this.lanes.placed[at], bins[at], peak));
    this.drawAxis(pen);
    this.drawCursor(pen);
  }

  x(position) {
    return ((position - this.view.from) / (this.view.to - this.view.from)) * this.width;
  }

  drawGround(pen) {
    pen.fillStyle = themed("--lane");
    for (const { top, height } of this.lanes.placed) pen.fillRect(0, top, this.width, height - 1);
    const start = this.x(Math.max(0, this.answer.position + 1 - this.answer.window));
    pen.fillStyle = themed("--near-ground");
    for (const { top, height } of this.lanes.placed) pen.fillRect(start, top, this.width - start, height - 1);
  }

  drawLane(pen, layer, { top, height }, { far, near }, peak) {
    const wide = this.width / far.length;
    const rows = themed(layer.source === null || layer.source === undefined ? "--near" : `--kv-${this.colour(layer)}`);
    const window_ = themed("--near");
    const pool = layer.pool ? 3 : 0;
    for (let bin = 0; bin < far.length; bin += 1) {
      const mass = far[bin] + near[bin];
      if (mass <= 0) continue;
      pen.fillStyle = far[bin] >= near[bin] ? rows : window_;
      pen.globalAlpha = FAINTEST + (1 - FAINTEST) * Math.min(1, mass / peak) ** GAMMA;
      pen.fillRect(bin * wide, top, Math.max(1, wide - (wide > 5 ? 0.5 : 0)), height - 1 - pool);
    }
    pen.globalAlpha = 0.7;
    pen.fillStyle = rows;
    for (const [first, last] of layer.pool ?? []) {
      const left = this.x(Math.max(first, this.view.from));
      const right = this.x(Math.min(last + 1, this.view.to));
      if (right > left) pen.fillRect(left, top + height - 3, Math.max(1, right - left), 2);
    }
    pen.globalAlpha = 1;
  }

  colour(layer) {
    return ((this.colours.get(layer.source) - 1) % 8) + 1;
  }

  drawAxis(pen) {
    const { from, to } = this.view;
    const wanted = (to - from) / Math.max(2, Math.floor(this.width / 70));
    const power = 10 ** Math.floor(Math.log10(Math.max(1, wanted)));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= wanted) ?? power * 10;
    pen.fillStyle = themed("--muted");
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "bottom";
    const base = this.lanes.height + AXIS;
    for (let at = Math.ceil(from / step) * step; at < to; at += step) {
      const x = this.x(at);
      pen.fillRect(x, this.lanes.height + 1, 1, 4);
      const text = at.toLocaleString("en");
      const half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.max(0, Math.min(this.width - 2 * half, x - half)), base);
    }
  }

  drawCursor(pen) {
    const { placed, height } = this.lanes;
    const { bin } = this.cell;
    const wide = this.width / this.bins;
    pen.fillStyle = themed("--ink");
    pen.globalAlpha = 0.25;
    pen.fillRect(bin * wide + wide / 2 - 0.5, 0, 1, height);
    pen.globalAlpha = 1;
    const { top, height: tall } = placed[this.cursor.lane];
    pen.strokeStyle = themed("--ink");
    pen.lineWidth = document.activeElement === this.holder ? 2 : 1;
    pen.strokeRect(bin * wide - 1, top - 0.5, Math.max(4, wide) + 1, tall);
  }
}
