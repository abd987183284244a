"""Messages in blocks, and the messages that a chat template makes a prompt of."""

from __future__ import annotations

import orjson

from jitney.engine.api.anthropic_messages.schema import (
    CountTokensBody,
    MessageParam,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from jitney.engine.api.request import Conversation, RouteKind
from jitney.engine.api.schema import ReasoningEffort
from jitney.engine.api.slices import Work
from jitney.engine.conversation.formats import TurnFormat
from jitney.engine.conversation.tools import ToolMode, ToolUse, chosen_tools
from jitney.engine.types import JsonDict

#: Messages between two stops of `Slices`.
_GROUP = 64
#: The mode of a choice.
_MODES: dict[str, ToolMode] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


def conversation_of(
    body: CountTokensBody, kind: RouteKind, turns: TurnFormat
) -> Work[Conversation]:
    """What the body makes the template read. An effort is a wish: a model that cannot be told of
    one does what it does. Raises RequestError.
    """
    messages = yield from _template_messages(body.system, body.messages)
    variables: JsonDict = {}
    if messages[-1]["role"] == "assistant":
        variables = {"add_generation_prompt": False, "continue_final_message": True}
    budget = None
    if body.thinking is not None:
        budget = body.thinking.budget_tokens
    return Conversation(
        kind=kind,
        messages=messages,
        variables=variables,
        tools=_tool_use(body),
        effort=_effort(body, turns),
        thinking_budget=budget,
    )


def _effort(body: CountTokensBody, turns: TurnFormat) -> ReasoningEffort | None:
    """How long the model shall think; None: as it likes."""
    thinking = None if body.thinking is None else body.thinking.type
    if thinking == "disabled":
        return "none"
    wish = None if body.output_config is None else body.output_config.effort
    if not turns.takes_effort:
        return None
    if wish is None and thinking == "enabled":
        return "medium"
    return "xhigh" if wish == "max" else wish


def _template_messages(system: str | None, given: list[MessageParam]) -> Work[list[JsonDict]]:
    """Neighbours of one role are one message. What the system says in the middle is said by the
    user: most templates know a system message only at the beginning.
    """
    messages: list[JsonDict] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for place, message in enumerate(given):
        if message.role == "assistant":
            _add_assistant(messages, message)
        else:
            _add_user(messages, message)
        if place % _GROUP == 0:
            yield
    return messages


def _add_user(messages: list[JsonDict], message: MessageParam) -> None:
    """What tools gave first, in messages of their own."""
    texts: list[str] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            messages.append(
                {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}
            )
        elif isinstance(block, TextBlock):
            texts.append(block.text)
    if texts:
        _say(messages, "user", "\n".join(texts))


def _add_assistant(messages: list[JsonDict], message: MessageParam) -> None:
    texts = [block.text for block in message.content if isinstance(block, TextBlock)]
    said = _say(messages, "assistant", "\n".join(texts))
    for block in message.content:
        if isinstance(block, ThinkingBlock):
            said["reasoning_content"] = said.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            said.setdefault("tool_calls", []).append(_call(block))


def _say(messages: list[JsonDict], role: str, text: str) -> JsonDict:
    """The message of this role that says the text: the last one, if it has the role."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": ""})
    last = messages[-1]
    texts = [each for each in (last["content"], text) if each]
    last["content"] = "\n".join(texts)
    return last


def _call(block: ToolUseBlock) -> JsonDict:
    function = {"name": block.name, "arguments": orjson.dumps(block.input).decode()}
    return {"id": block.id, "type": "function", "function": function}


def _tool_use(body: CountTokensBody) -> ToolUse | None:
    tools = [tool.as_tool() for tool in body.tools or ()]
    choice = body.tool_choice
    if choice is None:
        return chosen_tools(tools, "auto", None, parallel=True)
    parallel = not choice.disable_parallel_tool_use and choice.type != "tool"
    return chosen_tools(tools, _MODES[choice.type], body.chosen_names, parallel=parallel)
