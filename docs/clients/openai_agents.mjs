// OpenAI's agents for Node against a Jitney server.

import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run as runAgent, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { MODEL, TASK, base, expect, key, run } from "./checks.mjs";

setTracingDisabled(true);
const client = new OpenAI({ baseURL: base, apiKey: key });
const add = tool({
  name: "add",
  description: "Add two numbers.",
  parameters: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});

function agent(Model, more = {}) {
  const model = new Model(client, MODEL);
  return new Agent({ name: "adder", instructions: "Add.", model, tools: [add], ...more });
}

async function adds(Model) {
  const result = await runAgent(agent(Model), TASK);
  expect(result.finalOutput.includes("4711"), result.finalOutput);
}

async function streams(Model) {
  const result = await runAgent(agent(Model), TASK, { stream: true });
  let text = "";
  for await (const piece of result.toTextStream()) {
    text += piece;
  }
  await result.completed;
  expect(text.includes("4711"), text);
}

await run({
  "responses": () => adds(OpenAIResponsesModel),
  "responses-stream": () => streams(OpenAIResponsesModel),
  "chat": () => adds(OpenAIChatCompletionsModel),
  "chat-stream": () => streams(OpenAIChatCompletionsModel),
  async "output-type"() {
    const outputType = z.object({ feeling: z.enum(["happy", "sad"]) });
    const result = await runAgent(agent(OpenAIResponsesModel, { outputType, tools: [] }), "How are you?");
    expect(["happy", "sad"].includes(result.finalOutput.feeling), result.finalOutput);
  },
});
