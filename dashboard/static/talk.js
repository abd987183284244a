// One conversation: its settings, its turns, and the answer that is being streamed.

import {stream} from "./completion.js";
import {make, mark, percent, say, seconds} from "./dom.js";
import {markdown} from "./markdown.js";

/** The settings of a conversation: [field of the request, label, attributes of its input]. Empty: the model's default. */
const SETTINGS = [
  ["temperature", "Temperature", {type: "number", min: 0, max: 2, step: 0.1}],
  ["max_tokens", "Max tokens", {type: "number", min: 1, step: 1, value: 512}],
  ["seed", "Seed", {type: "number", step: 1}],
];
/** Number of alternatives requested for each token. */
const ALTERNATIVES = 3;

export class Talk {
  /** own: functions of the page, see `Chat`. */
  constructor(own) {
    this.own = own;
    this.turns = []; // {role, content, id, calls, tokens, status, stats, error}
    this.running = null; // AbortController
    this.element = make("section", {class: "talk", "aria-label": "Conversation"});
    this.model = make("select", {"aria-label": "Model"});
    this.system = make("textarea", {rows: 2, "aria-label": "System prompt", placeholder: "System prompt"});
    this.inputs = SETTINGS.map(([, , attributes]) => make("input", attributes));
    this.list = make("ol", {class: "turns"});
    const labels = SETTINGS.map(([, label], i) => make("label", {}, label, this.inputs[i]));
    const settings = make("div", {class: "settings"}, make("label", {}, "Model", this.model), ...labels);
    const folded = make("details", {}, make("summary", {}, "Settings of this conversation"), settings, this.system);
    this.element.append(folded, this.list);
  }

  offerModels(names) {
    const chosen = this.model.value;
    this.model.replaceChildren(...names.map((name) => make("option", {value: name}, name)));
    this.model.value = names.includes(chosen) ? chosen : names[0];
  }

  /** The body of the next request. */
  get body() {
    const system = this.system.value.trim();
    const messages = this.turns.filter(({error, content}) => !error && content);
    const body = {
      model: this.model.value,
      messages: [
        ...(system ? [{role: "system", content: system}] : []),
        ...messages.map(({role, content}) => ({role, content})),
      ],
    };
    SETTINGS.forEach(([field], i) => {
      if (this.inputs[i].value !== "") {
        body[field] = Number(this.inputs[i].value);
      }
    });
    return {...body, ...this.own.shared()};
  }

  /** Send a message; from: the turn that it replaces, with all later turns. */
  send(content, from = this.turns.length) {
    this.stop();
    this.turns.length = Math.min(from, this.turns.length);
    this.turns.push({role: "user", content});
    return this.answer();
  }

  /** Generate the newest answer again. */
  regenerate() {
    this.stop();
    if (this.turns.at(-1)?.role === "assistant") {
      this.turns.pop();
    }
    return this.answer();
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.turns = [];
    this.show();
  }

  async answer() {
    const {body} = this;
    const id = `chat-${crypto.randomUUID().slice(0, 13)}`;
    const turn = {role: "assistant", content: "", id, calls: [], tokens: [], sentAt: performance.now()};
    const running = new AbortController();
    this.running = running;
    this.turns.push(turn);
    this.show();
    try {
      for await (const chunk of stream(body, {id, key: this.own.key(), signal: running.signal})) {
        take(turn, chunk);
        this.changed();
      }
      turn.stats ??= {};
    } catch (error) {
      turn.stopped = running.signal.aborted;
      turn.error = turn.stopped ? "" : error.message;
    }
    turn.ended = performance.now();
    if (this.running === running) {
      this.running = null;
    }
    this.own.ended(id);
    this.show();
  }

  /** The answer that is being streamed; null: none. */
  get pending() {
    return this.running ? this.turns.at(-1) : null;
  }

  /** New text of the answer: shown at the next drawing. */
  changed() {
    this.drawing ??= requestAnimationFrame(() => {
      this.drawing = null;
      this.show();
    });
  }

  show() {
    const {list, turns} = this;
    while (list.children.length > turns.length) {
      list.lastChild.remove();
    }
    const scroller = this.element;
    const atEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
    turns.forEach((turn, i) => this.showTurn(list.children[i] ?? this.newLine(), turn, i));
    if (atEnd) {
      scroller.scrollTop = scroller.scrollHeight;
    }
    this.own.changed();
  }

  newLine() {
    const line = make("li", {}, make("div", {class: "text"}), make("p", {class: "sub"}), make("div", {class: "buttons"}));
    this.list.append(line);
    return line;
  }

