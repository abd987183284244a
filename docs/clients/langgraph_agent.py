"""LangGraph for Python against a Jitney server."""

from __future__ import annotations

from typing import Any, Literal

from checks import TASK, Checks, expect
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

checks = Checks(__doc__)


class Mood(BaseModel):
    """How somebody feels."""

    feeling: Literal["happy", "sad"]


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def _model(**more: Any) -> ChatOpenAI:
    key = SecretStr(checks.key)
    return ChatOpenAI(model=checks.model, base_url=checks.base_url, api_key=key, **more)


def _adds(model: ChatOpenAI) -> None:
    agent: Any = create_agent(model, [add])
    result = agent.invoke({"messages": [{"role": "user", "content": TASK}]})
    expect("4711" in str(result["messages"][-1].content), result["messages"][-1])


@checks.add
def chat() -> None:
    _adds(_model())


@checks.add
def responses() -> None:
    _adds(_model(use_responses_api=True))


@checks.add
def stream() -> None:
    agent: Any = create_agent(_model(), [add])
    sent = {"messages": [{"role": "user", "content": TASK}]}
    pieces = [piece.text for piece, _ in agent.stream(sent, stream_mode="messages")]
    expect("the sum is 4711" in "".join(pieces), pieces)


@checks.add
def structured_output() -> None:
    answer: Any = _model().with_structured_output(Mood).invoke("How are you?")
    expect(isinstance(answer, Mood), answer)


checks.run()
