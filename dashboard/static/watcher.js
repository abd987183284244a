// One engine being watched: the feed's events go into what is known of the engine, its stays and its history. The
// feed's fields are explained in dashboard/sse.py.

import {Engine} from "./engine.js";
import {ask, watch} from "./feed.js";
import {History} from "./history.js";
import {Waiting} from "./queue.js";
import {Recorder} from "./recorder.js";
import {momentOf} from "./seats.js";
import {KEPT_S, Stays} from "./stays.js";

/** The version of the feed that this page reads. */
const FEED_VERSION = 4;
/** Seconds that may pass until the server answers: it keeps no more than KEPT_S. */
const SLACK_S = 10;

export class Watcher {
  /** base: the path before the engine's own. on.greet(hello), on.change(), on.trouble(text). */
  constructor(base, on) {
    this.base = base;
    this.on = on;
    this.heardAt = performance.now();
    this.trouble = "";
    this.mismatch = "";
    this.stopping = new AbortController();
    this.stays = new Stays();
    this.reset();
    const trouble = (text) => {
      this.trouble = text;
      on.trouble();
    };
    const event = (name, data) => this.receive(name, data);
    watch(base, {event, trouble}, this.stopping.signal);
  }

  stop() {
    this.stopping.abort();
  }

  reset() {
    this.engine = new Engine();
    this.stays.clear();
    this.waiting = new Waiting();
    this.history = null;
    this.recorder = null;
    this.pastLoads = 0; // how often the server's account of the past was taken; each may change the picture
    this.nextEvent = null; // the number of the event that comes next; null: not known
    this.early = null; // events that came while the account of the past was on its way
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
      this.reset(); // another server: its times and steps start anew
    } else if (before) {
      this.nextEvent = null;
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
      return; // the key frame that follows asks for the past
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

  /** frame: the key frame or delta that the engine has just taken in. */
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

  /** The ten minutes before now from the server's own account; live events go on from there. */
  async loadPast() {
    if (this.early) {
      return;
    }
    this.early = [];
    const {history} = this;
    const now = this.engine.frame.t;
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
      this.stays.load(account);
    } else {
      this.stays.knownFrom = Math.min(this.stays.knownFrom, now);
    }
    if (account && this.pastLoads === 0) {
      history.fill(account, now);
    }
    this.pastLoads++;
    this.waiting.load(queue?.requests ?? []);
    early.forEach((event) => this.apply(event));
    this.on.change();
  }
}
