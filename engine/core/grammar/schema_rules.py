"""Rewrites a JSON schema where llguidance would enforce less than it says.

Keywords that cannot be rewritten are an error, or left out and reported; those that llguidance
refuses are handled in `enforcement`. The rules come from running JSON-Schema-Test-Suite
(docs/benchmarks/schema_suite.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from jitney.engine.common.requests import JsonDict, JsonValue
from jitney.engine.common.schema_tree import LISTED, NAMED, ONE, escaped, is_never
from jitney.engine.core.grammar.equivalents import with_known_keywords
from jitney.engine.core.grammar.pattern_rules import rust_pattern, without_assertions
from jitney.engine.core.grammar.terms import Terms

#: Most subschemas in all; one that oneOf refers to counts each time.
_MOST_SCHEMAS = 20_000
#: Name of a draft in "$schema" -> its number.
_DRAFTS = {"04": 4, "06": 6, "07": 7, "2019-09": 8, "2020-12": 9}
_NAMES_OF_DRAFTS = {number: f"draft {name.lstrip('0')}" for name, number in _DRAFTS.items()}
_NEWEST = 9
#: Keyword -> first draft; llguidance ignores it in schemas of older drafts.
_SINCE = {
    "const": 6,
    "contains": 6,
    "propertyNames": 6,
    "if": 7,
    "dependentRequired": 8,
    "dependentSchemas": 8,
    "unevaluatedItems": 8,
    "unevaluatedProperties": 8,
    "prefixItems": 9,
    "$dynamicRef": 9,
}
#: Keywords whose numbers llguidance converts to float64.
_INEXACT = frozenset({"const", "enum", "multipleOf"})
#: Bound -> infinity on the side of allowed values.
_BOUNDS = {
    "exclusiveMaximum": -math.inf,
    "exclusiveMinimum": math.inf,
    "maximum": -math.inf,
    "minimum": math.inf,
}
#: float64 represents all integers up to here.
_WHOLE = 2**53
#: The largest float64 whose negative llguidance accepts as an integer's bound.
_LARGEST = 2**63 - 1024
#: Characters that JSON only writes as \uXXXX, which answers may not (see `compiling`).
_CONTROLS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
#: Formats for which llguidance allows too much: 29 February in every year, second 60 at any time.
#: Python has no leap seconds and no year 0.
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
#: Other formats that llguidance enforces. The rest are annotations (JSON Schema 2020-12,
#: Validation, 7.2.3).
_KNOWN_FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
#: Keywords that llguidance does not support.
_UNKNOWN = frozenset(
    {
        "$dynamicRef",
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "if",
        "not",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
#: Keywords without effect except with one of those, and annotations.
_SILENT = frozenset({"contentSchema", "else", "maxContains", "minContains", "then"})
#: Keywords that are kept to enforce what is possible.
_PARTLY = frozenset({"minProperties", "properties", "required"})
_LAST_WITH_DEPENDENCIES = 7

#: Returns why a keyword (its value, its schema, the draft) cannot be enforced, or "".
type _ReasonAgainst = Callable[[str, JsonValue, JsonDict, int], str]


@dataclass(slots=True)
class SchemaRules:
    """Rewrites one schema."""

    #: The whole schema, for references.
    root: JsonDict
    terms: Terms
    #: JSON pointers to the keywords that were left out.
    left_out: list[str] = field(default_factory=list)
    #: Subschemas that may still be rewritten.
    left: int = _MOST_SCHEMAS
    #: References of oneOf that are being expanded.
    inside: list[str] = field(default_factory=list)

    def apply(self) -> JsonDict:
        """The rewritten schema. Raises RequestError naming the place if strict and not possible."""
        try:
            result = self._schema(self.root, "#", _NEWEST)
        except RecursionError:
            raise self.terms.refusal("#", "too complex: too deep") from None
        # llguidance requires an object.
        return result if isinstance(result, dict) else {"allOf": [result]}

    def _schema(self, schema: JsonValue, place: str, draft: int) -> JsonValue:
        """Rewrite a subschema. place: its JSON pointer."""
        if not isinstance(schema, dict):
            return schema
        self.left -= 1
        if self.left < 0:
            reason = f"too complex: more than {_MOST_SCHEMAS} schemas"
            raise self.terms.refusal("#", reason)
        if is_never(schema):
            return False
        draft = _draft_of(schema, draft)
        schema = self._enforceable(schema, place, draft, _reason_of_draft)
        schema = with_known_keywords(schema, self.root)
        schema = self._enforceable(schema, place, draft, _reason_against)
        result = {
            keyword: self._value(keyword, value, f"{place}/{keyword}", draft)
            for keyword, value in schema.items()
        }
        _narrow_format(result)
        return result

    def _enforceable(
        self, schema: JsonDict, place: str, draft: int, reason_against: _ReasonAgainst
    ) -> JsonDict:
        """A schema without keywords that cannot be enforced. Raises RequestError if strict."""
        keywords: JsonDict = {}
        for keyword, value in schema.items():
            if _says_nothing(keyword, value):
                continue
            reason = reason_against(keyword, value, schema, draft)
            # llguidance refuses it where the subschema is used.
            is_refused = self.terms.strict and keyword in _UNKNOWN
            if not reason or (is_refused and reason_against is _reason_against):
                keywords[keyword] = value
                continue
            if self.terms.strict:
                raise self.terms.refusal(place, reason)
            self.left_out.append(f"{place}/{keyword}")
            keywords |= _remainder(keyword, value)
        return keywords

    def _value(self, keyword: str, value: JsonValue, place: str, draft: int) -> JsonValue:
        """Rewrite a keyword's value."""
        if keyword == "oneOf" and isinstance(value, list):
            return [self._option(one, f"{place}/{at}", draft) for at, one in enumerate(value)]
        if keyword in LISTED and isinstance(value, list):
            return [self._schema(one, f"{place}/{at}", draft) for at, one in enumerate(value)]
        if keyword in NAMED and isinstance(value, dict):
            return self._named(keyword, value, place, draft)
        if keyword in ONE:
            return self._schema(value, place, draft)
        if keyword == "pattern" and isinstance(value, str):
            return rust_pattern(value)
        if keyword in _BOUNDS and isinstance(value, int) and not isinstance(value, bool):
            return _float_bound(keyword, value)
        return value

    def _named(self, keyword: str, schemas: JsonDict, place: str, draft: int) -> JsonValue:
        result: JsonDict = {}
        for name, schema in schemas.items():
            key = rust_pattern(name) if keyword == "patternProperties" else name
            result[key] = self._schema(schema, f"{place}/{escaped(name)}", draft)
        return result

    def _option(self, schema: JsonValue, place: str, draft: int) -> JsonValue:
        """Rewrite a schema of oneOf with its reference expanded, since llguidance does not follow
        references when it compares the schemas.
        """
        reference = schema.get("$ref") if isinstance(schema, dict) and len(schema) == 1 else None
        target = self._target(reference)
        if target is None or not isinstance(reference, str) or reference in self.inside:
            return self._schema(schema, place, draft)
        self.inside.append(reference)
        result = self._schema(target, place, draft)
        self.inside.pop()
        return result

    def _target(self, reference: JsonValue) -> JsonValue:
        """The root's definition of a reference; None if it is another kind of reference."""
        match = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", str(reference))
        if match is None or "$id" in self.root:
            return None
        definitions = self.root.get(match[1])
        target = definitions.get(match[2]) if isinstance(definitions, dict) else None
        # These keywords change how the definition's own references are read.
        if isinstance(target, dict) and not target.keys() & {"$id", "$schema", "$anchor"}:
            return target
        return None


