"""How much of a JSON schema is enforced: all, or, if not strict, what llguidance takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict, JsonValue
from jitney.engine.core.grammar.closing import closed
from jitney.engine.core.grammar.finite import endless_reference
from jitney.engine.core.grammar.schema_rules import SchemaRules
from jitney.engine.core.grammar.schema_tree import ANNOTATIONS, children, pointer
from jitney.engine.core.grammar.terms import Terms

#: Says what is wrong with a JSON schema, "" if nothing is.
type _ErrorOf = Callable[[JsonValue], str]

#: Compilations that looking for what is wrong may take, in one grammar, and seconds.
_MOST_LOOKS = 400
_MOST_SECONDS = 1.0
#: Characters of a pointer in an error.
_MOST_PLACE = 120
#: What a schema inside of another may refer to.
_SHARED = frozenset({"$defs", "definitions", "$schema"})
#: How llguidance refuses a oneOf whose schemas it cannot tell apart.
_ONE_OF_REFUSED = "oneOf constraints are not supported"
#: Keywords in the order in which they are left out where it is not known which is wrong; all others
#: come before them.
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
#: Keywords that would exclude more without the one they go with, and fall with it.
_FALLING = {
    "properties": ("additionalProperties",),
    "patternProperties": ("additionalProperties",),
    "prefixItems": ("items", "additionalItems"),
    "items": ("additionalItems",),
}


class Enforced(NamedTuple):
    """A schema as llguidance is given it."""

    schema: JsonDict
    #: Pointers to what an answer is not held to.
    left_out: list[str]


def by_rules(schema: JsonDict) -> Enforced:
    """Rewrite a schema by rules, on its own terms. Raises RequestError if strict and impossible."""
    terms, rest = Terms.split(schema)
    try:
        reference = endless_reference(rest)
        if reference:
            raise terms.refusal(reference, "no value is finite: each has another of these in it")
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
    """Any object, or anything, for a schema that cannot be enforced at all."""
    terms, rest = Terms.split(schema)
    made: JsonDict = {"type": "object"} if rest.get("type") == "object" else {}
    return Enforced(made, [terms.pointer("#")])


class _Place(NamedTuple):
    """A schema inside of another."""

    #: The steps to it.
    path: list[str]
    schema: JsonDict


class _GaveUpError(Exception):
    """Looking for what is wrong took too long."""


@dataclass(slots=True)
class Enforcer:
    """Finds out what llguidance refuses in schemas."""

    error_of: _ErrorOf
    looks_left: int = _MOST_LOOKS
    deadline: float = field(default_factory=lambda: time.monotonic() + _MOST_SECONDS)

    def enforced(self, schema: JsonDict) -> Enforced:
        """What llguidance takes of a schema. Raises RequestError with the place if strict."""
        terms, _ = Terms.split(schema)
        made, left_out = by_rules(schema)
        try:
            while error := self._error(made):
                places = self._way_to(made, error)
                if terms.strict:
                    raise terms.refusal(_shortened(pointer(places[-1].path)), error)
                made, place = self._mended(made, places, error)
                left_out = [*left_out, terms.pointer(place)]
        except _GaveUpError:
            if terms.strict:
                raise terms.refusal("#", "too complex") from None
            return bare(schema)
        return Enforced(made, left_out)

    def _error(self, schema: JsonValue) -> str:
        """The first line of what is wrong; further ones say how the compiler came there."""
        self.looks_left -= 1
        if self.looks_left < 0 or time.monotonic() > self.deadline:
            raise _GaveUpError
        return self.error_of(schema).partition("\n")[0]

    def _way_to(self, schema: JsonDict, error: str) -> list[_Place]:
        """From a schema to the innermost one that is wrong by itself in the same way."""
        shared = {name: schema[name] for name in _SHARED & schema.keys()}
        way = [_Place([], schema)]
        while True:
            path, inner = way[-1]
            for steps, child in children(inner):
                if isinstance(child, dict) and self._error(shared | child) == error:
                    way.append(_Place(path + steps, child))
                    break
            else:
                return way

    def _mended(self, schema: JsonDict, way: list[_Place], error: str) -> tuple[JsonDict, str]:
        """A schema without the keyword that causes an error, and a pointer to that keyword."""
        shared = {name: schema[name] for name in _SHARED & schema.keys()}
        for path, culprit in reversed(way):
            for keyword in _suspects(culprit, error):
                relaxed = _relaxed(culprit, keyword, error)
                if self._error(shared | relaxed if path else relaxed) != error:
                    return _replaced(schema, path, relaxed), pointer([*path, keyword])
        raise _GaveUpError


def _suspects(schema: JsonDict, error: str) -> list[str]:
    """The keywords that may cause an error, those first without which least is lost."""
    if error.startswith(_ONE_OF_REFUSED) and "oneOf" in schema:
        return ["oneOf"]
    suspects = [keyword for keyword in schema if keyword not in ANNOTATIONS]
    return sorted(suspects, key=lambda keyword: _LAST_RESORTS.get(keyword, -1))


def _relaxed(schema: JsonDict, keyword: str, error: str) -> JsonDict:
    """A schema without a keyword; oneOf that may hold for several of its schemas as anyOf."""
    falling = (keyword, *_FALLING.get(keyword, ()))
    rest = {name: value for name, value in schema.items() if name not in falling}
    others = schema.get("allOf", [])
    if not error.startswith(_ONE_OF_REFUSED) or keyword != "oneOf" or not isinstance(others, list):
        return rest
    return rest | {"allOf": [*others, {"anyOf": schema["oneOf"]}]}


def _replaced(schema: JsonValue, path: list[str], made: JsonDict) -> Any:
    """A schema with another one at a place."""
    if not path:
        return made
    step, *rest = path
    if isinstance(schema, list):
        at = int(step)
        return [*schema[:at], _replaced(schema[at], rest, made), *schema[at + 1 :]]
    assert isinstance(schema, dict)  # the path leads through it
    return schema | {step: _replaced(schema[step], rest, made)}


def _shortened(place: str) -> str:
    if len(place) <= _MOST_PLACE:
        return place
    return place[: _MOST_PLACE - 3] + "..."
