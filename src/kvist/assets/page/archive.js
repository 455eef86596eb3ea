// The list of kept conversations: open, delete, export. Deleting all asks once more in place. Owns nothing of their form.

import { announce, button, byId, download, element } from "./dom.js";
import { title } from "./history.js";

const DAY = new Intl.DateTimeFormat("en", { dateStyle: "medium", timeStyle: "short" });

export class Archive {
  constructor(history, session) {
    Object.assign(this, { history, session, sure: false });
    byId("open-history").addEventListener("click", () => {
      this.sure = false;
      this.draw();
      byId("history").showModal();
    });
    byId("export").addEventListener("click", () => download("kvist-history.json", history.exported(), "application/json"));
    byId("delete-all").addEventListener("click", () => this.deleteAll());
  }

  draw() {
    const { kept } = this.history;
    const list = byId("history-list");
    list.replaceChildren(...kept.map((one) => this.row(one)));
    if (!kept.length) list.append(element("li", { class: "empty" }, "Nothing is kept yet."));
    byId("export").disabled = byId("delete-all").disabled = !kept.length;
    byId("delete-all").textContent = this.sure ? "Really delete all" : "Delete all";
  }

  row(one) {
    const name = title(one);
    const open = button(name, () => {
      byId("history").close();
      this.session.open(one);
    }, { class: "opens", "aria-current": one.id === this.session.conversation.id ? "true" : null });
    const told = element("small", {}, `${one.mode === "chat" ? "Chat" : "Text"}, ${DAY.format(one.at)}`);
    const remove = button("Delete", () => {
      this.history.remove(one.id);
      announce("Deleted");
      this.draw();
      byId("history-list").querySelector("button")?.focus();
    }, { class: "quiet", "aria-label": `Delete ${name}` });
    return element("li", {}, element("div", {}, open, told), remove);
  }

  deleteAll() {
    if (this.sure) {
      this.history.clear();
      announce("All conversations were deleted");
    }
    this.sure = !this.sure && this.history.kept.length > 0;
    this.draw();
  }
}
