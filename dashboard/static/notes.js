// What the engine had to say: compiles while serving, restarts, preemption storms, refusals.

import {make} from "./dom.js";
import {ago} from "./status.js";

const SHOWN = 8;
const SIGN = {info: "·", warn: "!", error: "▲"};

export function showNotes(element, notes, t) {
  const newest = notes.slice(-SHOWN).reverse();
  const key = JSON.stringify([newest, Math.floor(t)]);
  if (element.dataset.shows === key) {
    return;
  }
  element.dataset.shows = key;
  if (!newest.length) {
    return element.replaceChildren(make("li", {class: "faint"}, "Nothing unusual has happened."));
  }
  element.replaceChildren(...newest.map((note) => noteLine(note, t)));
}

function noteLine(note, t) {
  const when = ago(Math.max(0, t - note.t));
  return make(
    "li",
    {class: `note ${note.level}`},
    make("span", {"aria-hidden": "true"}, SIGN[note.level] ?? "·"),
    ` ${note.message} `,
    make("span", {class: "faint"}, `${note.code}, ${when}`),
  );
}
