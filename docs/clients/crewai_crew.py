"""CrewAI against a Jitney server."""

from __future__ import annotations

from typing import Any

from checks import TASK, Checks, expect
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

checks = Checks(__doc__)


@tool("add")
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@checks.add
def crew() -> None:
    llm = LLM(model=f"openai/{checks.model}", base_url=checks.base_url, api_key=checks.key)
    agent: Any = Agent(role="adder", goal="add", backstory="It adds.", tools=[add], llm=llm)
    task = Task(description=TASK, expected_output="the sum", agent=agent)
    result = Crew(agents=[agent], tasks=[task]).kickoff()
    expect("4711" in str(result), result)


@checks.add
def call() -> None:
    llm = LLM(model=f"openai/{checks.model}", base_url=checks.base_url, api_key=checks.key)
    answer = llm.call("SAY the sky is blue")
    expect("the sky is blue" in str(answer), answer)


checks.run()