def _draft_of(schema: JsonDict, outer: int) -> int:
    draft = re.search(r"draft[-/](04|06|07|2019-09|2020-12)/", str(schema.get("$schema", "")))
    return outer if draft is None else _DRAFTS[draft[1]]


def _reason_of_draft(keyword: str, value: JsonValue, schema: JsonDict, draft: int) -> str:
    """The reason why llguidance ignores a keyword, or ""."""
    since = _SINCE.get(keyword, 0)
    if since <= draft:
        return ""
    names = _NAMES_OF_DRAFTS
    return f"{keyword} is a keyword since {names[since]}, and $schema says {names[draft]}"


def _reason_against(keyword: str, value: JsonValue, schema: JsonDict, draft: int) -> str:
    """The reason not to enforce a keyword; "" if it can be, or llguidance refuses it."""
    if keyword in _UNKNOWN or (keyword == "dependencies" and draft <= _LAST_WITH_DEPENDENCIES):
        return f"{keyword} cannot be enforced"
    match keyword:
        case "type":
            return _unknown_type(value)
        case "pattern" if isinstance(value, str) and without_assertions(value) != value:
            return "pattern uses look-around or word boundaries, which cannot be enforced"
        case "const" | "enum":
            return _inexact(keyword, value) or _controlled(value)
        case "required":
            return _controlled(value)
        case "properties":
            return _controlled(list(value) if isinstance(value, dict) else [])
        case "minProperties":
            return _uncounted(schema)
        case _:
            return _inexact(keyword, value) if keyword in _INEXACT else ""


