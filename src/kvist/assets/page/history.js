// Conversations in this browser's local storage, newest first. Owns the key, the form of a conversation and what happens when
// the storage is full: pictures go first, oldest first. Knows nothing of elements or of the server.
//
// A conversation: {id, mode: "text" | "chat", at, turns}. A turn of the person: {by: "person", text, images: [{name, url}]};
// of the model: {by: "model", text, reasoning, calls, pieces: [[text, logprob, kind, token]], tokens, request, reason, usage,
// error}.

const KEY = "kvist.history.1";
const TITLE = 64;

/** A new, empty conversation. */
export function blank(mode) {
  return { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`, mode, at: Date.now(), turns: [] };
}

/** What a conversation is called in the list. */
export function title(conversation) {
  const text = conversation.turns.map((turn) => turn.text.trim()).find(Boolean) ?? "";
  return text.length > TITLE ? `${text.slice(0, TITLE).trimEnd()}…` : text || "(no text)";
}

export class History {
  constructor() {
    this.kept = this.read();
  }

  read() {
    try {
      const kept = JSON.parse(localStorage.getItem(KEY) ?? "[]");
      return Array.isArray(kept) ? kept.filter((one) => one?.id && Array.isArray(one.turns)) : [];
    } catch {
      return []; // somebody else's bytes under our key
    }
  }

  find(id) {
    return this.kept.find((one) => one.id === id);
  }

  /** Keep a conversation; returns what had to be left out, in words, or "". */
  keep(conversation) {
    if (!conversation.turns.length) return "";
    const others = this.read().filter((one) => one.id !== conversation.id);
    this.kept = [{ ...conversation, at: Date.now() }, ...others];
    return this.write();
  }

  remove(id) {
    this.kept = this.read().filter((one) => one.id !== id);
    this.write();
  }

  clear() {
    this.kept = [];
    localStorage.removeItem(KEY);
  }

  /** All of it as text for a file. */
  exported() {
    return JSON.stringify({ format: "kvist history 1", conversations: this.kept }, null, 1);
  }

  write() {
    let left = "";
    for (;;) {
      try {
        localStorage.setItem(KEY, JSON.stringify(this.kept));
        return left;
      } catch (error) {
        if (error.name !== "QuotaExceededError") throw error;
        left = this.shrink();
        if (!left) return "This browser keeps no more: the conversation is not in the history.";
      }
    }
  }

  /** Drop the oldest picture, or else the oldest conversation. The one on screen keeps its own; only the copy shrinks. */
  shrink() {
    for (let at = this.kept.length - 1; at >= 0; at -= 1) {
      const turns = this.kept[at].turns;
      const found = turns.findIndex((turn) => turn.images?.some((image) => image.url));
      if (found < 0) continue;
      const bare = { ...turns[found], images: turns[found].images.map((image) => ({ name: image.name, url: "" })) };
      this.kept[at] = { ...this.kept[at], turns: turns.with(found, bare) };
      return "The history is full: pictures of old messages were dropped from it.";
    }
    if (this.kept.length < 2) return "";
    this.kept.pop();
    return "The history is full: the oldest conversation was dropped from it.";
  }
}
