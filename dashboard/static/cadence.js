// The pauses between a sequence's tokens: a bar each, so that a stall stands out.

import {colour, pen, resize} from "./dom.js";

const HIGH = 64;

export function drawCadence(canvas, {cadence: {t}}) {
  const width = canvas.parentElement.clientWidth;
  const gaps = t.slice(1).map((time, i) => time - t[i]);
  resize(canvas, width, HIGH);
  const context = pen(canvas);
  const columns = pooled(gaps, Math.floor(width / 3));
  const most = Math.max(...columns, 1e-6);
  const middle = gaps.toSorted((a, b) => a - b)[gaps.length >> 1] ?? 0;
  const step = width / Math.max(1, columns.length);
  context.clearRect(0, 0, width, HIGH);
  columns.forEach((gap, i) => {
    context.fillStyle = colour(gap > 3 * middle ? "bad" : "decode");
    const height = Math.max(1, (HIGH * gap) / most);
    context.fillRect(i * step, HIGH - height, Math.max(1, Math.min(12, step - 1)), height);
  });
}

/** At most `most` columns, each the longest of its gaps. */
function pooled(gaps, most) {
  const each = Math.max(1, Math.ceil(gaps.length / most));
  const longest = (_, i) => Math.max(...gaps.slice(i * each, (i + 1) * each));
  return Array.from({length: Math.ceil(gaps.length / each)}, longest);
}
