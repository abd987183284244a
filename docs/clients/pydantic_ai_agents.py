"""pydantic-ai's agents over chat completions, responses and Anthropic's messages."""

from __future__ import annotations

from typing import Any, Literal

from checks import Checks, expect
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.messages import ModelRequest, ToolCallPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

checks = Checks(__doc__)
provider = OpenAIProvider(base_url=checks.base_url, api_key=checks.key)
chat_model = OpenAIChatModel(checks.model, provider=provider)
responses_model = OpenAIResponsesModel(checks.model, provider=provider)
anthropic_model = AnthropicModel(
    checks.model, provider=AnthropicProvider(base_url=checks.url, api_key=checks.key)
)


class Mood(BaseModel):
    """How somebody feels."""

    feeling: Literal["happy", "sad", "angry"]
    strength: Literal[1, 2, 3]


def _agent(model: Any = chat_model, **options: Any) -> Agent[None, Any]:
    settings = {"max_tokens": options.pop("max_tokens", 300)}
    return Agent(model, model_settings=settings, instructions="You are polite.", **options)


@checks.add
def run() -> None:
    result = _agent(max_tokens=16).run_sync("Say hello.")
    expect(result.output, result)
    expect(result.usage.output_tokens > 0, result.usage)


@checks.add
async def stream() -> None:
    async with _agent(max_tokens=16).run_stream("Say hello.") as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    expect("".join(pieces) and len(pieces) > 1, pieces)


@checks.add
def conversation() -> None:
    agent = _agent(max_tokens=16)
    first = agent.run_sync("Say hello.")
    second = agent.run_sync("Again.", message_history=first.all_messages())
    expect(second.output, second)


@checks.add
def output_by_tool() -> None:
    expect(isinstance(_answer(chat_model, ToolOutput(Mood)), Mood), "no Mood")


@checks.add
def output_by_schema() -> None:
    expect(isinstance(_answer(chat_model, NativeOutput(Mood)), Mood), "no Mood")


@checks.add
def own_tool() -> None:
    """A tool that must be called: an answer in text is not allowed."""
    lamps = {"type": "string", "enum": ["kitchen", "hall"]}
    schema = {"type": "object", "properties": {"lamp": lamps}, "required": ["lamp"]}
    tool = ToolDefinition(name="set_lamp", parameters_json_schema=schema)
    answer = model_request_sync(
        chat_model,
        [ModelRequest.user_text_prompt("The hall is dark.")],
        model_settings={"max_tokens": 200},
        model_request_parameters=ModelRequestParameters(
            function_tools=[tool], allow_text_output=False
        ),
    )
    calls = [part for part in answer.parts if isinstance(part, ToolCallPart)]
    expect(calls and calls[0].tool_name == "set_lamp", answer)
    expect(calls[0].args_as_dict()["lamp"] in ("kitchen", "hall"), calls)


@checks.add
def responses() -> None:
    result = _agent(responses_model, max_tokens=16).run_sync("Say hello.")
    expect(result.output, result)
    expect(isinstance(_answer(responses_model, NativeOutput(Mood)), Mood), "no Mood")


@checks.add
def anthropic() -> None:
    result = _agent(anthropic_model, max_tokens=16).run_sync("Say hello.")
    expect(result.output, result)
    expect(isinstance(_answer(anthropic_model, ToolOutput(Mood)), Mood), "no Mood")


def _answer(model: Any, kind: Any) -> Any:
    return _agent(model, output_type=kind).run_sync("I am happy. How do I feel?").output


checks.run()
