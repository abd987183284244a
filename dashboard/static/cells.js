// Draws one seat. Large cells have words; small ones are copied from a sheet of prepared pictures, because a thousand
// paths would take longer than a frame.

import {colour} from "./dom.js";

export const GLYPH = {free: "", prefill: "»", decode: "●", held: "■", gone: "×"};
export const VERB = {
  free: "free",
  prefill: "reading its prompt",
  decode: "generating",
  held: "held until its batch is done",
  gone: "gone: there is no engine",
};
/** Number of brightness levels, which show a sequence's progress. */
export const LEVELS = 16;

/** Colours by state: empty part, done part with and without words, words, border. */
const PAINTS = {
  free: ["panel", "panel", "panel", "faint", "line"],
  prefill: ["prefill-soft", "prefill-mid", "prefill", "ink", "prefill"],
  decode: ["decode-soft", "decode-mid", "decode", "ink", "decode"],
  held: ["held-soft", "held-soft", "held-soft", "ink", "held"],
  gone: ["bad-soft", "bad-soft", "bad-soft", "bad", "bad"],
};

function paints(state) {
  const names = PAINTS[state] ?? PAINTS.held;
  const [soft, mid, full, ink, border] = names.map(colour);
  return {soft, mid, full, ink, border};
}

/** Draw a cell with words: {state, level, name (the seat), text}; the darker part is the part done. */
export function drawLarge(pen, width, height, cell) {
  const {soft, mid, ink, border} = paints(cell.state);
  const done = Math.round((width * cell.level) / LEVELS);
  pen.clearRect(0, 0, width, height);
  pen.fillStyle = soft;
  pen.fillRect(1, 1, width - 2, height - 2);
  pen.fillStyle = mid;
  if (done > 2) {
    pen.fillRect(1, 1, done - 2, height - 2);
  }
  if (cell.state === "prefill") {
    stripes(pen, width, height);
  }
  pen.lineWidth = 1.2;
  pen.strokeStyle = border;
  if (cell.state === "free") {
    pen.setLineDash([4, 3]);
  }
  pen.strokeRect(0.6, 0.6, width - 1.2, height - 1.2);
  pen.setLineDash([]);
  words(pen, width, height, cell, ink);
}

function words(pen, width, height, {state, name, text}, ink) {
  pen.fillStyle = ink;
  pen.textBaseline = "middle";
  pen.font = "600 13px system-ui, sans-serif";
  pen.textAlign = "left";
  pen.fillText(name, 9, 15);
  pen.textAlign = "right";
  pen.fillText(GLYPH[state] ?? "?", width - 9, 15);
  pen.font = "12px system-ui, sans-serif";
  pen.textAlign = "left";
  pen.fillText(text, 9, height - 14, width - 14);
}

/** Diagonal lines: a second sign, besides colour, that the prompt is being computed. */
function stripes(pen, width, height) {
  pen.save();
  pen.beginPath();
  pen.rect(0, 0, width, height);
  pen.clip();
  pen.strokeStyle = colour("cell-line");
  pen.lineWidth = 1.6;
  pen.beginPath();
  for (let x = -height; x < width; x += 6) {
    pen.moveTo(x, height);
    pen.lineTo(x + height, 0);
  }
  pen.stroke();
  pen.restore();
}

/** Prepared pictures of all small cells: a row per state, a column per level. */
export class Sheet {
  constructor(states, width, height, ratio) {
    Object.assign(this, {
      states,
      width: Math.round(width * ratio),
      height: Math.round(height * ratio),
      ratio,
    });
    this.canvas = Object.assign(document.createElement("canvas"), {
      width: this.width * (LEVELS + 1),
      height: this.height * states.length,
    });
    const pen = this.canvas.getContext("2d");
    states.forEach((state, i) => {
      for (let level = 0; level <= LEVELS; level++) {
        pen.setTransform(ratio, 0, 0, ratio, level * this.width, i * this.height);
        small(pen, width, height, state, level);
      }
    });
  }

  /** context: in device pixels. */
  stamp(context, code, level, x, y) {
    const {width, height} = this;
    context.clearRect(x, y, width, height);
    context.drawImage(
      this.canvas,
      level * width,
      code * height,
      width,
      height,
      x,
      y,
      width,
      height,
    );
  }
}

/** Draw a small cell. Brightness is progress; the sign is the state: a filled block generates, two strokes compute the
 *  prompt, a frame is held, a thin outline is free. */
function small(pen, width, height, state, level) {
  const {soft, full, border} = paints(state);
  const share = level / LEVELS;
  if (state === "free") {
    pen.strokeStyle = border;
    pen.strokeRect(1, 1, width - 2, height - 2);
    return;
  }
  pen.fillStyle = soft;
  pen.fillRect(0, 0, width, height);
  pen.globalAlpha = state === "held" ? 0 : share;
  pen.fillStyle = full;
  pen.fillRect(0, 0, width, height);
  pen.globalAlpha = 1;
  pen.strokeStyle = border;
  pen.lineWidth = 1;
  if (state === "held") {
    pen.lineWidth = 3;
    pen.strokeRect(1.5, 1.5, width - 3, height - 3);
  } else {
    pen.strokeRect(0.5, 0.5, width - 1, height - 1);
  }
  if (state === "prefill") {
    stripes(pen, width, height);
  }
}
