// What the person writes: the text field that grows, pictures by file, paste and drop with previews, send and stop. Owns the
// pictures until they are sent. Names of files are text. Knows nothing of how a request looks.

import { announce, button, byId, element } from "./dom.js";
import { bytes } from "./figures.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const LARGEST = 8_000_000;
const MOST = 8;

export class Composer {
  constructor(session) {
    this.session = session;
    this.images = [];
    this.field = byId("composer-text");
    this.form = byId("composer");
    this.notice = byId("notice");
    this.list = byId("images");
    this.attach = byId("attach");
    this.field.addEventListener("input", () => this.fit());
    this.field.addEventListener("keydown", (event) => this.onKey(event));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", () => session.stop());
    this.listenForImages();
    for (const name of ["opened", "began", "ended"]) session.addEventListener(name, () => this.update());
  }

  get mode() {
    return this.session.conversation.mode;
  }

  listenForImages() {
    const file = byId("file");
    this.attach.addEventListener("click", () => file.click());
    file.addEventListener("change", () => {
      this.add(file.files);
      file.value = "";
    });
    this.field.addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
    const writing = byId("writing");
    // Anywhere on the page: a file dropped beside the field would otherwise replace the page.
    document.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      writing.classList.add("over");
    });
    document.addEventListener("dragleave", (event) => event.relatedTarget || writing.classList.remove("over"));
    document.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      writing.classList.remove("over");
      this.add(event.dataTransfer.files);
    });
  }

  /** Why pictures cannot be sent now, or "". */
  refusal() {
    const { model } = this.session;
    if (!model) return "Not connected yet.";
    if (!model.capabilities?.vision) return `${model.id} has no vision.`;
    return this.mode === "text" ? "Images need chat." : "";
  }

  async add(files) {
    const refusal = this.refusal();
    if (refusal) return this.say(`No image was attached. ${refusal}`);
    for (const file of files) {
      if (!TYPES.includes(file.type)) this.say(`${file.name} is no PNG, JPEG, WebP or GIF image.`);
      else if (file.size > LARGEST) this.say(`${file.name} has ${bytes(file.size)}; at most ${bytes(LARGEST)} can be sent.`);
      else if (this.images.length >= MOST) this.say(`At most ${MOST} images go with a message.`);
      else this.images.push({ name: file.name || "image", url: await dataUrl(file) });
    }
    this.drawImages();
  }

  drawImages() {
    this.list.hidden = !this.images.length;
    this.list.replaceChildren(
      ...this.images.map((image, at) =>
        element(
          "figure",
          { role: "listitem" },
          element("img", { src: image.url, alt: "" }),
          element("figcaption", {}, image.name),
          button("×", () => this.drop(at), { class: "quiet", "aria-label": `Remove ${image.name}` }),
        ),
      ),
    );
  }

  drop(at) {
    this.images.splice(at, 1);
    this.drawImages();
    this.field.focus();
  }

  /** A message to the person beside the field; empty: none. */
  say(text) {
    this.notice.hidden = !text;
    this.notice.textContent = text;
  }

  fit() {
    this.field.style.setProperty("height", "auto");
    this.field.style.setProperty("height", `${Math.min(this.field.scrollHeight, innerHeight * 0.4)}px`);
    this.update();
  }

  fill(text) {
    this.field.value = text;
    this.fit();
    this.field.focus();
  }

  onKey(event) {
    if (event.key === "Escape" && this.session.running) return this.session.stop();
    if (event.key !== "Enter" || event.isComposing) return undefined;
    const sends = this.mode === "chat" ? !event.shiftKey : event.ctrlKey || event.metaKey;
    if (!sends) return undefined;
    event.preventDefault();
    return this.send();
  }

  send() {
    const text = this.field.value;
    const { running, model } = this.session;
    if (running || !model) return;
    if (this.mode === "chat" && !text.trim() && !this.images.length) return;
    const images = this.images;
    this.images = [];
    this.field.value = "";
    this.say("");
    this.drawImages();
    this.fit();
    this.session.send(text, images);
  }

  update() {
    const { running, model, turns } = this.session;
    const chat = this.mode === "chat";
    const stop = byId("stop");
    const hadFocus = document.activeElement;
    stop.hidden = !running;
    byId("send").hidden = Boolean(running);
    byId("send").disabled = !model;
    byId("send").textContent = chat ? "Send" : "Continue";
    if (hadFocus === byId("send") && running) stop.focus();
    else if (hadFocus === stop && !running) this.field.focus();
    this.field.placeholder = chat ? "Message" : turns.length ? "Add text, or let the model continue" : "The beginning of a text";
    byId("composer-label").textContent = chat ? "Message" : "Text to add";
    byId("composer-hint").textContent = running ? "Esc stops" : chat ? "Enter sends" : "Ctrl+Enter continues";
    const refusal = this.refusal();
    this.attach.disabled = Boolean(refusal);
    byId("attach-reason").textContent = refusal;
    if (refusal && this.images.length) {
      this.images = [];
      this.drawImages();
      announce("Attached images were removed");
    }
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
