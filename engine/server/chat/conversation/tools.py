"""The tools of a request, and which of them may be called."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import orjson

from jitney.engine.common.requests import JsonDict, JsonValue

#: Whether the model may call tools, must not, or must.
type ToolMode = Literal["auto", "none", "required"]
#: The argument of a custom tool.
CUSTOM_INPUT = "input"


def made_call(id: str, name: str, arguments: JsonValue) -> JsonDict:
    """An earlier call as chat templates expect it. arguments: JSON, or its text."""
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def custom_arguments(text: str) -> str:
    """The arguments, as JSON text, of a call that gives a custom tool this text."""
    return json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of the client's."""

    name: str
    description: str | None = None
    #: JSON schema of an object; None: it takes no arguments.
    parameters: JsonDict | None = None
    #: Whether its arguments must fit the schema even where calls are not forced.
    strict: bool = False
    #: Whether it takes a text: the model calls a function with one argument, `input`.
    is_custom: bool = False
    #: The field of the body that it came in, such as "tools[3]".
    path: str = "tools"

    @classmethod
    def custom(
        cls, name: str, description: str | None, syntax: str = "", definition: str = ""
    ) -> Tool:
        """A tool that takes a text. syntax: "lark", "regex" or empty (any text)."""
        text: JsonDict = {"type": "string"}
        if syntax:
            text["description"] = f"A text of this form ({syntax}):\n{definition}"
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        parameters: JsonDict = {
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
        return cls(name, description, parameters, is_custom=True)

    def at(self, path: str) -> Tool:
        """The tool with `path`, its field in the body."""
        return replace(self, path=path)

    def shown(self) -> JsonDict:
        """The tool as chat templates expect it."""
        function: JsonDict = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}

    def completed(self) -> JsonDict:
        """The tool as `shown`, for all templates: nothing missing, and the schema in the few forms
        that all of them read.
        """
        function: JsonDict = {"name": self.name, "description": self.description or ""}
        schema = {"type": "object", "properties": {}} | (self.parameters or {})
        function["parameters"] = _completed(schema)
        return {"type": "function", "function": function}


def _completed(schema: JsonDict) -> JsonDict:
    """A schema, and those of its properties and items, without booleans and lists of types."""
    made = dict(schema)
    types = made.get("type")
    if isinstance(types, list) and "anyOf" not in made:
        del made["type"]
        made["anyOf"] = [{"type": each} for each in cast("list[JsonValue]", types)]
    properties = made.get("properties")
    if isinstance(properties, dict):
        made["properties"] = {
            name: {"description": ""} | _completed(_as_object(each))
            for name, each in properties.items()
        }
    if isinstance(made.get("items"), dict | bool):
        made["items"] = _completed(_as_object(made["items"]))
    return made


def _as_object(schema: JsonValue) -> JsonDict:
    """A schema that may be true or false as an object that means the same."""
    if isinstance(schema, dict):
        return schema
    return {} if schema is True else {"not": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that a turn may call."""

    tools: tuple[Tool, ...]
    #: Whether the turn must consist of calls only.
    is_required: bool = False
    #: Number of calls after which it ends; None: unlimited.
    most_calls: int | None = None

    @classmethod
    def of(
        cls,
        tools: Sequence[Tool],
        mode: ToolMode,
        only: Collection[str] | None,
        *,
        parallel: bool,
    ) -> ToolUse | None:
        """The tools that may be called, or None. only: names; parallel: several calls in a turn."""
        chosen = [tool for tool in tools if only is None or tool.name in only]
        if mode == "none" or not chosen:
            return None
        return cls(tuple(chosen), mode == "required", None if parallel else 1)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)

    @property
    def functions(self) -> dict[str, JsonDict | None]:
        """The schemas of the arguments of what may be called, by name."""
        return {tool.name: tool.parameters for tool in self.tools}

    @property
    def custom_names(self) -> frozenset[str]:
        """Names of the tools that take a text."""
        return frozenset(tool.name for tool in self.tools if tool.is_custom)
