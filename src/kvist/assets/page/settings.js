// Sampling, replay, reasoning, theme and key: fields, limits, keeping. An empty field means the server's own default. The key
// stays in the tab's session storage (api.js), all else in local storage. Knows nothing of requests.

import { key } from "./api.js";
import { byId, element } from "./dom.js";

const STORED = "kvist.settings.1";
const THEMES = ["auto", "light", "dark"];
const DEFAULTS = { temperature: null, topP: null, seed: null, maxTokens: null, replay: null, effort: null, system: "", theme: "auto" };
const NUMBERS = {
  temperature: { label: "Temperature", min: 0, max: 100, step: "any", help: "0 takes the likeliest token each time." },
  topP: { label: "Top-p", min: 0.01, max: 1, step: "any", help: "Draw from the likeliest tokens that sum to this." },
  seed: { label: "Seed", min: 0, max: 2 ** 53 - 1, step: 1, help: "The same seed gives the same text." },
  maxTokens: { label: "New tokens at most", min: 1, max: 1_000_000, step: 1, help: "Empty: 200 in a text and from a base model, else the server's default." },
};
const CHOICES = {
  replay: {
    label: "Replay of a cached prefix",
    options: [["", "server's setting"], ["bounded", "bounded: the window, as published"], ["exact", "exact: as if nothing were cached"]],
  },
  effort: {
    label: "Reasoning (chat)",
    options: [["", "server's setting; off for a base model"], ["none", "off"], ["low", "low"], ["high", "high"], ["max", "max"]],
  },
};

export class Settings extends EventTarget {
  constructor() {
    super();
    this.values = { ...DEFAULTS, ...stored() };
    this.applyTheme();
    byId("sampling").addEventListener("click", () => this.open());
    byId("open-settings").addEventListener("click", () => this.open());
    byId("theme").addEventListener("click", () => {
      this.set("theme", THEMES[(THEMES.indexOf(this.values.theme) + 1) % THEMES.length]);
      this.applyTheme();
    });
    this.tell();
  }

  set(name, value) {
    this.values[name] = value;
    localStorage.setItem(STORED, JSON.stringify(this.values));
    this.tell();
  }

  tell() {
    const { temperature, topP, seed, maxTokens, replay } = this.values;
    const parts = [
      `temperature ${temperature ?? "default"}`,
      topP !== null && `top-p ${topP}`,
      seed !== null && `seed ${seed}`,
      maxTokens === null ? "default length" : `${maxTokens} tokens`,
      replay && `${replay} replay`,
    ];
    byId("sampling").textContent = parts.filter(Boolean).join(" · ");
    byId("sampling").setAttribute("aria-label", `Sampling: ${byId("sampling").textContent}. Change`);
    this.dispatchEvent(new Event("changed"));
  }

  applyTheme() {
    const { theme } = this.values;
    document.documentElement.dataset.theme = theme;
    byId("theme").textContent = { auto: "◐ Auto", light: "○ Light", dark: "● Dark" }[theme];
    byId("theme").setAttribute("aria-label", `Theme: ${theme}. Change`);
  }

  /** Show the dialog; with `locked` the key is what is missing. */
  open({ locked = false } = {}) {
    byId("settings-fields").replaceChildren(
      ...Object.entries(NUMBERS).map(([name, field]) => this.number(name, field)),
      ...Object.entries(CHOICES).map(([name, field]) => this.choice(name, field)),
      this.system(),
      this.keyField(locked),
    );
    if (!byId("settings").open) byId("settings").showModal();
    if (locked) byId("key").focus();
  }

  number(name, { label, help, ...limits }) {
    const value = this.values[name] ?? "";
    const field = element("input", { id: name, type: "number", inputmode: "decimal", placeholder: "server's default", value, ...limits });
    const told = element("small", { id: `${name}-told` }, help ?? "");
    field.setAttribute("aria-describedby", told.id);
    field.addEventListener("input", () => {
      const valid = field.validity.valid;
      field.setAttribute("aria-invalid", String(!valid));
      told.textContent = valid ? (help ?? "") : field.validationMessage;
      if (valid) this.set(name, field.value === "" ? null : Number(field.value));
    });
    return element("div", { class: "field" }, element("label", { for: name }, label), field, told);
  }

  choice(name, { label, options }) {
    const field = element("select", { id: name, onchange: () => this.set(name, field.value || null) });
    field.append(...options.map(([value, text]) => element("option", { value }, text)));
    field.value = this.values[name] ?? "";
    return element("div", { class: "field" }, element("label", { for: name }, label), field);
  }

  system() {
    const field = element("textarea", { id: "system", rows: "2", value: this.values.system, oninput: () => this.set("system", field.value) });
    return element("div", { class: "field" }, element("label", { for: "system" }, "System prompt (chat)"), field);
  }

  keyField(locked) {
    const field = element("input", { id: "key", type: "password", autocomplete: "off", value: key.get(), "aria-describedby": "key-told" });
    field.addEventListener("change", () => {
      key.set(field.value.trim());
      this.dispatchEvent(new Event("key"));
    });
    const words = locked ? "This server needs a key, or another one." : "Only where the server asks for one.";
    const told = element("small", { id: "key-told", class: locked ? "failed" : "" }, `${words} Forgotten when this tab closes.`);
    return element("div", { class: "field" }, element("label", { for: "key" }, "API key"), field, told);
  }
}

function stored() {
  try {
    return JSON.parse(localStorage.getItem(STORED) ?? "{}");
  } catch {
    return {}; // somebody else's bytes under our name
  }
}
