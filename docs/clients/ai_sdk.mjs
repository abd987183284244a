// Vercel's AI SDK against a Jitney server, through each of its providers.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { MODEL, TASK, base, expect, key, run } from "./checks.mjs";

const add = tool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const openai = createOpenAI({ baseURL: base, apiKey: key });
const MODELS = {
  compatible: createOpenAICompatible({ name: "jitney", baseURL: base, apiKey: key, supportsStructuredOutputs: true })(MODEL),
  responses: openai.responses(MODEL),
  chat: openai.chat(MODEL),
  anthropic: createAnthropic({ baseURL: base, apiKey: key })(MODEL),
};

const checks = {};
for (const [name, model] of Object.entries(MODELS)) {
  const wanted = { model, prompt: TASK, tools: { add }, stopWhen: stepCountIs(4) };
  checks[name] = async () => {
    const { text } = await generateText(wanted);
    expect(text.includes("4711"), text);
  };
  checks[`${name}-stream`] = async () => {
    const result = streamText({ ...wanted, onError: ({ error }) => { throw error; } });
    let text = "";
    for await (const piece of result.textStream) {
      text += piece;
    }
    expect(text.includes("4711"), text);
  };
  checks[`${name}-object`] = async () => {
    const schema = z.object({ feeling: z.enum(["happy", "sad"]) });
    const { object } = await generateObject({ model, schema, prompt: "How are you?" });
    expect(["happy", "sad"].includes(object.feeling), object);
  };
}
await run(checks);
