// The engine's notes: compiles while serving, outages, preemption storms, refusals. The notes list has all of them; the
// first screen has those not marked as seen yet.

import {$, make, recall, remember, say} from "./dom.js";
import {ago} from "./status.js";

const SIGN = {info: "·", warn: "!", error: "▲"};
/** Notes that the top of the page already shows while they are true. */
const ELSEWHERE = ["kernels_out", "dead"];
/** Incidents shown at a time, and names of seen ones stored in this browser. */
const MOST = 4;
const MOST_SEEN = 200;
const STORE = "jitney-seen";

export function showNotes(element, notes, t) {
  const newest = notes.toReversed();
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

/** The incidents on the first screen: each stays and is updated until it is marked as seen. */
export class Incidents {
  constructor() {
    this.element = $("incidents");
    this.lines = new Map(); // by name: {line, text}
    const seen = recall(STORE);
    this.seen = Array.isArray(seen) ? seen : [];
  }

  /** run: of the server that sent the notes; clock(t): a moment as the time of day. */
  show(notes, run, clock) {
    const name = (note) => `${run} ${note.code} ${note.t}`;
    const open = notes.filter(
      (note) => !ELSEWHERE.includes(note.code) && !this.seen.includes(name(note)),
    );
    const shown = new Map(open.slice(-MOST).map((note) => [name(note), note]));
    for (const [id, {line}] of this.lines) {
      if (!shown.has(id)) {
        line.remove();
        this.lines.delete(id);
      }
    }
    for (const [one, note] of shown) {
      const entry = this.lines.get(one) ?? this.newLine(one, note);
      say(entry.text, `${SIGN[note.level] ?? "·"} ${clock(note.t)}: ${note.message}.`);
    }
    this.element.hidden = !shown.size;
  }

  newLine(name, note) {
    const text = make("span");
    const button = make("button", {type: "button", class: "plain"}, "Seen");
    const line = make("li", {class: note.level}, text, button);
    button.addEventListener("click", () => {
      this.seen = [...this.seen, name].slice(-MOST_SEEN);
      remember(STORE, this.seen);
      line.remove();
      this.lines.delete(name);
      this.element.hidden = !this.lines.size;
    });
    this.element.prepend(line);
    this.lines.set(name, {line, text});
    return this.lines.get(name);
  }
}
