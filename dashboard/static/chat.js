// The chat beside the seats: one conversation, or two with different settings. Nothing is stored; the reader can save
// the conversation as a file.

import {asCurl, asPython, stream} from "./completion.js";
import {$, saveFile, say, seconds} from "./dom.js";
import {Talk, alternatives} from "./talk.js";

/** A busload: token limits of its requests, of four answers each. A browser opens 6 connections to a server; the feed
 *  has one. */
const BUSLOAD = [32, 64, 96, 160];
const ANSWERS = 4;
/** Without a keyboard, as on a phone, a focused text box is half covered. */
const hasKeyboard = matchMedia("(hover: hover)");

export class Chat {
  /** Ids are x-request-ids. page.place(id): a request's place in the queue, in words. page.began(id), page.ended(id): a
   *  request of this reader begins or ends. page.tell(id): show the request's story. */
  constructor(page) {
    this.page = page;
    this.needsKey = false;
    this.isListed = true; // before the first engine is known
    this.editing = null; // number of the turn whose text is in the box
    this.trouble = "";
    this.unseen = new Set(); // ids of busload requests
    const own = {
      shared: () => this.shared(),
      key: () => $("chat-key").value,
      ended: page.ended,
      place: page.place,
      tell: page.tell,
      edit: (turn, text) => this.edit(turn, text),
      focus: () => this.focus(),
      changed: () => this.changed(),
    };
    this.talks = [new Talk(own), new Talk(own)];
    this.talks[1].element.hidden = true;
    $("talks").append(...this.talks.map(({element}) => element));
    this.listen();
  }

  listen() {
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.busy ? this.stop() : this.send();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      } else if (event.key === "ArrowUp" && !$("prompt").value) {
        this.editLast(event);
      } else if (event.key === "Escape" && !this.busy) {
        $("prompt").blur(); // so that the keys of the views work again
      }
    });
    $("view-chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        this.stop();
      }
    });
    $("crowd").addEventListener("click", () => this.sendBusload());
    $("chat-clear").addEventListener("click", () => this.talks.forEach((talk) => talk.clear()));
    $("chat-save").addEventListener("click", () => this.save());
    $("chat-compare").addEventListener("change", ({target}) => {
      this.talks[1].element.hidden = !target.checked;
      this.changed();
    });
    $("chat-key").addEventListener("change", () => this.open());
    $("chat-code").addEventListener("toggle", () => this.changed());
  }

  /** Show another engine, or the same again. */
  greet({info, needs_key: needsKey}) {
    this.needsKey = needsKey;
    $("chat-key").parentElement.hidden = !needsKey;
    this.offer([info.model]);
    this.isListed = false;
  }

  /** The view becomes visible: focus the text box, and offer adapters beside the model. */
  async open() {
    if (hasKeyboard.matches) {
      this.focus();
    }
    const key = $("chat-key").value;
    if (this.isListed || (this.needsKey && !key)) {
      return;
    }
    this.isListed = true;
    const headers = key ? {authorization: `Bearer ${key}`} : {};
    const reply = await fetch("../v1/models", {headers}).catch(() => null);
    if (reply?.ok) {
      this.offer((await reply.json()).data.map(({id}) => id));
    }
  }

  offer(names) {
    this.talks.forEach((talk) => talk.offerModels(names));
    this.changed();
  }

  get shown() {
    return this.talks.filter(({element}) => !element.hidden);
  }

  get busy() {
    return this.talks.some(({running}) => running);
  }

  /** Fields that both conversations send. Throws SyntaxError for invalid JSON. */
  shared() {
    const tools = $("chat-tools").value.trim();
    const schema = $("chat-schema").value.trim();
    return {
      ...($("chat-probabilities").checked ? alternatives : {}),
      ...(tools ? {tools: JSON.parse(tools)} : {}),
      ...(schema
        ? {response_format: {type: "json_schema", json_schema: {name: "answer", schema: JSON.parse(schema)}}}
        : {}),
    };
  }

  send() {
    const text = $("prompt").value.trim();
    if (!text || !this.isValid()) {
      return;
    }
    $("prompt").value = "";
    const from = this.editing ?? undefined;
    this.editing = null;
    this.shown.forEach((talk) => talk.send(text, from));
  }

  isValid() {
    this.trouble = "";
    try {
      this.shared();
    } catch (error) {
      this.trouble = `Tools and schema are JSON: ${error.message}`;
    }
    say($("chat-trouble"), this.trouble);
    return !this.trouble;
  }

  stop() {
    this.talks.forEach((talk) => talk.stop());
  }

  edit(turn, text) {
    this.editing = turn;
    $("prompt").value = text;
    this.focus();
  }

  /** Edit the newest question; arrow up does this, as in a terminal. */
  editLast(event) {
    const {turns} = this.talks[0];
    const turn = turns.findLastIndex(({role}) => role === "user");
    if (turn >= 0) {
      event.preventDefault();
      this.edit(turn, turns[turn].content);
    }
  }

  focus() {
    $("prompt").focus({preventScroll: true});
  }

  /** Send requests that fill the seats. Their answers are not shown here. */
  sendBusload() {
    BUSLOAD.forEach((max_tokens) => this.sendUnseen({max_tokens, n: ANSWERS}));
  }

  async sendUnseen(fields) {
    const id = `busload-${crypto.randomUUID().slice(0, 13)}`;
    const content = $("prompt").value.trim() || "Tell me about small buses.";
    const body = {model: this.talks[0].model.value, messages: [{role: "user", content}], ...fields};
    this.unseen.add(id);
    try {
      for await (const chunk of stream(body, {id, key: $("chat-key").value})) {
        void chunk;
      }
    } catch (error) {
      say($("chat-trouble"), error.message);
    }
    this.unseen.delete(id);
    this.page.ended(id);
  }

  save() {
    const text = JSON.stringify(this.shown.map(({body}) => body), null, 2);
    saveFile("jitney-chat.json", "application/json", text);
  }

  changed() {
    say($("send"), this.busy ? "Stop" : "Send");
    if ($("chat-code").open && this.isValid()) {
      const {body} = this.talks[0];
      say($("chat-curl"), asCurl(body, this.needsKey));
      say($("chat-python"), asPython(body, this.needsKey));
    }
  }

  /** Call in each animation frame: show where the answers wait. */
  frame() {
    for (const talk of this.talks) {
      if (talk.pending) {
        this.page.began(talk.pending.id);
        talk.show();
      }
    }
    this.unseen.forEach((id) => this.page.began(id));
  }
}

/** A request's place before its first token, in words. waiting: see queue.js; predicted: seconds, of a new request. */
export function placeInWords(waiting, id, now, predicted) {
  const position = waiting.find(id);
  if (!position) {
    return "on board, reading the prompt";
  }
  const expected = waiting.expected(position.place, predicted);
  const about = expected ? `, about ${seconds(Math.max(0, expected - (now - position.since)))}` : "";
  return `place ${position.place} in the queue${about}`;
}
