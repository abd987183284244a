"""A JSON schema as llguidance is given it: what it would take for less than the schema says is
refused or said in another way.

What llguidance itself refuses is left to it. Found with the official JSON-Schema-Test-Suite
(docs/benchmarks/schema_suite.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from jitney.engine.errors import RequestError
from jitney.engine.structured.refusals import bad_grammar
from jitney.engine.types import JsonValue

#: Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
#: Schemas looked at in all; one that oneOf refers to counts each time.
_MOST_SCHEMAS = 20_000
#: How a schema names its draft, and that draft.
_DRAFTS = {"04": 4, "06": 6, "07": 7, "2019-09": 8, "2020-12": 9}
_NAMES_OF_DRAFTS = {number: f"draft {name.lstrip('0')}" for name, number in _DRAFTS.items()}
_NEWEST = 9
#: Keywords that llguidance passes over in a schema of an older draft than these.
_SINCE = {
    "const": 6,
    "contains": 6,
    "propertyNames": 6,
    "if": 7,
    "then": 7,
    "else": 7,
    "dependentRequired": 8,
    "dependentSchemas": 8,
    "minContains": 8,
    "maxContains": 8,
    "unevaluatedItems": 8,
    "unevaluatedProperties": 8,
    "prefixItems": 9,
    "$dynamicRef": 9,
}
#: Numbers are float64 to llguidance.
_NUMBERS = {
    "const",
    "enum",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
}
#: Characters that JSON can only write as \uXXXX, which answers may not (see `compiling`).
_CONTROLS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
#: Formats that llguidance takes too widely: a 29th of February in every year, seconds of 60 at any
#: time. Python knows no leap second and no year 0.
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTH_AND_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = f"(?:{_YEAR}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
}

#: White space and the ends of lines (ECMA-262, 12.2 and 12.3).
_SPACES = r"\t-\r \u00A0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_NO_END_OF_LINE = r"[^\n\r\u2028\u2029]"
#: One word of a pattern, outside of brackets and in them.
_OUTSIDE_BRACKETS = re.compile(r"\\.|\[\^?\]?|.|\\", re.DOTALL)
_IN_BRACKETS = re.compile(r"\\.|&&|--|~~|.|\\", re.DOTALL)
#: Words that Rust has another meaning for, outside of brackets: the empty set, and all but it.
_OTHERWISE = {
    ".": _NO_END_OF_LINE,
    r"\<": "<",
    r"\>": ">",
    "[]": r"[^\x00-\x{10FFFF}]",
    "[^]": r"[\x00-\x{10FFFF}]",
}
#: And in them: a set in a set, and the operators of sets.
_OTHERWISE_IN_BRACKETS = {"[": r"\[", "&&": r"&\&", "~~": r"~\~", "--": r"-\-"}
_SPACE_SETS = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}


def kept_to(schema: JsonValue) -> JsonValue:
    """A schema, an object or a boolean, that llguidance keeps to as this one says. Raises
    RequestError that says where and why for one that cannot be kept to.
    """
    if isinstance(schema, bool):
        return {"allOf": [schema]}  # llguidance wants an object
    if isinstance(schema, dict):
        return _kept_object(schema)
    return schema


def _kept_object(schema: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """`kept_to` of an object."""
    try:
        return _Rules(schema).members(schema, "#", _NEWEST)
    except RecursionError:
        raise _refusal("#", "too complex: too deep") from None


@dataclass(slots=True)
class _Rules:
    #: The whole schema, which references begin at.
    root: dict[str, JsonValue]
    #: Schemas that may still be looked at.
    left: int = _MOST_SCHEMAS
    #: What oneOf referred to, outside of where we are.
    inside: list[str] = field(default_factory=list)

    def schema(self, schema: JsonValue, place: str, draft: int) -> JsonValue:
        """What llguidance is given for a schema. place: a JSON pointer to it."""
        if isinstance(schema, dict):
            return self.members(schema, place, draft)
        return schema

    def members(self, schema: dict[str, JsonValue], place: str, draft: int) -> dict[str, JsonValue]:
        """What llguidance is given for a schema that is an object."""
        self.left -= 1
        if self.left < 0:
            raise _refusal("#", f"too complex: more than {_MOST_SCHEMAS} schemas")
        draft = _draft_of(schema, draft)
        _refuse_unkept(schema, place, draft)
        made = {
            keyword: self.value(keyword, value, f"{place}/{keyword}", draft)
            for keyword, value in schema.items()
            if not _says_nothing(keyword, value)
        }
        _narrow_format(made)
        return made

    def value(self, keyword: str, value: JsonValue, place: str, draft: int) -> JsonValue:
        """What llguidance is given for a keyword's value."""
        if keyword == "oneOf" and isinstance(value, list):
            return [self.option(one, f"{place}/{at}", draft) for at, one in enumerate(value)]
        if keyword in _LISTED and isinstance(value, list):
            return [self.schema(one, f"{place}/{at}", draft) for at, one in enumerate(value)]
        if keyword in _NAMED and isinstance(value, dict):
            return self.named(keyword, value, place, draft)
        if keyword in _ONE:
            return self.schema(value, place, draft)
        if keyword == "pattern" and isinstance(value, str):
            return _rust_pattern(value)
        return value

    def named(
        self, keyword: str, schemas: dict[str, JsonValue], place: str, draft: int
    ) -> JsonValue:
        made: dict[str, JsonValue] = {}
        for name, schema in schemas.items():
            key = _rust_pattern(name) if keyword == "patternProperties" else name
            made[key] = self.schema(schema, f"{place}/{_escaped(name)}", draft)
        return made

    def option(self, schema: JsonValue, place: str, draft: int) -> JsonValue:
        """A schema of oneOf. llguidance does not look at what one refers to when it looks whether
        they exclude each other, so it stands there itself.
        """
        reference = schema.get("$ref") if isinstance(schema, dict) and len(schema) == 1 else None
        target = self.target(reference)
        if target is None or not isinstance(reference, str) or reference in self.inside:
            return self.schema(schema, place, draft)
        self.inside.append(reference)
        made = self.schema(target, place, draft)
        self.inside.pop()
        return made

    def target(self, reference: JsonValue) -> JsonValue:
        """The definition of the root's that is referred to, None if it is no such reference."""
        found = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", str(reference))
        if found is None or "$id" in self.root:
            return None
        definitions = self.root.get(found[1])
        target = definitions.get(found[2]) if isinstance(definitions, dict) else None
        # What it says by "$id" holds only there.
        if isinstance(target, dict) and not target.keys() & {"$id", "$schema", "$anchor"}:
            return target
        return None


