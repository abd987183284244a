// Batches, jobs, files and adapters. The lists come from the page's own route (dashboard/work.py); contents come from
// the API, which requires an API key where the server has keys: a session alone shows no texts.

import {$, count, make, saveFile, say, seconds} from "./dom.js";
import {Listing, Polled} from "./listing.js";

const EVERY_MS = 2000;
const UNITS = ["B", "kB", "MB", "GB", "TB"];

const timeOf = (t) => (t === null ? "" : new Date(1000 * t).toLocaleString("en-GB", {dateStyle: "short", timeStyle: "medium"}));

export function inBytes(value) {
  const power = Math.min(UNITS.length - 1, Math.floor(Math.log10(Math.max(1, value)) / 3));
  return `${power ? (value / 1000 ** power).toPrecision(3) : value} ${UNITS[power]}`;
}

export class Work {
  /** base(): the path before the engine's own. */
  constructor(base) {
    this.polled = new Polled(base, "work", {note: $("work-note"), show: (answer) => this.show(answer), every: EVERY_MS});
    this.lists = {
      batches: new Listing($("batches"), this.batchColumns(), {none: "No batch was sent to this server."}),
      jobs: new Listing($("jobs"), this.jobColumns(), {none: "No job was sent to this server."}),
      files: new Listing($("files"), this.fileColumns(), {none: "No file is kept."}),
      adapters: new Listing(
        $("adapters"),
        [
          ["Adapter", (row) => row.name],
          ["Open requests", (row) => count(row.open)],
          ["Ended in the last minutes", (row) => count(row.ended)],
        ],
        {key: ({name}) => name, none: "This engine has no adapters."},
      ),
    };
    $("view-work").addEventListener("click", ({target}) => this.act(target.closest("[data-act]")));
  }

  /** Show another engine. hello: of its feed; isBeside: the API is beside this page. */
  greet({needs_key: needsKey, role}, isBeside) {
    Object.assign(this, {needsKey, isBeside, seesAll: role !== "user"});
    $("work-key").parentElement.hidden = !needsKey || !isBeside;
  }

  frame(isShown) {
    this.polled.frame(isShown);
  }

  show(answer) {
    this.now = answer.t;
    for (const [name, list] of Object.entries(this.lists)) {
      list.show(answer[name]);
    }
  }

  ownColumns(kind) {
    return [
      [kind, ({id}) => make("code", {title: id}, shortened(id))],
      ["Owner", ({owner, own}) => (own && !this.seesAll ? "you" : owner)],
    ];
  }

  taskColumns() {
    return [
      ["Status", ({status}) => make("span", {class: `status ${status}`}, status.replaceAll("_", " "))],
      ["Asks", ({endpoint}) => endpoint],
    ];
  }

  ends() {
    return [
      ["Came", ({created_at: at}) => timeOf(at)],
      ["Window ends", (row) => (row.ended_at === null ? `in ${seconds(Math.max(0, row.expires_at - this.now))}` : "")],
      ["Ended", ({ended_at: at}) => timeOf(at)],
    ];
  }

  batchColumns() {
    return [
      ...this.ownColumns("Batch"),
      ...this.taskColumns(),
      ["Progress", progress],
      ["Time left", ({left_s: left}) => (left === null ? "" : `about ${seconds(left)}`)],
      ...this.ends(),
      ["Answers", (row) => this.contents(row, row.output_file_id && `files/${row.output_file_id}/content`, "answers")],
      ["Errors", (row) => this.contents(row, row.error_file_id && `files/${row.error_file_id}/content`, "errors")],
      ["Action", cancelButton],
    ];
  }

  jobColumns() {
    return [
      ...this.ownColumns("Job"),
      ...this.taskColumns(),
      ...this.ends(),
      ["Answer", (row) => this.contents(row, row.status === "completed" || row.status === "failed" ? `jobs/${row.id}` : "", "answer")],
      ["Action", cancelButton],
    ];
  }

  fileColumns() {
    return [
      ...this.ownColumns("File"),
      ["Name", ({name}) => name],
      ["Purpose", ({purpose}) => purpose.replaceAll("_", " ")],
      ["Size", ({bytes}) => inBytes(bytes)],
      ["Came", ({created_at: at}) => timeOf(at)],
      ["Contents", (row) => this.contents(row, `files/${row.id}/content`, "contents")],
    ];
  }

  /** A button that saves a result from the API; the API returns only a key's own results. */
  contents({id, own}, path, what) {
    if (!path || !this.isBeside || !own) {
      return "";
    }
    const label = `Save the ${what} of ${id}`;
    return make("button", {type: "button", class: "plain small", "data-act": "save", "data-path": path, "aria-label": label}, "Save");
  }

  act(button) {
    if (button?.dataset.act === "save") {
      this.save(button.dataset.path);
    } else if (button?.dataset.act === "cancel") {
      button.disabled = true;
      this.polled.refresh(`/${encodeURIComponent(button.dataset.id)}`, {method: "DELETE"});
    }
  }

  async save(path) {
    const key = $("work-key").value;
    if (this.needsKey && !key) {
      say($("work-note"), "The API gives contents for an API key alone: type yours above.");
      $("work-key").focus();
      return;
    }
    const headers = key ? {authorization: `Bearer ${key}`} : {};
    const reply = await fetch(`../v1/${path}`, {headers, cache: "no-store"}).catch(() => null);
    if (!reply?.ok) {
      const answer = await reply?.json().catch(() => null);
      say($("work-note"), answer?.error?.message ?? "The server does not answer.");
      return;
    }
    const [, id] = path.split("/");
    const isJob = path.startsWith("jobs/");
    saveFile(`${id}.${isJob ? "json" : "jsonl"}`, "application/octet-stream", await reply.text());
  }
}

/** The beginning and the end of an id. */
const shortened = (id) => (id.length > 20 ? `${id.slice(0, 14)}…${id.slice(-4)}` : id);

function progress({id, status, total, completed, failed, fault}) {
  if (fault) {
    return make("span", {class: "bad"}, fault);
  }
  if (!total) {
    return status === "validating" ? "its file is read" : "";
  }
  const done = completed + failed;
  const words = `${count(done)} of ${count(total)}${failed ? `, ${count(failed)} failed` : ""}`;
  const bar = make("meter", {value: done / total, "aria-label": `Lines answered of ${id}`});
  return make("span", {class: "metered"}, words, bar);
}

function cancelButton({id, open}) {
  const attributes = {type: "button", class: "plain small", "data-act": "cancel", "data-id": id, "aria-label": `Cancel ${id}`};
  return open ? make("button", attributes, "Cancel") : "";
}
