"""The items of a conversation, as /v1/responses has them."""

from __future__ import annotations

from typing import Annotated, Literal

import orjson
from pydantic import ConfigDict, Field, PlainValidator

from jitney.engine.common.requests import JsonDict, JsonValue
from jitney.engine.server.chat.content import Content, content_of
from jitney.engine.server.chat.conversation.tools import made_call
from jitney.engine.server.chat.schema import Label, Part, unsupported
from jitney.engine.server.http.errors import echo

_Status = Literal["in_progress", "completed", "incomplete"]
_Texts = str | list[JsonDict]
_CallId = Annotated[Label, Field(min_length=1)]


class _Item(Part):
    """One item of a conversation. id: from an earlier answer; ignored."""

    id: Label | None = None
    status: _Status | None = None

    def shown(self) -> JsonDict:
        """The item as it is stored and listed, without its id."""
        fields = self.model_dump(exclude={"id"}, exclude_none=True)
        return fields | {"status": self.status or "completed"}

    @property
    def replaced(self) -> tuple[str, ...]:
        """Types of the content that the model does not read."""
        return ()


_Content = Annotated[Content, PlainValidator(content_of, json_schema_input_type=_Texts)]


class MessageItem(_Item):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content

    @property
    def replaced(self) -> tuple[str, ...]:
        return self.content.replaced

    def shown(self) -> JsonDict:
        if self.role == "assistant":
            part = {"type": "output_text", "text": self.content.text, "annotations": []}
        else:
            part = {"type": "input_text", "text": self.content.text}
        return {
            "type": "message",
            "role": self.role,
            "status": self.status or "completed",
            "content": [part],
        }


class FunctionCallItem(_Item):
    """The model called a function. namespace: of the function."""

    type: Literal["function_call"]
    call_id: _CallId
    name: _CallId
    arguments: str
    namespace: Label | None = None


class CustomCallItem(_Item):
    """The model called a custom tool. namespace: of the tool."""

    type: Literal["custom_tool_call"]
    call_id: _CallId
    name: _CallId
    input: str
    namespace: Label | None = None


class CallOutputItem(_Item):
    """The output of a function or a custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: _CallId
    output: _Content

    @property
    def replaced(self) -> tuple[str, ...]:
        return self.output.replaced

    def shown(self) -> JsonDict:
        return super().shown() | {"output": self.output.text}


class _Thought(Part):
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(_Item):
    """The model's reasoning. Only `content` is read again."""

    type: Literal["reasoning"]
    content: list[_Thought] | None = None
    summary: list[JsonDict] | None = None
    encrypted_content: str | None = None

    @property
    def replaced(self) -> tuple[str, ...]:
        return ("encrypted reasoning",) if self.encrypted_content and not self.content else ()

    def shown(self) -> JsonDict:
        content = [{"type": "reasoning_text", "text": each.text} for each in self.content or ()]
        return {
            "type": "reasoning",
            "status": self.status or "completed",
            "summary": [],
            "content": content,
        }


class ReferenceItem(Part):
    """An item of an earlier response."""

    type: Literal["item_reference"] | None = None
    id: Label


class HostedItem(Part):
    """An item of a tool that one provider defines or runs. It is stored unchanged."""

    model_config = ConfigDict(extra="allow")

    type: str

    @property
    def replaced(self) -> tuple[str, ...]:
        """Its type, unless the model reads it as a function call or a result."""
        item = self.shown()
        is_read = hosted_call(item) is not None or hosted_output(item) is not None
        return () if is_read else (self.type,)

    def shown(self) -> JsonDict:
        extra = {name: value for name, value in (self.model_extra or {}).items() if name != "id"}
        if self.type == "local_shell_call_output" and "call_id" not in extra:
            extra["call_id"] = (self.model_extra or {}).get("id")  # where this type has it
        return {"type": self.type} | extra


#: Tools that the client runs: type of a call -> function, and the field of its arguments.
_HOSTED_CALLS = {
    "apply_patch_call": ("apply_patch", "operation"),
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "tool_search_call": ("tool_search", "arguments"),
}
#: Type of a result of such a tool -> the field that contains it.
_HOSTED_OUTPUTS = {
    "apply_patch_call_output": "output",
    "local_shell_call_output": "output",
    "shell_call_output": "output",
    "tool_search_output": "tools",
}
#: Items that no template can show, in addition to calls of tools that a provider runs.
_UNREAD = frozenset(
    {
        "additional_tools",
        "agent_message",
        "compaction",
        "configuration_update",
        "context_compaction",
        "ghost_snapshot",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_list_tools",
        "program",
        "program_output",
    }
)


def hosted_call(item: JsonDict) -> JsonDict | None:
    """The function call that a stored item reads as; None if it is no call of the client's."""
    name, field = _HOSTED_CALLS.get(item["type"], ("", ""))
    if not name or not isinstance(item.get("call_id"), str):
        return None
    return made_call(item["call_id"], name, item.get(field) or {})


def hosted_output(item: JsonDict) -> JsonDict | None:
    """The tool message that a stored item reads as; None if the client's tool returned nothing."""
    field = _HOSTED_OUTPUTS.get(item["type"])
    if field is None or not isinstance(item.get("call_id"), str):
        return None
    output = item.get(field) or ""
    text = output if isinstance(output, str) else orjson.dumps(output).decode()
    return {"role": "tool", "tool_call_id": item["call_id"], "content": text}


AnyItem = (
    MessageItem
    | FunctionCallItem
    | CustomCallItem
    | CallOutputItem
    | ReasoningItem
    | ReferenceItem
    | HostedItem
)
_ITEMS: dict[str, type[AnyItem]] = {
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "function_call": FunctionCallItem,
    "function_call_output": CallOutputItem,
    "item_reference": ReferenceItem,
    "message": MessageItem,
    "reasoning": ReasoningItem,
}


def item_of(value: JsonValue) -> AnyItem:
    """An item, by its type. Raises ValueError and pydantic's errors."""
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    kind = value.get("type")
    if kind is None and "role" in value:
        return MessageItem.model_validate(value)
    if kind is None:
        return ReferenceItem.model_validate(value)
    if isinstance(kind, str) and kind in _ITEMS:
        return _ITEMS[kind].model_validate(value)
    if isinstance(kind, str) and (
        kind in _UNREAD or kind in _HOSTED_OUTPUTS or kind.endswith(("_call", "_call_output"))
    ):
        return HostedItem.model_validate(value)
    raise unsupported(f"items of type {echo(kind)} are not supported here")
