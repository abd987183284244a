// One streamed chat completion of this engine, and the same call as a curl command and in Python.

import {blocks} from "./feed.js";

const PATH = "v1/chat/completions";

/** The chunks of a streamed chat completion; throws Error with the server's own message. id: the x-request-id, by which
 *  the page finds the request before the first token; key: "" where none is needed. */
export async function* stream(body, {id, key, signal}) {
  const reply = await fetch(`../${PATH}`, {
    method: "POST",
    headers: {
      "content-type": "application/json",
      "x-request-id": id,
      ...(key ? {authorization: `Bearer ${key}`} : {}),
    },
    body: JSON.stringify({...body, stream: true, stream_options: {include_usage: true}}),
    signal,
  });
  if (!reply.ok) {
    throw new Error((await reply.json()).error.message);
  }
  for await (const block of blocks(reply.body)) {
    if (!block.startsWith("data: {")) {
      continue; // the end marker
    }
    const chunk = JSON.parse(block.slice(6));
    if (chunk.error) {
      throw new Error(chunk.error.message);
    }
    yield chunk;
  }
}

/** A curl command. */
export function asCurl(body, needsKey, path = PATH) {
  const key = needsKey ? ' -H "authorization: Bearer $JITNEY_API_KEY"' : "";
  const data = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl ${location.origin}/${path} -H 'content-type: application/json'${key} -d '${data}'`;
}

/** A program for OpenAI's Python client. */
export function asPython(body, needsKey) {
  const key = needsKey ? 'os.environ["JITNEY_API_KEY"]' : '"none"';
  const fields = Object.entries(body).map(([name, value]) => `    ${name}=${asLiteral(value)},`);
  return [
    ...(needsKey ? ["import os"] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${location.origin}/v1", api_key=${key})`,
    "answer = client.chat.completions.create(",
    ...fields,
    ")",
    "print(answer.choices[0].message.content)",
  ].join("\n");
}

/** A JSON value in Python syntax. */
function asLiteral(value) {
  if (value === null) {
    return "None";
  }
  if (typeof value === "boolean") {
    return value ? "True" : "False";
  }
  if (Array.isArray(value)) {
    return `[${value.map(asLiteral).join(", ")}]`;
  }
  if (typeof value === "object") {
    const items = Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${asLiteral(item)}`);
    return `{${items.join(", ")}}`;
  }
  return JSON.stringify(value);
}
