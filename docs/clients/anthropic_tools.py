"""The tool runner of Anthropic's client for Python against a Jitney server."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic import beta_tool
from checks import TASK, Checks, expect

checks = Checks(__doc__)
client = anthropic.Anthropic(base_url=checks.url, api_key=checks.key)


@beta_tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return str(a + b)


def _runner(**more: Any) -> Any:
    messages: Any = [{"role": "user", "content": TASK}]
    return client.beta.messages.tool_runner(
        model=checks.model, max_tokens=200, tools=[add], messages=messages, **more
    )


@checks.add
def tool_runner() -> None:
    message = _runner().until_done()
    text = "".join(block.text for block in message.content if block.type == "text")
    expect("4711" in text, message)


@checks.add
def tool_runner_stream() -> None:
    text = ""
    for stream in _runner(stream=True):
        for event in stream:
            text += event.text if event.type == "text" else ""
    expect("4711" in text, text)


checks.run()
