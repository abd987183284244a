"""Anthropic's Python client against a Jitney server."""

from __future__ import annotations

from typing import Any

import anthropic
from checks import Checks, expect

checks = Checks(__doc__)
client = anthropic.Anthropic(base_url=checks.url, api_key=checks.key)
MODEL = checks.model
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Today's weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris today?"}]


@checks.add
def messages() -> None:
    answer = client.messages.create(
        model=MODEL, max_tokens=16, system="You are polite.", messages=HELLO
    )
    expect(answer.role == "assistant" and answer.content[0].type == "text", answer)
    expect(answer.stop_reason in ("end_turn", "max_tokens"), answer.stop_reason)
    expect(answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0, answer.usage)


@checks.add
def stop_sequence() -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=64,
        messages=[{"role": "user", "content": "Count: one two three"}],
        stop_sequences=["e"],
    )
    expect(answer.stop_reason == "stop_sequence" and answer.stop_sequence == "e", answer)


@checks.add
def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=16, messages=HELLO) as events:
        pieces = list(events.text_stream)
        answer = events.get_final_message()
    expect(len(pieces) > 1, "it came in one piece")
    expect("".join(pieces) == _text(answer), (pieces, answer))
    expect(answer.usage.output_tokens > 0, answer.usage)


@checks.add
def stream_events() -> None:
    events = client.messages.create(model=MODEL, max_tokens=16, messages=HELLO, stream=True)
    kinds = [event.type for event in events]
    expect(kinds[:2] == ["message_start", "content_block_start"], kinds)
    expect(kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], kinds)


@checks.add
async def async_stream() -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=checks.url, api_key=checks.key) as remote,
        remote.messages.stream(model=MODEL, max_tokens=8, messages=HELLO) as events,
    ):
        pieces = [piece async for piece in events.text_stream]
    expect("".join(pieces), "no text")


@checks.add
def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
    usage = client.messages.create(model=MODEL, max_tokens=1, messages=HELLO).usage
    used = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    expect(counted == used, f"counted {counted}, used {used}")


@checks.add
def tools_any() -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    _weather_call(answer)


@checks.add
def tools_named() -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice={
            "type": "tool",
            "name": "get_weather",
            "disable_parallel_tool_use": True,
        },
    )
    _weather_call(answer)


@checks.add
def tools_stream() -> None:
    with client.messages.stream(
        model=MODEL,
        max_tokens=200,
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as events:
        kinds = [event.type for event in events]
        answer = events.get_final_message()
    _weather_call(answer)
    expect(kinds.count("input_json") > 1, "the input came in one piece")


@checks.add
def tools_conversation() -> None:
    asked: Any = {"model": MODEL, "tools": [WEATHER]}
    first = client.messages.create(
        max_tokens=200, messages=QUESTION, tool_choice={"type": "any"}, **asked
    )
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "Sunny, 21 degrees."}
        for block in first.content
        if block.type == "tool_use"
    ]
    spoken: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    last = client.messages.create(
        max_tokens=32, messages=spoken, tool_choice={"type": "none"}, **asked
    )
    expect(_text(last), last)


@checks.add
def errors() -> None:
    try:
        client.messages.create(model="no-such-model", max_tokens=8, messages=HELLO)
    except anthropic.NotFoundError as error:
        expect(_kind_of(error) == "not_found_error", error.body)
    try:
        client.messages.create(model=MODEL, max_tokens=-1, messages=HELLO)
    except anthropic.BadRequestError as error:
        expect(_kind_of(error) == "invalid_request_error", error.body)
        return
    raise AssertionError("max_tokens -1 was accepted")


def _kind_of(error: anthropic.APIStatusError) -> str:
    body: Any = error.body
    return body["error"]["type"]


def _text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def _weather_call(message: Any) -> None:
    expect(message.stop_reason == "tool_use", message)
    calls = [block for block in message.content if block.type == "tool_use"]
    expect(calls, message)
    for call in calls:
        expect(call.name == "get_weather" and call.id, call)
        expect(call.input["unit"] in ("celsius", "fahrenheit"), call.input)


checks.run()