  showTurn(line, turn, i) {
    const isLast = i === this.turns.length - 1;
    const key = JSON.stringify([turn.content.length, turn.calls?.length, turn.ended, turn.error, isLast, turn.role]);
    if (line.shows !== turn || line.dataset.key !== key) {
      line.shows = turn;
      line.dataset.key = key;
      mark(line, "class", turn.role);
      line.children[0].replaceChildren(...contentOf(turn));
      line.children[2].replaceChildren(...this.buttons(turn, i, isLast));
    }
    say(line.children[1], this.note(turn));
  }

  buttons(turn, i, isLast) {
    const button = (text, action) => {
      const element = make("button", {type: "button", class: "plain"}, text);
      element.addEventListener("click", action);
      return element;
    };
    if (turn.role === "user") {
      return [button("Edit", () => this.own.edit(i, turn.content))];
    }
    if (!turn.ended) {
      return [];
    }
    const copy = button("Copy", () => navigator.clipboard?.writeText(turn.content));
    const story = button("Story", () => this.own.tell(turn.id));
    const regenerate = () => {
      this.own.focus(); // the button disappears
      this.regenerate();
    };
    return isLast ? [button("Regenerate", regenerate), copy, story] : [copy, story];
  }

  /** Text under an answer: its place in the queue, then its speed. */
  note(turn) {
    if (turn.role === "user") {
      return "";
    }
    if (turn.error) {
      return turn.error;
    }
    if (!turn.first && !turn.ended) {
      return this.own.place(turn.id);
    }
    return statsOf(turn);
  }
}

/** Add a chunk of the stream to the answer. */
function take(turn, chunk) {
  const [choice] = chunk.choices;
  const {delta} = choice ?? {};
  const text = delta?.content ?? "";
  if (text || delta?.tool_calls || delta?.reasoning_content) {
    turn.first ??= performance.now();
    turn.newest = performance.now();
  }
  turn.content += text;
  turn.thoughts = (turn.thoughts ?? "") + (delta?.reasoning_content ?? "");
  turn.tokens.push(...(choice?.logprobs?.content ?? []));
  for (const {index, function: called} of delta?.tool_calls ?? []) {
    turn.calls[index] ??= {name: "", arguments: ""};
    turn.calls[index].name += called?.name ?? "";
    turn.calls[index].arguments += called?.arguments ?? "";
  }
  turn.finish = choice?.finish_reason ?? turn.finish;
  turn.stats = chunk.usage ?? turn.stats;
}

function contentOf(turn) {
  if (turn.role === "user") {
    return [make("p", {class: "said"}, turn.content)];
  }
  const thoughts = turn.thoughts
    ? [make("details", {class: "thoughts"}, make("summary", {}, "Thoughts"), make("p", {class: "said"}, turn.thoughts))]
    : [];
  const calls = turn.calls.map(({name, arguments: text}) =>
    make("pre", {class: "call", tabindex: "0"}, make("code", {}, `${name}(${text})`)),
  );
  const said = turn.tokens.length ? [tokensOf(turn.tokens)] : markdown(turn.content);
  return [...thoughts, ...said, ...calls];
}

/** Tokens with their probabilities, shown on hover. */
function tokensOf(tokens) {
  const spans = tokens.map(({token, logprob, top_logprobs: top}) => {
    const others = top.map((one) => `${JSON.stringify(one.token)} ${percent(Math.exp(one.logprob), 1)}`);
    const title = `${percent(Math.exp(logprob), 1)} of: ${others.join(", ")}`;
    const span = make("span", {class: "token", title}, token);
    span.style.setProperty("--sure", Math.exp(logprob).toFixed(2));
    return span;
  });
  return make("p", {class: "said"}, ...spans);
}

export const alternatives = {logprobs: true, top_logprobs: ALTERNATIVES};

function statsOf({sentAt, first, newest, ended, stats, finish, stopped}) {
  const parts = [];
  if (first) {
    parts.push(`first token ${seconds((first - sentAt) / 1000)}`);
  }
  const tokens = stats?.completion_tokens;
  if (tokens > 1 && newest > first) {
    parts.push(`${((1000 * (tokens - 1)) / (newest - first)).toFixed(0)} tok/s`);
  }
  if (tokens) {
    parts.push(`${tokens} tokens`);
  }
  if (ended) {
    parts.push(stopped ? "stopped" : finish === "length" ? "cut off at max tokens" : (finish ?? ""));
  }
  return parts.filter(Boolean).join(" · ");
}
