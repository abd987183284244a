"""OpenAI's Python client against a Jitney server."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import openai
from checks import Checks, expect
from pydantic import BaseModel

checks = Checks(__doc__)
client = openai.OpenAI(base_url=checks.base_url, api_key=checks.key)
MODEL = checks.model
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris today?"}]

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Today's weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Mood(BaseModel):
    """What `parse` has to return."""

    feeling: Literal["happy", "sad", "angry"]
    strength: Literal[1, 2, 3]


@checks.add
def models() -> None:
    names = [model.id for model in client.models.list()]
    expect(MODEL in names, f"{MODEL} is not in {names}")
    expect(client.models.retrieve(MODEL).id == MODEL, "retrieve gives another model")


@checks.add
def completion() -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["Once upon", "In the"], max_tokens=8, temperature=0
    )
    expect([choice.index for choice in answer.choices] == [0, 1], answer)
    expect(answer.usage and answer.usage.completion_tokens == 16, answer.usage)


@checks.add
def completion_stream() -> None:
    sent: Any = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**sent).choices[0].text
    pieces = [event.choices[0].text for event in client.completions.create(**sent, stream=True)]
    expect("".join(pieces) == whole, (pieces, whole))
    expect(len(pieces) > 1, "it came in one piece")


@checks.add
def echo_and_logprobs() -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The sky is blue", echo=True, max_tokens=1, logprobs=2, temperature=0
    )
    scores = answer.choices[0].logprobs
    expect(scores and scores.token_logprobs and scores.tokens, answer)
    expect(scores.token_logprobs[0] is None, "the first token has a log-probability")
    expect(all(score <= 0 for score in scores.token_logprobs[1:]), scores.token_logprobs)
    expect(len(scores.tokens) == len(scores.token_logprobs), "lengths differ")


@checks.add
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=16, n=2)
    expect([choice.index for choice in answer.choices] == [0, 1], answer)
    expect(all(choice.message.content for choice in answer.choices), "no content")
    expect(answer.choices[0].finish_reason in ("stop", "length"), answer.choices[0].finish_reason)


@checks.add
def chat_stream() -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = list(stream)
    expect(events[0].choices[0].delta.role == "assistant", events[0])
    expect("".join(_texts(events)), "no content")
    expect(events[-1].usage and not events[-1].choices, "the last event has no usage")


def _texts(events: list[Any]) -> list[str]:
    return [choice.delta.content or "" for event in events for choice in event.choices]


@checks.add
def chat_logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0
    )
    scores = answer.choices[0].logprobs
    expect(scores and scores.content, answer)
    for token in scores.content or []:
        expect(len(token.top_logprobs) == 3, token)
        expect(bytes(token.bytes or []).decode() == token.token, token)


@checks.add
def chat_seed() -> None:
    sent: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 16, "temperature": 1, "seed": 7}
    first, again = (client.chat.completions.create(**sent).choices[0] for _ in range(2))
    expect(first.message.content == again.message.content, "one seed, two answers")


@checks.add
async def async_chat() -> None:
    async with openai.AsyncOpenAI(base_url=checks.base_url, api_key=checks.key) as remote:
        stream = await remote.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=8, stream=True
        )
        events = [event async for event in stream]
    expect(events[-1].choices[0].finish_reason, events[-1])


@checks.add
def request_id() -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, max_tokens=1
    )
    expect(raw.headers.get("x-request-id"), "no x-request-id")


@checks.add
def errors() -> None:
    _refused(openai.BadRequestError, "temperature", model=MODEL, temperature=9)
    _refused(openai.NotFoundError, "model", model="no-such-model")


@checks.add
def embeddings() -> None:
    """Two vectors of length 1; or, of an engine started without --embedding-pooling, one clear
    error.
    """
    try:
        made = client.embeddings.create(model=MODEL, input=["one text", "another"])
    except openai.BadRequestError as error:
        expect(error.code == "unsupported_parameter", error.body)
        return
    lengths = [sum(number**2 for number in each.embedding) for each in made.data]
    expect(all(abs(length - 1) < 1e-3 for length in lengths) and len(lengths) == 2, lengths)


def _refused(kind: type[openai.APIStatusError], param: str, **fields: Any) -> None:
    try:
        client.chat.completions.create(messages=HELLO, **fields)
    except kind as error:
        expect(error.param == param, error.body)
        return
    raise AssertionError(f"{fields} was accepted")


@checks.add
def parse() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Mood)
    expect(isinstance(answer.choices[0].message.parsed, Mood), answer)


@checks.add
def parse_stream() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, response_format=Mood
    ) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    expect(isinstance(answer.choices[0].message.parsed, Mood), answer)
    expect({"content.delta", "content.done"} <= kinds, kinds)


@checks.add
def json_object() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "A JSON object with one key, please."}],
        response_format={"type": "json_object"},
        max_tokens=200,
    )
    choice = answer.choices[0]
    if choice.finish_reason == "stop":
        expect(isinstance(json.loads(choice.message.content or ""), dict), choice)
    expect((choice.message.content or "").lstrip().startswith("{"), choice)


@checks.add
def tools_required() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice="required"
    )
    _weather_call(answer.choices[0])


@checks.add
def tools_named() -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice=named
    )
    call = (answer.choices[0].message.tool_calls or [None])[0]
    expect(call and json.loads(call.function.arguments)["city"], answer)


@checks.add
def tools_stream() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice="required"
    ) as stream:
        deltas = [event for event in stream if event.type.startswith("tool_calls.function")]
        answer = stream.get_final_completion()
    _weather_call(answer.choices[0])
    expect(len(deltas) > 2, "the arguments came in one piece")


@checks.add
def tools_conversation() -> None:
    asked: Any = {"model": MODEL, "tools": [WEATHER]}
    first = client.chat.completions.create(messages=QUESTION, tool_choice="required", **asked)
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}
        for call in message.tool_calls or []
    ]
    spoken: Any = [*QUESTION, message, *results]
    last = client.chat.completions.create(
        messages=spoken, tool_choice="none", max_tokens=32, **asked
    )
    expect(last.choices[0].message.content and not last.choices[0].message.tool_calls, last)


@checks.add
def tools_parse() -> None:
    class Search(BaseModel):
        """Search the library."""

        shelf: Literal["history", "science"]

    answer = client.chat.completions.parse(
        model=MODEL,
        messages=HELLO,
        tools=[openai.pydantic_function_tool(Search)],
        tool_choice="required",
    )
    call = (answer.choices[0].message.tool_calls or [None])[0]
    expect(call and isinstance(call.function.parsed_arguments, Search), answer)


def _weather_call(choice: Any) -> None:
    expect(choice.finish_reason == "tool_calls", choice)
    expect(choice.message.tool_calls, choice)
    for call in choice.message.tool_calls:
        arguments = json.loads(call.function.arguments)
        expect(call.id and call.function.name == "get_weather", call)
        expect(arguments["unit"] in ("celsius", "fahrenheit"), arguments)


@checks.add
def responses() -> None:
    answer = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16)
    expect(answer.output_text, answer)
    expect(answer.usage and answer.usage.output_tokens > 0, answer.usage)
    expect(answer.status in ("completed", "incomplete"), answer.status)


@checks.add
def responses_stream() -> None:
    stream = client.responses.create(
        model=MODEL, input="Say hello.", max_output_tokens=16, stream=True
    )
    events = list(stream)
    kinds = [event.type for event in events]
    expect(kinds[0] == "response.created", kinds)
    expect(kinds[-1] in ("response.completed", "response.incomplete"), kinds)
    pieces = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    expect(pieces and pieces == events[-1].response.output_text, (pieces, events[-1]))
    numbers = [event.sequence_number for event in events]
    expect(numbers == sorted(set(numbers)), numbers)


@checks.add
def responses_parse() -> None:
    answer = client.responses.parse(model=MODEL, input="How do you feel?", text_format=Mood)
    expect(isinstance(answer.output_parsed, Mood), answer)


@checks.add
def responses_tools() -> None:
    tool: Any = {"type": "function", **WEATHER["function"]}
    question = QUESTION[0]["content"]
    answer = client.responses.create(
        model=MODEL, input=question, tools=[tool], tool_choice="required"
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    expect(calls and json.loads(calls[0].arguments)["city"] is not None, answer)
    result: Any = {
        "type": "function_call_output",
        "call_id": calls[0].call_id,
        "output": "Sunny, 21 degrees.",
    }
    last = client.responses.create(
        model=MODEL,
        input=[result],
        previous_response_id=answer.id,
        tools=[tool],
        tool_choice="none",
        max_output_tokens=16,
    )
    expect(last.output_text, last)


@checks.add
def responses_stored() -> None:
    first = client.responses.create(model=MODEL, input="My name is Ann.", max_output_tokens=8)
    second = client.responses.create(
        model=MODEL, input="Who am I?", previous_response_id=first.id, max_output_tokens=8
    )
    expect(client.responses.retrieve(second.id).output_text == second.output_text, "it changed")
    items = list(client.responses.input_items.list(first.id))
    expect(items, "no input items")
    client.responses.delete(second.id)
    try:
        client.responses.retrieve(second.id)
    except openai.NotFoundError:
        return
    raise AssertionError("a deleted response is still there")


@checks.add
def files() -> None:
    file = client.files.create(file=("three.jsonl", _batch_lines(3)), purpose="batch")
    expect(client.files.retrieve(file.id).bytes == len(_batch_lines(3)), file)
    expect(file.id in [known.id for known in client.files.list()], "it is not in the list")
    expect(client.files.content(file.id).read() == _batch_lines(3), "its content changed")
    expect(client.files.delete(file.id).deleted, "it is not deleted")


@checks.add
def batches() -> str:
    file = client.files.create(file=("four.jsonl", _batch_lines(4)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    started = time.monotonic()
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        expect(time.monotonic() < started + 120, f"still {batch.status} after 120 s")
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    expect(batch.status == "completed" and batch.output_file_id, batch)
    lines = client.files.content(batch.output_file_id or "").text.splitlines()
    names = sorted(json.loads(line)["custom_id"] for line in lines)
    expect(names == [f"line-{number}" for number in range(4)], names)
    expect(batch.id in [known.id for known in client.batches.list()], "it is not in the list")
    return f"4 lines in {time.monotonic() - started:.1f} s"


@checks.add
def batch_cancelled() -> None:
    file = client.files.create(file=("many.jsonl", _batch_lines(200)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    batch = client.batches.cancel(batch.id)
    started = time.monotonic()
    while batch.status == "cancelling":
        expect(time.monotonic() < started + 60, "still cancelling after 60 s")
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    expect(batch.status == "cancelled", batch)


def _batch_lines(count: int) -> bytes:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 4}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    rows = [json.dumps({"custom_id": f"line-{number}", **line}) for number in range(count)]
    return "\n".join(rows).encode()


checks.run()
