// The microscope: asks what a chosen token's position read, and puts map, drawings, text and table together. Owns which layer
// is chosen, and waiting when the server limits the rate. Knows nothing of conversations.

import * as api from "./api.js";
import { announce, button, element } from "./dom.js";
import { count, isNumber, percent, seconds, visible } from "./figures.js";
import { Heatmap } from "./heatmap.js";
import { experts, kvColour, labels, masses, roleMark, shares, table } from "./matrix.js";
import { describes, lanes, prepared, served, sourceColours, textOf } from "./reads.js";
import { Shaded } from "./shaded.js";

const MOST_READ = 3;

export class Scope {
  constructor(root) {
    this.root = root;
    this.asking = null;
    this.timer = 0;
    this.answer = null;
    this.clear();
    root.addEventListener("position", ({ detail }) => this.follow(detail));
  }

  clear() {
    this.forget();
    this.answer = null;
    const words = "Choose a token of the reply, by a click or with the arrow keys and Enter, to see which positions each layer read when it was written.";
    this.root.replaceChildren(element("p", { class: "empty" }, words), legend());
  }

  /** Colours have changed. */
  repaint() {
    if (this.answer) this.heatmap.draw();
  }

  forget() {
    this.asking?.abort();
    clearTimeout(this.timer);
  }

  /** Ask for a token of a request; `said` is the token in words. */
  async choose({ turn, token, said }) {
    this.forget();
    const asking = new AbortController();
    this.asking = asking;
    this.chosen = { turn, token, said };
    this.tell(`Running ${said} again with eyes open …`);
    try {
      const answer = await api.microscope(turn.request, token, asking.signal);
      if (!asking.signal.aborted) this.show(answer);
    } catch (error) {
      if (asking.signal.aborted) return;
      if (error.status === 429) this.retry(Math.max(1, error.retryAfter));
      else if (error.status === 404) this.tell("The server no longer keeps this request. Write again, then choose a token.");
      else this.tell(`No look at this token: ${error.message}`);
    }
  }

  retry(wait) {
    this.tell(`The server limits how often it looks. Again in ${wait} s.`);
    this.timer = setTimeout(() => this.choose(this.chosen), wait * 1000);
  }

  tell(words) {
    const note = element("p", { class: "waiting" }, words);
    if (this.answer) this.root.firstChild.replaceWith(note);
    else this.root.replaceChildren(note);
    announce(words);
  }

  show(answer) {
    this.answer = answer;
    this.layers = prepared(answer);
    this.colours = sourceColours(this.layers);
    this.places = lanes(this.layers);
    this.lane = Math.min(this.lane ?? this.layers.length - 1, this.layers.length - 1);
    this.root.replaceChildren(this.head(), this.summary(), this.drawings(), this.line(), legend(true), this.reading(), this.numbers());
    this.heatmap.show(answer, this.layers);
    this.heatmap.cursor.lane = this.lane;
    this.shaded.reset();
    this.mark(this.lane);
    this.say(null);
    const { said } = this.chosen;
    announce(`Drawn: what ${said} read in ${this.layers.length} layers`);
  }

  head() {
    const { turn, token } = this.chosen;
    const { position, output = {} } = this.answer;
    const { logprob, rank } = output;
    const likely = [
      isNumber(logprob) && `probability ${percent(Math.exp(logprob))}`,
      isNumber(rank) && (rank === 0 ? "the likeliest" : `rank ${count(rank + 1)}`),
    ].filter(Boolean);
    const step = (by, name, mark) =>
      button(mark, () => document.dispatchEvent(new CustomEvent("step", { detail: { turn, token: token + by } })), {
        class: "quiet step", "aria-label": name, disabled: token + by < 0 || token + by >= turn.tokens,
      });
    return element(
      "div",
      { class: "chosen-token" },
      step(-1, "Token before", "‹"),
      step(1, "Token after", "›"),
      element("p", {}, element("q", {}, visible(output.text ?? "")), ` token ${count(token + 1)}, written at position ${count(position)}`),
      element("p", { class: "likely" }, likely.join(" · ")),
    );
  }

