// A reply as its tokens: text that grows, each token choosable by pointer or keyboard. Owns the cursor among tokens and what
// is said of one. Everything the model wrote goes into text nodes. Tells by a bubbling event `choose` {turn, token, text}.

import { announce, element } from "./dom.js";
import { count, percent, visible } from "./figures.js";
import { CONTENT, HIDDEN, NO_TOKEN, REASONING } from "./session.js";

const ENDS = { stop: "", length: "Cut at the limit of new tokens.", stopped: "Stopped.", tool_calls: "" };
const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };

export class Reply {
  constructor(turn, { inline = false } = {}) {
    this.turn = turn;
    this.cursor = null;
    this.body = this.group("Reply");
    this.thoughts = this.group("Reasoning");
    this.aside = element("details", { class: "reasoning", hidden: true }, element("summary", {}, "Reasoning"), this.thoughts);
    this.calls = element("div", { class: "calls" });
    this.end = element(inline ? "span" : "p", { class: "end" });
    this.element = element(inline ? "span" : "div", { class: "reply" }, inline ? [] : this.aside, this.body, this.calls);
    this.grow(0);
    if (turn.reason || turn.error) this.finish();
  }

  group(name) {
    return element("span", {
      class: "tokens",
      role: "group",
      tabindex: "0",
      "aria-label": `${name}; arrow keys go from token to token, Enter shows what one read`,
      onclick: (event) => getSelection().isCollapsed && this.choose(event.target.closest(".piece")),
      onkeydown: (event) => this.onKey(event),
      onblur: () => this.mark(null),
    });
  }

  /** Show the pieces from number `from` on. */
  grow(from) {
    const added = { [CONTENT]: [], [REASONING]: [] };
    for (const [text, logprob, kind, token] of this.turn.pieces.slice(from)) {
      if (kind === HIDDEN) continue;
      const chosen = token !== NO_TOKEN;
      added[kind].push(
        chosen ? element("span", { class: "piece", data: { token, logprob: logprob ?? "" } }, text) : document.createTextNode(text),
      );
    }
    this.body.append(...added[CONTENT]);
    this.thoughts.append(...added[REASONING]);
    // Reasoning is open as long as nothing else is there to read.
    if (added[REASONING].length && this.aside.hidden) this.aside.open = true;
    if (added[REASONING].length) this.aside.hidden = false;
    if (added[CONTENT].length && !this.answered) this.aside.open = false;
    this.answered ||= added[CONTENT].length > 0;
    const calls = this.turn.calls ?? [];
    if (calls.length) {
      this.calls.replaceChildren(
        ...calls.map((call) => element("pre", { class: "call" }, element("b", {}, call.name), "\n", call.arguments)),
      );
    }
  }

  /** The end has come: how, and what it cost. */
  finish() {
    const { usage, reason, error } = this.turn;
    const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const cost = usage && `${count(usage.prompt_tokens)} prompt tokens, ${count(cached)} cached, ${count(usage.completion_tokens)} new`;
    const texts = [error ? `Failed: ${error}` : (ENDS[reason] ?? reason), cost].filter(Boolean);
    this.end.classList.toggle("failed", Boolean(error));
    this.end.replaceChildren(texts.join(" "));
  }

  pieces(group) {
    return Array.from(group.querySelectorAll(".piece"));
  }

  mark(piece) {
    this.cursor?.classList.remove("cursor");
    this.cursor = piece;
    piece?.classList.add("cursor");
  }

  onKey(event) {
    const group = event.currentTarget;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.choose(this.cursor ?? this.pieces(group).at(-1));
      return;
    }
    const step = STEPS[event.key];
    const all = this.pieces(group);
    if (step === undefined || !all.length || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const at = this.cursor ? all.indexOf(this.cursor) + step : step < 0 ? all.length - 1 : 0;
    this.mark(all[Math.max(0, Math.min(all.length - 1, at))]);
    this.cursor.scrollIntoView({ block: "nearest" });
    announce(said(this.cursor));
  }

  /** Choose a token by number; one that shows nothing has no piece and is chosen all the same. */
  chooseToken(token) {
    const piece = this.element.querySelector(`.piece[data-token="${token}"]`);
    if (piece) this.choose(piece);
    else this.tell(this.body, { token, text: "", said: `token ${token + 1}, which shows nothing` });
  }

  tell(from, detail) {
    from.dispatchEvent(new CustomEvent("choose", { bubbles: true, detail: { turn: this.turn, ...detail } }));
  }

  choose(piece) {
    if (!piece) return;
    for (const other of document.querySelectorAll(".piece.chosen")) other.classList.remove("chosen");
    piece.classList.add("chosen");
    this.tell(piece, { token: Number(piece.dataset.token), text: piece.textContent, said: said(piece) });
  }
}

/** A token in words. */
function said(piece) {
  const { token, logprob } = piece.dataset;
  const likely = logprob === "" ? "" : `, probability ${percent(Math.exp(Number(logprob)))}`;
  return `token ${Number(token) + 1} “${visible(piece.textContent)}”${likely}`;
}
