// Small helpers: elements, numbers as people read them, colours of the current scheme, sharp canvases.

export const $ = (id) => document.getElementById(id);

/** An element whose children are text nodes or elements: what comes from the engine never becomes markup. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.map((child) => child instanceof Node ? child : document.createTextNode(String(child))));
  return element;
}

export function table(element, head, rows) {
  element.replaceChildren(
    make("thead", {}, make("tr", {}, ...head.map((name) => make("th", {scope: "col"}, name)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell ?? ""))))),
  );
}

/** A legend: [swatch class, text] pairs. */
export function legend(element, entries) {
  element.replaceChildren(...entries.map(([swatch, text]) =>
    make("li", {}, make("span", {class: `swatch ${swatch}`, "aria-hidden": "true"}), text)));
}

export const count = (value) => Math.round(value).toLocaleString("en");
export function percent(part, whole) {
  const share = 100 * part / whole;
  return whole ? `${share && share < 9.95 ? share.toFixed(1) : Math.round(share)} %` : "–";
}
export const short = (text, length) => text.length > length ? text.slice(0, length - 1) + "…" : text;

let styles = null;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { styles = null; });

/** A colour of style.css by its name, for canvases and charts. */
export function colour(name) {
  styles ??= {read: getComputedStyle(document.documentElement), known: {}};
  return styles.known[name] ??= styles.read.getPropertyValue(`--${name}`).trim();
}

/** The canvas's 2D context, scaled to the screen and cleared; width in CSS pixels comes from the layout. */
export function canvas2d(canvas, height) {
  const width = canvas.parentElement.clientWidth, ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return {context, width};
}

const patterns = new Map();

/** Diagonal stripes: the second sign, besides colour, for "prefill" and "unknown". */
export function stripes(context, ink) {
  if (!patterns.has(ink)) {
    const tile = Object.assign(document.createElement("canvas"), {width: 6, height: 6}), pen = tile.getContext("2d");
    pen.strokeStyle = ink;
    pen.lineWidth = 1.6;
    for (const x of [-6, 0, 6]) { pen.moveTo(x - 1, 7); pen.lineTo(x + 7, -1); }
    pen.stroke();
    patterns.set(ink, tile);
  }
  return context.createPattern(patterns.get(ink), "repeat");
}

export function bytes(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}
