"""instructor in each of its modes for OpenAI's API against a Jitney server."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from checks import Checks, expect
from pydantic import BaseModel, ConfigDict

checks = Checks(__doc__)
client = openai.OpenAI(base_url=checks.base_url, api_key=checks.key)
ASKED: dict[str, Any] = {
    "model": checks.model,
    "messages": [{"role": "user", "content": "I am happy today. How do I feel?"}],
    "max_retries": 0,
    "max_tokens": 300,
}


class Mood(BaseModel):
    """How somebody feels. A schema that does not forbid more fields lets a small model go on for
    ever.
    """

    model_config = ConfigDict(extra="forbid")

    feeling: Literal["happy", "sad", "angry"]
    strength: Literal[1, 2, 3]


def _answer(mode: instructor.Mode) -> None:
    answer = instructor.from_openai(client, mode=mode).create(response_model=Mood, **ASKED)
    expect(isinstance(answer, Mood), answer)


@checks.add
def tools() -> None:
    _answer(instructor.Mode.TOOLS)


@checks.add
def tools_strict() -> None:
    _answer(instructor.Mode.TOOLS_STRICT)


@checks.add
def json_schema() -> None:
    _answer(instructor.Mode.JSON_SCHEMA)


@checks.add
def partial_stream() -> None:
    remote = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    states = list(remote.create_partial(response_model=Mood, **ASKED))
    expect(len(states) > 1 and states[-1].feeling and states[-1].strength, states)


@checks.add
async def async_schema() -> None:
    remote = openai.AsyncOpenAI(base_url=checks.base_url, api_key=checks.key)
    patched = instructor.from_openai(remote, mode=instructor.Mode.JSON_SCHEMA)
    expect(isinstance(await patched.create(response_model=Mood, **ASKED), Mood), "no Mood")


@checks.add
def with_completion() -> None:
    remote = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    answer, raw = remote.create_with_completion(response_model=Mood, **ASKED)
    expect(isinstance(answer, Mood) and raw.usage.completion_tokens > 0, raw)


@checks.add
def responses_tools() -> None:
    remote = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
    answer = remote.responses.create(
        model=checks.model,
        input="I am happy today. How do I feel?",
        response_model=Mood,
        max_retries=0,
    )
    expect(isinstance(answer, Mood), answer)


checks.run()
