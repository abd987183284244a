// Tenants: keys, or without keys the users named in requests. A reader without an administrator's key has one row.

import {$, count, make, percent, say, seconds} from "./dom.js";
import {pricePerHour} from "./band.js";
import {Listing, Polled} from "./listing.js";

const both = (points) => (points ? `${seconds(points.p50)} / ${seconds(points.p95)}` : "");
const limited = (used, most) => (most === null ? "" : `${count(used)} of ${count(most)}`);

export class Tenants {
  /** base(): the path before the engine's own. onFind(text): called to show a tenant's requests. */
  constructor(base, onFind) {
    this.polled = new Polled(base, "tenants", {note: $("tenant-note"), show: (answer) => this.show(answer)});
    this.list = new Listing($("tenant-table"), this.columns(), {key: ({search}) => search, none: "No request came in the last minutes."});
    $("tenant-table").addEventListener("click", ({target}) => {
      const {find} = target.closest("button")?.dataset ?? {};
      if (find !== undefined) {
        onFind(find.replace(/^user /, ""));
      }
    });
  }

  frame(isShown) {
    this.polled.frame(isShown);
  }

  show(answer) {
    this.answer = answer;
    this.list.show(answer.tenants);
    say($("tenant-sub"), `Of the requests that are open, or ended in the last ${seconds(answer.seconds)}.${priced()}`);
  }

  columns() {
    return [
      ["Tenant", ({name, search}) => make("button", {type: "button", class: "plain small", "data-find": search}, name)],
      ["Seats", ({seats}) => `${count(seats)} of ${count(this.answer.seats)}`],
      ["Waiting", ({waiting}) => count(waiting)],
      ["Share of the batch", (row) => share(row)],
      ["Fair share", ({fair_share: fair}) => (fair === null ? "" : percent(fair, 1))],
      ["Requests", ({requests}) => count(requests)],
      ["Refused", ({refused}) => make("span", {class: refused ? "bad" : ""}, count(refused))],
      ["Tokens in", ({prompt_tokens: tokens}) => count(tokens)],
      ["Cached", (row) => percent(row.cached_tokens, row.prompt_tokens)],
      ["Tokens out", ({output_tokens: tokens}) => count(tokens)],
      ["Wait p50 / p95", ({wait_s: wait}) => both(wait)],
      ["First token p50 / p95", ({ttft_s: first}) => both(first)],
      ["Open, of limit", ({open, max_open: most}) => limited(open, most)],
      ["Tokens left a minute", ({left, tokens_per_minute: most}) => limited(left, most)],
      ["Cost", (row) => this.cost(row)],
    ];
  }

  /** The tenant's share of the engine's price for this time, by its useful tokens. */
  cost({useful_tokens: tokens}) {
    const {seconds: time, useful_tokens: all} = this.answer;
    const price = pricePerHour();
    return price && all ? ((price * time * tokens) / (3600 * all)).toPrecision(3) : "";
  }
}

const priced = () =>
  pricePerHour() ? " Cost: the engine's price for this time, by useful tokens." : " A price for an hour (Settings) gives costs.";

function share({name, share: part, fair_share: fair}) {
  if (part === null) {
    return "";
  }
  const meter = make("meter", {value: part.toFixed(4), "aria-label": `Share of the batch of ${name}`});
  const isMore = fair !== null && part > 1.2 * fair;
  return make("span", {class: "metered"}, `${percent(part, 1)}${isMore ? " ▲" : ""}`, meter);
}
