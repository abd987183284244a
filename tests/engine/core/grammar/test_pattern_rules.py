"""Patterns as ECMAScript means them: what may be written under each, byte by byte."""

from __future__ import annotations

import json
import re

import pytest
from grammars import may_be_written
from hypothesis import given
from hypothesis import strategies as st

from jitney.engine.core.grammar.pattern_rules import rust_pattern, without_assertions


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^\S$", ["a"], ["\ufeff", "\u2003", "\n"]),
        (r"^[^\s]$", ["a", "\u0085"], ["\ufeff", " "]),
        (r"^.$", ["a", "é"], ["\n", "\r", "\u2028"]),
        (r"^[.]$", ["."], ["a"]),
        (r"^[[a]$", ["[", "a"], ["b"]),
        (r"^[^a&&b]$", ["c"], ["a", "b", "&"]),
        (r"^[+--]$", ["+", ",", "-"], ["."]),
        (r"^[--0]$", ["-", ".", "0"], ["1"]),
        (r"^\<a\>$", ["<a>"], ["a"]),
        (r"^[^]$", ["\n", "a"], ["ab"]),
        (r"^[\]\\]$", ["]", "\\"], ["a"]),
        (r"^\d\w$", ["1a"], ["١a", "1é"]),
    ],
)
def test_patterns_mean_what_ecmascript_means(pattern: str, right: list[str], wrong: list[str]):
    texts = [json.dumps(text, ensure_ascii=False) for text in right + wrong]
    wanted = [True] * len(right) + [False] * len(wrong)
    assert may_be_written({"type": "string", "pattern": pattern}, *texts) == wanted


@given(st.text("ab[]^-&\\.s~{}()*+?|$", max_size=12))
def test_a_pattern_is_read_to_its_end(pattern: str):
    made = rust_pattern(pattern)
    assert re.sub(r"\\.", "", pattern).count("(") == re.sub(r"\\.", "", made).count("(")


@pytest.mark.parametrize(
    ("pattern", "rest"),
    [
        (r"^(?!.*\.\.)a$", r"^a$"),
        (r"^(?=[)\]]|(b|c))*x(?<!y)\b+z$", r"^xz$"),
        (r"(?<name>a)(?:b)", r"(?<name>a)(?:b)"),
        (r"[(?=a)\b]\\b", r"[(?=a)\b]\\b"),
        (r"a(?=b){2,3}?c", "ac"),
    ],
)
def test_conditions_on_what_stands_around_are_taken_out_whole(pattern: str, rest: str):
    assert without_assertions(pattern) == rest


_PIECES = st.lists(
    st.sampled_from(["a", "b", "(?=a)", "(?!b)", r"\b", "(a|b)", "[ab]", "(?<=a)", "(?=(a|b)c)"]),
    max_size=6,
)


@given(_PIECES, st.text("abc", max_size=6))
def test_a_pattern_without_conditions_matches_no_less(pieces: list[str], text: str):
    pattern = "".join(pieces)
    if re.search(pattern, text):
        assert re.search(without_assertions(pattern), text)
