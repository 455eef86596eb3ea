// The document as text, shaded by what one layer read. Long stretches that it did not read are folded. Owns the folding; told
// layer and colour. Tokens are text nodes. Tells by a bubbling event `position` which token the pointer is on.

import { button, element } from "./dom.js";
import { count, percent, visible } from "./figures.js";
import { isControl, massByPosition, shown } from "./reads.js";

const AROUND = 8;
const FOLDED = 24;
const MOST = 4000;
const GAMMA = 0.45;
const FAINTEST = 0.12;
const STRONGEST = 48; // percent of the colour: text on it keeps its contrast in both themes

export class Shaded {
  constructor(root) {
    this.root = root;
    this.open = new Set();
    root.addEventListener("pointerover", (event) => {
      const at = event.target.dataset?.at;
      if (at !== undefined) root.dispatchEvent(new CustomEvent("position", { bubbles: true, detail: Number(at) }));
    });
  }

  /** Forget which folds are open. */
  reset() {
    this.open.clear();
  }

  draw(answer, layer, colour) {
    Object.assign(this, { answer, layer, colour });
    const end = answer.position + 1;
    const masses = massByPosition(layer.spans, 0, end);
    const peak = masses.reduce((most, mass) => Math.max(most, mass), 1e-9);
    this.root.replaceChildren();
    this.root.style.setProperty("--shade", colour);
    let shown = 0;
    for (const [first, last, read] of stretches(masses, this.open)) {
      if (!read || shown > MOST) this.root.append(this.fold(first, last));
      else {
        for (let at = first; at <= last; at += 1) this.root.append(this.token(at, masses[at], peak));
        shown += last - first + 1;
      }
    }
    this.root.append(element("span", { class: "next", title: "the chosen token" }, visible(answer.output?.text ?? "")));
  }

  token(at, mass, peak) {
    const text = shown(this.answer.tokens[at]);
    const first = at === this.answer.position + 1 - this.answer.window && at > 0;
    const classes = ["word", isControl(this.answer.tokens[at]) && "control", mass > 0 && "read", first && "window-begins", at === this.answer.position && "here"].filter(Boolean);
    const node = element("span", { class: classes.join(" "), data: { at } }, text);
    if (mass > 0) {
      const strong = FAINTEST + (1 - FAINTEST) * (mass / peak) ** GAMMA;
      node.style.setProperty("--strength", `${Math.round(strong * STRONGEST)}%`);
      node.title = `position ${count(at)}: ${percent(mass)}`;
    }
    return node;
  }

  fold(first, last) {
    const words = `${count(last - first + 1)} tokens not read`;
    return button(words, () => this.unfold(first), { class: "fold" });
  }

  unfold(first) {
    this.open.add(first);
    this.draw(this.answer, this.layer, this.colour);
    this.show(first);
  }

  /** Bring a position into sight and mark it. */
  show(at) {
    this.root.querySelector(".found")?.classList.remove("found");
    let node = this.root.querySelector(`[data-at="${at}"]`);
    if (!node) {
      const folds = stretches(massByPosition(this.layer.spans, 0, this.answer.position + 1), this.open);
      const fold = folds.find(([first, last, read]) => !read && first <= at && at <= last);
      if (!fold) return;
      this.open.add(fold[0]);
      this.draw(this.answer, this.layer, this.colour);
      node = this.root.querySelector(`[data-at="${at}"]`);
    }
    node?.classList.add("found");
    if (node) this.root.scrollTop += node.getBoundingClientRect().top - this.root.getBoundingClientRect().top - this.root.clientHeight / 2;
  }
}

/** Stretches [first, last, shown]: tokens near a read one are shown, others folded if they are many and not in `open`. */
function stretches(masses, open) {
  const near = new Uint8Array(masses.length);
  masses.forEach((mass, at) => mass > 0 && near.fill(1, Math.max(0, at - AROUND), at + AROUND + 1));
  const found = [];
  for (let at = 0; at < near.length; ) {
    let end = at;
    while (end + 1 < near.length && near[end + 1] === near[at]) end += 1;
    found.push([at, end, Boolean(near[at]) || end - at < FOLDED || open.has(at)]);
    at = end + 1;
  }
  return found;
}
