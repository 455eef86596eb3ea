// Puts the page together: model, session, sheet, composer, live figures, microscope. Owns which part is seen on narrow screens.

import { ApiError, model } from "./api.js";
import { Archive } from "./archive.js";
import { Composer } from "./composer.js";
import { announce, byId, element } from "./dom.js";
import { count } from "./figures.js";
import { History } from "./history.js";
import { Live } from "./live.js";
import { Scope } from "./scope.js";
import { Session } from "./session.js";
import { Settings } from "./settings.js";
import { Writing } from "./writing.js";

const settings = new Settings();
const history = new History();
const session = new Session(history, settings);
const composer = new Composer(session);
const writing = new Writing(byId("sheet"), session);
const live = new Live(byId("live"));
const scope = new Scope(byId("token"));
new Archive(history, session);

let picked = false;

function seen(part) {
  document.body.dataset.seen = part;
  byId("show-writing").setAttribute("aria-pressed", String(part === "writing"));
  byId("show-scope").setAttribute("aria-pressed", String(part === "scope"));
}

function modeShown() {
  for (const radio of document.querySelectorAll('input[name="mode"]')) radio.checked = radio.value === session.conversation.mode;
}

async function connect() {
  try {
    session.model = await model();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    byId("model").textContent = error.status === 401 ? "needs a key" : error.message;
    if (error.status === 401) settings.open({ locked: true });
    else composer.say(error.message);
    return;
  }
  const { id, max_model_len: context, capabilities: can = {} } = session.model;
  const facts = [can.base ? "base model" : "tuned to chat", can.vision ? "vision" : "no vision", `context ${count(context)}`];
  byId("model").replaceChildren(element("b", {}, id), ` ${facts.join(" · ")}`);
  if (!picked && !session.turns.length) session.fresh(can.base ? "text" : "chat");
  document.title = `Kvist: ${id}`;
  composer.say("");
  composer.update();
}

session.addEventListener("heard", ({ detail }) => live.follow(detail.turn.request));
session.addEventListener("ended", () => live.finish());
session.addEventListener("opened", modeShown);
session.addEventListener("locked", () => settings.open({ locked: true }));
session.addEventListener("kept", ({ detail }) => detail.left && composer.say(detail.left));
settings.addEventListener("key", connect);
settings.addEventListener("changed", () => scope.repaint());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => scope.repaint());

byId("sheet").addEventListener("choose", ({ detail }) => {
  seen("scope");
  scope.choose(detail);
});
byId("sheet").addEventListener("begin", ({ detail }) => composer.fill(detail));
document.addEventListener("step", ({ detail }) => writing.choose(detail.turn, detail.token));
byId("show-writing").addEventListener("click", () => seen("writing"));
byId("show-scope").addEventListener("click", () => seen("scope"));
byId("new-text").addEventListener("click", () => {
  session.fresh();
  scope.clear();
  live.idle();
  byId("composer-text").focus();
});
for (const radio of document.querySelectorAll('input[name="mode"]')) {
  radio.addEventListener("change", () => {
    picked = true;
    session.fresh(radio.value);
    announce(radio.value === "chat" ? "A new chat" : "A new text");
  });
}

seen("writing");
modeShown();
writing.draw();
connect();
