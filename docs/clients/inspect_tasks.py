"""inspect-ai against a Jitney server: tasks of its own, run in process."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from checks import Checks, expect

checks = Checks(__doc__)
# Where inspect-ai finds what openai-api/jitney/MODEL is.
os.environ |= {"JITNEY_BASE_URL": checks.base_url, "JITNEY_API_KEY": checks.key}

from inspect_ai import Task, eval  # noqa: E402  (it reads its environment when imported)
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import GenerateConfig, ResponseSchema  # noqa: E402
from inspect_ai.scorer import choice, includes  # noqa: E402
from inspect_ai.solver import generate, multiple_choice, use_tools  # noqa: E402
from inspect_ai.tool import Tool, tool  # noqa: E402
from inspect_ai.util import json_schema  # noqa: E402
from pydantic import BaseModel  # noqa: E402

_folder = tempfile.TemporaryDirectory()


class Sum(BaseModel):
    """What two and two are."""

    result: bool


def _run(task: Task, **settings: Any) -> Any:
    """The log of the task, run with the server's model."""
    [log] = eval(
        task,
        model=f"openai-api/jitney/{checks.model}",
        model_args=settings,
        log_dir=_folder.name,
        display="none",
        fail_on_error=True,
        max_retries=1,
    )
    expect(log.status == "success", log.error)
    return log


def _questions() -> list[Sample]:
    return [
        Sample(input="The capital of France?", target="Paris"),
        Sample(input="The capital of Italy?", target="Rome"),
        Sample(input="How many legs has a dog?", target="four"),
    ]


def _score(log: Any) -> str:
    value = log.results.scores[0].metrics["accuracy"].value
    tokens = sum(use.output_tokens for use in log.stats.model_usage.values())
    expect(tokens > 0, log.stats)
    return f"accuracy {value:.2f}, {tokens} tokens"


@checks.add
def questions() -> str:
    config = GenerateConfig(max_tokens=32, temperature=0)
    task = Task(dataset=_questions(), solver=generate(), scorer=includes(), config=config)
    return _score(_run(task))


@checks.add
def stream() -> str:
    config = GenerateConfig(max_tokens=32, temperature=0)
    task = Task(dataset=_questions(), solver=generate(), scorer=includes(), config=config)
    return _score(_run(task, stream=True))


@checks.add
def multiple_choices() -> str:
    samples = [
        Sample(input="The capital of France?", choices=["Paris", "Rome"], target="A"),
        Sample(input="The capital of Italy?", choices=["Oslo", "Rome"], target="B"),
    ]
    config = GenerateConfig(max_tokens=32, temperature=0, seed=1)
    return _score(
        _run(Task(dataset=samples, solver=multiple_choice(), scorer=choice(), config=config))
    )


@checks.add
def log_probabilities() -> None:
    config = GenerateConfig(max_tokens=4, logprobs=True, top_logprobs=2)
    log = _run(Task(dataset=_questions()[:1], solver=generate(), config=config))
    output = log.samples[0].output
    expect(len(output.choices[0].logprobs.content) == 4, output)


@checks.add
def answer_schema() -> None:
    schema = ResponseSchema(name="sum", json_schema=json_schema(Sum), strict=True)
    config = GenerateConfig(max_tokens=100, response_schema=schema)
    log = _run(Task(dataset=_questions()[:1], solver=generate(), config=config))
    Sum.model_validate_json(log.samples[0].output.completion)


@checks.add
def tools() -> None:
    log = _run(
        Task(
            dataset=[Sample(input="Switch the lamp on.")],
            solver=[use_tools(_set_lamp(), tool_choice="any"), generate(tool_calls="single")],
            config=GenerateConfig(max_tokens=100),
        )
    )
    [call, *_] = log.samples[0].output.message.tool_calls
    expect(call.function == "_set_lamp" and call.parse_error is None, call)


@tool
def _set_lamp() -> Tool:
    async def execute(on: bool) -> str:
        """Switch the lamp on or off.

        Args:
            on: Whether it is to be on.
        """
        return f"The lamp is {'on' if on else 'off'}."

    return execute


@checks.add
def responses() -> str:
    config = GenerateConfig(max_tokens=32, temperature=0)
    task = Task(dataset=_questions(), solver=generate(), scorer=includes(), config=config)
    return _score(_run(task, responses_api=True))


checks.run()
