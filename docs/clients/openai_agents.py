"""OpenAI's agents for Python against a Jitney server."""

from __future__ import annotations

from typing import Any, Literal

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import TASK, Checks, expect
from openai import AsyncOpenAI
from pydantic import BaseModel

checks = Checks(__doc__)
set_tracing_disabled(True)


class Mood(BaseModel):
    """How somebody feels."""

    feeling: Literal["happy", "sad"]


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def _agent(kind: Any, **more: Any) -> Agent[Any]:
    client = AsyncOpenAI(base_url=checks.base_url, api_key=checks.key)  # one for each event loop
    model = kind(model=checks.model, openai_client=client)
    fields: dict[str, Any] = {"instructions": "Add.", "tools": [add]} | more
    return Agent(name="adder", model=model, **fields)


async def _adds(kind: Any) -> None:
    result = await Runner.run(_agent(kind), TASK)
    expect("4711" in result.final_output, result.final_output)


async def _streams(kind: Any) -> None:
    result = Runner.run_streamed(_agent(kind), TASK)
    events = [event.type async for event in result.stream_events()]
    expect("4711" in result.final_output and len(events) > 5, result.final_output)


@checks.add
async def responses() -> None:
    await _adds(OpenAIResponsesModel)


@checks.add
async def responses_stream() -> None:
    await _streams(OpenAIResponsesModel)


@checks.add
async def chat() -> None:
    await _adds(OpenAIChatCompletionsModel)


@checks.add
async def chat_stream() -> None:
    await _streams(OpenAIChatCompletionsModel)


@checks.add
async def output_type() -> None:
    agent = _agent(OpenAIResponsesModel, tools=[], output_type=Mood)
    result = await Runner.run(agent, "How are you?")
    expect(isinstance(result.final_output, Mood), result.final_output)


checks.run()
