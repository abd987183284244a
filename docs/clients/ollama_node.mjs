// Ollama's client for Node against a Jitney server.

import { Ollama } from "ollama";
import { MODEL, expect, run, url } from "./checks.mjs";

const client = new Ollama({ host: url });
const messages = [{ role: "user", content: "SAY the sky is blue" }];

await run({
  async list() {
    const { models } = await client.list();
    expect(models.some((model) => model.name.startsWith(MODEL)), models);
  },
  async chat() {
    const answer = await client.chat({ model: MODEL, messages });
    expect(answer.message.content === "the sky is blue", answer);
  },
  async "chat-stream"() {
    let text = "";
    for await (const piece of await client.chat({ model: MODEL, messages, stream: true })) {
      text += piece.message.content;
    }
    expect(text === "the sky is blue", text);
  },
});
