"""The state of one HTTP request while it is answered."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from jitney.engine.server.http.errors import ErrorForm

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from jitney.engine.server.http.quotas import Spending
    from jitney.engine.server.http.routing import HttpRoute


#: Most entries of a note's header, and characters of each.
_MOST_NOTES = 20
_NOTE_CHARS = 160
_UNPRINTABLE = re.compile(r"[^ -+\--~]")  # nor a comma, which separates notes


@dataclass(frozen=True, slots=True)
class Notes:
    """Deviations from the request, reported to the client; each list is one response header."""

    #: `x-ignored-params`: fields of the body that change nothing here.
    ignored: list[str] = field(default_factory=list)
    #: `x-unenforced-schema`: JSON pointers to schema keywords that are not enforced.
    unenforced: list[str] = field(default_factory=list)
    #: `x-jitney-warnings`: changes made to the conversation before the model read it.
    warnings: list[str] = field(default_factory=list)

    WARNINGS: ClassVar[str] = "x-jitney-warnings"
    HEADERS: ClassVar[tuple[str, ...]] = ("x-ignored-params", "x-unenforced-schema", WARNINGS)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response headers with lower-case names; empty ones are left out."""
        lists = (self.ignored, self.unenforced, self.warnings)
        made: list[tuple[bytes, bytes]] = []
        for name, notes in zip(self.HEADERS, lists, strict=True):
            if notes:
                value = ", ".join([_header_text(note) for note in notes[:_MOST_NOTES]])
                made.append((name.encode(), value.encode()))
        return made


def _header_text(note: str) -> str:
    """A note in characters that a header allows, without a blank at its end; may be empty."""
    return _UNPRINTABLE.sub("?", note[:_NOTE_CHARS]).strip() or "?"


@dataclass(slots=True)
class Context:
    """One HTTP request as the middleware and the log see it; in the ASGI scope under "jitney"."""

    #: Form of a client's name for a request, or for a session.
    SAFE_ID: ClassVar[re.Pattern[str]] = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")

    request_id: str
    #: Its line in the table of routes; None if it has none.
    route: HttpRoute | None = None
    #: How its errors are written.
    error_form: ErrorForm = ErrorForm.OPENAI
    #: time.monotonic() of its arrival.
    started: float = field(default_factory=time.monotonic)
    #: Digest of the key it came with.
    tenant: str = ""
    #: Status of the answer; 0 before it begins.
    status: int = 0
    #: Written by the generation routes, for the log.
    prompt_tokens: int = 0
    completion_tokens: int = 0
    #: The client went away before the answer was complete.
    left: bool = False
    #: No client waits for it: it is a line of a batch, of ours or of a fleet's (`background`).
    background: bool = False
    #: Another engine of the fleet admitted it before that engine was lost (`background`).
    admitted: bool = False
    #: Its share of its key's token budget, while it runs.
    spending: Spending | None = None
    #: The router's id of its conversation; empty: none.
    session_id: str = ""
    #: Span of OpenTelemetry; None where that is off.
    span: Span | None = None
    #: Ends the answer early with an error of its own; None: the request is cancelled instead.
    end: Callable[[Exception], None] | None = None
    #: Written while the request is read; sent with the answer's headers.
    notes: Notes = field(default_factory=Notes)

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> Context:
        """The context of a request, or of its scope."""
        return scope["jitney"]

    @property
    def elapsed_ms(self) -> float:
        return (time.monotonic() - self.started) * 1000
