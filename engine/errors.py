"""Every error that Jitney raises on purpose.

One rule: an error names what was wrong and what to do about it, in one line, without paths or
addresses of this machine unless the reader is the one who typed them.
"""

from __future__ import annotations

import msgspec


class JitneyError(Exception):
    """Base of all errors raised on purpose; `str(error)` is one line fit for a person."""


class ConfigError(JitneyError):
    """A setting is unknown, out of range or contradicts another; raised before anything starts."""


class ModelError(JitneyError):
    """A model cannot be found, read or run: missing tensors, unknown architecture, unsafe files."""


class EngineDead(JitneyError):
    """The core process is gone; open requests have been ended."""


class ErrorInfo(msgspec.Struct, frozen=True):
    """A request-scoped error as it crosses the process boundary."""

    #: One of CODES.
    code: str
    #: One line.
    message: str
    #: Dotted path of the offending field, if one is to blame.
    param: str | None = None
    #: Seconds until a retry is worthwhile, if that is known.
    retry_after: float | None = None


#: Every code a request can end with; `engine.api.errors` gives each its HTTP status.
_CODES = (
    "invalid_value",
    "context_length_exceeded",
    "unsupported_parameter",
    "grammar_too_complex",
    "queue_full",
    "rate_limit",
    "draining",
    "loading",
    "restarting",
    "sleeping",
    "busy",
    "engine_dead",
    "deadline_exceeded",
    "deadline_unreachable",
    "nan_logits",
    "request_failed",
    "request_quarantined",
    "internal_error",
)


class RequestError(JitneyError):
    """One request cannot be served; the engine and its neighbours are fine."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_value",
        param: str | None = None,
        retry_after: float | None = None,
    ):
        assert code in _CODES, code
        super().__init__(message)
        self.info = ErrorInfo(code=code, message=message, param=param, retry_after=retry_after)

    @classmethod
    def from_info(cls, info: ErrorInfo) -> RequestError:
        return cls(info.message, code=info.code, param=info.param, retry_after=info.retry_after)

    def blaming(self, param: str | None) -> RequestError:
        """The same error, blamed on another field."""
        return RequestError(str(self), code=self.info.code, param=param)
