"""dspy against a Jitney server."""

from __future__ import annotations

from typing import Any, Literal

import dspy
from checks import Checks, Skipped, expect
from dspy.utils.exceptions import AdapterParseError
from pydantic import BaseModel, ConfigDict

checks = Checks(__doc__)


def _model(**settings: Any) -> dspy.LM:
    return dspy.LM(
        f"openai/{checks.model}",
        api_base=checks.base_url,
        api_key=checks.key,
        cache=False,
        num_retries=0,
        **settings,
    )


class Feel(dspy.Signature):
    """How somebody feels."""

    text: str = dspy.InputField()
    feeling: Literal["happy", "sad", "angry"] = dspy.OutputField()
    strength: Literal[1, 2, 3] = dspy.OutputField()


class Mood(BaseModel):
    """The same, as an answer's schema."""

    model_config = ConfigDict(extra="forbid")

    feeling: Literal["happy", "sad", "angry"]
    strength: Literal[1, 2, 3]


@checks.add
def call() -> None:
    model = _model(max_tokens=16)
    [answer] = model("Say hello.")
    expect(answer, "no text")
    [answer] = model(messages=[{"role": "user", "content": "Say hello."}])
    expect(answer, "no text")


@checks.add
def text_completion() -> None:
    [answer] = _model(max_tokens=8, model_type="text")("Once upon a time")
    expect(answer, "no text")


@checks.add
def several() -> None:
    answers = _model(max_tokens=16, temperature=1.0, n=3)("Say hello.")
    expect(len(answers) == 3, answers)


@checks.add
def predict() -> None:
    """JSONAdapter asks for a JSON object: of a model that it does not know it expects no more."""
    with dspy.context(lm=_model(max_tokens=200, temperature=0.0), adapter=dspy.JSONAdapter()):
        try:
            answer = dspy.Predict(Feel)(text="What a beautiful day!")
        except AdapterParseError as error:
            raise Skipped(f"the model wrote other fields than it was asked for: {error}") from error
    expect(answer.feeling in ("happy", "sad", "angry"), answer)
    expect(answer.strength in (1, 2, 3), answer)


@checks.add
def answer_schema() -> None:
    [answer] = _model(max_tokens=100)("I am happy. How do I feel?", response_format=Mood)
    Mood.model_validate_json(answer)


@checks.add
def responses() -> None:
    [answer] = _model(max_tokens=16, model_type="responses")("Say hello.")
    expect(answer, "no text")


checks.run()
