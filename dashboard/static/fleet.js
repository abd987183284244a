// The page of a fleet: one feed describes all replicas (its fields are explained in dashboard/fleet.py), and the newest
// frame is drawn at most once per animation frame.

import {$, count, legend, make, mark, percent, reducedMotion, say, seconds, shareInWords, sum, table} from "./dom.js";
import {watch} from "./feed.js";
import {FleetRequests} from "./fleetrequests.js";
import {Replicas, noteOf, priceInWords, waitInWords} from "./replicas.js";
import {Rollouts} from "./rollouts.js";
import {seatLegend} from "./seats.js";
import {Tenants} from "./tenants.js";
import {Views} from "./views.js";
import {Work} from "./work.js";

/** The version of the feed that this page reads. */
const FEED_VERSION = 2;
const STALE_MS = 3000;
/** Milliseconds between two drawings with reduced motion, and between two updates of the table. */
const STILL_MS = 1900;
const FILL_MS = 900;
const HEAD = [
  "Replica",
  "State",
  "Seats taken",
  "Seats",
  "Waiting",
  "Predicted wait",
  "Output tok/s",
  "Prompt tok/s",
  "Boarded a second",
  "Prefix hits",
  "KV pages",
  "Restarts",
  "Model",
];

let hello = null;
let fleet = null; // the newest frame with later deltas applied: t, sums, replicas
let heardAt = performance.now();
let trouble = "";
let scheduled = false;
let shownAt = 0;
let filledAt = 0;
const replicas = new Replicas($("replicas"), $("found"));
replicas.onMeasured = schedule;
let candidates = []; // names of candidates' replicas
const rollouts = new Rollouts($("rollouts"), $("rollout-list"), $("confirm"), (names) => {
  candidates = names;
  replicas.markCandidates(names);
});

const views = new Views({shown: schedule, request: () => {}, moment: () => {}}, ["fleet", "requests", "tenants", "work"]);
const requests = new FleetRequests();
const tenants = new Tenants(() => "", (text) => {
  requests.find(text);
  views.go("requests");
});
const work = new Work(() => "");

const receive = {
  hello(data) {
    hello = data;
    fleet = null;
    $("sign-out").hidden = !data.signed_in;
    views.offer("requests", data.role !== "user");
    views.offer("work", data.keeps_work);
    work.greet({...data, needs_key: data.signed_in}, data.keeps_work);
    views.follow();
    if (data.compares && data.role !== "user") {
      rollouts.start();
    }
    if (data.version !== FEED_VERSION) {
      trouble = "This page is of another version than its server; expect mistakes.";
    }
  },
  fleet(data) {
    const names = ({replicas: all}) => JSON.stringify(all.map((card) => card.name));
    const same = fleet && names(fleet) === names(data);
    fleet = data;
    if (!same) {
      replicas.reset(data.replicas, hello);
      replicas.markCandidates(candidates);
      find();
    }
  },
  delta(data) {
    if (!fleet) {
      return;
    }
    const {replicas: changed = {}, sums = {}, t} = data;
    fleet = {
      t,
      sums: {...fleet.sums, ...sums},
      replicas: fleet.replicas.map((card) =>
        changed[card.name] ? {...card, ...changed[card.name]} : card,
      ),
    };
  },
  bye({reason}) {
    trouble = reason;
  },
};

function event(name, data) {
  heardAt = performance.now();
  trouble = "";
  receive[name]?.(data);
  schedule();
}

function schedule() {
  if (!scheduled) {
    scheduled = true;
    requestAnimationFrame(draw);
  }
}

function draw(now) {
  scheduled = false;
  updateState();
  if (!fleet || (reducedMotion.matches && now - shownAt < STILL_MS)) {
    return;
  }
  shownAt = now;
  say($("headline"), headline(fleet.sums));
  document.title = `Jitney: ${fleet.sums.ready} of ${fleet.sums.replicas} replicas ready`;
  showSums(fleet.sums);
  replicas.show(fleet.replicas, fleet.t);
  requests.frame(views.shown === "requests");
  tenants.frame(views.shown === "tenants");
  work.frame(views.shown === "work");
  if ($("replica-details").open && now - filledAt >= FILL_MS) {
    filledAt = now;
    fillTable();
  }
}

/** The headline: taken seats, waiting requests, and missing replicas. */
function headline({replicas: all, ready, seats, taken, waiting}) {
  if (all && !ready) {
    return all === 1 ? "No replica is ready" : `None of ${count(all)} replicas is ready`;
  }
  const there = ready === all ? `All ${count(all)} replicas ready` : `${count(ready)} of ${count(all)} replicas ready`;
  const queue = waiting ? `, ${count(waiting)} waiting` : ", none waiting";
  return `${there}, ${count(taken)} of ${count(seats)} seats taken${queue}`;
}

