// Elements out of names, properties and children. Children that are strings become text nodes: nothing here, and nothing
// anywhere on this page, reads a string as markup.

const SVG = "http://www.w3.org/2000/svg";

function assign(node, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "hidden") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
}

/** An HTML element; `on…` properties are listeners, `style` goes through the CSSOM, which the content policy allows. */
export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  assign(node, properties);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** The same for SVG. */
export function drawing(name, properties = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  assign(node, properties);
  node.append(...children.flat().filter(Boolean));
  return node;
}

/** The element with an id that index.html has. */
export function byId(id) {
  const node = document.getElementById(id);
  if (!node) throw new Error(`index.html has no element "${id}"`);
  return node;
}

/** Say something to screen readers, once and in few words. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** A button. */
export function button(text, onclick, properties = {}) {
  return element("button", { type: "button", ...properties, onclick }, text);
}

/** Hand a text to the person as a file. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
