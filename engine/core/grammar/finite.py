"""Finds rules of a Lark grammar, and references of a JSON schema, that match no finite text.

Computes the fixpoint of productive symbols (J. E. Hopcroft, J. D. Ullman, "Introduction to Automata
Theory, Languages, and Computation", 1979, section 4.4). Unknown syntax counts as finite, so that
nothing is refused by mistake.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import chain

from jitney.engine.common.requests import JsonDict, JsonValue
from jitney.engine.common.schema_tree import children, resolved

_DECODER = json.JSONDecoder()
#: Parts of a grammar: comments, JSON, literals, patterns, tokens, repetitions and names.
_PART = re.compile(
    r'//[^\n]*|%\w+\s*\{|"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|<[^>\n]*>|\{[^}\n]*\}'
    r"|~\s*\d+|\w+|\S"
)
_MAY_BE_MISSING = re.compile(r"[*?]|\{\s*0*\s*[,}].*|~\s*0+")
#: A rule's name. Terminals are in capitals; llguidance itself refuses endless ones.
_NAME = re.compile(r"_*[a-z]\w*")

#: A rule's alternatives, each a list of names and alternatives in parentheses.
type _Alternatives = list[list[str | _Alternatives]]


def endless_rule(lark: str) -> str:
    """A rule of a Lark grammar that never ends, if no sentence is finite; else ""."""
    try:
        rules = _rules(list(_parts(lark)))
        endless = _endless(rules, lambda name, waiting: _waits_for(rules[name], waiting))
    except (ValueError, RecursionError):
        return ""
    name, visited = "start", set[str]()
    while name in endless and name not in visited:
        visited.add(name)
        name = _waits_for(rules[name], endless)
    return name if name in visited else ""


def endless_reference(schema: JsonDict) -> str:
    """A reference of a JSON schema that never ends, if no value is finite; else ""."""
    try:
        targets = {name: resolved(schema, name) for name in _references(schema)}
        endless = _endless(targets, lambda name, waiting: _needs(targets[name], waiting))
        return _needs(schema, endless)
    except (AttributeError, RecursionError, TypeError, ValueError):  # llguidance refuses it
        return ""


def _endless(names: Iterable[str], waits_for: Callable[[str, Set[str]], str]) -> Set[str]:
    """The names that never end. waits_for: maps (name, open names) to an open name without which
    the name cannot end, or "" if it ends.
    """
    endless = set(names)
    order, before = list(names), -1
    while len(endless) != before:
        before = len(endless)
        for name in order:
            if not waits_for(name, endless):
                endless.discard(name)
        order = [name for name in reversed(order) if name in endless]
    return endless


def _parts(lark: str) -> Iterator[str]:
    """The parts of a grammar. Raises ValueError for unknown syntax."""
    at = 0
    while match := _PART.search(lark, at):
        part, at = match[0], match.end()
        if part.startswith("%lark"):
            raise ValueError("a grammar inside of a grammar")
        if part.startswith("%") and part.endswith("{"):
            _, at = _DECODER.raw_decode(lark, at - 1)
            part = '""'
        if not part.startswith("//"):
            yield part


def _rules(parts: list[str]) -> dict[str, _Alternatives]:
    """The rules by name. Raises ValueError for unknown syntax."""
    colons = [at for at, part in enumerate(parts) if part == ":"]
    begins = [_begin(parts, colon) for colon in colons]
    rules: dict[str, _Alternatives] = {}
    for begin, colon, end in zip(begins, colons, [*begins[1:], len(parts)], strict=True):
        if _NAME.fullmatch(parts[begin]):
            rules[parts[begin]] = _read(iter(parts[colon + 1 : end]))
    return rules


def _begin(parts: list[str], colon: int) -> int:
    """The index of a rule's name, before its attributes. Raises ValueError."""
    at = colon - 1
    if parts[at] == "]":
        at -= 1 + parts[at::-1].index("[")
    if at < 0 or not parts[at].isidentifier():
        raise ValueError("a colon without a rule")
    return at


def _read(parts: Iterator[str]) -> _Alternatives:
    """Read alternatives up to the end or the closing parenthesis or bracket."""
    alternatives: _Alternatives = [[]]
    for part in parts:
        last = alternatives[-1]
        if part in ")]":
            break
        if part == "|":
            alternatives.append([])
        elif part == "(":
            last.append(_read(parts))
        elif part == "[":
            _read(parts)  # optional
        elif _MAY_BE_MISSING.fullmatch(part):
            del last[-1:]
        else:
            last.append(part)
    return alternatives


def _waits_for(alternatives: _Alternatives, endless: Set[str]) -> str:
    """An endless rule of these alternatives if all have one; "" if some alternative ends."""
    name = ""
    for parts in alternatives:
        names = (
            (part if part in endless else "")
            if isinstance(part, str)
            else _waits_for(part, endless)
            for part in parts
        )
        name = next(filter(None, names), "")
        if not name:
            break
    return name


def _references(schema: JsonValue) -> Iterator[str]:
    """All values of "$ref" in a schema."""
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        for _, child in children(schema):
            yield from _references(child)


def _needs(schema: JsonDict | JsonValue, endless: Set[str]) -> str:
    """An endless reference that each value of a schema contains; "" if some value has none.
    Raises TypeError for keywords of a wrong type.
    """
    if not isinstance(schema, dict):
        return ""
    return _needs_of(schema, endless)


def _needs_of(schema: JsonDict, endless: Set[str]) -> str:
    """`_needs` of a schema that is an object."""
    if schema.get("$ref") in endless:
        return schema["$ref"]
    for one_of in (schema.get("anyOf"), schema.get("oneOf")):
        needed = [_needs(each, endless) for each in one_of or ()]
        if needed and all(needed):
            return needed[0]
    values = chain(schema.get("allOf") or (), _required(schema))
    return next(filter(None, (_needs(each, endless) for each in values)), "")


def _required(schema: JsonDict) -> Iterator[JsonValue]:
    """Schemas of required properties or items, if all values are objects or all are arrays."""
    kind = schema.get("type")
    if kind in ("object", ["object"]):
        properties = schema.get("properties", {})
        yield from (properties[name] for name in schema.get("required", ()) if name in properties)
    elif kind in ("array", ["array"]):
        items = schema.get("items")
        first = items if isinstance(items, list) else schema.get("prefixItems", [])
        least = schema.get("minItems", 0)
        yield from first[: int(least)]
        if least > len(first):
            yield items
