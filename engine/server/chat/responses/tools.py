"""The tools of /v1/responses: functions, custom tools, namespaces of both, and tool choices. The
model gets functions only; those of a namespace are named by namespace and tool. Its calls are
translated back to the client's names (`CallForm`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple, cast

from pydantic import BeforeValidator, Field, PlainValidator

from jitney.engine.common.requests import JsonDict, JsonValue
from jitney.engine.server.chat.conversation.tools import Tool
from jitney.engine.server.chat.schema import (
    LIMITS,
    CustomFields,
    FunctionFields,
    FunctionName,
    OtherTool,
    Part,
    is_for_the_model,
    kind_of,
    unsupported,
    with_names,
)
from jitney.engine.server.http.errors import echo


class CallForm(NamedTuple):
    """The client's names of a tool."""

    name: str
    namespace: str | None = None

    @property
    def flat_name(self) -> str:
        """The model's name of the tool."""
        if self.namespace is None:
            return self.name
        separator = "" if self.namespace.endswith("__") else "__"
        return f"{self.namespace}{separator}{self.name}"


class FunctionTool(FunctionFields):
    """A function that the client runs."""

    type: Literal["function"]
    #: A hint: the model gets all tools at once.
    defer_loading: bool | None = None

    def shown(self) -> JsonDict:
        """The tool as the response repeats it."""
        shown = {
            "type": "function",
            "name": self.name,
            "parameters": self.parameters,
            "strict": self.strict is not False,
        }
        if self.description is not None:
            shown["description"] = self.description
        return shown


class CustomTool(CustomFields):
    """A tool of the client's that takes a text."""

    type: Literal["custom"]
    #: A hint, as above.
    defer_loading: bool | None = None

    def shown(self) -> JsonDict:
        return self.model_dump(exclude={"defer_loading"}, exclude_none=True)


_Own = FunctionTool | CustomTool
_OWN: dict[str | None, type[_Own]] = {
    None: FunctionTool,
    "custom": CustomTool,
    "function": FunctionTool,
}


def _own_tool(value: JsonValue) -> _Own | OtherTool:
    kind = kind_of(value)
    if kind in _OWN and is_for_the_model(value):
        return _OWN[kind].model_validate(value)
    return OtherTool.of(value)


class NamespaceTool(Part):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[
        list[Annotated[_Own | OtherTool, PlainValidator(_own_tool, json_schema_input_type=_Own)]],
        Field(max_length=LIMITS.tools),
    ]

    def shown(self) -> JsonDict:
        tools = [tool.shown() for tool in self.tools if not isinstance(tool, OtherTool)]
        described = self.description or ""
        return {
            "type": "namespace",
            "name": self.name,
            "description": described,
            "tools": tools,
        }


AnyTool = FunctionTool | CustomTool | NamespaceTool | OtherTool


def tool_of(value: JsonValue) -> AnyTool:
    """A tool, by its type. Raises pydantic's errors."""
    if kind_of(value) == "namespace":
        return NamespaceTool.model_validate(value)
    return _own_tool(value)


class PlacedTool(NamedTuple):
    """A tool that the model gets."""

    #: Where it stands in the body.
    path: str
    form: CallForm
    tool: _Own

    def as_tool(self) -> Tool:
        return replace(self.tool.as_tool(), name=self.form.flat_name, path=self.path)


def placed(tools: Iterable[AnyTool]) -> list[PlacedTool | str]:
    """All tools in order, also those of namespaces; for tools the model does not get, the path."""
    placed_tools: list[PlacedTool | str] = []
    for place, tool in enumerate(tools):
        path = f"tools[{place}]"
        if isinstance(tool, NamespaceTool):
            for number, own in enumerate(tool.tools):
                placed_tools.append(_placed(f"{path}.tools[{number}]", own, tool.name))
        else:
            placed_tools.append(_placed(path, tool, None))
    return placed_tools


def _placed(path: str, tool: _Own | OtherTool, namespace: str | None) -> PlacedTool | str:
    if isinstance(tool, OtherTool):
        return path
    return PlacedTool(path, CallForm(tool.name, namespace), tool)


class NamedTool(Part):
    """A choice of one tool. namespace: needed if several tools have this name."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    @property
    def names(self) -> list[str]:
        return [CallForm(self.name, self.namespace).flat_name]


class AllowedTools(Part):
    """A choice of several tools. Tools that the model does not get are left out."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[NamedTool],
        BeforeValidator(with_names),
        Field(min_length=1, max_length=LIMITS.tools),
    ]

    @property
    def names(self) -> list[str]:
        return [name for tool in self.tools for name in tool.names]


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


def choice_of(value: JsonValue) -> ToolChoice | None:
    """A choice of tools. Raises ValueError and pydantic's errors."""
    if value is None or (isinstance(value, str) and value in ("none", "auto", "required")):
        return cast("ToolChoice | None", value)
    kind = kind_of(value)
    if kind in ("function", "custom"):
        return NamedTool.model_validate(value)
    if kind == "allowed_tools":
        return AllowedTools.model_validate(value)
    if kind is not None:
        raise unsupported(f"a choice of type {echo(kind)} is not supported here")
    raise ValueError("must be none, auto, required or a tool")
