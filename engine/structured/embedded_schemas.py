"""Schemas inside of a grammar in Lark (`%json {...}`), as those of tools' arguments are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from jitney.engine.types import JsonDict

_SCHEMA = re.compile(r"%json\s*(?=\{)")
_DECODER = json.JSONDecoder()


def with_schemas(text: str, kept_to: Callable[[JsonDict], JsonDict]) -> str:
    """A grammar in Lark, with each of its schemas as `kept_to` makes it. What is no JSON is left
    for llguidance to refuse.
    """
    made: list[str] = []
    at = 0
    for found in _SCHEMA.finditer(text):
        if found.start() < at or _is_quoted(text, found.start()):
            continue
        try:
            schema, end = _DECODER.raw_decode(text, found.end())
        except (ValueError, RecursionError):
            continue
        made += [text[at : found.end()], json.dumps(kept_to(schema), ensure_ascii=False)]
        at = end
    return "".join([*made, text[at:]])


def _is_quoted(text: str, at: int) -> bool:
    """Whether a place stands in a literal, which ends in the line where it began."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return re.sub(r"\\.", "", line).count('"') % 2 == 1
