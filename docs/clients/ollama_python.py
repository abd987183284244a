"""Ollama's client for Python against a Jitney server."""

from __future__ import annotations

import json
from typing import Any

import ollama
from checks import TASK, Checks, expect

checks = Checks(__doc__)
client = ollama.Client(host=checks.url)
HELLO = [{"role": "user", "content": "SAY the sky is blue"}]


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return str(a + b)


@checks.add
def tags() -> None:
    names = [model.model for model in client.list().models]
    expect(any(str(name).startswith(checks.model) for name in names), names)


@checks.add
def show() -> None:
    shown = client.show(checks.model)
    expect("completion" in (shown.capabilities or []), shown)


@checks.add
def chat() -> None:
    answer = client.chat(checks.model, HELLO)
    expect(answer.message.content == "the sky is blue" and answer.done, answer)


@checks.add
def chat_stream() -> None:
    pieces = list(client.chat(checks.model, HELLO, stream=True))
    text = "".join(piece.message.content or "" for piece in pieces)
    expect(text == "the sky is blue" and pieces[-1].done_reason == "stop", pieces[-1])


@checks.add
async def async_chat() -> None:
    answer = await ollama.AsyncClient(host=checks.url).chat(checks.model, HELLO)
    expect(answer.message.content == "the sky is blue", answer)


@checks.add
def tools() -> None:
    messages: list[Any] = [{"role": "user", "content": TASK}]
    first = client.chat(checks.model, messages, tools=[add])
    [call] = first.message.tool_calls or []
    result = add(**call.function.arguments)
    messages += [first.message, {"role": "tool", "content": result, "tool_name": "add"}]
    answer = client.chat(checks.model, messages, tools=[add])
    expect("4711" in str(answer.message.content), answer)


@checks.add
def schema() -> None:
    wanted = {
        "type": "object",
        "properties": {"feeling": {"type": "string", "enum": ["happy", "sad"]}},
        "required": ["feeling"],
    }
    question = [{"role": "user", "content": "How are you?"}]
    answer = client.chat(checks.model, question, format=wanted)
    feeling = json.loads(answer.message.content or "")["feeling"]
    expect(feeling in ("happy", "sad"), answer)


@checks.add
def generate() -> None:
    answer = client.generate(checks.model, "SAY the sky is blue", options={"num_predict": 64})
    expect("the sky is blue" in answer.response and answer.eval_count, answer)


@checks.add
def embed() -> None:
    answer = client.embed(checks.model, ["a dog", "a cat"])
    expect(len(answer.embeddings) == 2, answer)


checks.run()
