"""The events of an assistant's turn, as they come: thoughts, content, calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pydantic_core import from_json

from jitney.engine.common.requests import JsonDict


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """An addition to the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """An addition to the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of a tool begins. Its arguments follow before the next call begins."""

    #: Position of the call in this turn: 0, 1, ...
    index: int
    #: Made here; the client's answer names it.
    id: str
    #: Name of the function.
    name: str
    #: Whether the client has a custom tool of this name: what follows is its text.
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """An addition to a call's arguments: a piece of JSON text, or of a custom tool's text."""

    #: Position of the call that these belong to.
    index: int
    text: str
    is_custom: bool = False


def arguments_object(text: str) -> JsonDict:
    """A call's arguments as an object, as far as their JSON text goes, which may be cut off."""
    try:
        value = from_json(text.encode("utf-8", "replace"), allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


type AssistantEvent = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments


def joined(events: Iterable[AssistantEvent]) -> list[AssistantEvent]:
    """The events with texts that follow each other in one."""
    result: list[AssistantEvent] = []
    for event in events:
        before = result[-1] if result else None
        match before, event:
            case (ContentDelta(), ContentDelta()) | (ReasoningDelta(), ReasoningDelta()):
                result[-1] = replace(before, text=before.text + event.text)
            case (ToolCallArguments(), ToolCallArguments()) if before.index == event.index:
                result[-1] = replace(before, text=before.text + event.text)
            case _:
                result.append(event)
    return result


@dataclass(slots=True)
class WrittenCall:
    """A whole call."""

    id: str
    name: str
    #: JSON text, as the model wrote it; of a custom tool its text.
    arguments: str
    is_custom: bool


@dataclass(slots=True)
class AssistantMessage:
    """A whole turn."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[WrittenCall] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[AssistantEvent]) -> AssistantMessage:
        """The events of a whole turn, joined."""
        message = cls()
        content: list[str] = []
        reasoning: list[str] = []
        arguments: list[list[str]] = []
        for event in events:
            match event:
                case ContentDelta():
                    content.append(event.text)
                case ReasoningDelta():
                    reasoning.append(event.text)
                case ToolCallStart():
                    message.tool_calls.append(
                        WrittenCall(event.id, event.name, "", event.is_custom)
                    )
                    arguments.append([])
                case ToolCallArguments():
                    arguments[event.index].append(event.text)
        message.content = "".join(content)
        message.reasoning = "".join(reasoning)
        for call, pieces in zip(message.tool_calls, arguments, strict=True):
            call.arguments = "".join(pieces)
        return message
