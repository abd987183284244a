// The queue: a dot for each waiting sequence, as far as there is room.

import {colour, count, onWidth, pen, resize, say, seconds} from "./dom.js";

const DOT = 13;
const ROWS = 3;
const widths = new WeakMap();

/** wait: seconds that a request should wait that came now; null where that is not known. */
export function drawQueue(canvas, text, waiting, wait) {
  const newcomer = wait ? `; who comes now should wait ${seconds(wait)}` : "";
  say(text, (waiting ? `${count(waiting)} waiting` : "nobody waits") + newcomer);
  if (!widths.has(canvas)) {
    widths.set(canvas, canvas.parentElement.clientWidth);
    onWidth(canvas.parentElement, (width) => widths.set(canvas, width));
  }
  const width = widths.get(canvas);
  const fits = Math.max(1, Math.floor(width / DOT));
  const rows = Math.min(ROWS, Math.ceil(waiting / fits));
  const shown = Math.min(waiting, fits * rows);
  const ink = colour("waiting");
  const appearance = `${width} ${shown} ${ink}`;
  if (canvas.dataset.shows === appearance) {
    return;
  }
  canvas.dataset.shows = appearance;
  resize(canvas, width, Math.max(1, rows * DOT));
  const context = pen(canvas);
  context.clearRect(0, 0, width, rows * DOT);
  context.fillStyle = ink;
  context.beginPath();
  for (let i = 0; i < shown; i++) {
    context.roundRect((i % fits) * DOT + 1, Math.floor(i / fits) * DOT + 1, 10, 10, 5);
  }
  context.fill();
}
