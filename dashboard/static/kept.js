// The incidents of the last day, as the server stores them, including those before its last start.

import {$, count, make, seconds} from "./dom.js";
import {ask} from "./feed.js";

const LIMIT = 100;
const EVERY_MS = 5000;
/** The server writes a new note within a second. */
const AFTER_NOTE_MS = 1500;
const DAY_MS = 86400_000;

/** A moment as the time of day, with the date if it is not today. */
function timeOf(t) {
  const date = new Date(1000 * t);
  const time = date.toLocaleTimeString("en-GB");
  const isToday = Date.now() - date < DAY_MS && new Date().getDate() === date.getDate();
  return isToday ? time : `${date.toLocaleDateString("en-GB", {day: "numeric", month: "short"})} ${time}`;
}

export class KeptIncidents {
  /** base(): the path before the engine's own. */
  constructor(base) {
    this.base = base;
    this.element = $("kept");
    this.older = $("older");
    this.older.addEventListener("click", () => this.refresh(Math.min(...this.incidents.keys())));
    this.reset("");
  }

  reset(base) {
    Object.assign(this, {shownBase: base, incidents: new Map(), key: "", dueAt: 0, asking: false});
    this.element.replaceChildren();
    this.element.hidden = this.older.hidden = true;
    $("notes").hidden = false;
  }

  /** All loaded incidents, with times on a clock to which `origin` is added to give seconds since 1970. */
  notesAt(origin) {
    return [...this.incidents.values()].map((one) => ({...one, t: one.t - origin}));
  }

  /** isShown: the view is on the screen; notes: of the feed, whose changes mean new incidents. */
  frame(isShown, notes) {
    const base = this.base();
    if (base !== this.shownBase) {
      this.reset(base);
    }
    const now = performance.now();
    const key = JSON.stringify(notes);
    if (key !== this.key) {
      this.key = key;
      this.dueAt = Math.min(this.dueAt, now + AFTER_NOTE_MS);
    }
    if (isShown && !this.asking && now >= this.dueAt) {
      this.refresh();
    }
  }

  async refresh(before = null) {
    const base = this.base();
    this.asking = true;
    this.dueAt = performance.now() + EVERY_MS;
    const rest = before === null ? "" : `&before=${before}`;
    // Without an answer (a full disk, an older engine) the live notes stay.
    const answer = await ask(`${base}incidents?limit=${LIMIT}${rest}`).catch(() => null);
    this.asking = false;
    if (answer === null || base !== this.base()) {
      return;
    }
    const isFirst = !this.incidents.size;
    answer.incidents.forEach((incident) => this.incidents.set(incident.id, incident));
    if (isFirst || before !== null) {
      this.older.hidden = !answer.more;
    }
    this.show();
  }

  show() {
    const newest = [...this.incidents.values()].toSorted((a, b) => b.id - a.id);
    const lines = newest.map(incidentLine);
    const none = make("li", {class: "faint"}, "Nothing unusual has happened in the last 24 hours.");
    this.element.replaceChildren(...(lines.length ? lines : [none]));
    this.element.hidden = false;
    $("notes").hidden = true;
  }
}

/** The time as a link to the figures of that moment. */
function when(t) {
  const time = make("time", {datetime: new Date(1000 * t).toISOString()}, timeOf(t));
  return make("a", {href: `#overview/at=${t.toFixed(1)}`, title: "Show the figures of that moment"}, time);
}

function incidentLine({t, code, level, message, hit, silence_s: silence, advice}) {
  const concerned = Object.entries(hit).map(([unit, n]) => `${count(n)} ${unit}`);
  if (silence !== null) {
    concerned.push(`no tokens for ${seconds(silence)}`);
  }
  return make(
    "li",
    {class: `note ${level}`},
    make("div", {}, when(t), " ", make("b", {}, code.replaceAll("_", " "))),
    make("div", {}, message),
    make("div", {class: "faint"}, [...concerned, advice].filter(Boolean).join(" · ")),
  );
}
