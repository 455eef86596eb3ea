// Live figures of the running request, asked for twice a second while the page is seen, and once more after its end. Owns
// their layout. Fields may be missing or more than we know: what is not there is not shown.

import * as api from "./api.js";
import { drawing, element } from "./dom.js";
import { bytes, count, isNumber, percent, seconds } from "./figures.js";

const EVERY_MS = 500;
const SAMPLES = 60;
const WIDTH = 119;
const HEIGHT = 20;

export class Live {
  constructor(root) {
    this.root = root;
    this.id = null;
    this.timer = 0;
    this.rates = [];
    this.idle();
  }

  idle() {
    const words = "While the model writes, its figures stand here: what was cached, replayed and computed, which layers ran, tokens a second.";
    this.root.replaceChildren(element("p", { class: "empty" }, words));
  }

  /** Ask for this request's figures from now on. */
  follow(id) {
    this.id = id;
    this.rates = [];
    this.later(EVERY_MS / 2);
  }

  /** The request has ended: one last look. */
  async finish() {
    clearTimeout(this.timer);
    const id = this.id;
    if (!id) return;
    await this.look(id);
    if (this.id === id) this.id = null;
  }

  later(wait) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.tick(), wait);
  }

  async tick() {
    if (!this.id) return;
    const wait = document.hidden ? 0 : await this.look(this.id);
    if (this.id) this.later(Math.max(EVERY_MS, wait));
  }

  /** Ask and show; returns how long the server wants to be left alone, in ms. */
  async look(id) {
    try {
      const figures = await api.live(id);
      if (id === this.id) this.show(figures);
    } catch (error) {
      if (error.status === 429) return error.retryAfter * 1000;
      if (error.status !== 404) this.root.replaceChildren(element("p", { class: "empty" }, `No figures: ${error.message}`));
    }
    return 0;
  }

  show(figures) {
    const rate = figures.decode_tokens_per_s;
    if (isNumber(rate) && rate > 0) this.rates = [...this.rates, rate].slice(-SAMPLES);
    const rows = [this.speed(figures), prompt(figures), halves(figures), drafts(figures), cache(figures), tiers(figures)];
    const state = element("p", { class: "state", data: { state: figures.state ?? "" } }, figures.state ?? "");
    const list = element("dl", { class: "facts" }, rows.filter(Boolean).flat());
    this.root.replaceChildren(state, list);
  }

  speed(figures) {
    const { prefill_tokens_per_s: prefill, decode_tokens_per_s: decode, queue_seconds: queued } = figures;
    const words = [
      isNumber(decode) && `${count(decode)} tokens/s`,
      isNumber(prefill) && `prompt ${count(prefill)} rows/s`,
      isNumber(queued) && queued >= 0.001 && `${seconds(queued)} in the queue`,
    ].filter(Boolean);
    return words.length ? fact("Speed", this.line(), words.join(" · ")) : null;
  }

  line() {
    if (this.rates.length < 3) return null;
    const top = Math.max(...this.rates);
    const step = WIDTH / (SAMPLES - 1);
    const points = this.rates.map((rate, at) => `${(at * step).toFixed(1)},${(HEIGHT - 2 - (rate / top) * (HEIGHT - 4)).toFixed(1)}`);
    return drawing(
      "svg",
      { class: "rates", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT, "aria-hidden": "true" },
      drawing("polyline", { points: points.join(" ") }),
    );
  }
}

function fact(name, graphic, words) {
  return [element("dt", {}, name), element("dd", {}, element("span", { class: "graphic" }, graphic ?? []), element("span", {}, words))];
}

/** Parts of a whole side by side: [name, value, class]; the words beside it are the text alternative. */
function bar(parts) {
  const whole = parts.reduce((sum, [, value]) => sum + value, 0);
  const shown = parts.filter(([, value]) => value > 0);
  if (!whole) return null;
  return element(
    "span",
    { class: "bar", "aria-hidden": "true" },
    shown.map(([name, value, kind]) => element("span", { class: kind, title: name, style: { "flex-grow": String(value / whole) } })),
  );
}

function prompt({ prompt_tokens: all, cached_tokens: cached = 0, replayed_tokens: replayed = 0, computed_tokens: computed }) {
  if (!isNumber(all)) return null;
  const kept = Math.max(0, cached - replayed);
  const fresh = isNumber(computed) ? computed : Math.max(0, all - cached);
  const again = replayed ? ` (${count(replayed)} of them replayed)` : "";
  const words = `${count(all)} tokens: ${count(cached)} cached${again}, ${count(fresh)} computed`;
  return fact("Prompt", bar([["cached", kept, "tone-1"], ["replayed", replayed, "tone-2"], ["computed", fresh, "tone-3"]]), words);
}

function halves(figures) {
  const sides = ["encoder", "decoder"].map((half) => [half, figures[half]?.layers, figures[half]?.rows]);
  const known = sides.filter(([, layers, rows]) => isNumber(layers) && isNumber(rows));
  if (!known.length) return null;
  const parts = known.map(([name, layers, rows], at) => [name, layers * rows, at ? "tone-1" : "tone-3"]);
  const words = known.map(([name, layers, rows]) => `${name} ${count(layers)} × ${count(rows)} rows`);
  return fact("Layers run", bar(parts), words.join(", "));
}

function drafts({ drafted_tokens: drafted, accepted_tokens: accepted }) {
  if (!isNumber(drafted) || !drafted || !isNumber(accepted)) return null;
  const parts = [["accepted", accepted, "tone-3"], ["refused", drafted - accepted, "tone-1"]];
  return fact("Drafts", bar(parts), `${count(accepted)} of ${count(drafted)} drafted tokens accepted, ${percent(accepted / drafted)}`);
}

function cache({ cache_bytes_per_token: kinds }) {
  const parts = Object.entries(kinds ?? {}).filter(([, value]) => isNumber(value));
  if (!parts.length) return null;
  const whole = parts.reduce((sum, [, value]) => sum + value, 0);
  const toned = parts.map(([name, value], at) => [name, value, `tone-${3 - (at % 3)}`]);
  const words = `${bytes(whole)} a token: ${parts.map(([name, value]) => `${spaced(name)} ${bytes(value)}`).join(", ")}`;
  return fact("Cache", bar(toned), words);
}

function tiers({ cache_bytes_by_tier: held }) {
  const parts = Object.entries(held ?? {}).filter(([, value]) => isNumber(value) && value > 0);
  const toned = parts.map(([name, value], at) => [name, value, `tone-${3 - (at % 3)}`]);
  return parts.length ? fact("Held in", bar(toned), parts.map(([name, value]) => `${spaced(name)} ${bytes(value)}`).join(", ")) : null;
}

const spaced = (name) => name.replaceAll("_", " ");
