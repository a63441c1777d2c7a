// Building pages of nodes. Text is always text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes, listeners (onclick: f), dataset entries ("data-x") and children: nodes or texts. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for parts of a picture. */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const $ = (selector, root = document) => root.querySelector(selector);

/** An id that no other has. randomUUID is not there on plain http. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), (b) => b.toString(36).padStart(2, "0")).join("");
}

export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  const area = h("textarea", { class: "offscreen", "aria-hidden": "true", value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A button that copies what `get` gives, and says so for a moment. */
export function copyButton(get, label = "Copy") {
  const button = h("button", { type: "button", class: "quiet small", text: label });
  button.addEventListener("click", async () => {
    await copyText(get());
    button.textContent = "Copied";
    announce("Copied");
    setTimeout(() => (button.textContent = label), 1200);
  });
  return button;
}

export function download(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

const live = h("div", { class: "offscreen", "aria-live": "polite" });
document.body.append(live);

/** Say something to screen readers. */
export function announce(text) {
  live.textContent = text;
}

/** A text that the browser keeps under a name; where its storage is off, the page keeps it. */
export function stored(name, area = "localStorage") {
  let memory = null;
  const use = (act) => {
    try {
      return act(window[area]);
    } catch {
      return null; // Storage is off, or full.
    }
  };
  return {
    get: () => use((storage) => storage.getItem(name)) ?? memory,
    set(value) {
      memory = value;
      use((storage) => (value === null ? storage.removeItem(name) : storage.setItem(name, value)));
    },
  };
}

const number = new Intl.NumberFormat("en");
export const count = (value) => number.format(Math.round(value));

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** The button that goes round system, light and dark. */
export function themeButton(button) {
  const order = ["system", "light", "dark"];
  const read = () => document.documentElement.dataset.theme ?? "system";
  const show = () => {
    button.textContent = { system: "◐", light: "☀", dark: "☾" }[read()];
    button.setAttribute("aria-label", `Colours: ${read()}`);
    button.title = `Colours: ${read()}`;
  };
  button.addEventListener("click", () => {
    const next = order[(order.indexOf(read()) + 1) % order.length];
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    stored("quire.theme").set(next);
    show();
    window.dispatchEvent(new Event("themechange"));
  });
  show();
}
