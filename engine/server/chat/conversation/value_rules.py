"""Grammars of values that are not written as JSON, translated from JSON schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from jitney.engine.common.requests import JsonDict, JsonValue
from jitney.engine.common.schema_tree import ANNOTATIONS, escaped, is_never, resolved
from jitney.engine.server.chat.conversation.lark import Lark
from jitney.engine.server.chat.conversation.schema_types import (
    ALL_TYPES,
    Steps,
    listed_values,
    new_steps,
    types_of,
)

#: Keywords that narrow numbers, which all forms write as JSON does.
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
#: Keywords that restrict values and that these rules cannot express.
_INEXPRESSIBLE = (
    *("not", "if", "then", "else", "pattern", "prefixItems", "contains"),
    *("uniqueItems", "unevaluatedItems", "additionalItems", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    "unevaluatedProperties",
)
#: Prefixes of keywords that also apply to parts of a schema.
_SHARED = ("$defs", "definitions", "$schema", "x-")
#: Keywords of which only one alternative can be translated.
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
#: Keywords that narrow nothing; format is an annotation (JSON Schema Validation, 7.2.1).
_NOTES = ANNOTATIONS | {"discriminator", "format"}
_INTEGER = "/-?(0|[1-9][0-9]{0,15})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][-+]?[0-9]{1,2})?/"
#: Most subschemas that are translated; further ones are not enforced.
_MOST_SCHEMAS = 2000
#: Greatest length of a string that a grammar counts.
_MOST_COUNTED = 4096


@dataclass(frozen=True, slots=True)
class ValueSyntax:
    """A form's syntax of values. All texts are literal, except `char`."""

    #: Before and after a string.
    quote: str
    #: One character of a string, as a regular expression; empty: any that does not begin a quote.
    char: str = ""
    #: Escapes of characters that cannot appear literally.
    escapes: Mapping[str, str] = MappingProxyType({})
    true: str = "true"
    false: str = "false"
    null: str = "null"
    comma: str = ","
    colon: str = ":"
    #: Whether names of properties have no quotes where they are plain words.
    has_bare_keys: bool = False

    def text(self, text: str) -> str:
        inner = "".join([self.escapes.get(char, char) for char in text])
        return f"{self.quote}{inner}{self.quote}"

    def key(self, name: str) -> str:
        """The name of a property."""
        if self.has_bare_keys and name.replace("_", "a").isalnum():
            return name
        return self.text(name)

    def value(self, value: JsonValue) -> str:
        match value:
            case str():
                return self.text(value)
            case None:
                return self.null
            case bool():
                return self.true if value else self.false
            case list():
                return f"[{self.comma.join(map(self.value, value))}]"
            case dict():
                pairs = [
                    f"{self.key(name)}{self.colon}{self.value(each)}"
                    for name, each in value.items()
                ]
                return f"{{{self.comma.join(pairs)}}}"
            case _:
                return repr(value)


