"""Items of a conversation, and the messages that a chat template makes a prompt of."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from jitney.engine.api.errors import echo
from jitney.engine.api.responses.schema import Item, ReferenceItem
from jitney.engine.api.responses.store import ResponseStore
from jitney.engine.api.slices import Work
from jitney.engine.errors import RequestError
from jitney.engine.types import JsonDict

#: Type of an item -> how its ids begin.
_ID_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
}
#: Items between two stops of `Slices`.
_GROUP = 64


def new_item_id(kind: str) -> str:
    """Of an item of this type. Nobody can guess it."""
    return _ID_PREFIXES[kind] + uuid.uuid4().hex


def kept_items(items: Sequence[Item], store: ResponseStore, tenant: str) -> Work[list[JsonDict]]:
    """The items of a body as they are kept: each has an id of ours, and references are what they
    refer to. Raises RequestError.
    """
    kept: list[JsonDict] = []
    for place, item in enumerate(items):
        if isinstance(item, ReferenceItem):
            kept.append(_referred(item, place, store, tenant))
        else:
            shown = item.shown()
            kept.append({"id": new_item_id(shown["type"])} | shown)
        if place % _GROUP == 0:
            yield
    return kept


def _referred(item: ReferenceItem, place: int, store: ResponseStore, tenant: str) -> JsonDict:
    found = store.item(tenant, item.id)
    if found is None:
        raise RequestError(
            f"no item {echo(item.id)} in the responses that are kept", param=f"input[{place}].id"
        )
    return found


def template_messages(instructions: str | None, items: Iterable[JsonDict]) -> Work[list[JsonDict]]:
    """The messages that items make. Thoughts, content and calls that follow one another are one
    message of the assistant.
    """
    messages: list[JsonDict] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for place, item in enumerate(items):
        _add(messages, item)
        if place % _GROUP == 0:
            yield
    return messages


def _add(messages: list[JsonDict], item: JsonDict) -> None:
    match item["type"]:
        case "message" if item["role"] == "assistant":
            message = _assistant(messages, "content")
            message["content"] = _text(item)
        case "message":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _text(item)})
        case "reasoning":
            thoughts = "".join(thought["text"] for thought in item["content"])
            if thoughts:
                _assistant(messages, "reasoning_content")["reasoning_content"] = thoughts
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            messages.append(
                {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            )


def _assistant(messages: list[JsonDict], field: str = "") -> JsonDict:
    """The assistant's message that comes next: the last one, unless it has something in this field
    already, or has called a tool and goes on to speak.
    """
    if not _goes_on(messages, field):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _goes_on(messages: list[JsonDict], field: str) -> bool:
    """Whether the last message is the assistant's, and may get this field."""
    last = messages[-1] if messages else {}
    is_over = bool(last.get(field)) or (bool(field) and "tool_calls" in last)
    return last.get("role") == "assistant" and not is_over


def _text(item: JsonDict) -> str:
    return "".join(part["text"] for part in item["content"])
