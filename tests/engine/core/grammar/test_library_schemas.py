"""Schemas as pydantic and zod 4 write them: none is refused unless it is strict, and what may be
written fits the client's own schema. What is right is decided by jsonschema.
"""

from __future__ import annotations

import json
import re
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import pydantic
import pytest
from grammars import BYTES, accepts, written
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, create_model
from schemas import SCHEMAS

from jitney.engine.common.schema_tree import children
from jitney.engine.core.grammar import grammar
from jitney.engine.core.grammar.compiling import checked, new_matcher
from jitney.engine.core.grammar.terms import Terms


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str | None = None


class Tree(BaseModel):
    value: int
    kids: list[Tree] = []


class Point(NamedTuple):
    x: int
    y: float = 0.0


class Film(TypedDict, total=False):
    title: str
    year: int


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


PYDANTIC: dict[str, Any] = {
    "any": Any,
    "aware": pydantic.AwareDatetime,
    "base64 bytes": pydantic.Base64Bytes,
    "base64 text": pydantic.Base64Str,
    "bool": bool,
    "byte size": pydantic.ByteSize,
    "bytes": bytes,
    "choice of models": Annotated[Cat | Dog, Field(discriminator="kind")],
    "date": date,
    "datetime": datetime,
    "decimal": Decimal,
    "dict": dict[str, Any],
    "dict of models": dict[str, Cat],
    "dict with enum": dict[Colour, int],
    "dict with integers": dict[int, str],
    "dict with names": dict[Literal["a", "b"], int],
    "dict with pattern": dict[Annotated[str, StringConstraints(pattern="^[a-z]+$")], int],
    "enum": Colour,
    "file": pydantic.FilePath,
    "float": float,
    "frozenset": frozenset[int],
    "http url": pydantic.HttpUrl,
    "int": int,
    "int enum": Level,
    "int of 64 bits": Annotated[int, Field(ge=-(2**63), le=2**63 - 1)],
    "ip": pydantic.IPvAnyAddress,
    "ipv4": IPv4Address,
    "ipv6": IPv6Address,
    "json": pydantic.Json[Any],
    "list of models": list[Cat],
    "literal": Literal["a", 1, None],
    "named tuple": Point,
    "network": IPv4Network,
    "none": None,
    "open model": Open,
    "optional": int | None,
    "path": Path,
    "pattern": Annotated[str, Field(pattern=r"^\d{3}$")],
    "positive": pydantic.PositiveInt,
    "regex": re.Pattern[str],
    "secret": pydantic.SecretStr,
    "set": set[str],
    "set of booleans": set[bool],
    "set of enum": set[Colour],
    "set of names": set[Literal["x", "y"]],
    "step": Annotated[int, Field(multiple_of=5)],
    "str": str,
    "time": time,
    "timedelta": timedelta,
    "tree": Tree,
    "tuple": tuple[int, str],
    "tuples": tuple[int, ...],
    "typed dict": Film,
    "union": Cat | Dog | int,
    "url": pydantic.AnyUrl,
    "uuid": UUID,
    "uuid4": pydantic.UUID4,
    "within": Annotated[int, Field(ge=0, lt=10)],
}
ZOD = json.loads((Path(__file__).parents[3] / "data" / "zod_schemas.json").read_text())
CASES: dict[str, dict[str, Any]] = {
    **{
        f"pydantic: {name}": create_model("Answer", value=(kind, ...)).model_json_schema()
        for name, kind in PYDANTIC.items()
    },
    **{f"zod: {name}": schema for name, schema in ZOD.items()},
}
#: Those of which something cannot be enforced, and what.
PARTLY = {
    "pydantic: frozenset": "uniqueItems",
    "pydantic: set": "uniqueItems",
    "zod: duration": "pattern",
    "zod: emoji": "pattern",
    "zod: hostname": "pattern",
}