@dataclass(slots=True)
class ValueRules:
    """The rules of one schema's values, in a grammar that is being written."""

    lark: Lark
    syntax: ValueSyntax
    #: The schema that references point into.
    root: JsonDict
    #: JSON pointers to keywords that the rules do not enforce; written here.
    unenforced: list[str]
    #: Rules of referenced schemas by JSON pointer, and the rule of any value.
    _shared: dict[str, str] = field(default_factory=dict[str, str])
    #: Subschemas that may still be visited.
    _left: int = _MOST_SCHEMAS

    def value(self, schema: JsonValue, place: str) -> str:
        """The rule of the values that fit a schema. place: a JSON pointer to it."""
        self._left -= 1
        if self._left < 0:
            self.unenforced.append(place)
            return self.any_value()
        if not isinstance(schema, dict):
            return self.any_value()
        listed = listed_values(schema)
        if listed is not None:
            return self.lark.one_of([self.lark.literal(self.syntax.value(each)) for each in listed])
        combining = next((keyword for keyword in _COMBINING if keyword in schema), None)
        if combining is not None:
            return self._combined(schema, combining, place)
        self.report(schema, place)
        types = types_of(_with_type(schema), self.root)
        if types == ALL_TYPES:
            return self.any_value()
        if "number" in types:
            types -= {"integer"}
        return self.lark.one_of([self._typed(each, schema, place) for each in sorted(types)])

    def top(self) -> JsonDict:
        """The root as the schema of an object, without references and parts."""
        schema = self.root
        skipped = (*_NOTES, "$ref", "allOf")
        parts = [{"$ref": schema["$ref"]}] if "$ref" in schema else []
        parts += [part for part in _list(schema.get("allOf")) if isinstance(part, dict)]
        rest = {name: each for name, each in schema.items() if name not in skipped}
        made = self.merged(rest, parts, "#") if parts else rest
        for keyword in ("anyOf", "oneOf"):
            if keyword in made:
                self.unenforced.append(f"#/{keyword}")
        self.report(made, "#")
        return made

    def report(self, schema: JsonDict, place: str) -> None:
        """Note the keywords that cannot be expressed."""
        for keyword in _INEXPRESSIBLE:
            if schema.get(keyword, False) is not False:
                self.unenforced.append(f"{place}/{keyword}")

    def _combined(self, schema: JsonDict, keyword: str, place: str) -> str:
        """The rule of a schema that refers to others."""
        skipped = _NOTES | {keyword}
        rest = {name: each for name, each in schema.items() if name not in skipped}
        inner = f"{place}/{keyword}"
        if keyword == "$ref":
            self.report(rest, place)
            return self._referred(schema["$ref"], inner)
        parts = schema[keyword]
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            self.unenforced.append(inner)
            return self.value(rest, place)
        if keyword == "allOf":
            return self.value(self.merged(rest, parts, inner), place)
        if keyword == "oneOf" and not self._are_disjoint(parts):
            self.unenforced.append(inner)
        options = [
            self.value(self.merged(rest, [part], inner), f"{inner}/{number}")
            for number, part in enumerate(parts)
        ]
        return self.lark.one_of(options)

    def merged(self, schema: JsonDict, parts: Sequence[JsonValue], place: str) -> JsonDict:
        """A schema and its parts merged into one; keywords that cannot be merged are not
        enforced.
        """
        made = dict(schema)
        for part in parts:
            target = part
            if isinstance(part, dict) and part.keys() == {"$ref"} and (made or len(parts) > 1):
                target = resolved(self.root, str(part["$ref"]))
            for name, value in target.items() if isinstance(target, dict) else ():
                mine = made.get(name, value)
                if name == "properties" and isinstance(mine, dict) and isinstance(value, dict):
                    made[name] = value | mine
                elif name == "required" and isinstance(mine, list) and isinstance(value, list):
                    made[name] = list(dict.fromkeys([*mine, *value]))
                elif mine != value and name not in _NOTES:
                    self.unenforced.append(f"{place}/{name}")
                else:
                    made[name] = mine
        return made

    def _are_disjoint(self, schemas: Sequence[JsonValue]) -> bool:
        """Whether the schemas are disjoint by their types: no value fits two of them."""
        types = [types_of(schema, self.root) for schema in schemas]
        return sum(map(len, types)) == len(frozenset().union(*types))

    def _referred(self, reference: JsonValue, place: str) -> str:
        target = resolved(self.root, str(reference))
        if target is None:
            self.unenforced.append(place)
            return self.any_value()
        pointer = str(reference)
        if pointer not in self._shared:
            self._shared[pointer] = name = self.lark.new_name("shared")
            self.lark.define(name, self.value(target, pointer))
        return self._shared[pointer]

    def _typed(self, type: str, schema: JsonDict, place: str) -> str:
        """The rule of the values of one type that fit a schema."""
        syntax, literal = self.syntax, self.lark.literal
        match type:
            case "string":
                return self._text(schema, place)
            case "boolean":
                return self.lark.one_of([literal(syntax.true), literal(syntax.false)])
            case "null":
                return literal(syntax.null)
            case "array":
                return self._array(schema, place)
            case "object":
                return self._object(schema, place)
            case _:
                bounds = {keyword: schema[keyword] for keyword in _NUMBERS if keyword in schema}
                if bounds:
                    return self.embedded({"type": type} | bounds)
                return _INTEGER if type == "integer" else _NUMBER

    def _text(self, schema: JsonDict, place: str) -> str:
        """A string between quotes."""
        quote = self.lark.literal(self.syntax.quote)
        least, most = _bounds(schema, "minLength", "maxLength")
        if not self.syntax.char:
            for keyword in ("minLength", "maxLength"):
                if keyword in schema:
                    self.unenforced.append(f"{place}/{keyword}")
            return f"{quote} {self.lark.up_to(self.syntax.quote)}"
        if max(least, most or 0) > _MOST_COUNTED:
            self.unenforced.append(f"{place}/maxLength")
            least, most = min(least, _MOST_COUNTED), None
        char = f"({self.syntax.char}){_times(least, most)}"
        return f"/{self.syntax.quote}{char}{self.syntax.quote}/"

    def _array(self, schema: JsonDict, place: str) -> str:
        item = self.value(schema.get("items", True), f"{place}/items")
        least, most = _bounds(schema, "minItems", "maxItems")
        comma = self.lark.literal(self.syntax.comma)
        empty = self.lark.literal("[]")
        if most == 0:
            return empty
        more = f"({comma} {item}){_times(max(0, least - 1), None if most is None else most - 1)}"
        filled = f'"[" {item} {more} "]"'
        return filled if least else self.lark.one_of([filled, empty])

    def _object(self, schema: JsonDict, place: str) -> str:
        colon = self.syntax.colon

        def around(name: str) -> tuple[str, str]:
            return f"{self.syntax.key(name)}{colon}", ""

        pairs = list(self.pairs(schema, place, around, self.value))
        others = self.other_schema(schema)
        if others is not None:
            value = self.value(others, f"{place}/additionalProperties")
            key = "NAME" if self.syntax.has_bare_keys else self._text({}, "")
            pair = self.lark.rule(f"{key} {self.lark.literal(colon)} {value}")
            pairs.append(Pair(pair, is_required=False, is_repeated=True))
        return f'"{{" {joined(self.lark, pairs, self.syntax.comma)} "}}"'

    def pairs(
        self,
        schema: JsonDict,
        place: str,
        around: Callable[[str], tuple[str, str]],
        value: Callable[[JsonValue, str], str],
    ) -> Iterator[Pair]:
        """Named properties in order. around: texts before and after a value; value: its rule."""
        properties, required = schema.get("properties"), schema.get("required")
        names = required if isinstance(required, list) else []
        schemas = properties if isinstance(properties, dict) else {}
        for name in (*schemas, *[str(each) for each in names if each not in schemas]):
            inner = schemas.get(name, True)
            if is_never(inner) or listed_values(inner) == []:
                continue
            before, after = around(name)
            rule = value(inner, f"{place}/properties/{escaped(name)}")
            text = f"{self.lark.literal(before)} {rule} {self.lark.literal(after)}"
            yield Pair(self.lark.rule(text), is_required=name in names)

    def other_schema(self, schema: JsonDict) -> JsonValue | None:
        """The schema of unnamed properties; None where some are named: one could come twice."""
        others = schema.get("additionalProperties", True)
        return None if others is False or schema.get("properties") else others

    def embedded(self, schema: JsonValue) -> str:
        """The rule of a value that is written as JSON, with the definitions of the root schema."""
        if not isinstance(schema, dict):
            schema = {"allOf": [schema]}
        shared = {name: each for name, each in self.root.items() if name.startswith(_SHARED)}
        return self.lark.json(shared | schema)

    def any_value(self) -> str:
        """The rule of any value."""
        if "" not in self._shared:
            self._shared[""] = name = self.lark.new_name("any_value")
            types = ("string", "number", "boolean", "null", "array", "object")
            self.lark.define(name, self.lark.one_of([self._typed(type, {}, "") for type in types]))
        return self._shared[""]


