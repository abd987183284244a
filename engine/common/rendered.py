"""The text of a template that a worker process renders, or why there is none."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from jitney.engine.common.worker_pipe import time_limit

#: Most characters of a template's error in a message.
_MOST_REASON = 200


class Rendered(msgspec.Struct, frozen=True):
    """The rendered text, or why there is none."""

    text: str = ""
    #: The template's error.
    refusal: str = ""
    #: Length of a text that is too long, else 0.
    too_long: int = 0

    @classmethod
    def within(cls, make: Callable[[], str], limit_s: float, most_chars: int) -> Rendered:
        """Render a text. The process ends if that takes longer than limit_s seconds."""
        try:
            with time_limit(limit_s):
                text = make()
        except Exception as error:  # a template may raise anything: jinja2's errors, TypeError, ...
            return cls(refusal=reason_of(error) or type(error).__name__)
        if len(text) > most_chars:
            return cls(too_long=len(text))
        return cls(text)


def reason_of(error: Exception) -> str:
    """A template's error in one line, for clients."""
    return " ".join(str(error).split())[:_MOST_REASON]
