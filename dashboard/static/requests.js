// The newest requests as a table: sortable, and usable with the keyboard alone.

import {$, make, mark, saveFile, say, seconds, short, watchVisible} from "./dom.js";
import {Polled} from "./listing.js";

const EVERY_MS = 1000;
const LIMIT = 200;
/** [heading, value to sort by, text]. */
const COLUMNS = [
  [
    "Request",
    (row) => row.request,
    (row) => (row.index ? `${row.request} (${row.index})` : row.request),
  ],
  ["State", (row) => row.state, (row, {place}) => stateInWords(row) + place(row)],
  ["Came", (row) => row.arrival, (row, {clock}) => clock(row.arrival)],
  ["x-request-id", (row) => row.client_id, (row) => short(row.client_id, 18)],
  ["Route", (row) => row.route, (row) => row.route],
  ["User or key", accountOf, (row) => short(accountOf(row), 24)],
  ["Adapter", (row) => row.adapter, (row) => short(row.adapter, 18)],
  ["Seat", (row) => row.seat, (row) => (row.seat < 0 ? "" : row.seat)],
  ["Prompt", (row) => row.n_prompt, (row) => row.n_prompt],
  ["Output", (row) => row.n_output, (row) => `${row.n_output} / ${row.max_tokens}`],
  ["Waited", (row) => row.queued_s, (row) => seconds(row.queued_s)],
  ["First token", (row) => row.ttft_s, (row) => seconds(row.ttft_s)],
  ["In all", (row) => row.e2e_s, (row) => seconds(row.e2e_s)],
  ["tok/s", rateOf, (row) => rateOf(row)?.toFixed(1) ?? ""],
  ["Preempted", (row) => row.preemptions, (row) => row.preemptions || ""],
  ["End", (row) => row.finish, (row) => row.code || row.finish],
];

/** The user named in the request, else its key. */
function accountOf({user, account}) {
  return user || account;
}

/** The result of a sequence; for a refused one also the answer's status, and when its client may come again. */
export function stateInWords({state, status, retry_s: retry}) {
  if (state !== "refused") {
    return state;
  }
  return `refused (${status})${retry ? `, retry in ${seconds(retry)}` : ""}`;
}

/** Tokens a second after the first; null: fewer than two, or still on board. */
function rateOf({n_output: tokens, e2e_s: all, ttft_s: first}) {
  return tokens > 1 && all > first ? (tokens - 1) / (all - first) : null;
}

const isUnknown = (value) => value === null || value === undefined;

/** For sorting: unknown values come last in both directions. */
function compare(a, b, sign) {
  if (a === b) {
    return 0;
  }
  if (isUnknown(a) || isUnknown(b)) {
    return isUnknown(a) ? 1 : -1;
  }
  return a < b ? -sign : sign;
}

export class Requests {
  /** words.clock(t): a moment as the time of day; words.place(row): the place in the queue. */
  constructor(element, base, onPick, words) {
    Object.assign(this, {element, onPick, words, sort: null, falling: false});
    this.polled = new Polled(base, "requests", {
      note: $("request-note"),
      show: () => this.show(),
      every: EVERY_MS,
      query: () => `?${this.query}`,
      words: () => this.note,
    });
    this.visible = watchVisible([element.parentElement]);
    const headings = COLUMNS.map(([name], i) => this.heading(name, i));
    element.createTHead().append(make("tr", {}, ...headings));
    this.body = element.createTBody();
    this.body.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("click", (event) => this.open(event.target.closest("tr")));
    const anew = () => {
      this.polled.dueAt = 0;
      this.frame(false, true);
    };
    $("request-state").addEventListener("change", anew);
    $("request-search").addEventListener("input", anew);
    $("request-export").addEventListener("click", () => this.save());
    this.reset();
  }

  reset() {
    this.polled.reset();
    this.show();
    say($("request-note"), this.note);
  }

  heading(name, i) {
    const button = make("button", {type: "button", class: "sort"}, name);
    const cell = make("th", {scope: "col"}, button);
    button.addEventListener("click", () => {
      this.falling = this.sort === i && !this.falling;
      this.sort = i;
      for (const other of cell.parentElement.cells) {
        other.removeAttribute("aria-sort");
      }
      cell.setAttribute("aria-sort", this.falling ? "descending" : "ascending");
      this.show();
    });
    return cell;
  }

  /** Load the rows again if they are due and visible. */
  frame(still, live) {
    this.polled.frame(!still && live && this.visible(this.element.parentElement));
  }

  /** Search for a text. */
  find(text) {
    $("request-search").value = text;
    this.polled.dueAt = 0;
  }

  get query() {
    const search = $("request-search").value.trim();
    return new URLSearchParams({state: $("request-state").value, limit: LIMIT, search});
  }

  /** The visible rows as a table for a spreadsheet. */
  save() {
    const cell = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;
    const head = COLUMNS.map(([name]) => cell(name));
    const lines = this.sorted().map((row) => COLUMNS.map(([, value]) => cell(value(row))));
    saveFile("jitney-requests.csv", "text/csv", [head, ...lines].map((line) => line.join(",")).join("\n"));
  }

  /** The newest requests; null before they are loaded. */
  get rows() {
    return this.polled.answer?.requests ?? null;
  }

  sorted() {
    if (this.sort === null || !this.rows) {
      return this.rows ?? [];
    }
    const value = COLUMNS[this.sort][1];
    const sign = this.falling ? -1 : 1;
    return this.rows.toSorted((a, b) => compare(value(a), value(b), sign));
  }

  show() {
    const rows = this.sorted();
    const {body} = this;
    while (body.rows.length > rows.length) {
      body.deleteRow(-1);
    }
    rows.forEach((row, i) => this.showRow(body.rows[i] ?? this.newRow(), row));
    if (body.rows.length && !body.querySelector("tr[tabindex='0']")) {
      body.rows[0].tabIndex = 0;
    }
  }

  get note() {
    if (!this.rows) {
      return "Asked for when they are on the screen.";
    }
    const count = this.rows.length;
    return count ? `${count} newest. Enter or a click tells why one was slow.` : "There are none.";
  }

  newRow() {
    const line = this.body.insertRow();
    line.tabIndex = -1;
    COLUMNS.forEach(() => line.insertCell());
    return line;
  }

  showRow(line, row) {
    line.row = row;
    mark(line, "data-state", row.state);
    COLUMNS.forEach(([, , text], i) => say(line.cells[i], String(text(row, this.words) ?? "")));
  }

  key(event) {
    const line = event.target.closest("tr");
    const {rows} = this.body;
    if (event.key === "Enter") {
      event.preventDefault();
      return this.open(line);
    }
    const at = line.sectionRowIndex;
    const last = rows.length - 1;
    const to = {ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last}[event.key];
    if (to === undefined || !rows[to]) {
      return;
    }
    event.preventDefault();
    line.tabIndex = -1;
    rows[to].tabIndex = 0;
    rows[to].focus();
  }

  open(line) {
    if (line?.row) {
      this.onPick(line.row.request, line.row.index);
    }
  }
}
