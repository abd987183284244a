"""Every error that Jitney raises on purpose.

One rule: an error names what was wrong and what to do about it, in one line, without paths or
addresses of this machine unless the reader is the one who typed them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import msgspec


class JitneyError(Exception):
    """Base of all errors raised on purpose; `str(error)` is one line fit for a person."""


class ConfigError(JitneyError):
    """A setting is unknown, out of range or contradicts another; raised before anything starts."""


class ModelError(JitneyError):
    """A model cannot be found, read or run: missing tensors, unknown architecture, unsafe files."""


class EngineDead(JitneyError):
    """The core process is gone; open requests have been ended."""


#: Fields of a body that say how long the answer may be, and hold no prompt.
_ANSWER_FIELDS = ("max_tokens", "min_tokens")


class ContextOverflow(msgspec.Struct, frozen=True):
    """A request that is longer than the context, in tokens.

    Clients compact or shorten a conversation when they read certain words, and take the numbers
    from them: those of OpenAI's API (searched for by LiteLLM, opencode, Continue) and those of
    Anthropic's (Claude Code, Cline). So the words are made here alone.
    """

    #: Most tokens of a sequence, prompt included.
    limit: int
    prompt: int
    #: Tokens that the answer is to have, or the one that it must have.
    completion: int
    #: The prompt has at least so many tokens: its text was refused before it was tokenised.
    is_lower_bound: bool = False
    #: The model's own context, where the KV cache holds less; 0 where it does not.
    model_context: int = 0

    def openai_message(self, field: str | None) -> str:
        """The message in the words of OpenAI's API. field: the one that the prompt came in."""
        where = field if field and field not in _ANSWER_FIELDS else "prompt"
        message = (
            f"This model's maximum context length is {self.limit} tokens. However, you requested "
            f"{self.prompt + self.completion} tokens ({self.prompt} in the {where}, "
            f"{self.completion} in the completion){' or more' if self.is_lower_bound else ''}. "
            f"Please reduce the length of the {where} or completion."
        )
        if self.model_context:
            message += (
                f" The KV cache has room for no more; the model itself takes {self.model_context}."
            )
        return message

    def anthropic_message(self) -> str:
        """The message in the words of Anthropic's API, which count the prompt alone if that is too
        long by itself.
        """
        requested = self.prompt
        if requested <= self.limit:
            requested += self.completion
        return f"prompt is too long: {requested} tokens > {self.limit} maximum"


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
    #: The numbers behind context_length_exceeded, where they are known.
    overflow: ContextOverflow | None = None


#: Every code a request can end with; `engine.server.http.errors` gives each its HTTP status.
_CODES = (
    "invalid_value",
    "model_not_found",
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
        """The error that an info tells of."""
        error = cls(info.message, code=info.code, param=info.param, retry_after=info.retry_after)
        error.info = info
        return error

    @classmethod
    def too_long(cls, overflow: ContextOverflow, param: str | None) -> RequestError:
        """The request needs more than the context. param: the field to blame."""
        code, message = "context_length_exceeded", overflow.openai_message(param)
        return cls.from_info(ErrorInfo(code, message, param, overflow=overflow))

    def blaming(self, param: str | None) -> RequestError:
        """The same error, blamed on another field."""
        if self.info.overflow is not None:
            return RequestError.too_long(self.info.overflow, param)
        return RequestError(str(self), code=self.info.code, param=param)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """What to add to the complaint about a word that is none of these; nothing if none is like
    it.
    """
    close = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]}?" if close else ""
