"""llama-index (OpenAILike) against a Jitney server.

It reads the annotations of tools as they stand, so none of them may be put off to later.
"""

from typing import Any, Literal

from checks import Checks, expect
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

checks = Checks(__doc__)
SPOKEN = [ChatMessage(role="system", content="You are polite."), ChatMessage(content="Hello!")]


class Mood(BaseModel):
    """How somebody feels."""

    feeling: Literal["happy", "sad", "angry"]
    strength: Literal[1, 2, 3]


def _model(**settings: Any) -> OpenAILike:
    return OpenAILike(
        model=checks.model,
        api_base=checks.base_url,
        api_key=checks.key,
        is_chat_model=settings.pop("is_chat_model", True),
        **settings,
    )


def _set_lamp(lamp: Literal["kitchen", "hall"], on: bool) -> str:
    """Switch a lamp on or off."""
    return f"{lamp} is {'on' if on else 'off'}"


@checks.add
def complete() -> None:
    model = _model(is_chat_model=False, max_tokens=8)
    expect(model.complete("Once upon a time").text, "no text")
    pieces = [piece.delta for piece in model.stream_complete("Once upon a time")]
    expect(len(pieces) > 1, pieces)


@checks.add
def chat() -> None:
    expect(_model(max_tokens=16).chat(SPOKEN).message.content, "no content")


@checks.add
def chat_stream() -> None:
    pieces = list(_model(max_tokens=16).stream_chat(SPOKEN))
    expect(len(pieces) > 1 and pieces[-1].message.content, pieces[-1])


@checks.add
async def async_chat() -> None:
    model = _model(max_tokens=16)
    expect((await model.achat(SPOKEN)).message.content, "no content")
    stream = await model.astream_chat(SPOKEN)
    expect([piece.delta async for piece in stream], "no pieces")


@checks.add
def structured() -> None:
    model = _model(should_use_structured_outputs=True).as_structured_llm(Mood)
    answer = model.complete("How do you feel?")
    expect(isinstance(answer.raw, Mood), answer)


@checks.add
def tools() -> None:
    lamp = FunctionTool.from_defaults(fn=_set_lamp)
    model = _model(is_function_calling_model=True, max_tokens=200)
    answer = model.chat_with_tools([lamp], "Switch the lamp in the hall on.", tool_required=True)
    [call, *_] = model.get_tool_calls_from_response(answer)
    expect(call.tool_name == "_set_lamp", call)
    expect(lamp.call(**call.tool_kwargs).content, call)


@checks.add
def predict_and_call() -> None:
    lamp = FunctionTool.from_defaults(fn=_set_lamp)
    model = _model(is_function_calling_model=True, max_tokens=200)
    answer = model.predict_and_call([lamp], "Switch the lamp in the hall on.", tool_required=True)
    expect(answer.sources and not answer.sources[0].is_error, answer)


checks.run()
