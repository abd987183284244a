"""The tools of a request: what they are, which may be called, and how a model is told of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jitney.engine.conversation.formats import TurnFormat

#: What a model may do with its tools: call them, not call them, or nothing else than call them.
ToolMode = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of the client's."""

    name: str
    description: str | None = None
    #: JSON schema of an object; None: it takes no arguments.
    parameters: dict[str, Any] | None = None
    #: Whether its arguments must fit the schema even where calls are not forced.
    strict: bool = False

    def shown(self) -> dict[str, Any]:
        """As chat templates know it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a turn may call."""

    tools: tuple[Tool, ...]
    #: Whether it must call, and say nothing else.
    is_required: bool = False
    #: Calls after which it ends; None: as many as the model makes.
    most_calls: int | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)


def chosen_tools(
    tools: Sequence[Tool], mode: ToolMode, only: Collection[str] | None, *, parallel: bool
) -> ToolUse | None:
    """Of all tools those that may be called, None if none may. only: their names, where a request
    says them. parallel: whether a turn may call more than once.
    """
    chosen = [tool for tool in tools if only is None or tool.name in only]
    if mode == "none" or not chosen:
        return None
    return ToolUse(tuple(chosen), mode == "required", None if parallel else 1)


def shaped_messages(
    messages: Sequence[dict[str, Any]], turns: TurnFormat, use: ToolUse | None
) -> Generator[None, None, list[dict[str, Any]]]:
    """The messages as the model's template wants them. One that knows no tools is told of them in a
    system message, and of earlier calls and results in words. Work that may be stopped.
    """
    shaped: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        if turns.template_has_tools:
            shaped.append(_shaped(message, names, turns))
        else:
            _add_in_words(shaped, message)
        yield
    if use is not None and not turns.template_has_tools:
        return _with_system(shaped, _tools_text(use))
    return shaped


def _shaped(message: dict[str, Any], names: dict[str, str], turns: TurnFormat) -> dict[str, Any]:
    """names: of the calls so far, by their ids; written here."""
    calls = message.get("tool_calls") or []
    for call in calls:
        names[call["id"]] = call["function"]["name"]
    if message["role"] == "tool" and message.get("tool_call_id") in names:
        return {"name": names[message["tool_call_id"]]} | message
    if calls and (turns.tools is None or turns.tools.wants_objects):
        return message | {"tool_calls": [_with_object(call) for call in calls]}
    return message


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object, if they are the JSON text of one."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (json.JSONDecodeError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return call | {"function": function | {"arguments": arguments}}


def _add_in_words(shaped: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message for a template that knows no tools."""
    if message["role"] == "tool":
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        last = shaped[-1] if shaped else {}
        if last.get("is_result"):
            last["content"] += "\n" + text
        else:
            shaped.append({"role": "user", "content": text, "is_result": True})
        return
    calls = message.get("tool_calls") or []
    texts = [message["content"]] if message["content"] else []
    texts += [_call_text(call) for call in calls]
    said = {name: value for name, value in message.items() if name != "tool_calls"}
    shaped.append(said | {"content": "\n".join(texts)})


def _call_text(call: dict[str, Any]) -> str:
    function = call["function"]
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {function["arguments"]}}}\n</tool_call>'


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """With a text at the end of the first system message, which is made if there is none."""
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        content = f"{first['content']}\n\n{text}".lstrip()
        return [first | {"content": content}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _tools_text(use: ToolUse) -> str:
    """What a model is told whose template knows no tools."""
    lines = [json.dumps(tool.shown(), ensure_ascii=False) for tool in use.tools]
    listed = "\n".join(lines)
    return (
        "You can call these functions:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, write its name and its arguments as JSON, in this form:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>'
    )
