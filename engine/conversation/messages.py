"""The messages of a conversation, as a model's template wants them: how it is told of tools."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence

from jitney.engine.conversation.formats import TurnFormat
from jitney.engine.conversation.tools import ToolUse
from jitney.engine.types import JsonDict


def shaped_messages(
    messages: Sequence[JsonDict], turns: TurnFormat, use: ToolUse | None
) -> Generator[None, None, list[JsonDict]]:
    """The messages as the model's template wants them. One that knows no tools is told of them in a
    system message, and of earlier calls and results in words. Work that may be stopped.
    """
    shaped: list[JsonDict] = []
    names: dict[str, str] = {}
    for message in messages:
        if turns.template_has_tools:
            shaped.append(_shaped(message, names, turns))
        else:
            _add_in_words(shaped, message, turns)
        yield
    if use is not None and not turns.template_has_tools:
        return _with_system(shaped, turns.tools_text(use))
    return shaped


def _shaped(message: JsonDict, names: dict[str, str], turns: TurnFormat) -> JsonDict:
    """names: of the calls so far, by their ids; written here."""
    calls = message.get("tool_calls") or []
    for call in calls:
        names[call["id"]] = call["function"]["name"]
    if message["role"] == "tool" and message.get("tool_call_id") in names:
        return {"name": names[message["tool_call_id"]]} | message
    if calls and (turns.tools is None or turns.tools.wants_objects):
        return message | {"tool_calls": [_with_object(call) for call in calls]}
    return message


def _with_object(call: JsonDict) -> JsonDict:
    """A call whose arguments are an object, if they are the JSON text of one."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (json.JSONDecodeError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return call | {"function": function | {"arguments": arguments}}


def _add_in_words(shaped: list[JsonDict], message: JsonDict, turns: TurnFormat) -> None:
    """Add a message for a template that knows no tools."""
    if message["role"] == "tool":
        text = turns.result_text(message["content"])
        last = shaped[-1] if shaped else {}
        if last.get("is_result"):
            last["content"] += "\n" + text
        else:
            shaped.append({"role": "user", "content": text, "is_result": True})
        return
    calls = message.get("tool_calls") or []
    texts = [message["content"]] if message["content"] else []
    functions = [call["function"] for call in calls]
    texts += [turns.call_text(each["name"], each["arguments"]) for each in functions]
    said = {name: value for name, value in message.items() if name != "tool_calls"}
    shaped.append(said | {"content": "\n".join(texts)})


def _with_system(messages: list[JsonDict], text: str) -> list[JsonDict]:
    """With a text at the end of the first system message, which is made if there is none."""
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        content = f"{first['content']}\n\n{text}".lstrip()
        return [first | {"content": content}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
