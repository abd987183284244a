"""What a body says of tools, as every route of conversations has it."""

from __future__ import annotations

from jitney.engine.api.responses.schema import AllowedTools, NamedFunction, ResponsesBody
from jitney.engine.conversation.tools import ToolMode, ToolUse, chosen_tools


def tool_use(body: ResponsesBody) -> ToolUse | None:
    tools = [tool.as_tool() for tool in body.tools or ()]
    names_one = isinstance(body.tool_choice, NamedFunction)
    parallel = body.parallel_tool_calls is not False and not names_one
    return chosen_tools(tools, _mode(body), body.chosen_names, parallel=parallel)


def _mode(body: ResponsesBody) -> ToolMode:
    choice = body.tool_choice
    if isinstance(choice, NamedFunction):
        return "required"
    if isinstance(choice, AllowedTools):
        return choice.mode
    return choice or "auto"
