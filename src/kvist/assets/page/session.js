// One conversation with the model: what is asked for, how the stream becomes turns, stopping, editing. Owns the requests'
// bodies. Tells listeners by events: opened, began, heard, grew, ended, locked, kept. Knows nothing of elements.

import * as api from "./api.js";
import { blank } from "./history.js";
import { split } from "./pieces.js";

export const HIDDEN = 0;
export const CONTENT = 1;
export const REASONING = 2;
/** New tokens where nothing is said and no end is to be expected. */
const TEXT_TOKENS = 200;
/** The token number of text that was held back and came without its token. */
export const NO_TOKEN = -1;

export class Session extends EventTarget {
  constructor(history, settings) {
    super();
    Object.assign(this, { history, settings, model: null, running: null, conversation: blank("text") });
  }

  get turns() {
    return this.conversation.turns;
  }

  tell(name, detail = {}) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  open(conversation) {
    this.stop();
    this.conversation = structuredClone(conversation);
    this.tell("opened");
  }

  /** A fresh page of the same kind, or of another. */
  fresh(mode = this.conversation.mode) {
    this.open(blank(mode));
  }

  stop() {
    this.running?.abort();
  }

  /** Add what the person wrote, if anything, and let the model go on. */
  async send(text, images = []) {
    if (this.running) return;
    if (text || images.length) this.turns.push({ by: "person", text, images });
    this.tell("opened");
    await this.generate();
  }

  /** Replace a turn's text, drop what follows, and ask again. */
  async edit(at, text) {
    if (this.running) return;
    const turn = { ...this.turns[at], text };
    this.turns.splice(at, Infinity, turn);
    this.tell("opened");
    await this.generate();
  }

  /** In a text everything is one: what the person left of it is the new beginning. */
  async rewrite(text) {
    if (this.running) return;
    this.turns.splice(0, Infinity, { by: "person", text, images: [] });
    this.tell("opened");
    await this.generate();
  }

  /** The last reply once more. */
  async again() {
    if (this.running) return;
    while (this.turns.at(-1)?.by === "model") this.turns.pop();
    this.tell("opened");
    await this.generate();
  }

  async generate() {
    const { conversation } = this; // another one may be opened before this reply has ended
    const turn = { by: "model", text: "", reasoning: "", calls: [], pieces: [], tokens: 0, request: api.requestId(), reason: null };
    const { path, body } = this.conversation.mode === "text" ? this.textRequest() : this.chatRequest();
    const running = new AbortController();
    this.running = running;
    this.turns.push(turn);
    this.tell("began", { turn });
    const heard = () => this.tell("heard", { turn });
    try {
      for await (const chunk of api.stream(path, body, { signal: running.signal, id: turn.request, heard })) this.take(turn, chunk);
    } catch (error) {
      if (running.signal.aborted) turn.reason = "stopped";
      else turn.error = error.message;
      if (error.status === 401) this.tell("locked");
    } finally {
      this.running = null;
      this.tell("ended", { turn });
      this.tell("kept", { left: this.history.keep(conversation) });
    }
  }

  sampling() {
    const { temperature, topP, seed, maxTokens, replay } = this.settings.values;
    const body = { model: this.model.id, stream: true, stream_options: { include_usage: true } };
    const endless = this.conversation.mode === "text" || this.model.capabilities?.base;
    const most = maxTokens ?? (endless ? TEXT_TOKENS : null);
    const given = { temperature, top_p: topP, seed, max_tokens: most, replay };
    for (const [name, value] of Object.entries(given)) if (value !== null) body[name] = value;
    return body;
  }

  textRequest() {
    const prompt = this.turns.map((turn) => turn.text).join("");
    return { path: "v1/completions", body: { ...this.sampling(), prompt, logprobs: 0 } };
  }

  chatRequest() {
    const { system, effort } = this.settings.values;
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const turn of this.turns) {
      if (turn.by === "person") messages.push({ role: "user", content: content(turn) });
      else if (turn.text) messages.push({ role: "assistant", content: turn.text });
    }
    const body = { ...this.sampling(), messages, logprobs: true };
    // A base model never ends its reasoning, so it is not asked to begin.
    const asked = effort ?? (this.model.capabilities?.base ? "none" : null);
    if (asked !== null) body.reasoning_effort = asked;
    return { path: "v1/chat/completions", body };
  }

  take(turn, chunk) {
    if (chunk.usage) turn.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    if (choice.finish_reason) turn.reason = choice.finish_reason;
    const delta = choice.delta ?? { content: choice.text };
    const details = listed(choice.logprobs);
    const kind = delta.reasoning_content ? REASONING : delta.content ? CONTENT : HIDDEN;
    const text = delta.reasoning_content || delta.content || "";
    turn.text += kind === CONTENT ? text : "";
    turn.reasoning += kind === REASONING ? text : "";
    for (const call of delta.tool_calls ?? []) {
      const known = (turn.calls[call.index] ??= { name: "", arguments: "" });
      known.name += call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
    }
    const parts = split(text, details.map(([token]) => token));
    const from = turn.pieces.length;
    parts.forEach((part, at) => turn.pieces.push([part, details[at][1], part ? kind : HIDDEN, turn.tokens++]));
    if (text && !details.length) turn.pieces.push([text, null, kind, NO_TOKEN]);
    this.tell("grew", { turn, from });
  }
}

/** A person's message as the API wants it. A picture that the history no longer has is left out. */
function content(turn) {
  const images = (turn.images ?? []).filter((image) => image.url);
  if (!images.length) return turn.text;
  const parts = images.map((image) => ({ type: "image_url", image_url: { url: image.url } }));
  return turn.text ? [...parts, { type: "text", text: turn.text }] : parts;
}

/** Tokens with their log-probabilities, in either API's form. */
function listed(logprobs) {
  if (logprobs?.content) return logprobs.content.map((one) => [one.token, one.logprob]);
  return (logprobs?.tokens ?? []).map((token, at) => [token, logprobs.token_logprobs[at]]);
}