  summary() {
    const sources = served(this.layers);
    const readers = sources.reduce((sum, one) => sum + one.readers.length, 0);
    const words = `${count(sources.length)} stored KV${sources.length === 1 ? "" : "s"} serve ${count(readers)} of ${count(this.layers.length)} layers:`;
    const chips = sources.map(({ source, first, last }) => {
      const colour = kvColour({ source }, this.colours);
      const span = first === last ? `layer ${first}` : `layers ${first}–${last}`;
      return element("span", { class: "chip" }, roleMark("full", colour), `KV ${source}: ${span}`);
    });
    return element("p", { class: "summary" }, words, " ", chips);
  }

  tools() {
    const { position, window: near } = this.answer;
    const act = (text, name, then) => button(text, then, { class: "quiet", "aria-label": name });
    return element(
      "div",
      { class: "zoom", role: "group", "aria-label": "Shown positions" },
      act("Whole", "Show the whole document", () => this.heatmap.zoom(Infinity)),
      act("Window", "Show the window", () => this.heatmap.look(position + 1 - near, position + 1)),
      act("−", "Zoom out", () => this.heatmap.zoom(2)),
      act("+", "Zoom in", () => this.heatmap.zoom(0.5)),
    );
  }

  drawings() {
    const holder = element("div", {
      class: "map",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "colour map",
      "aria-label": "Positions by layers. Arrow keys move, Page Up and Page Down go to what was read, plus, minus and 0 zoom, Enter shows the place in the text.",
      "aria-describedby": "map-line",
    });
    this.heatmap = new Heatmap(holder);
    this.heatmap.addEventListener("at", ({ detail }) => {
      if (detail.layer !== this.lane) this.pick(detail.layer);
      this.say(detail);
    });
    this.heatmap.addEventListener("pick", () => this.shaded.show(this.heaviest(this.heatmap.cell)));
    const names = () => labels(this.layers, this.places, this.colours, (at) => this.pick(at));
    const side = (title, help, svg) => element("div", { class: "side" }, element("h3", { title: help }, title), svg);
    return element(
      "div",
      { class: "drawings" },
      element("div", { class: "side names" }, element("h3", {}, "Layer"), names()),
      element("div", { class: "side wide" }, element("header", {}, element("h3", {}, "Position"), this.tools()), holder),
      element("div", { class: "side names again" }, element("h3", {}, "Layer"), names()),
      side("Mass", "shares of attention: window, rows, sink", masses(this.layers, this.places, this.colours)),
      side("Overlap", "share of its choice that the choice before it has too", shares(this.layers, this.places, (layer) => layer.overlap, "overlap")),
      side("Experts", "which experts acted, as tall as their weight", experts(this.layers, this.places)),
      side("Engram", "mean gate", shares(this.layers, this.places, (layer) => layer.engram, "Engram gate", 34)),
    );
  }

  line() {
    this.readout = element("output", { id: "map-line", class: "readout", "aria-live": "polite" });
    return this.readout;
  }

  /** What is under the cursor; null: how to get there. */
  say(cell) {
    if (!cell) {
      this.readout.textContent = "Point at the map, or focus it and use the arrow keys.";
      return;
    }
    const layer = this.layers[cell.layer];
    const { first, last } = cell;
    const inside = layer.spans.filter(([begin, end]) => begin <= last && end >= first);
    const part = ([begin, end, mass]) => (mass * (Math.min(end, last) - Math.max(begin, first) + 1)) / (end - begin + 1);
    const near = inside.filter((span) => span[3]).reduce((sum, span) => sum + part(span), 0);
    const far = inside.filter((span) => !span[3]).reduce((sum, span) => sum + part(span), 0);
    const pooled = (layer.pool ?? []).some(([begin, end]) => begin <= last && end >= first);
    const read = [near > 0 && `${percent(near)} in the window`, far > 0 && `${percent(far)} in rows`].filter(Boolean);
    const where = first === last ? `position ${count(first)}` : `positions ${count(first)}–${count(last)}`;
    const pool = pooled ? ", candidate" : "";
    this.readout.replaceChildren(
      element("b", {}, `Layer ${layer.layer}`),
      ` ${where}: ${read.join(", ") || "not read"}${pool} `,
      element("q", {}, textOf(this.answer.tokens, first, last).replaceAll("\n", "⏎")),
    );
  }

