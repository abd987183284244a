// OpenAI's client for Node against a Jitney server.
//
//   node openai_node.mjs URL MODEL      (where `npm install openai zod` has been run)

import OpenAI, { toFile } from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { MODEL, base, expect, key, run } from "./checks.mjs";

const client = new OpenAI({ baseURL: base, apiKey: key });
const HELLO = [{ role: "user", content: "Say hello." }];
const QUESTION = [{ role: "user", content: "What is the weather in Paris today?" }];
const WEATHER = {
  name: "get_weather",
  description: "Today's weather in a city.",
  parameters: {
    type: "object",
    properties: {
      city: { type: "string", maxLength: 20 },
      unit: { type: "string", enum: ["celsius", "fahrenheit"] },
    },
    required: ["city", "unit"],
    additionalProperties: false,
  },
  strict: true,
};
const Mood = z.object({
  feeling: z.enum(["happy", "sad", "angry"]),
  strength: z.enum(["weak", "strong"]),
});

async function pause(ms) {
  await new Promise((resolve) => setTimeout(resolve, ms));
}

function batchLines(count) {
  const body = { model: MODEL, messages: HELLO, max_tokens: 4 };
  const rows = [];
  for (let number = 0; number < count; number++) {
    rows.push(JSON.stringify({
      custom_id: `line-${number}`, method: "POST", url: "/v1/chat/completions", body,
    }));
  }
  return rows.join("\n");
}

const checks = {
  async models() {
    const names = [];
    for await (const model of client.models.list()) {
      names.push(model.id);
    }
    expect(names.includes(MODEL), names);
  },

  async completion() {
    const answer = await client.completions.create({
      model: MODEL, prompt: "Once upon a time", max_tokens: 8, temperature: 0,
    });
    expect(answer.choices[0].text, answer);
  },

  async chat() {
    const answer = await client.chat.completions.create({
      model: MODEL, messages: HELLO, max_tokens: 16,
    });
    expect(answer.choices[0].message.content, answer);
    expect(answer.usage.completion_tokens > 0, answer.usage);
  },

  async "chat-stream"() {
    const stream = await client.chat.completions.create({
      model: MODEL, messages: HELLO, max_tokens: 16, stream: true,
      stream_options: { include_usage: true },
    });
    let text = "";
    let usage = null;
    for await (const event of stream) {
      text += event.choices[0]?.delta?.content ?? "";
      usage = event.usage ?? usage;
    }
    expect(text && usage?.completion_tokens > 0, { text, usage });
  },

  async "chat-stream-left"() {
    const stream = await client.chat.completions.create({
      model: MODEL, messages: HELLO, max_tokens: 1000, ignore_eos: true, stream: true,
    });
    for await (const event of stream) {
      expect(event.choices, event);
      break; // which closes the connection
    }
  },

  async errors() {
    try {
      await client.chat.completions.create({ model: MODEL, messages: HELLO, temperature: 9 });
    } catch (error) {
      expect(error instanceof OpenAI.BadRequestError && error.param === "temperature", error);
      return;
    }
    throw new Error("temperature 9 was accepted");
  },

  async parse() {
    const answer = await client.chat.completions.parse({
      model: MODEL, messages: HELLO, response_format: zodResponseFormat(Mood, "mood"),
    });
    Mood.parse(answer.choices[0].message.parsed);
  },

  async "tools-required"() {
    const answer = await client.chat.completions.create({
      model: MODEL, messages: QUESTION, tool_choice: "required",
      tools: [{ type: "function", function: WEATHER }],
    });
    const choice = answer.choices[0];
    expect(choice.finish_reason === "tool_calls", choice);
    const call = choice.message.tool_calls[0];
    expect(JSON.parse(call.function.arguments).unit, call);
  },

  async "tools-stream"() {
    const stream = client.chat.completions.stream({
      model: MODEL, messages: QUESTION, tool_choice: "required",
      tools: [{ type: "function", function: WEATHER }],
    });
    const call = await stream.finalFunctionToolCall();
    expect(call.name === "get_weather" && JSON.parse(call.arguments).unit, call);
  },

  async responses() {
    const answer = await client.responses.create({
      model: MODEL, input: "Say hello.", max_output_tokens: 16,
    });
    expect(answer.output_text, answer);
  },

  async "responses-stream"() {
    const stream = client.responses.stream({
      model: MODEL, input: "Say hello.", max_output_tokens: 16,
    });
    let text = "";
    stream.on("response.output_text.delta", (event) => { text += event.delta; });
    const answer = await stream.finalResponse();
    expect(text && text === answer.output_text, { text, answer });
  },

  async "responses-parse"() {
    const answer = await client.responses.parse({
      model: MODEL, input: "How do you feel?", text: { format: zodTextFormat(Mood, "mood") },
    });
    Mood.parse(answer.output_parsed);
  },

  async "responses-tools"() {
    const tools = [{ type: "function", ...WEATHER }];
    const first = await client.responses.create({
      model: MODEL, input: QUESTION[0].content, tools, tool_choice: "required",
    });
    const call = first.output.find((item) => item.type === "function_call");
    expect(call && JSON.parse(call.arguments).unit, first);
  },

  async files() {
    const file = await client.files.create({
      file: await toFile(Buffer.from(batchLines(2)), "two.jsonl"), purpose: "batch",
    });
    const content = await client.files.content(file.id);
    expect(await content.text() === batchLines(2), "its content changed");
    const gone = await client.files.delete(file.id);
    expect(gone.deleted, gone);
  },

  async batches() {
    const file = await client.files.create({
      file: await toFile(Buffer.from(batchLines(3)), "three.jsonl"), purpose: "batch",
    });
    let batch = await client.batches.create({
      input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h",
    });
    const until = Date.now() + 120_000;
    while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
      expect(Date.now() < until, `still ${batch.status} after 120 s`);
      await pause(500);
      batch = await client.batches.retrieve(batch.id);
    }
    expect(batch.status === "completed", batch);
    const content = await client.files.content(batch.output_file_id);
    const lines = (await content.text()).trim().split("\n");
    expect(lines.length === 3, lines);
  },
};

await run(checks);
