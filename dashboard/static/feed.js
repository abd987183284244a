// The live feed: server-sent events read with fetch, because EventSource hides the status of a refusal.

const FIRST_WAIT = 500;
const LONGEST_WAIT = 5000;

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** Watch the engine at `base` until `signal` is aborted. on.event(name, data); on.trouble(text) when there is no feed;
 *  both may be called many times. After a reconnect the server sends missed events after the last event's id. id: of an
 *  event received earlier. */
export async function watch(base, on, signal, id = null) {
  const seen = {id, retry: 0};
  for (let wait = FIRST_WAIT; !signal.aborted; wait = Math.min(LONGEST_WAIT, wait * 1.5)) {
    seen.retry = 0;
    try {
      if (await connect(base, on, signal, seen)) {
        wait = FIRST_WAIT;
      }
    } catch (error) {
      if (signal.aborted) {
        return;
      }
      // A TypeError is a network error; any other error is a bug of the page.
      if (!(error instanceof TypeError)) {
        throw error;
      }
    }
    await pause(Math.max(wait, seen.retry));
  }
}

/** Read one connection to its end; returns true if the server accepted it. */
async function connect(base, on, signal, seen) {
  const headers = {accept: "text/event-stream", ...(seen.id ? {"last-event-id": seen.id} : {})};
  const answer = await fetch(`${base}feed`, {headers, cache: "no-store", signal});
  if (answer.status === 401) {
    location.reload();
  }
  if (answer.status === 503) {
    on.trouble("Too many pages watch this engine already; trying again.");
  }
  if (!answer.ok) {
    return false;
  }
  for await (const {event, id, data} of events(answer.body)) {
    seen.id = id ?? seen.id;
    if (event === "bye") {
      seen.retry = data.retry_ms;
    }
    on.event(event, data);
  }
  return true;
}

async function* events(body) {
  for await (const block of blocks(body)) {
    if (!block.startsWith(":")) {
      yield parse(block);
    }
  }
}

/** The texts of a stream of server-sent events. */
export async function* blocks(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const {done, value} = await reader.read();
    if (done) {
      return;
    }
    const whole = (text + value).split("\n\n");
    text = whole.pop();
    yield* whole;
  }
}

/** The {event, id, data} of the text of an event. */
export function parse(block) {
  const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s)));
  return {event: fields.event, id: fields.id, data: JSON.parse(fields.data)};
}

/** The JSON of another of the engine's routes; throws Error with the server's own message. */
export async function ask(path, options = {}) {
  const answer = await fetch(path, {cache: "no-store", ...options}).catch(() => null);
  if (!answer) {
    throw new Error("The server does not answer.");
  }
  if (answer.status === 401) {
    location.reload();
  }
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) {
    throw Object.assign(new Error(body.error?.message ?? `The server answered ${answer.status}.`), {
      code: body.error?.code,
      status: answer.status,
    });
  }
  return body;
}
