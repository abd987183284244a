// The pool of KV pages: one small cell a page (several, in a large pool).

import {bytes, canvas2d, colour, count, legend} from "./dom.js";

const TEXT = {free: "free", held: "held by one sequence", shared: "shared by several", cached: "cached, free to reuse"};

export function drawPages(canvas, pages, states) {
  const cells = bytes(pages.cells), wide = canvas.parentElement.clientWidth;
  const size = Math.max(3, Math.min(14, Math.floor(Math.sqrt(wide * 190 / Math.max(1, cells.length)))));
  const columns = Math.max(1, Math.floor(wide / size));
  const {context} = canvas2d(canvas, Math.ceil(cells.length / columns) * size);
  const paint = states.map((state) => colour(`page-${state}`));
  for (let i = 0; i < cells.length; i++) {
    context.fillStyle = paint[cells[i]];
    context.fillRect((i % columns) * size, Math.floor(i / columns) * size, size - 1, size - 1);
  }
  canvas.setAttribute("aria-label", `KV pages: ${states.map((name) => `${pages.counts[name]} ${name}`).join(", ")}`);
}

export function pageLegend(element, counts, states) {
  legend(element, states.map((name) => [`page-${name}`, `${count(counts[name])} ${TEXT[name] ?? name}`]));
}
