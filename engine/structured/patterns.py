"""Patterns of JSON schemas, which are ECMAScript's, in the words of Rust's `regex`, where both know
the same words and mean something else. What Rust does not have (look-around, backreferences) is
left as it is, for Rust to refuse.
"""

from __future__ import annotations

import re

#: White space and the ends of lines (ECMA-262, 12.2 and 12.3).
_SPACES = r"\t-\r \u00A0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_NO_END_OF_LINE = r"[^\n\r\u2028\u2029]"
#: One word of a pattern, outside of brackets and in them.
_OUTSIDE = re.compile(r"\\.|\[\^?\]?|.|\\", re.DOTALL)
_INSIDE = re.compile(r"\\.|&&|--|~~|.|\\", re.DOTALL)
#: Words that Rust has another meaning for, outside of brackets: the empty set, and all but it.
_OTHERWISE = {
    ".": _NO_END_OF_LINE,
    r"\<": "<",
    r"\>": ">",
    "[]": r"[^\x00-\x{10FFFF}]",
    "[^]": r"[\x00-\x{10FFFF}]",
}
#: And in them: a set in a set, and the operators of sets.
_OTHERWISE_INSIDE = {"[": r"\[", "&&": r"&\&", "~~": r"~\~", "--": r"-\-"}
_SPACE_SETS = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}


def rust_pattern(pattern: str) -> str:
    """A pattern that Rust matches as ECMAScript matches this one."""
    made: list[str] = []
    inside = False
    at = 0
    while at < len(pattern):
        found = (_INSIDE if inside else _OUTSIDE).match(pattern, at)
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
    return _OTHERWISE_INSIDE.get(word, word)
