"""langchain-openai against a Jitney server."""

from __future__ import annotations

from typing import Any, Literal

from checks import Checks, expect
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr

checks = Checks(__doc__)
SPOKEN = [SystemMessage("You are polite."), HumanMessage("Say hello.")]


class Mood(BaseModel):
    """How somebody feels."""

    feeling: Literal["happy", "sad", "angry"]
    strength: Literal[1, 2, 3]


@tool
def set_lamp(lamp: Literal["kitchen", "hall"], on: bool) -> str:
    """Switch a lamp on or off."""
    return f"{lamp} is {'on' if on else 'off'}"


def _chat(**settings: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=checks.model, base_url=checks.base_url, api_key=SecretStr(checks.key), **settings
    )


@checks.add
def invoke() -> None:
    answer = _chat(max_tokens=16).invoke(SPOKEN)
    expect(answer.text, answer)
    expect(answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0, answer)


@checks.add
def stream() -> None:
    chunks = list(_chat(max_tokens=16, stream_usage=True).stream(SPOKEN))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    expect(len(chunks) > 2 and whole.text, whole)
    expect(whole.usage_metadata and whole.usage_metadata["output_tokens"] > 0, whole)


@checks.add
def batch() -> None:
    answers = _chat(max_tokens=8).batch([SPOKEN, "Hello?", "Who are you?"])
    expect(all(answer.text for answer in answers), answers)


@checks.add
async def async_stream() -> None:
    pieces = [chunk.text async for chunk in _chat(max_tokens=16).astream(SPOKEN)]
    expect("".join(pieces), pieces)


@checks.add
def log_probabilities() -> None:
    answer = _chat(max_tokens=4, logprobs=True, top_logprobs=2).invoke(SPOKEN)
    expect(len(answer.response_metadata["logprobs"]["content"]) == 4, answer)


@checks.add
def completions() -> None:
    model = OpenAI(
        model=checks.model,
        base_url=checks.base_url,
        api_key=SecretStr(checks.key),
        max_tokens=8,
    )
    expect(model.invoke("Once upon a time"), "no text")
    expect("".join(model.stream("Once upon a time")), "no text in the stream")


@checks.add
def structured_output() -> None:
    answer = _chat().with_structured_output(Mood).invoke(SPOKEN)
    expect(isinstance(answer, Mood), answer)


@checks.add
def structured_output_by_function() -> None:
    model = _chat().with_structured_output(Mood, method="function_calling")
    answer = model.invoke(SPOKEN)
    expect(isinstance(answer, Mood), answer)


@checks.add
def tools() -> None:
    spoken: list[Any] = [HumanMessage("Switch the lamp in the hall on.")]
    answer = _chat(max_tokens=200).bind_tools([set_lamp], tool_choice="any").invoke(spoken)
    expect(answer.tool_calls and not answer.invalid_tool_calls, answer)
    spoken.append(answer)
    for call in answer.tool_calls:
        result = set_lamp.invoke(call)
        expect(isinstance(result, ToolMessage), result)
        spoken.append(result)
    last = _chat(max_tokens=16).bind_tools([set_lamp], tool_choice="none").invoke(spoken)
    expect(last.text, last)


@checks.add
def tools_stream() -> None:
    model = _chat(max_tokens=200).bind_tools([set_lamp], tool_choice="set_lamp")
    chunks = list(model.stream("Switch the lamp in the hall on."))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    expect(whole.tool_calls and whole.tool_calls[0]["name"] == "set_lamp", whole)
    expect(set_lamp.invoke(whole.tool_calls[0]), "the call cannot be made")


@checks.add
def responses() -> None:
    model = _chat(max_tokens=16, use_responses_api=True)
    answer = model.invoke(SPOKEN)
    expect(answer.text, answer)
    pieces = [chunk.text for chunk in model.stream(SPOKEN)]
    expect("".join(pieces), pieces)


checks.run()
