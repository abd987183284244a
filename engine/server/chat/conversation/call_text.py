"""The texts of tool calls, as data: one description serves prompt, parser and grammar."""

from __future__ import annotations

import json
import keyword
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from jitney.engine.common.requests import JsonDict, JsonValue
from jitney.engine.server.chat.conversation.lark import Lark
from jitney.engine.server.chat.conversation.schema_types import TEXT, all_values, types_of
from jitney.engine.server.chat.conversation.value_rules import (
    Pair,
    ValueRules,
    ValueSyntax,
    assertions,
    joined,
)


class _ArgumentText(Protocol):
    """The form of a call's arguments."""

    def rule(self, lark: Lark, schema: JsonDict, unenforced: list[str]) -> str:
        """The grammar rule of arguments for a schema. Adds pointers to keywords it cannot
        enforce.
        """
        ...

    def written(self, arguments: str) -> str:
        """Arguments that are given as JSON text."""
        ...


class _JsonText:
    """Arguments as JSON."""

    def rule(self, lark: Lark, schema: JsonDict, unenforced: list[str]) -> str:
        return lark.json(schema)

    def written(self, arguments: str) -> str:
        return arguments


@dataclass(frozen=True, slots=True)
class SyntaxText:
    """Arguments as pairs of names and values, in a syntax of the form's own."""

    syntax: ValueSyntax
    #: Between the name of an argument and its value.
    colon: str
    #: Around an argument whose name is no identifier; None: as for a nested property.
    odd: tuple[str, str] | None = None

    def rule(self, lark: Lark, schema: JsonDict, unenforced: list[str]) -> str:
        rules = ValueRules(lark, self.syntax, schema, unenforced)
        top = rules.top()
        pairs = list(rules.pairs(top, "#", self.around, rules.value))
        others = rules.other_schema(top)
        if others is not None:
            value = rules.value(others, "#/additionalProperties")
            pair = f"NAME {lark.literal(self.colon)} {value}"
            pairs.append(Pair(lark.rule(pair), is_required=False, is_repeated=True))
        return joined(lark, pairs, self.syntax.comma)

    def around(self, name: str) -> tuple[str, str]:
        """The texts before and after an argument's value."""
        if self.odd is None:
            return f"{self.syntax.key(name)}{self.colon}", ""
        if name.isidentifier() and not keyword.iskeyword(name):
            return f"{name}{self.colon}", ""
        before, after = self.odd
        return f"{before}{self.syntax.text(name)}{self.syntax.colon}", after

    def written(self, arguments: str) -> str:
        pairs: list[str] = []
        for name, value in _object(arguments).items():
            before, after = self.around(name)
            pairs.append(f"{before}{self.syntax.value(value)}{after}")
        return self.syntax.comma.join(pairs)


@dataclass(frozen=True, slots=True)
class TagText:
    """Arguments as one element each: strings verbatim, other values as JSON."""

    before_key: str
    after_key: str
    after_value: str

    def rule(self, lark: Lark, schema: JsonDict, unenforced: list[str]) -> str:
        rules = ValueRules(lark, _JSON_VALUES, schema, unenforced)
        top = rules.top()

        def around(name: str) -> tuple[str, str]:
            return f"{self.before_key}{name}{self.after_key}", ""  # the value's text has its end

        def value(inner: JsonValue, place: str) -> str:
            return self._value(rules, inner, place)

        pairs = list(rules.pairs(top, "#", around, value))
        others = rules.other_schema(top)
        if others is not None:
            rule = value(others, "#/additionalProperties")
            key = f"{lark.literal(self.before_key)} {_KEY} {lark.literal(self.after_key)}"
            pairs.append(Pair(lark.rule(f"{key} {rule}"), is_required=False, is_repeated=True))
        return joined(lark, pairs, "")

    def _value(self, rules: ValueRules, schema: JsonValue, place: str) -> str:
        """The grammar rule of a value and the closing tag."""
        lark, root = rules.lark, rules.root
        values = all_values(schema, root)
        if values is not None:
            listed = lark.one_of([lark.literal(_raw(each)) for each in values])
            return f"{listed} {lark.literal(self.after_value)}"
        if types_of(schema, root).isdisjoint(TEXT):
            return f"{rules.embedded(schema)} {lark.literal(self.after_value)}"
        rules.unenforced += assertions(schema, root, place)
        return lark.up_to(self.after_value)

    def written(self, arguments: str) -> str:
        elements: list[str] = []
        for name, value in _object(arguments).items():
            elements.append(
                f"{self.before_key}{name}{self.after_key}{_raw(value)}{self.after_value}"
            )
        return "".join(elements)


#: Syntax of values that are not strings.
_JSON_VALUES = ValueSyntax('"')
#: Rule of argument names that the schema does not declare.
_KEY = "/[A-Za-z0-9_.-]{1,64}/"


def _raw(value: JsonValue) -> str:
    """A value as the inside of an element."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _object(arguments: str) -> JsonDict:
    """The JSON text of an object, decoded; empty for any other text."""
    with suppress(ValueError, RecursionError):
        value = json.loads(arguments)
        if isinstance(value, dict):
            return value
    return {}


_JSON_TEXT = _JsonText()


@dataclass(frozen=True, slots=True)
class CallText:
    """The calls of a turn: first, call, separator, call ..., last. A call is before_name, NAME,
    before_arguments, ARGUMENTS, after.
    """

    before_name: str
    before_arguments: str
    after: str
    first: str = ""
    separator: str = ""
    last: str = ""
    #: Whether a marker begins each call; else calls begin at the beginning of a line.
    has_marker: bool = True
    #: Whether a turn ends with its call.
    is_alone: bool = False
    arguments: _ArgumentText = _JSON_TEXT

    def written(self, name: str, arguments: str) -> str:
        """A turn with one call. arguments: JSON text."""
        before = f"{self.first}{self.before_name}{name}{self.before_arguments}"
        return f"{before}{self.arguments.written(arguments)}{self.after}{self.last}"
