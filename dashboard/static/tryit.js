// A prompt box that streams the answer, so that a visitor can fill seats without leaving the page.

import {$} from "./dom.js";

/** A busload: requests of four answers each. A browser opens six connections to a server, and the feed has one. */
const BUSLOAD = [32, 64, 96, 160];
const ANSWERS = 4;

let asked = 0;

/** onRequest(id): the engine's id of a request of ours, as soon as it is known; onDone(id) after its end. */
export function setUp(model, onRequest, onDone) {
  const ask = (lengths, n) => {
    $("answer").textContent = "";
    asked++;
    lengths.forEach((max_tokens, i) =>
      send({model: model(), max_tokens, n}, onRequest, onDone, i === 0 ? asked : -1),
    );
  };
  $("try-form").onsubmit = (event) => {
    event.preventDefault();
    ask([96], 1);
  };
  $("crowd").onclick = () => ask(BUSLOAD, ANSWERS);
}

/** Shows the first answer, if `turn` is still the newest thing asked. */
async function send(fields, onRequest, onDone, turn) {
  const show = (text) => {
    if (turn === asked) {
      $("answer").append(text);
    }
  };
  let id = null;
  try {
    for await (const chunk of answer(fields)) {
      if (!id) {
        id = chunk.id.replace("chatcmpl-", "");
        onRequest(id);
      }
      if (chunk.choices[0]?.index === 0) {
        show(chunk.choices[0].delta?.content ?? "");
      }
    }
  } catch (error) {
    show(`\n${error.message}`);
  }
  if (id) {
    onDone(id);
  }
}

/** The chunks of a streamed chat completion; throws Error with the server's own words. */
async function* answer(fields) {
  const messages = [{role: "user", content: $("prompt").value}];
  const reply = await fetch("../v1/chat/completions", {
    method: "POST",
    headers: {"content-type": "application/json"},
    body: JSON.stringify({...fields, stream: true, messages}),
  });
  if (!reply.ok) {
    throw new Error((await reply.json()).error.message);
  }
  for await (const chunk of chunks(reply.body)) {
    if (chunk.error) {
      throw new Error(chunk.error.message);
    }
    yield chunk;
  }
}

async function* chunks(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const {done, value} = await reader.read();
    if (done) {
      return;
    }
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (event.startsWith("data: {")) {
        yield JSON.parse(event.slice(6));
      }
    }
  }
}
