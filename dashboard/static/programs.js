// The compiled sizes, possible savings of other sizes, the parts of a step, and the proofs of the kernels.

import {$, count, make, percent, say, seconds, table} from "./dom.js";
import {ask} from "./feed.js";
import {Listing, Polled} from "./listing.js";

const EVERY_MS = 5000;
const PARTS = {
  plan: "planning, on the host",
  batch: "packing the upload, on the host",
  launch: "launching the program",
  device: "the device's own time",
  fetch: "fetching the tokens",
  commit: "taking the tokens in, on the host",
  gap: "idle time of the device before it",
};

export class Programs {
  /** base(): the path before the engine's own. */
  constructor(base) {
    this.base = base;
    this.polled = new Polled(base, "programs", {note: $("program-note"), show: (answer) => this.show(answer), every: EVERY_MS});
    this.list = new Listing($("program-table"), this.columns(), {key: ({name}) => name, none: "No size is known."});
    $("propose").addEventListener("click", () => this.propose());
  }

  /** Show another engine. */
  greet({role, info}) {
    this.isOffered = role !== "user" && !info?.encoder;
    $("programs").hidden = $("step-parts").hidden = !this.isOffered;
    $("proofs").hidden = !info?.proofs?.length;
    if (info) {
      const {executables: programs, compile_seconds: time} = info;
      say($("program-sub"), `${count(programs)} programs were compiled, or read from the cache folder, in ${seconds(time)} at the start.`);
    }
    showProofs(info);
  }

  frame(isShown) {
    if (this.isOffered) {
      this.polled.frame(isShown);
    }
  }

  columns() {
    return [
      ["Program", ({name}) => name],
      ["Steps", ({steps}) => count(steps)],
      ["Share of steps", ({steps}) => percent(steps, this.steps)],
      ["Padding", ({padding, rows}) => (rows ? percent(padding, rows) : "")],
      ["A step", ({mean_s: mean}) => (mean === null ? "" : seconds(mean))],
      ["Share of the device's time", (row) => (row.steps ? percent(row.device_s, this.deviceTime) : "")],
      ["Compiled", compiledInWords],
    ];
  }

  show({steps, sizes, parts}) {
    this.steps = steps;
    this.deviceTime = sizes.reduce((sum, row) => sum + row.device_s, 0);
    this.list.show(sizes);
    table(
      $("part-table"),
      ["Part of a step", "Decode, mean", "p95", "With prompts, mean", "p95"],
      Object.entries(PARTS).map(([name, text]) => [
        text,
        ...[parts.decode, parts.mixed].flatMap((kind) => (kind ? [seconds(kind[name].mean), seconds(kind[name].p95)] : ["", ""])),
      ]),
    );
  }

  async propose() {
    $("propose").disabled = true;
    say($("proposal"), "Computing, at the lowest priority.");
    try {
      say($("proposal"), proposalInWords(await ask(`${this.base()}buckets`)));
    } catch (error) {
      say($("proposal"), error.message);
    }
    $("propose").disabled = false;
  }
}

function compiledInWords({late, late_s: time, compile_s: before, from_cache: cached}) {
  if (!late) {
    return before === null ? "at the start" : `${seconds(before)}${cached ? ", from the cache folder" : ""}`;
  }
  return make("span", {class: "bad"}, `late, ${count(late)} ${late === 1 ? "time" : "times"}, ${seconds(time)}`);
}

function proposalInWords(proposal) {
  const {steps, seconds: best, seconds_now: now, share, share_now: shareNow} = proposal;
  const saved = now - best;
  const basis = `Of ${count(steps)} steps, with at most as many programs:`;
  if (saved < 0.005 * now) {
    return `${basis} no other sizes would have saved as much as 0.5 % of their time.`;
  }
  const flags = `--seat-buckets ${proposal.seat_buckets.join(",")} --token-buckets ${proposal.token_buckets.join(",")}`;
  return (
    `${basis} ${flags} would have taken ${seconds(best)} instead of ${seconds(now)} (${percent(saved, now)} less), ` +
    `with ${percent(share, 1)} of the rows padding instead of ${percent(shareNow, 1)}.`
  );
}

function showProofs(info) {
  table(
    $("proof-table"),
    ["Kernel", "Largest error", "Explained by rounding", "Result"],
    (info?.proofs ?? []).map(({kernel, error, limit, reason}) => [
      kernel,
      error === null ? "could not run" : error.toPrecision(2),
      limit.toPrecision(2),
      error !== null && error <= limit ? "right" : `taken out${reason ? `: ${reason}` : ""}`,
    ]),
  );
}
