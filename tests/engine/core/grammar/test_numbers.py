"""Numbers in JSON end: what float64 and int64 need can be written, and no digits for ever."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from grammars import BYTES
from hypothesis import given
from hypothesis import strategies as st

from jitney.engine.common.requests import Grammar
from jitney.engine.core.grammar import grammar
from jitney.engine.core.grammar.matchers import GrammarMatcher, Matchers
from jitney.engine.core.grammar.numbers import NumberEnds

MATCHERS = Matchers(BYTES)


def longest(wanted: Grammar, text: str) -> str:
    """So much of a text as its grammar lets a model write."""
    MATCHERS.begin(wanted)
    while (maker := MATCHERS.maker(wanted)) is None:
        pass
    place: GrammarMatcher = maker()
    data = list(text.encode())
    for at, byte in enumerate(data):
        place.take(data[:at], 0)
        masks = MATCHERS.masks(1)
        goes_on = MATCHERS.fill(place, masks, 0, may_end=True)
        if not goes_on or not masks[0].view(np.uint32)[byte // 32] >> np.uint32(byte % 32) & 1:
            return text[:at]
    return text


OBJECT = Grammar("json_object")
CALL = Grammar("lark", 'start: "<call>" %json {"type": "object"}')


@pytest.mark.parametrize("number", [-(2**63), 2**63 - 1, 2**64 - 1, 0, -7])
def test_integers_of_64_bits_can_be_written(number: int):
    text = json.dumps({"n": number})
    assert longest(OBJECT, text) == text


@given(st.binary(min_size=8, max_size=8))
def test_every_float64_can_be_written(data: bytes):
    [number] = struct.unpack("d", data)
    if number - number == 0:  # neither infinite nor no number
        text = json.dumps([number, {"n": number}])
        assert longest(grammar.schema_grammar({}), text) == text


@pytest.mark.parametrize(
    "opening", ['{"n":', '{"n":-', '{"n":0.', '{"n":[1,2.5e-', '{"a":"b","n":7']
)
@pytest.mark.parametrize("wanted", [OBJECT, CALL, grammar.schema_grammar({"type": "object"})])
def test_no_number_has_digits_for_ever(wanted: Grammar, opening: str):
    start = "<call>" if wanted is CALL else ""
    written = longest(wanted, start + opening + "3" * 400)
    assert len(written) <= len(start + opening) + 22
    assert longest(wanted, written + ("]}" if "[" in opening else "}")).endswith("}")


TEXTS: list[Any] = [{}, {"type": "string"}, {"type": "string", "pattern": "^[0-9]+$"}]


@pytest.mark.parametrize("schema", TEXTS)
def test_digits_in_texts_are_free(schema: Any):
    text = json.dumps({"n": "4" * 60})
    assert longest(grammar.schema_grammar({"additionalProperties": schema}), text) == text


def test_a_number_that_must_go_on_does():
    """And what is no JSON is what its own grammar says."""
    digits = np.zeros(9, np.int32)
    digits[1] = 0x03FF << 16  # the bytes of "0" to "9"
    mask = digits.copy()
    ends = NumberEnds(BYTES)
    ends.apply(b"1" * 22, mask)
    assert (mask == digits).all()
    mask[1] |= 1 << 12  # a comma
    ends.apply(b"1" * 22, mask)
    assert mask[1] == 1 << 12
    assert longest(Grammar("regex", "[0-9]+"), "5" * 60) == "5" * 60


def test_blanks_indent_eight_levels_and_end():
    deep: Any = "x"
    for _ in range(8):
        deep = {"a": deep}
    for indent in (None, 2, 4, "\t"):
        text = json.dumps(deep, indent=indent)
        assert longest(OBJECT, text) == text
    for blanks in ("  ", "\n\n", "\n" + " " * 33, "\n \n", "\t\t", " \n\t\t "):
        assert longest(OBJECT, "{" + blanks) == "{" + blanks[:-1]