def _remainder(keyword: str, value: JsonValue) -> JsonDict:
    """The part of a keyword that can be enforced."""
    if keyword == "pattern" and isinstance(value, str):
        return {"pattern": without_assertions(value)}
    return {keyword: value} if keyword in _PARTLY else {}


def _unknown_type(types: JsonValue) -> str:
    for name in types if isinstance(types, list) else [types]:
        if not isinstance(name, str) or name not in _TYPES:
            return f"{json.dumps(name)} is no type of JSON schema"
    return ""


def _inexact(keyword: str, value: JsonValue) -> str:
    for number in _leaves(value):
        if isinstance(number, int) and int(float(number)) != number:
            return f"{keyword}: {number} has more digits than a float64 keeps"
    return ""


def _float_bound(keyword: str, bound: int) -> int:
    """An integer bound rounded to float64, towards the allowed values."""
    inside = _BOUNDS[keyword]
    if inside > 0 and bound < -_LARGEST:
        return -_LARGEST
    if inside < 0 and bound > _LARGEST:
        return _LARGEST
    nearest = float(bound)
    is_outside = nearest < bound if inside > 0 else nearest > bound
    # llguidance adds 1 to an exclusive bound in float64, where the result may be the same number.
    is_excluded = keyword.startswith("exclusive") and abs(bound) > _WHOLE
    return int(math.nextafter(nearest, inside) if is_outside or is_excluded else nearest)


def _controlled(texts: JsonValue) -> str:
    for text in _leaves(texts):
        if isinstance(text, str) and _CONTROLS.search(text):
            return "control characters cannot be written in an answer"
    return ""


def _uncounted(schema: JsonDict) -> str:
    """The reason not to enforce minProperties, or "": an unlisted name can be written twice, and
    counts once.
    """
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    if not isinstance(least, int) or not isinstance(required, list):
        return ""
    if least <= len({str(name) for name in required}) + 1:
        return ""
    return "minProperties can be at most one more than there are required properties"


def _says_nothing(keyword: str, value: JsonValue) -> bool:
    if keyword == "format":
        return isinstance(value, str) and value not in _KNOWN_FORMATS and value not in _FORMATS
    return keyword in _SILENT


def _narrow_format(schema: JsonDict) -> None:
    """Replace a format that llguidance does not fully enforce by a pattern."""
    pattern = _FORMATS.get(str(schema.get("format")))
    if pattern is None:
        return
    del schema["format"]
    if "pattern" not in schema:
        schema["pattern"] = pattern
        return
    others = schema.get("allOf", [])
    if isinstance(others, list):  # otherwise llguidance refuses it
        schema["allOf"] = [*others, {"pattern": pattern}]


def _leaves(value: JsonValue) -> list[JsonValue]:
    """All scalars in a JSON value, names of properties included."""
    if isinstance(value, dict):
        return _leaves([*value.keys(), *value.values()])
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, bool) or (isinstance(value, float) and math.isinf(value)):
        return []
    return [value]
