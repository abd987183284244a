// The live feed: server-sent events read with fetch, because EventSource hides the status of a refusal.

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** Watch for ever. on.event(name, data), on.trouble(text) when there is no feed; both may be called many times. */
export async function watch(on) {
  for (let wait = 1000; ; wait = Math.min(5000, wait * 1.5)) {
    try {
      const answer = await fetch("feed", {headers: {accept: "text/event-stream"}, cache: "no-store"});
      if (answer.status === 401) return location.reload();
      if (answer.status === 503) on.trouble("Too many pages watch this engine already; trying again.");
      if (answer.ok) {
        wait = 1000;
        for await (const [name, data] of events(answer.body)) on.event(name, data);
      }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;  // a TypeError is the network; anything else is our own mistake
    }
    await pause(wait);
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const {done, value} = await reader.read();
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) yield parse(block);
  }
}

function parse(block) {
  const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s)));
  return [fields.event, JSON.parse(fields.data)];
}
