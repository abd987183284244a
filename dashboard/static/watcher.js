// Watches one engine: the feed's events update the engine's state, its stays and its history. The feed's fields are
// explained in dashboard/sse.py.

import {Engine} from "./engine.js";
import {ask, parse, watch} from "./feed.js";
import {History} from "./history.js";
import {Waiting} from "./queue.js";
import {Recorder} from "./recorder.js";
import {momentOf} from "./seats.js";
import {KEPT_S, Stays} from "./stays.js";

/** The version of the feed that this page reads. */
const FEED_VERSION = 4;
/** Seconds that the server may take to answer: it stores no more than KEPT_S. */
const SLACK_S = 10;
/** Bins of the history of hours, and milliseconds after which it is loaded again. */
const BINS_OF_HOURS = 600;
const HOURS_MS = 20_000;
/** Seconds of old stays to load around a moment, and most such stays. */
const AROUND_S = 60;
const OLD_STAYS = 8192;

export class Watcher {
  /** base: the path before the engine's own. on.greet(hello), on.change(), on.trouble(text). first: {events, past}
   *  embedded in the page: the feed's first events, and `timeline` of the minute before them; null: none. */
  constructor(base, on, first = null) {
    this.base = base;
    this.on = on;
    this.heardAt = performance.now();
    this.trouble = "";
    this.mismatch = "";
    this.stopping = new AbortController();
    this.stays = new Stays();
    this.oldStays = new Stays(OLD_STAYS); // around a moment before the ten minutes
    this.reset();
    const trouble = (text) => {
      this.trouble = text;
      on.trouble();
    };
    const event = (name, data) => this.receive(name, data);
    this.past = first?.past ?? null; // embedded `timeline` that is not applied yet
    const events = (first?.events ?? []).map(parse);
    events.forEach((one) => event(one.event, one.data));
    watch(base, {event, trouble}, this.stopping.signal, events.at(-1)?.id);
  }

  stop() {
    this.stopping.abort();
  }

  reset() {
    this.engine = new Engine();
    this.stays.clear();
    this.oldStays.clear();
    this.old = {from: 0, to: 0}; // time covered by `oldStays`, loaded or loading
    this.waiting = new Waiting();
    this.history = null;
    this.recorder = null;
    this.pastLoads = 0; // times that the past was loaded; each may change the picture
    this.nextEvent = null; // the number of the event that comes next; null: not known
    this.lastRequest = {reach: 0, at: -Infinity}; // the newest request for a history of hours
    this.early = null; // events that arrive while the past is loading
  }

  /** Milliseconds since the last event. */
  get silent() {
    return performance.now() - this.heardAt;
  }

  receive(name, data) {
    this.heardAt = performance.now();
    this[`on_${name}`]?.(data);
    this.trouble = name === "bye" ? data.reason : this.mismatch;
  }

  on_hello(hello) {
    const before = this.engine.hello;
    if (before && before.run !== hello.run) {
      this.reset(); // another server has other times and steps
    }
    const same = hello.version === FEED_VERSION;
    this.mismatch = same ? "" : "This page is of another version than the engine; expect mistakes.";
    this.engine.hello = hello;
    this.on.greet(hello);
  }

  on_key_frame(frame) {
    this.engine.applyKeyFrame(frame);
    this.history ??= new History(Object.keys(frame.metrics.rows));
    this.frameApplied(frame);
  }

  on_delta(delta) {
    if (this.engine.applyDelta(delta)) {
      this.frameApplied(delta);
    }
  }

  on_events({first, events}) {
    if (this.nextEvent === null) {
      return; // the next key frame loads the past
    }
    const missed = first > this.nextEvent;
    this.nextEvent = first + events.length;
    const columns = this.engine.hello.event_columns;
    const named = events.map((row) => Object.fromEntries(columns.map((name, i) => [name, row[i]])));
    if (this.early) {
      this.early.push(...named);
    } else if (missed) {
      this.loadPast();
    } else {
      named.forEach((event) => this.apply(event));
    }
  }

  apply(event) {
    this.stays.apply(event);
    this.waiting.apply(event);
  }

  on_note(note) {
    this.engine.addNote(note);
  }

  /** frame: the key frame or delta that the engine has just applied. */
  frameApplied(frame) {
    const {engine} = this;
    const moment = momentOf(engine);
    if (frame.n_events !== this.nextEvent) {
      this.nextEvent = frame.n_events;
      this.loadPast();
    }
    if (moment.count && this.recorder?.seats !== moment.count) {
      this.recorder = new Recorder(moment.count, engine.states);
    }
    this.recorder?.record(engine.frame.t, moment, engine.frame.metrics.waiting);
    this.history.add(engine.frame, engine.taken, engine.pages?.windows);
    if (engine.seats) {
      const decode = engine.code("decode");
      this.stays.settle(engine.frame.t, (seat) => engine.seats.state[seat] === decode);
    }
    this.on.change();
  }

  /** Load the history of the `reach` seconds before now, if due. */
  async loadHours(reach) {
    const {history, lastRequest} = this;
    const now = performance.now();
    if (reach <= KEPT_S || (lastRequest.reach === reach && now - lastRequest.at < HOURS_MS)) {
      return;
    }
    this.lastRequest = {reach, at: now};
    const {t} = this.engine.frame;
    const path = `${this.base}history?from=${t - reach}&to=${t}&bins=${BINS_OF_HOURS}`;
    const account = await ask(path).catch(() => null); // without an answer the old history stays
    if (account && history === this.history) {
      history.fillHours(account);
      this.pastLoads++;
      this.on.change();
    }
  }

  /** Load the stays of the `span` seconds before t, unless already loaded. */
  async loadOldStays(t, span) {
    const {old} = this;
    if (old.from <= t - span && t <= old.to) {
      return;
    }
    this.old = {from: t - Math.min(KEPT_S, span) - AROUND_S, to: t + AROUND_S};
    const path = `${this.base}stays?from=${this.old.from}&to=${this.old.to}`;
    const request = this.old;
    const account = await ask(path).catch(() => null);
    if (request !== this.old) {
      return; // the reader moved to another moment
    }
    this.oldStays.clear();
    if (account) {
      this.oldStays.load(account);
    }
    this.pastLoads++;
    this.on.change();
  }

  /** Load the ten minutes before now from the server; live events continue from there. */
  async loadPast() {
    if (this.early) {
      return;
    }
    this.early = [];
    const {history} = this;
    const now = this.engine.frame.t;
    if (this.past) {
      this.takePast(this.past, now);
      this.past = null;
    }
    const length = KEPT_S - SLACK_S;
    const path = `${this.base}timeline?from=${now - length}&to=${now}&bins=${length}`;
    const [account, queue] = await Promise.all([
      ask(path).catch(() => null),
      ask(`${this.base}requests?state=waiting&limit=1000`).catch(() => null),
    ]);
    if (history !== this.history) {
      return;
    }
    const {early} = this;
    this.early = null;
    if (account) {
      this.takePast(account, now);
    } else {
      this.stays.knownFrom = Math.min(this.stays.knownFrom, now);
    }
    this.waiting.load(queue?.requests ?? []);
    early.forEach((event) => this.apply(event));
    this.on.change();
  }

  takePast(account, now) {
    this.stays.load(account);
    this.history.fill(account, now);
    this.pastLoads++;
  }
}
