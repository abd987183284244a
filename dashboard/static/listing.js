// Views that are lists: a route of the engine, requested while its view is on the screen, as rows of a table.

import {heading, mark, say} from "./dom.js";
import {ask} from "./feed.js";

/** A route of the engine, requested again every `every` milliseconds while visible. */
export class Polled {
  /** base(): the path before the engine's own; note: element for error messages, else for words(); show(answer);
   *  query(): what follows the path. */
  constructor(base, path, {note, show, every = 2000, query = () => "", words = () => ""}) {
    Object.assign(this, {base, path, note, onAnswer: show, every, query, words});
    this.reset();
  }

  reset() {
    Object.assign(this, {shownBase: null, answer: null, dueAt: 0, asking: false});
  }

  /** Call in each animation frame. isShown: its view is on the screen. */
  frame(isShown) {
    if (this.shownBase !== null && this.shownBase !== this.base()) {
      this.reset();
    }
    if (isShown && !this.asking && performance.now() >= this.dueAt) {
      this.refresh();
    }
  }

  /** Request the route now; options: of fetch, for a path below its own. */
  async refresh(rest = this.query(), options = {}) {
    const base = (this.shownBase = this.base());
    this.asking = true;
    this.dueAt = performance.now() + this.every;
    let trouble = "";
    try {
      const answer = await ask(`${base}${this.path}${rest}`, options);
      if (base === this.base()) {
        this.answer = answer;
        this.onAnswer(answer);
      }
    } catch (error) {
      trouble = error.message;
    }
    this.asking = false;
    say(this.note, trouble || this.words());
    this.note.classList.toggle("bad", Boolean(trouble));
  }
}

/** A table whose cells may hold elements. A row's element is reused while its key is listed, and so is the content of
 *  an unchanged cell, so that redrawing moves neither focus nor scroll. */
export class Listing {
  /** columns: [heading, value(row)], where a value is a text or an element. key(row): unique among all rows. */
  constructor(table, columns, {key = ({id}) => id, none = "There are none."} = {}) {
    Object.assign(this, {columns, key, none, lines: new Map()});
    table.createTHead().append(heading(columns.map(([name]) => name)));
    this.body = table.createTBody();
  }

  show(rows) {
    const before = this.lines;
    this.lines = new Map(rows.map((row) => [this.key(row), before.get(this.key(row)) ?? this.newLine()]));
    for (const [key, line] of before) {
      this.lines.has(key) || line.remove();
    }
    this.empty?.remove();
    rows.forEach((row, i) => {
      const line = this.lines.get(this.key(row));
      if (this.body.rows[i] !== line) {
        this.body.insertBefore(line, this.body.rows[i] ?? null);
      }
      this.columns.forEach(([, value], j) => fill(line.cells[j], value(row)));
    });
    if (!rows.length) {
      this.empty = this.body.insertRow();
      const cell = this.empty.insertCell();
      mark(cell, "colspan", String(this.columns.length));
      mark(cell, "class", "faint");
      say(cell, this.none);
    }
  }

  newLine() {
    const line = document.createElement("tr");
    this.columns.forEach(() => line.insertCell());
    return line;
  }
}

function fill(cell, value) {
  if (!(value instanceof Node)) {
    say(cell, String(value ?? ""));
  } else if (cell.firstElementChild?.outerHTML !== value.outerHTML) {
    cell.replaceChildren(value);
  }
}
