// Small helpers: elements, numbers as people read them, colours of the current scheme, sharp canvases.

export const $ = (id) => document.getElementById(id);

/** An element whose children are text nodes or elements, so that text from the engine never becomes markup. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    element.setAttribute(name, value);
  }
  element.append(
    ...children.map((child) =>
      child instanceof Node ? child : document.createTextNode(String(child)),
    ),
  );
  return element;
}

/** Set an element's text, touching the document only where it changes. */
export function say(element, text) {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

/** Set an attribute, touching the document only where it changes. */
export function mark(element, name, value) {
  if (element.getAttribute(name) !== value) {
    element.setAttribute(name, value);
  }
}

/** Have the browser save a text as a file. */
export function saveFile(name, type, text) {
  const link = make("a", {href: URL.createObjectURL(new Blob([text], {type})), download: name});
  link.click();
  URL.revokeObjectURL(link.href);
}

/** Fill a table with plain values. Row elements are reused, so that redrawing moves neither focus nor scroll. */
export function table(element, head, rows) {
  if (!element.tHead) {
    element.createTHead().append(heading(head));
  }
  const body = element.tBodies[0] ?? element.createTBody();
  while (body.rows.length > rows.length) {
    body.deleteRow(-1);
  }
  rows.forEach((cells, i) => {
    const row = body.rows[i] ?? body.insertRow();
    while (row.cells.length > cells.length) {
      row.deleteCell(-1);
    }
    cells.forEach((cell, j) => say(row.cells[j] ?? row.insertCell(), String(cell ?? "")));
  });
}

/** A closed box with a table, for readers who cannot see the picture that it belongs to. */
export const twin = (name, title, element) =>
  make("details", {class: name}, make("summary", {}, title), make("div", {class: "scroll"}, element));

export const heading = (names) =>
  make("tr", {}, ...names.map((name) => make("th", {scope: "col"}, name)));

/** A legend: [swatch class, text] pairs. */
export function legend(element, entries) {
  const key = JSON.stringify(entries);
  if (element.dataset.shows === key) {
    return;
  }
  element.dataset.shows = key;
  element.replaceChildren(
    ...entries.map(([swatch, text]) =>
      make("li", {}, make("span", {class: `swatch ${swatch}`, "aria-hidden": "true"}), text),
    ),
  );
}

export const count = (value) => Math.round(value).toLocaleString("en");
export function percent(part, whole) {
  const share = (100 * part) / whole;
  return whole ? `${share && share < 9.95 ? share.toFixed(1) : Math.round(share)}\u00a0%` : "–";
}
/** A share, or a dash where it is not known. */
export const shareInWords = (value) => (Number.isFinite(value) ? percent(value, 1) : "–");
export const short = (text, length) =>
  text.length > length ? text.slice(0, length - 1) + "…" : text;
export const sum = (counts) => Object.values(counts).reduce((all, value) => all + value, 0);

/** Seconds in readable units: 850 µs, 12 ms, 1.25 s, 3 min 20 s, 2 h 5 min. */
export function seconds(value) {
  if (value === null || value === undefined) {
    return "–";
  }
  if (value < 0.001) {
    return value ? `${Math.round(value * 1e6)} µs` : "0 s";
  }
  if (value < 1) {
    return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  }
  if (value < 60) {
    return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  }
  if (value < 3600) {
    return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  }
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

let styles = null;
const darkScheme = matchMedia("(prefers-color-scheme: dark)");
darkScheme.addEventListener("change", () => {
  styles = null;
});

/** Whether the page uses the dark colour scheme. */
export const isDark = () => darkScheme.matches;

/** A colour of style.css by its name, for canvases and charts. */
export function colour(name) {
  styles ??= {read: getComputedStyle(document.documentElement), known: {}};
  return (styles.known[name] ??= styles.read.getPropertyValue(`--${name}`).trim());
}

/** A colour of style.css (#rrggbb) as one little-endian RGBA pixel; mixed with `other` where share < 1. */
export function pixel(name, other = name, share = 1) {
  const [from, to] = [colour(name), colour(other)].map((text) => parseInt(text.slice(1), 16));
  const mix = (shift) =>
    Math.round(((from >> shift) & 255) * share + ((to >> shift) & 255) * (1 - share));
  return ((255 << 24) | (mix(0) << 16) | (mix(8) << 8) | mix(16)) >>> 0;
}

export const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

/** Give a canvas its size in CSS pixels; true if that changed (and so cleared) it. */
export function resize(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const wide = Math.round(width * ratio);
  const high = Math.round(height * ratio);
  if (canvas.width === wide && canvas.height === high) {
    return false;
  }
  canvas.width = wide;
  canvas.height = high;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  return true;
}

/** A canvas's 2D context in CSS pixels. */
export function pen(canvas) {
  const ratio = devicePixelRatio || 1;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** Call `then(width, height)` when the element changes size: layout is read there, never while drawing. */
export function onSize(element, then) {
  let last = "";
  new ResizeObserver(([{contentRect}]) => {
    const [width, height] = [Math.floor(contentRect.width), Math.floor(contentRect.height)];
    if (width && last !== `${width} ${height}`) {
      last = `${width} ${height}`;
      then(width, height);
    }
  }).observe(element);
}

/** Like onSize, for changes of the width only. */
export function onWidth(element, then) {
  let last = 0;
  onSize(element, (width) => {
    if (width !== last) {
      then((last = width));
    }
  });
}

/** Call an action by its key, unless the key has a meaning of its own in the focused element. */
export function onKeys(actions) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) {
      return;
    }
    const action = actions[event.key];
    if (!action || event.target.closest("input, textarea, select, button, summary, a, [role=button]")) {
      return;
    }
    event.preventDefault();
    action();
  });
}

/** Track which elements are on the screen; `visible(element)` does not read the layout. */
export function watchVisible(elements, margin = "200px") {
  const seen = new Set();
  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        entry.isIntersecting ? seen.add(entry.target) : seen.delete(entry.target);
      }
    },
    {rootMargin: margin},
  );
  for (const element of elements) {
    observer.observe(element);
  }
  return (element) => seen.has(element);
}

/** What this browser stored under a name; null: nothing that can be read. */
export function recall(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

/** Store a value in this browser. One that refuses storage forgets it when the page closes. */
export function remember(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // as said above
  }
}

export function bytes(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}