  heaviest({ layer, first, last }) {
    const inside = this.layers[layer].spans.filter(([begin, end]) => begin <= last && end >= first);
    const best = inside.sort((one, other) => other[2] - one[2])[0];
    return best ? Math.max(first, best[0]) : first;
  }

  /** The document's pointer is on a position: the map's cursor follows. */
  follow(at) {
    if (at < this.heatmap.view.from || at >= this.heatmap.view.to) return;
    this.heatmap.cursor = { lane: this.lane, at };
    this.heatmap.moved();
  }

  pick(at) {
    this.heatmap.cursor.lane = at;
    this.heatmap.draw();
    this.mark(at);
  }

  mark(at) {
    this.lane = at;
    const layer = this.layers[at];
    for (const name of this.root.querySelectorAll(".lane-name")) name.classList.toggle("chosen", Number(name.dataset.at) === at);
    this.select.value = String(at);
    this.does.textContent = `${describes(layer)}: ${percent(layer.window_mass)} window, ${percent(layer.row_mass)} rows, ${percent(layer.sink_mass)} sink`;
    this.shaded.draw(this.answer, layer, kvColour(layer, this.colours));
  }

  reading() {
    this.select = element("select", { id: "shade-layer", onchange: () => this.pick(Number(this.select.value)) });
    this.select.append(...this.layers.map((layer, at) => element("option", { value: String(at) }, `Layer ${layer.layer}`)));
    this.does = element("span", { class: "does" });
    const text = element("div", { class: "document", tabindex: "0", role: "region", "aria-label": "The document, shaded by what the layer read" });
    this.shaded = new Shaded(text);
    const label = element("label", { for: "shade-layer" }, "The text as seen by");
    return element("div", { class: "reading" }, element("p", { class: "shade-by" }, label, " ", this.select, " ", this.does), text);
  }

  numbers() {
    const holder = element("div", { class: "scrolled", tabindex: "0", role: "region", "aria-label": "Numbers" });
    const details = element("details", { class: "numbers" }, element("summary", {}, `Numbers as a table (the look took ${seconds(this.answer.seconds)})`), holder);
    details.addEventListener("toggle", () => {
      if (details.open && !holder.firstChild) holder.append(table(this.answer, this.layers, (layer) => this.mostRead(layer)));
    });
    return details;
  }

  mostRead(layer) {
    const best = [...layer.spans].sort((one, other) => other[2] - one[2]).slice(0, MOST_READ);
    return best.map(([first, last, mass]) => `“${textOf(this.answer.tokens, first, last)}” at ${count(first)}, ${percent(mass)}`).join("; ");
  }
}

/** What marks and colours mean. */
function legend(short = false) {
  const colour = short ? "var(--soft-ink)" : "var(--kv-1)";
  const item = (mark, words) => element("li", {}, mark, words);
  const swatch = (kind) => element("span", { class: `swatch ${kind}`, "aria-hidden": "true" });
  return element(
    "ul",
    { class: "legend", "aria-label": "Legend" },
    item(roleMark("full", colour), "Full: makes KV and an index"),
    item(roleMark("reindex", colour), "Reindex: chooses anew in shared KV"),
    item(roleMark("reuse", colour), "Reuse: shared KV, shared choice"),
    item(roleMark("window", "var(--near)"), "window only"),
    item(swatch("near"), "window"),
    item(swatch("rows"), "compressed rows, one colour a shared KV"),
    item(swatch("sink"), "sink"),
    item(swatch("pool"), "candidate pool"),
  );
}
