// The sheet: a text that person and model write on, or the messages of a chat; editing; following the end while it grows.
// Owns nothing of requests. Everything shown is a text node.

import { announce, button, element } from "./dom.js";
import { Reply } from "./reply.js";

const BEGINNINGS = ["It was a dark night and", "The river rises in the", "def add(left, right):\n    "];
const NEAR_END_PX = 60;
const ANNOUNCED = 400;

export class Writing {
  constructor(sheet, session) {
    this.sheet = sheet;
    this.session = session;
    this.replies = new Map();
    this.frame = 0;
    this.waiting = new Map();
    session.addEventListener("opened", () => this.draw());
    session.addEventListener("began", ({ detail }) => this.began(detail.turn));
    session.addEventListener("grew", ({ detail }) => this.grew(detail));
    session.addEventListener("ended", ({ detail }) => this.ended(detail.turn));
  }

  draw() {
    this.replies.clear();
    this.waiting.clear();
    const { mode, turns } = this.session.conversation;
    this.sheet.replaceChildren();
    this.sheet.dataset.mode = mode;
    if (!turns.length) this.sheet.append(this.empty(mode));
    else if (mode === "text") this.drawText(turns);
    else turns.forEach((turn, at) => this.sheet.append(this.message(turn, at)));
    this.sheet.scrollTop = this.sheet.scrollHeight;
  }

  empty(mode) {
    if (mode === "chat") {
      const base = this.session.model?.capabilities?.base;
      const words = base ? "This is a base model: it was not tuned to chat and will ramble. It continues texts far better." : "Say something.";
      return element("p", { class: "empty" }, words);
    }
    const starts = BEGINNINGS.map((text) =>
      button(text.trim(), () => this.sheet.dispatchEvent(new CustomEvent("begin", { bubbles: true, detail: text }))),
    );
    return element("div", { class: "empty" }, element("p", {}, "Write a beginning; the model goes on from there."), element("div", { class: "beginnings" }, starts));
  }

  drawText(turns) {
    this.flow = element("div", { class: "flow" });
    this.foot = element("footer", { class: "foot" });
    for (const turn of turns) this.flow.append(turn.by === "person" ? element("span", { class: "person" }, turn.text) : this.reply(turn, true));
    this.sheet.append(element("article", { class: "manuscript", "aria-label": "Text" }, this.flow, this.foot));
    this.drawFoot();
  }

  drawFoot() {
    if (!this.foot?.isConnected) return;
    const last = this.session.turns.at(-1);
    const note = last?.by === "model" ? this.replies.get(last)?.end : null;
    const idle = !this.session.running;
    this.foot.replaceChildren(
      ...[
        note,
        idle && button("Edit text", () => this.editText(), { class: "quiet" }),
        idle && last?.by === "model" && button("Write again", () => this.session.again(), { class: "quiet" }),
      ].filter(Boolean),
    );
  }

  reply(turn, inline) {
    const reply = new Reply(turn, { inline });
    this.replies.set(turn, reply);
    return reply.element;
  }

  message(turn, at) {
    const person = turn.by === "person";
    const head = element("header", {}, element("h3", {}, person ? "You" : "Model"), element("span", { class: "tools" }));
    const body = person ? [this.pictures(turn), element("p", { class: "said" }, turn.text)] : this.reply(turn, false);
    const article = element("article", { class: `message ${turn.by}`, "aria-label": person ? "You" : "Model" }, head, body);
    const tools = head.lastChild;
    if (person) tools.append(button("Edit", () => this.editMessage(article, turn, at), { class: "quiet" }));
    else {
      if (at === this.session.turns.length - 1) tools.append(button("Again", () => this.session.again(), { class: "quiet" }));
      article.append(this.replies.get(turn).end);
    }
    return article;
  }

  pictures(turn) {
    const images = turn.images ?? [];
    if (!images.length) return [];
    const shown = images.map((image) =>
      image.url ? element("img", { src: image.url, alt: `Image ${image.name}` }) : element("span", { class: "gone" }, `${image.name} (no longer kept)`),
    );
    return element("div", { class: "pictures" }, shown);
  }

  editMessage(article, turn, at) {
    article.querySelector(".tools").replaceChildren();
    article.querySelector(".said").replaceWith(this.editor(turn.text, (text) => this.session.edit(at, text)));
    article.querySelector("textarea").focus();
  }

  editText() {
    const text = this.session.turns.map((turn) => turn.text).join("");
    this.flow.replaceWith(this.editor(text, (changed) => this.session.rewrite(changed)));
    this.foot.replaceChildren();
    this.sheet.querySelector("textarea").focus();
  }

  editor(text, done) {
    const field = element("textarea", { class: "edited", "aria-label": "Edited text", rows: "6", value: text });
    const finish = () => field.value && done(field.value);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) finish();
      if (event.key === "Escape") this.draw();
    });
    const actions = element("div", { class: "actions" }, button("Send again", finish, { class: "send" }), button("Cancel", () => this.draw(), { class: "quiet" }));
    return element("div", { class: "editor" }, field, actions);
  }

  /** Choose a token by number. */
  choose(turn, token) {
    this.replies.get(turn)?.chooseToken(token);
  }

  began(turn) {
    if (this.session.conversation.mode === "text") {
      this.flow?.isConnected ? this.flow.append(this.reply(turn, true)) : this.draw();
      this.drawFoot();
    } else this.sheet.append(this.message(turn, this.session.turns.length - 1));
    this.sheet.setAttribute("aria-busy", "true");
    this.sheet.scrollTop = this.sheet.scrollHeight;
    announce("Writing");
  }

  /** Many tokens may come between two frames: they are drawn together. */
  grew({ turn, from }) {
    if (!this.waiting.has(turn)) this.waiting.set(turn, from);
    this.frame ||= requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { scrollHeight, scrollTop, clientHeight } = this.sheet;
    const follow = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    for (const [turn, from] of this.waiting) this.replies.get(turn)?.grow(from);
    this.waiting.clear();
    if (follow) this.sheet.scrollTop = this.sheet.scrollHeight;
  }

  ended(turn) {
    this.flush();
    this.sheet.removeAttribute("aria-busy");
    this.replies.get(turn)?.finish();
    if (this.session.conversation.mode === "text") this.drawFoot();
    else this.sheet.querySelectorAll(".message.model:not(:last-of-type) .tools").forEach((tools) => tools.replaceChildren());
    this.sheet.scrollTop = this.sheet.scrollHeight;
    const end = turn.error ? `Failed: ${turn.error}` : turn.reason === "stopped" ? "Stopped" : "Written";
    announce(turn.text && turn.text.length <= ANNOUNCED ? `${end}: ${turn.text}` : `${end}, ${turn.tokens} tokens`);
  }
}
