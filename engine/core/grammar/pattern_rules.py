"""Translates patterns of JSON schemas from ECMAScript to Rust's `regex`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

#: White space and line terminators (ECMA-262, 12.2 and 12.3).
_SPACES = r"\t-\r \u00A0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_NO_END_OF_LINE = r"[^\n\r\u2028\u2029]"
#: A word of a pattern, outside of brackets and inside.
_OUTSIDE_BRACKETS = re.compile(r"\\.|\[\^?\]?|\(\?<?[=!]|.|\\", re.DOTALL)
_IN_BRACKETS = re.compile(r"\\.|&&|--|~~|.|\\", re.DOTALL)
#: Words with another meaning in Rust, outside of brackets.
_OTHERWISE = {
    ".": _NO_END_OF_LINE,
    r"\<": "<",
    r"\>": ">",
    "[]": r"[^\x00-\x{10FFFF}]",
    "[^]": r"[\x00-\x{10FFFF}]",
}
#: Inside of brackets: nested sets and set operators.
_OTHERWISE_IN_BRACKETS = {"[": r"\[", "&&": r"&\&", "~~": r"~\~", "--": r"-\-"}
_SPACE_SETS = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}
#: Assertions, which llguidance does not support.
_LOOK_AROUND = frozenset({"(?=", "(?!", "(?<=", "(?<!"})
_BOUNDARIES = frozenset({r"\b", r"\B"})
_QUANTIFIER = re.compile(r"(?:(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??)?")


def rust_pattern(pattern: str) -> str:
    """A pattern for Rust's `regex` that matches like ECMAScript's; look-around and backreferences
    are left in, and Rust refuses them.
    """
    made: list[str] = []
    for word in _words(pattern):
        made.append(_rust_word(word.text, made[-1] if made else "", inside=word.in_brackets))
    return "".join(made)


def without_assertions(pattern: str) -> str:
    """A wider pattern, without look-around and boundaries and their quantifiers."""
    texts: list[str] = []
    #: Open parentheses inside of a look-around.
    depth = 0
    #: End of the last assertion and its quantifier.
    end = 0
    for word in _words(pattern):
        is_group = not word.in_brackets and (depth > 0 or word.text in _LOOK_AROUND)
        if is_group:
            depth += word.text.startswith("(") - (word.text == ")")
        is_boundary = word.text in _BOUNDARIES and not word.in_brackets
        if (is_group and not depth) or is_boundary:
            quantifier = _QUANTIFIER.match(pattern, word.end)
            assert quantifier is not None  # it may be empty
            end = quantifier.end()
        elif not depth and word.end > end:
            texts.append(word.text)
    return "".join(texts)


class _Word(NamedTuple):
    """One or several characters of a pattern with one meaning."""

    text: str
    #: End position in the pattern.
    end: int
    in_brackets: bool


def _words(pattern: str) -> Iterator[_Word]:
    inside = False
    at = 0
    while at < len(pattern):
        word = (_IN_BRACKETS if inside else _OUTSIDE_BRACKETS).match(pattern, at)
        assert word is not None  # any character is a word
        text, at = word[0], word.end()
        yield _Word(text, at, inside)
        inside = text != "]" if inside else text in ("[", "[^")


def _rust_word(word: str, before: str, *, inside: bool) -> str:
    """Translate a word; before: the translation of the word before."""
    if word in _SPACE_SETS:
        return _SPACE_SETS[word]
    if not inside:
        return _OTHERWISE.get(word, word)
    if word == "--" and before in ("[", "[^"):
        return r"\--"  # a range that begins with it; elsewhere it ends one
    return _OTHERWISE_IN_BRACKETS.get(word, word)
