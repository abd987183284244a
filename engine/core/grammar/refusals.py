"""How a grammar is refused."""

from __future__ import annotations

from jitney.engine.common.errors import RequestError

#: Most characters of the reason that are told.
_MOST_REASON = 200
#: How llguidance begins the account of a limit that was met.
_LIMIT_WORDS = ("too many", "too large", "too big", "limit", "fuel", "toocomplex", "too complex")
#: How llguidance says that no token may come.
NO_TOKEN = "NoExtension"
#: What llguidance says to those who call it, and what it means for those who write a schema.
_SAID_OTHERWISE = {
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with "
    "anyOf": "oneOf is only possible where no value can fit two of its schemas, such as objects "
    "that require a property of another constant; anyOf always is",
    "Unimplemented keys": "keywords that cannot be enforced",
}


def bad_grammar(reason: str) -> RequestError:
    """A grammar cannot be used."""
    return refused("the grammar cannot be used", reason)


def refused(what: str, reason: str, param: str | None = None) -> RequestError:
    """Something cannot be used, for a reason that llguidance or we give."""
    line = "it matches no text" if reason.startswith(NO_TOKEN) else " ".join(reason.split())
    code = "invalid_value"
    if any([words in line.lower() for words in _LIMIT_WORDS]):
        code = "grammar_too_complex"
    for said, meant in _SAID_OTHERWISE.items():
        line = line.replace(said, meant)
    if len(line) > _MOST_REASON:
        line = line[:_MOST_REASON] + "..."
    return RequestError(f"{what}: {line}", code=code, param=param)
