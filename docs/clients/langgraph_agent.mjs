// LangGraph for Node against a Jitney server.

import { tool } from "@langchain/core/tools";
import { createReactAgent } from "@langchain/langgraph/prebuilt";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { MODEL, TASK, base, expect, key, run } from "./checks.mjs";

const add = tool(async ({ a, b }) => String(a + b), {
  name: "add",
  description: "Add two numbers.",
  schema: z.object({ a: z.number(), b: z.number() }),
});

function model(more = {}) {
  return new ChatOpenAI({ model: MODEL, apiKey: key, configuration: { baseURL: base }, ...more });
}

async function adds(llm) {
  const agent = createReactAgent({ llm, tools: [add] });
  const result = await agent.invoke({ messages: [{ role: "user", content: TASK }] });
  const text = JSON.stringify(result.messages.at(-1).content);
  expect(text.includes("4711"), text);
}

await run({
  "chat": () => adds(model()),
  async "chat-stream"() {
    const agent = createReactAgent({ llm: model(), tools: [add] });
    const messages = [{ role: "user", content: TASK }];
    let text = "";
    for await (const [piece] of await agent.stream({ messages }, { streamMode: "messages" })) {
      text += typeof piece.content === "string" ? piece.content : "";
    }
    expect(text.includes("the sum is 4711"), text);
  },
  "responses": () => adds(model({ useResponsesApi: true })),
  async "structured-output"() {
    const schema = z.object({ feeling: z.enum(["happy", "sad"]) });
    const answer = await model().withStructuredOutput(schema).invoke("How are you?");
    expect(["happy", "sad"].includes(answer.feeling), answer);
  },
});