def enforced(schema: dict[str, Any]) -> tuple[LLMatcher, list[str]]:
    """As far as possible: what may be written, and pointers to what is left out."""
    ready = checked(grammar.schema_grammar(schema, Terms(strict=False, closed=True)), BYTES)
    return new_matcher(ready.grammar, BYTES), ready.left_out


def without(schema: Any, pointers: list[str]) -> Any:
    """A schema without what stands at some places."""
    made = json.loads(json.dumps(schema))
    for pointer in pointers:
        *steps, last = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")]
        place = made
        for step in steps[1:]:
            place = place[int(step) if isinstance(place, list) else step]
        place.pop(last, None)
    return made


@pytest.mark.parametrize("name", CASES)
def test_what_may_be_written_fits(name: str):
    schema = CASES[name]
    matcher, left_out = enforced(schema)
    kept = [PARTLY[name]] if name in PARTLY else []
    assert [pointer.rpartition("/")[2] for pointer in left_out] == kept
    validator = Draft202012Validator(without(schema, left_out))
    for seed in range(8):
        validator.validate(json.loads(written(matcher, Random(seed))))


def test_a_small_model_invents_no_properties():
    """Neither in the model itself nor in those inside of it."""
    matcher, _ = enforced(CASES["pydantic: list of models"])
    assert accepts(matcher, '{"value":[{"kind":"cat","lives":9}]}')
    assert not accepts(matcher, '{"value":[{"kind":"cat","lives":9,"tail":1}]}')
    assert not accepts(matcher, '{"value":[],"more":1}')


#: Keywords that cannot be enforced everywhere, or at all.
HARD: list[dict[str, Any]] = [
    {"not": {"const": 1}},
    {"not": {"required": ["a"]}},
    {"if": {"required": ["a"]}, "then": {"maxProperties": 2}, "else": {"minProperties": 1}},
    {"contains": {"type": "integer"}},
    {"uniqueItems": True},
    {"propertyNames": {"pattern": "^[a-x ]", "maxLength": 9}},
    {"minProperties": 2},
    {"maxProperties": 2},
    {"dependentRequired": {"a": ["b"]}},
    {"oneOf": [{"type": ["object", "string"]}, {"type": ["array", "string"], "minItems": 1}]},
    {"anyOf": [{"not": {"type": "null"}}, {"maxLength": 2}]},
    {"type": ["object", "any"]},
    {"pattern": "^(?!x).*$"},
    {"pattern": "("},
    {"$ref": "http://example.com/nowhere"},
]


@st.composite
def hard_schemas(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema that can be enforced, and the same with hard keywords in some places."""
    easy = draw(SCHEMAS)
    hard = json.loads(json.dumps(easy))
    places = [hard, *_inside(hard)]
    for place in draw(st.lists(st.sampled_from(places), min_size=1, max_size=3)):
        place |= draw(st.sampled_from([{key: each[key] for key in each} for each in HARD]))
    return easy, hard


def _inside(schema: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for _, child in children(schema):
        if isinstance(child, dict):
            found += [child, *_inside(child)]
    return found


@settings(max_examples=150, derandomize=True)
@given(hard_schemas(), st.integers(0, 2**32))
def test_leaving_out_allows_more_and_never_less(
    pair: tuple[dict[str, Any], dict[str, Any]], seed: int
):
    """What the easy schema allows and the hard one does not exclude may be written; what may be
    written fits the hard one without what was left out.
    """
    easy, hard = pair
    matcher, left_out = enforced(hard)
    plain = new_matcher(grammar.schema_grammar(easy), BYTES)
    text = written(plain, Random(seed))
    if _is_valid(json.loads(text), hard):
        assert accepts(matcher, text), (text, left_out)
    if not left_out:
        assert _is_valid(json.loads(written(matcher, Random(seed))), hard)


def _is_valid(instance: Any, schema: dict[str, Any]) -> bool:
    """Unknown types and references fit nothing here, and so do broken patterns."""
    try:
        return Draft202012Validator(schema).is_valid(instance)
    except Exception:  # of several libraries
        return False
