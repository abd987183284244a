// Requests of all replicas: a search that asks each replica, and links to a request's story at its own replica.

import {$, count, make, say, seconds} from "./dom.js";
import {Listing, Polled} from "./listing.js";
import {stateInWords} from "./requests.js";

const EVERY_MS = 2000;
/** Milliseconds without a key press after which the search starts. */
const TYPED_MS = 250;

const nameOf = ({request, index}) => (index ? `${request} (${index})` : request);

export class FleetRequests {
  constructor() {
    this.polled = new Polled(() => "", "requests", {
      note: $("request-note"),
      show: (answer) => this.show(answer),
      every: EVERY_MS,
      query: () => this.query,
    });
    this.list = new Listing(
      $("request-table"),
      [
        ["Request", (row) => make("a", {href: storyOf(row)}, nameOf(row))],
        ["Replica", ({replica}) => replica],
        ["State", stateInWords],
        ["Came", ({age_s: age}) => `${seconds(age)} ago`],
        ["x-request-id", (row) => row.client_id],
        ["User", ({user}) => user],
        ["Prompt", (row) => row.n_prompt],
        ["Output", (row) => `${row.n_output} / ${row.max_tokens}`],
        ["Waited", (row) => seconds(row.queued_s)],
        ["First token", (row) => seconds(row.ttft_s)],
        ["In all", (row) => seconds(row.e2e_s)],
        ["End", (row) => row.code || row.finish],
      ],
      {key: ({replica, request, index}) => `${replica} ${request} ${index}`},
    );
    let timer = null;
    $("request-search").addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.polled.refresh(), TYPED_MS);
    });
    $("request-state").addEventListener("change", () => this.polled.refresh());
  }

  get query() {
    return `?${new URLSearchParams({state: $("request-state").value, search: $("request-search").value.trim()})}`;
  }

  /** Search for a text. */
  find(text) {
    $("request-search").value = text;
    this.polled.refresh();
  }

  frame(isShown) {
    this.polled.frame(isShown);
  }

  show({requests, missing}) {
    this.list.show(requests);
    const silent = missing.length ? ` Without an answer: ${missing.join(", ")}.` : "";
    say($("request-sub"), `${count(requests.length)} newest of all replicas.${silent}`);
  }
}

function storyOf({replica, request, index}) {
  return `r/${encodeURIComponent(replica)}/#requests/${encodeURIComponent(request)}/${index}`;
}