def _rust_pattern(pattern: str) -> str:
    """A pattern that Rust's `regex` matches as ECMAScript matches this one, where both know the
    same words and mean something else. What Rust does not have (look-around, backreferences) is
    left as it is, for Rust to refuse.
    """
    made: list[str] = []
    inside = False
    at = 0
    while at < len(pattern):
        found = (_IN_BRACKETS if inside else _OUTSIDE_BRACKETS).match(pattern, at)
        assert found is not None  # any character is a word
        word, at = found[0], found.end()
        made.append(_rust_word(word, made[-1] if made else "", inside=inside))
        inside = word != "]" if inside else word in ("[", "[^")
    return "".join(made)


def _rust_word(word: str, before: str, *, inside: bool) -> str:
    """before: what was made of the word before."""
    if word in _SPACE_SETS:
        return _SPACE_SETS[word]
    if not inside:
        return _OTHERWISE.get(word, word)
    if word == "--" and before in ("[", "[^"):
        return r"\--"  # a range that begins with it; elsewhere it ends one
    return _OTHERWISE_IN_BRACKETS.get(word, word)


def children(schema: JsonValue) -> Iterator[tuple[list[str], JsonValue]]:
    """(steps down from here, schema) of the schemas directly inside one."""
    if not isinstance(schema, dict):
        return
    for name in _ONE:
        inner = schema.get(name)
        if isinstance(inner, dict):
            yield [name], inner
    for name in _LISTED:
        listed = schema.get(name)
        if isinstance(listed, list):
            for number, child in enumerate(listed):
                yield [name, str(number)], child
    for name in _NAMED:
        named = schema.get(name)
        if isinstance(named, dict):
            for key, child in named.items():
                yield [name, _escaped(key)], child


def _escaped(key: str) -> str:
    """As a step of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def _draft_of(schema: dict[str, JsonValue], outer: int) -> int:
    found = re.search(r"draft[-/](04|06|07|2019-09|2020-12)/", str(schema.get("$schema", "")))
    if found is None:
        return outer
    return _DRAFTS[found[1]]


def _refuse_unkept(schema: dict[str, JsonValue], place: str, draft: int) -> None:
    """Raises RequestError for what llguidance would take, and not keep to."""
    for keyword in schema:
        since = _SINCE.get(keyword, 0)
        if since > draft:
            names = _NAMES_OF_DRAFTS
            reason = f"{keyword} is a keyword since {names[since]}, and $schema says {names[draft]}"
            raise _refusal(place, reason)
        if keyword in _NUMBERS:
            _refuse_inexact(keyword, schema[keyword], place)
    _refuse_controls(schema, place)
    _refuse_counted(schema, place)


def _refuse_inexact(keyword: str, value: JsonValue, place: str) -> None:
    for number in _leaves(value):
        if isinstance(number, int) and int(float(number)) != number:
            raise _refusal(place, f"{keyword}: {number} has more digits than a float64 keeps")


def _refuse_controls(schema: dict[str, JsonValue], place: str) -> None:
    properties = schema.get("properties")
    names = list(properties) if isinstance(properties, dict) else []
    texts = [schema.get("const"), schema.get("enum"), schema.get("required"), names]
    for text in _leaves(texts):
        if isinstance(text, str) and _CONTROLS.search(text):
            raise _refusal(place, "control characters cannot be written in an answer")


def _refuse_counted(schema: dict[str, JsonValue], place: str) -> None:
    """A name that the schema does not have can be written twice, and JSON keeps one of them."""
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    if not isinstance(least, int) or not isinstance(required, list):
        return
    if least > len({str(name) for name in required}) + 1:
        reason = "minProperties can be at most one more than there are required properties"
        raise _refusal(place, reason)


def _says_nothing(keyword: str, value: JsonValue) -> bool:
    return keyword == "uniqueItems" and value is False


def _narrow_format(schema: dict[str, JsonValue]) -> None:
    """Say a format as a pattern, where llguidance's own is too wide."""
    pattern = _FORMATS.get(str(schema.get("format")))
    if pattern is None:
        return
    del schema["format"]
    if "pattern" not in schema:
        schema["pattern"] = pattern
        return
    others = schema.get("allOf", [])
    if isinstance(others, list):  # else llguidance refuses it
        schema["allOf"] = [*others, {"pattern": pattern}]


def _leaves(value: JsonValue) -> list[JsonValue]:
    """All that is no list and no object in a value of JSON, the names of its objects too."""
    if isinstance(value, dict):
        return _leaves([*value.keys(), *value.values()])
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, bool) or (isinstance(value, float) and math.isinf(value)):
        return []
    return [value]


def _refusal(place: str, reason: str) -> RequestError:
    return bad_grammar(f"at {place}: {reason}")
