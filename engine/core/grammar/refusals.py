"""Errors of refused grammars."""

from __future__ import annotations

from jitney.engine.common.errors import RequestError

#: Most characters of a reason.
_MOST_REASON = 200
#: Words of llguidance's errors about its limits.
_LIMIT_WORDS = ("too many", "too large", "too big", "limit", "fuel", "toocomplex", "too complex")
#: Start of llguidance's error if no token is allowed.
NO_TOKEN = "NoExtension"
#: Text of llguidance's errors -> text for authors of schemas.
_REWORDED = {
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with "
    "anyOf": "oneOf is only possible where no value can fit two of its schemas, such as objects "
    "that require a property of another constant; anyOf always is",
    "Unimplemented keys": "keywords that cannot be enforced",
}


def bad_grammar(reason: str) -> RequestError:
    """The error of a grammar that cannot be used."""
    return refused("the grammar cannot be used", reason)


def refused(what: str, reason: str, param: str | None = None) -> RequestError:
    """The error "what: reason"; the reason may be llguidance's."""
    line = "it matches no text" if reason.startswith(NO_TOKEN) else " ".join(reason.split())
    code = "invalid_value"
    if any([words in line.lower() for words in _LIMIT_WORDS]):
        code = "grammar_too_complex"
    for theirs, ours in _REWORDED.items():
        line = line.replace(theirs, ours)
    if len(line) > _MOST_REASON:
        line = line[:_MOST_REASON] + "..."
    return RequestError(f"{what}: {line}", code=code, param=param)
