"""smolagents against a Jitney server."""

from __future__ import annotations

from typing import Any

from checks import Checks, expect
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

checks = Checks(__doc__)
_TASK = 'CALL add {"a": 4000, "b": 711}\nCALL final_answer {"answer": "the sum is 4711"}'


@tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return str(a + b)


def _agent(**more: Any) -> ToolCallingAgent:
    model = OpenAIServerModel(checks.model, api_base=checks.base_url, api_key=checks.key, **more)
    return ToolCallingAgent([add], model, max_steps=4)


@checks.add
def auto() -> None:
    """The model may call or not; smolagents' own default forces it to."""
    agent = _agent(tool_choice="auto")
    result = agent.run(_TASK)
    expect("4711" in str(result), result)


@checks.add
def required() -> str:
    agent = _agent()
    step = list(agent.run("Add 4000 and 711.", stream=True))
    expect(step, "no steps")
    return f"{len(step)} steps"


checks.run()
