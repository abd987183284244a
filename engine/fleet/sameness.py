"""Whether two answers say the same."""

from __future__ import annotations

import json
import string
from collections import Counter
from contextlib import suppress

from jitney.engine.fleet.answering import text_of
from jitney.engine.types import JsonDict

_EDGES = string.punctuation + string.whitespace


def normalised(choice: JsonDict) -> str:
    """What a choice of a whole answer says, without what does not matter: case, spaces, and
    punctuation at both ends; the calls of tools by name and arguments.
    """
    words = text_of(choice).casefold().split()
    text = " ".join(words).strip(_EDGES)
    calls = (choice.get("message") or {}).get("tool_calls") or ()
    return text + "".join(f"\n{_call(call['function'])}" for call in calls)


def _call(function: JsonDict) -> str:
    arguments = function["arguments"]
    with suppress(ValueError, TypeError):  # else as it was written
        arguments = json.dumps(json.loads(arguments), sort_keys=True)
    return f"{function['name']}({arguments})"


def likeness(first: str, second: str) -> float:
    """Of two normalised texts, 0 to 1: F1 of the words that they share."""
    if first == second:
        return 1.0
    words, others = Counter(first.split()), Counter(second.split())
    shared = (words & others).total()
    return 2 * shared / (words.total() + others.total()) if shared else 0.0