@dataclass(frozen=True, slots=True)
class Pair:
    """A property with its name and its value."""

    rule: str
    is_required: bool
    #: Whether it may come several times, under different names.
    is_repeated: bool = False


def joined(lark: Lark, pairs: Sequence[Pair], comma: str) -> str:
    """The rule of an object's inside: the pairs in their order, without those that are left out."""
    if not comma:
        marks = {(True, False): "", (False, False): "?", (False, True): "*"}
        return " ".join(
            [f"{each.rule}{marks[each.is_required, each.is_repeated]}" for each in pairs]
        )
    separator = lark.literal(comma)
    #: Rules of the pairs from here on, where none has been written, and where one has.
    first, later = '""', '""'
    for pair in reversed(pairs):
        one = f"{pair.rule} ({separator} {pair.rule})*" if pair.is_repeated else pair.rule
        begun = f"{one} {later}"
        followed = f"{separator} {one} {later}"
        if pair.is_required:
            first, later = lark.rule(begun), lark.rule(followed)
        else:
            first = lark.rule(lark.one_of([begun, first]))
            later = lark.rule(lark.one_of([followed, later]))
    return first


def _with_type(schema: JsonDict) -> JsonDict:
    """A schema that says the type which its keywords are about."""
    if "type" in schema:
        return schema
    about = {
        "object": ("properties", "required", "additionalProperties"),
        "array": ("items", "minItems", "maxItems"),
        "string": ("minLength", "maxLength", "pattern", "format"),
        "number": _NUMBERS,
    }
    for type, keywords in about.items():
        if any(keyword in schema for keyword in keywords):
            return schema | {"type": type}
    return schema


def _bounds(schema: JsonDict, least: str, most: str) -> tuple[int, int | None]:
    bounds = [
        int(value) if isinstance(value := schema.get(name), int | float) else None
        for name in (least, most)
    ]
    return bounds[0] or 0, bounds[1]


def _times(least: int, most: int | None) -> str:
    """A quantifier of a grammar."""
    if most is None:
        return "*" if not least else f"{{{least},}}"
    return f"{{{least},{most}}}"


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []


def assertions(
    schema: JsonValue, root: JsonDict, place: str, steps: Steps | None = None
) -> list[str]:
    """JSON pointers to the keywords that restrict a value beyond its type."""
    steps = steps or new_steps()
    places: list[str] = []
    for keyword, value in schema.items() if isinstance(schema, dict) else ():
        inner = f"{place}/{keyword}"
        if keyword in ("anyOf", "oneOf", "allOf"):
            for number, part in enumerate(_list(value)):
                places += assertions(part, root, f"{inner}/{number}", steps)
        elif keyword == "$ref":
            is_known = next(steps, None) is not None
            if not is_known or assertions(resolved(root, str(value)), root, "", steps):
                places.append(inner)
        elif keyword != "type" and keyword not in _NOTES:
            places.append(inner)
    return places
