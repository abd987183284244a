"""Prepares JSON schemas for llguidance, leaving out unsupported keywords unless strict."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict, JsonValue
from jitney.engine.common.schema_tree import ANNOTATIONS, children, pointer
from jitney.engine.core.grammar.closing import closed
from jitney.engine.core.grammar.finite import endless_reference
from jitney.engine.core.grammar.schema_rules import SchemaRules
from jitney.engine.core.grammar.terms import Terms

#: Returns llguidance's error for a JSON schema, or "".
type _ErrorOf = Callable[[JsonValue], str]

#: Most compilations to find the errors of one grammar, and seconds.
_MOST_COMPILATIONS = 400
_MOST_SECONDS = 1.0
#: Most characters of a pointer in an error.
_MOST_PLACE = 120
#: Keywords that references of a subschema may need.
_SHARED = frozenset({"$defs", "definitions", "$schema"})
#: Start of llguidance's error for a oneOf whose schemas it cannot tell apart.
_ONE_OF_REFUSED = "oneOf constraints are not supported"
#: Order of leaving out keywords if the error may be any of them; all others come before.
_LAST_RESORTS = {
    keyword: order
    for order, keyword in enumerate(
        (
            "allOf",
            "anyOf",
            "$ref",
            "enum",
            "const",
            "required",
            "items",
            "prefixItems",
            "additionalProperties",
            "patternProperties",
            "properties",
            "type",
        )
    )
}
#: Keyword -> keywords that are left out with it, since they would exclude more without it.
_LEFT_OUT_WITH = {
    "properties": ("additionalProperties",),
    "patternProperties": ("additionalProperties",),
    "prefixItems": ("items", "additionalItems"),
    "items": ("additionalItems",),
}


class Enforced(NamedTuple):
    """A schema for llguidance."""

    schema: JsonDict
    #: JSON pointers to keywords that are not enforced.
    left_out: list[str]


def by_rules(schema: JsonDict) -> Enforced:
    """Rewrite a schema by rules. Raises RequestError if it is strict and cannot be enforced."""
    terms, rest = Terms.split(schema)
    try:
        reference = endless_reference(rest)
        if reference:
            raise terms.refusal(reference, "no value is finite: each contains another one")
        rules = SchemaRules(_closed(rest, terms) if terms.closed else rest, terms)
        return Enforced(rules.apply(), [terms.pointer(place) for place in rules.left_out])
    except RequestError:
        if terms.strict:
            raise
        return bare(schema)


def _closed(schema: JsonDict, terms: Terms) -> JsonDict:
    try:
        return closed(schema)
    except RecursionError:
        raise terms.refusal("#", "too complex: too deep") from None


def bare(schema: JsonDict) -> Enforced:
    """Allow any object, or any value, for a schema that cannot be enforced at all."""
    terms, rest = Terms.split(schema)
    loose: JsonDict = {"type": "object"} if rest.get("type") == "object" else {}
    return Enforced(loose, [terms.pointer("#")])


class _Subschema(NamedTuple):
    """A schema inside of another."""

    #: Steps of its JSON pointer.
    path: list[str]
    schema: JsonDict


class _GaveUpError(Exception):
    """Finding the error of a schema took too long."""


@dataclass(slots=True)
class Enforcer:
    """Finds and leaves out the keywords that llguidance refuses."""

    error_of: _ErrorOf
    compilations_left: int = _MOST_COMPILATIONS
    deadline: float = field(default_factory=lambda: time.monotonic() + _MOST_SECONDS)

    def enforced(self, schema: JsonDict) -> Enforced:
        """The part of a schema that llguidance supports. Raises RequestError naming the place if
        strict.
        """
        terms, _ = Terms.split(schema)
        supported, left_out = by_rules(schema)
        try:
            while error := self._error(supported):
                path = self._find(supported, error)
                if terms.strict:
                    raise terms.refusal(_shortened(pointer(path[-1].path)), error)
                supported, place = self._without_error(supported, path, error)
                left_out = [*left_out, terms.pointer(place)]
        except _GaveUpError:
            if terms.strict:
                raise terms.refusal("#", "too complex") from None
            return bare(schema)
        return Enforced(supported, left_out)

    def _error(self, schema: JsonValue) -> str:
        """The first line of llguidance's error; further ones are the compiler's trace."""
        self.compilations_left -= 1
        if self.compilations_left < 0 or time.monotonic() > self.deadline:
            raise _GaveUpError
        return self.error_of(schema).partition("\n")[0]

    def _find(self, schema: JsonDict, error: str) -> list[_Subschema]:
        """The path from a schema to the innermost subschema with the same error."""
        shared = {name: schema[name] for name in _SHARED & schema.keys()}
        subschemas = [_Subschema([], schema)]
        while True:
            path, inner = subschemas[-1]
            for steps, child in children(inner):
                if isinstance(child, dict) and self._error(shared | child) == error:
                    subschemas.append(_Subschema(path + steps, child))
                    break
            else:
                return subschemas

    def _without_error(
        self, schema: JsonDict, subschemas: list[_Subschema], error: str
    ) -> tuple[JsonDict, str]:
        """(the schema without the keyword that causes an error, a pointer to the keyword)."""
        shared = {name: schema[name] for name in _SHARED & schema.keys()}
        for path, culprit in reversed(subschemas):
            for keyword in _suspects(culprit, error):
                relaxed = _relaxed(culprit, keyword, error)
                if self._error(shared | relaxed if path else relaxed) != error:
                    return _replaced(schema, path, relaxed), pointer([*path, keyword])
        raise _GaveUpError


def _suspects(schema: JsonDict, error: str) -> list[str]:
    """The keywords that may cause an error, the least restrictive first."""
    if error.startswith(_ONE_OF_REFUSED) and "oneOf" in schema:
        return ["oneOf"]
    suspects = [keyword for keyword in schema if keyword not in ANNOTATIONS]
    return sorted(suspects, key=lambda keyword: _LAST_RESORTS.get(keyword, -1))


def _relaxed(schema: JsonDict, keyword: str, error: str) -> JsonDict:
    """A schema without a keyword; an unsupported oneOf becomes anyOf."""
    dropped = (keyword, *_LEFT_OUT_WITH.get(keyword, ()))
    rest = {name: value for name, value in schema.items() if name not in dropped}
    others = schema.get("allOf", [])
    if not error.startswith(_ONE_OF_REFUSED) or keyword != "oneOf" or not isinstance(others, list):
        return rest
    return rest | {"allOf": [*others, {"anyOf": schema["oneOf"]}]}


def _replaced(schema: JsonValue, path: list[str], new: JsonDict) -> Any:
    """A schema with the subschema at a path replaced."""
    if not path:
        return new
    step, *rest = path
    if isinstance(schema, list):
        at = int(step)
        return [*schema[:at], _replaced(schema[at], rest, new), *schema[at + 1 :]]
    assert isinstance(schema, dict)  # the path leads through it
    return schema | {step: _replaced(schema[step], rest, new)}


def _shortened(place: str) -> str:
    if len(place) <= _MOST_PLACE:
        return place
    return place[: _MOST_PLACE - 3] + "..."