function showSums(sums) {
  const worst = sums.worst && sums.predicted_wait_s ? ` (${sums.worst})` : "";
  const priced = hello.price_per_hour !== null;
  showTiles([
    ["Replicas ready", `${count(sums.ready)} of ${count(sums.replicas)}`, sums.ready / sums.replicas],
    [
      "Seats taken",
      `${count(sums.taken)} of ${count(sums.seats)}`,
      sums.seats ? sums.taken / sums.seats : 0,
      sums.seats && sums.taken === sums.seats ? "full" : "",
    ],
    ["Output tok/s", count(sums.output_rate)],
    ["Prompt tok/s", count(sums.prompt_rate)],
    ["Prefix hits", shareInWords(sums.hits)],
    ["Waiting", count(sums.waiting), undefined, sums.waiting ? "waits" : ""],
    ...(sums.refused ? [refusals(sums)] : []),
    ["Longest predicted wait", waitInWords(sums.predicted_wait_s), undefined, sums.predicted_wait_s ? "waits" : ""],
    ...(priced ? [["A million useful tokens", priceInWords(sums.price)]] : []),
  ]);
  showRouting(sums.choices);
  const where = worst ? ` The longest wait is foreseen at ${sums.worst}.` : "";
  say(
    $("fleet-sub"),
    `One cell is one seat; its brightness is how far its sequence has come.${where}`,
  );
}

/** Counts of requests by route, for a router that follows prefixes. */
const CHOICES = {
  known: "to the engine that has their beginning",
  moved: "elsewhere, since that one was busy or gone",
  hashed: "with a new beginning, to the engine that it belongs to",
  spread: "with a new beginning, to another engine",
};

function showRouting(choices) {
  const shares = Object.entries(choices).map(([name, n]) => `${count(n)} ${CHOICES[name] ?? name}`);
  $("routing").hidden = !shares.length;
  say($("routing"), `Routing since the start: ${shares.join("; ")}.`);
}

let tiles = null;

/** Show the figures: [name, value, share for a meter (undefined: no meter), mark] each. */
function showTiles(values) {
  tiles ??= values.map(([name, , share]) => makeTile(name, share !== undefined));
  values.forEach(([, value, share, kind], i) => setTile(tiles[i], value, share, kind));
}

function makeTile(name, metered) {
  const value = make("span");
  const text = make("dd", {}, value);
  const tile = make("div", {class: "figure"}, make("dt", {}, name), text);
  const meter = metered ? make("meter", {value: 0, "aria-label": name}) : null;
  if (meter) {
    text.append(meter);
  }
  $("figures").append(tile);
  return {tile, value, meter};
}

function setTile({tile, value, meter}, text, share, kind) {
  say(value, text);
  if (meter && Number.isFinite(share)) {
    meter.value = share;
  }
  mark(tile, "class", `figure ${kind ?? ""}`.trim());
}

/** The tile of refused requests. */
function refusals({refused, refused_ever: ever}) {
  const lately = sum(refused);
  const value = lately ? `${count(lately)} a minute` : `${count(ever)} in all`;
  return ["Turned away", value, undefined, lately ? "full" : ""];
}

/** The fleet's state in a word, as /readyz reports it; see [data-state] in the style sheets. */
function stateNow(silent) {
  if (silent > STALE_MS) {
    return "stale";
  }
  if (!fleet) {
    return "connecting";
  }
  if (!fleet.sums.unready) {
    return "live";
  }
  const onTheWay = fleet.replicas.some(({state}) => ["starting", "connecting", "loading"].includes(state));
  return onTheWay ? "loading" : "unready";
}

/** Text about what is wrong with the whole fleet; empty: nothing. */
function troubleOf({sums: {unready, unready_models: models, refused}}) {
  const said = [];
  if (unready) {
    said.push(`New requests are refused: ${unready}.`);
  } else if (models.length) {
    said.push(`Requests are refused for models of which no engine is ready: ${models.join(", ")}.`);
  }
  const kinds = Object.entries(refused ?? {}).map(([status, n]) => `${count(n)} with ${status}`);
  if (kinds.length) {
    said.push(`Turned away in the last minute: ${kinds.join(", ")}.`);
  }
  return said.join(" ");
}

function fillTable() {
  const priced = hello.price_per_hour !== null;
  const rows = fleet.replicas.map((card) => [
    card.name,
    card.state,
    card.taken,
    card.seats.length,
    card.waiting,
    waitInWords(card.predicted_wait_s),
    card.output_rate,
    card.prompt_rate,
    card.boarding_rate,
    shareInWords(card.hits),
    percent(card.pages_used, card.pages),
    card.restarts,
    card.model,
    ...(priced ? [priceInWords(card.price)] : []),
    noteOf(card, fleet.t).trim(),
  ]);
  const head = [...HEAD, ...(priced ? ["A million useful tokens"] : []), "What there is to say"];
  table($("replica-table"), head, rows);
}

function updateState() {
  const silent = performance.now() - heardAt;
  const state = stateNow(silent);
  mark(document.body, "data-state", state);
  say($("state"), state === "unready" ? "not ready" : state);
  const last = fleet ? " The last values are shown." : "";
  const text =
    state === "stale"
      ? `No news from the server for ${seconds(Math.round(silent / 1000))}.${last}`
      : trouble || (fleet ? troubleOf(fleet) : "");
  $("trouble").hidden = !text;
  say($("trouble"), text);
}

function find() {
  if (fleet) {
    replicas.find($("find").value, fleet.replicas);
    replicas.measure();
    schedule();
  }
}

$("find").addEventListener("input", find);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== $("find")) {
    event.preventDefault();
    $("find").focus();
  }
});
$("replica-details").addEventListener("toggle", () => {
  filledAt = 0;
  schedule();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  replicas.restyle();
  schedule();
});
legend($("seat-legend"), seatLegend);
setInterval(updateState, 500);
watch(
  "",
  {
    event,
    trouble(text) {
      trouble = text;
      updateState();
    },
  },
  new AbortController().signal,
);
