// The tool runner of Anthropic's client for Node against a Jitney server.

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";
import { MODEL, TASK, expect, key, run, url } from "./checks.mjs";

const client = new Anthropic({ baseURL: url, apiKey: key });
const add = betaZodTool({
  name: "add",
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  run: ({ a, b }) => String(a + b),
});
const SENT = { model: MODEL, max_tokens: 200, tools: [add], messages: [{ role: "user", content: TASK }] };

await run({
  async "tool-runner"() {
    const message = await client.beta.messages.toolRunner(SENT);
    expect(message.content.some((block) => block.text?.includes("4711")), message);
  },
  async "tool-runner-stream"() {
    let text = "";
    for await (const stream of client.beta.messages.toolRunner({ ...SENT, stream: true })) {
      for await (const event of stream) {
        text += event.delta?.text ?? "";
      }
    }
    expect(text.includes("4711"), text);
  },
});
