"""The exceptions of Jitney, and request errors as sent between processes.

An error says in one line what is wrong and what to do, without paths or addresses of this machine
unless the reader typed them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

import msgspec


class JitneyError(Exception):
    """Base of all errors; `str(error)` is one line for users."""


class ConfigError(JitneyError):
    """A setting is unknown, out of range or contradicts another; raised before anything starts."""


class ModelError(JitneyError):
    """A model cannot be found, read or run: missing tensors, unknown architecture, unsafe files."""


class EngineDead(JitneyError):
    """The core process is dead; its open requests have ended."""


#: Body fields that limit the answer's length and hold no prompt.
_ANSWER_FIELDS = ("max_tokens", "min_tokens")


class ContextOverflow(msgspec.Struct, frozen=True):
    """Numbers of a request that is longer than the context, in tokens, and its error messages.
    Clients parse these messages to shorten a conversation: LiteLLM, opencode and Continue those of
    OpenAI's API, Claude Code and Cline those of Anthropic's.
    """

    #: Most tokens of a sequence, prompt included.
    limit: int
    prompt: int
    #: Tokens requested for the answer, at least 1.
    completion: int
    #: `prompt` is a lower bound: the text was refused before it was tokenized.
    is_lower_bound: bool = False
    #: The model's context if the KV cache holds less, else 0.
    model_context: int = 0

    def openai_message(self, field: str | None) -> str:
        """The message in the words of OpenAI's API. field: the prompt's field of the body."""
        where = field if field and field not in _ANSWER_FIELDS else "prompt"
        message = (
            f"This model's maximum context length is {self.limit} tokens. However, you requested "
            f"{self.prompt + self.completion} tokens ({self.prompt} in the {where}, "
            f"{self.completion} in the completion){' or more' if self.is_lower_bound else ''}. "
            f"Please reduce the length of the {where} or completion."
        )
        if self.model_context:
            message += (
                f" The KV cache holds no more; the model's own context is {self.model_context}."
            )
        return message

    def anthropic_message(self) -> str:
        """The message in Anthropic's words, which counts the prompt alone if that is too long."""
        requested = self.prompt
        if requested <= self.limit:
            requested += self.completion
        return f"prompt is too long: {requested} tokens > {self.limit} maximum"


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error of one request, as sent between processes."""

    #: One of `CODES`.
    code: str
    #: One line.
    message: str
    #: Dotted path of the wrong field, if any.
    param: str | None = None
    #: Seconds until a retry may succeed, if known.
    retry_after: float | None = None
    #: Numbers of a context_length_exceeded, if known.
    overflow: ContextOverflow | None = None


#: Code of a request error -> (HTTP status, seconds until a retry where none are known better).
CODES: dict[str, tuple[int, float | None]] = {
    "invalid_value": (400, None),
    "model_not_found": (404, None),
    "context_length_exceeded": (400, None),
    "unsupported_parameter": (400, None),
    "grammar_too_complex": (400, None),
    "queue_full": (429, 1.0),
    "rate_limit": (429, 1.0),
    "draining": (503, 5.0),
    "loading": (503, 5.0),
    "restarting": (503, 5.0),
    "sleeping": (503, None),
    "busy": (503, 1.0),
    "engine_dead": (503, 5.0),
    "store_unavailable": (503, 10.0),
    "deadline_exceeded": (504, None),
    "deadline_unreachable": (504, None),
    "nan_logits": (500, None),
    "request_failed": (500, None),
    "request_quarantined": (400, None),
    "internal_error": (500, None),
}


def status_of(code: str) -> int:
    """The HTTP status of a request's error, by its code."""
    return CODES.get(code, CODES["internal_error"])[0]


def retry_after_s(headers: Mapping[str, str], default: float) -> float:
    """Seconds after which a refusal may be retried. headers: lower case; default: none given."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name, "")
        if value.isascii() and value.isdigit():
            return int(value) * unit
    return default


class RequestError(JitneyError):
    """One request cannot be served; the engine and other requests are unaffected."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_value",
        param: str | None = None,
        retry_after: float | None = None,
    ):
        assert code in CODES, code
        super().__init__(message)
        self.info = ErrorInfo(code=code, message=message, param=param, retry_after=retry_after)

    @classmethod
    def from_info(cls, info: ErrorInfo) -> RequestError:
        """The exception for an ErrorInfo."""
        error = cls(info.message, code=info.code, param=info.param, retry_after=info.retry_after)
        error.info = info
        return error

    @classmethod
    def too_long(cls, overflow: ContextOverflow, param: str | None) -> RequestError:
        """The error of a request longer than the context. param: the field to name."""
        code, message = "context_length_exceeded", overflow.openai_message(param)
        return cls.from_info(ErrorInfo(code, message, param, overflow=overflow))

    def blaming(self, param: str | None) -> RequestError:
        """The same error, naming another field."""
        if self.info.overflow is not None:
            return RequestError.too_long(self.info.overflow, param)
        return RequestError(str(self), code=self.info.code, param=param)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """A hint to append to the error about an unknown word: the closest of `words`, or ""."""
    close = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def unknown_word(name: str, choices: list[str]) -> str:
    """The error text for a name that is not in `choices`, with the closest one."""
    hint = did_you_mean(name, choices) or f"; known: {', '.join(choices)}"
    return f"{shortened(name)} is unknown{hint}"


def shortened(text: str) -> str:
    """A user's value as an error repeats it."""
    if len(text) <= 60:
        return text
    return text[:57] + "..."
