"""The table of errors, and their conversion into responses."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import msgspec
from msgspec import UNSET
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jitney.engine.common.errors import (
    CODES,
    ContextOverflow,
    ErrorInfo,
    JitneyError,
    RequestError,
)
from jitney.engine.common.requests import JsonDict
from jitney.engine.server.http.answers import Maybe, ResponseModel

_log = logging.getLogger("jitney.api")

#: Most characters of a message, quoted input included.
_MESSAGE_LIMIT = 1000
#: Most characters of a client's own input that any message repeats.
_ECHO_LIMIT = 200

#: HTTP status -> error type; else server_error from 500 on, and invalid_request_error.
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
#: The same in Anthropic's form; else api_error from 500 on, and invalid_request_error.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: The code of a request that is longer than the context.
_TOO_LONG: Literal["context_length_exceeded"] = "context_length_exceeded"
#: Codes of request errors that clients do not see, as OpenAI has none there.
_NOT_SHOWN = ("invalid_value", "model_not_found")
#: Messages for errors of the router, by status.
_ROUTER = {404: ("no such route", "not_found"), 405: ("this route does not take that method", None)}
#: Anthropic's routes, those that both APIs have, those of stored responses; what the paths of
#: Ollama's begin with.
_MESSAGES = "/v1/messages"
_MODELS = "/v1/models"
_RESPONSES = "/v1/responses"
_OLLAMA = "/api/"


class ErrorForm(Enum):
    """The API whose error form a client reads; also the answer's form on routes of two APIs."""

    #: {"error": {"message", "type", "param", "code"}}
    OPENAI = "openai"
    #: {"type": "error", "error": {"type", "message"}, "request_id"}
    ANTHROPIC = "anthropic"
    #: {"error": text}
    OLLAMA = "ollama"

    @classmethod
    def of(cls, path: str, *, names_version: bool = False) -> ErrorForm:
        """The form of a path's answers. names_version: with anthropic-version, for shared paths."""
        is_shared = path == _MODELS or path.startswith(_MODELS + "/")
        is_own = path == _MESSAGES or path.startswith(_MESSAGES + "/")
        if is_own or (is_shared and names_version):
            return cls.ANTHROPIC
        return cls.OLLAMA if path.startswith(_OLLAMA) else cls.OPENAI


class Error(ResponseModel):
    """The problem and its remedy."""

    message: str
    type: str
    #: Dotted path of the field at fault.
    param: str | None
    code: str | None


class ErrorAnswer(ResponseModel):
    """The body of every answer that is an error."""

    error: Error


class AnthropicError(ResponseModel):
    """The problem and its remedy. details: facts by which a client can recover, where there are
    any. code: only for a prompt that is too long.
    """

    type: str
    message: str
    details: Maybe[JsonDict] = UNSET
    code: Maybe[Literal["context_length_exceeded"]] = UNSET


class AnthropicErrorAnswer(ResponseModel, tag_field="type", tag="error"):
    """The body of an error below /v1/messages."""

    error: AnthropicError
    request_id: str


class OllamaErrorAnswer(ResponseModel):
    """The body of an error below /api/."""

    error: str


class HttpError(JitneyError):
    """A refusal by the HTTP side. close: the connection is unusable (unread body)."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        close: bool = False,
        details: JsonDict | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.details = details
        if close:
            self.headers["connection"] = "close"

    @classmethod
    def no_model(cls, name: str, hint: str = "") -> HttpError:
        """HttpError 404 for an unknown model. hint: text after the name."""
        return cls(404, f"no model {echo(name)}{hint}", code="model_not_found", param="model")

    @classmethod
    def missing(
        cls, what: str, name: object, *, code: str = "not_found", param: str | None = None
    ) -> HttpError:
        """HttpError 404 for a thing that a client names. what: its kind."""
        return cls(404, f"no {what} {echo(name)}", code=code, param=param)


@dataclass(slots=True)
class ErrorReply:
    """The answer to an exception."""

    request_id: str
    status: int
    message: str
    code: str | None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    details: JsonDict | None = None
    #: Facts of a request that is longer than the context.
    overflow: ContextOverflow | None = None

    @classmethod
    def of(cls, error: BaseException, request_id: str) -> ErrorReply:
        """The answer to an exception; a bare 500 for those that are not raised on purpose."""
        match error:
            case HttpError():
                return cls(
                    request_id,
                    error.status,
                    str(error),
                    error.code,
                    error.param,
                    error.headers,
                    error.details,
                )
            case RequestError(info=info) if info.code != "internal_error":
                return _refusal(info, request_id)
            case HTTPException():
                return _router_reply(error, request_id)
        if not isinstance(error, RequestError):
            _log.error("request %s failed", request_id, exc_info=error)
        message = f"internal error; the log names it by request id {request_id}"
        return cls(request_id, 500, message, "internal_error")

    def response(self, form: ErrorForm = ErrorForm.OPENAI) -> Response:
        """The whole response."""
        return Response(self.json(form), self.status, self.headers, "application/json")

    def json(self, form: ErrorForm) -> bytes:
        """The error body in this form."""
        match form:
            case ErrorForm.OPENAI:
                body = self.openai()
            case ErrorForm.ANTHROPIC:
                body = self.anthropic()
            case ErrorForm.OLLAMA:
                body = OllamaErrorAnswer(self._naming_param()[:_MESSAGE_LIMIT])
        return msgspec.json.encode(body)

    def event(self) -> bytes:
        """The error as one SSE event, for a stream that has already begun."""
        return b"data: " + self.json(ErrorForm.OPENAI) + b"\n\n"

    def stream_end(self, path: str) -> bytes:
        """The end of a stream of this path that failed between an engine and its client."""
        form = ErrorForm.of(path)
        if form is ErrorForm.OLLAMA:
            return self.json(form) + b"\n"
        if form is ErrorForm.ANTHROPIC:
            return b"event: error\ndata: " + self.json(form) + b"\n\n"
        if path.startswith(_RESPONSES):
            error = msgspec.structs.replace(self.openai().error, type="error")
            return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"
        return self.event() + b"data: [DONE]\n\n"

    def openai(self) -> ErrorAnswer:
        error = Error(
            message=self.message[:_MESSAGE_LIMIT],
            type=self._type(_TYPES, "server_error"),
            param=None if self.param is None else self.param[:_ECHO_LIMIT],
            code=self.code,
        )
        return ErrorAnswer(error)

    def _naming_param(self) -> str:
        if self.param is None or self.param in self.message:
            return self.message
        return f"{self.param[:_ECHO_LIMIT]}: {self.message}"

    def _type(self, types: Mapping[int, str], ours: str) -> str:
        """types: by status. ours: of errors that are the server's."""
        other = ours if self.status >= 500 else "invalid_request_error"
        return types.get(self.status, other)

    def anthropic(self) -> AnthropicErrorAnswer:
        """Anthropic's form: the message names the field; the only code is the one that opencode
        reads.
        """
        message = self._naming_param()
        if self.overflow is not None:
            message = self.overflow.anthropic_message()
        error = AnthropicError(
            type=self._type(_ANTHROPIC_TYPES, "api_error"),
            message=message[:_MESSAGE_LIMIT],
            details=UNSET if self.details is None else self.details,
            code=_TOO_LONG if self.code == _TOO_LONG else UNSET,
        )
        return AnthropicErrorAnswer(error, self.request_id)


def _refusal(info: ErrorInfo, request_id: str) -> ErrorReply:
    status, pause = CODES[info.code]
    code = None if info.code in _NOT_SHOWN else info.code
    if info.retry_after is not None:
        pause = info.retry_after
    headers = {} if pause is None else _retry_headers(pause)
    return ErrorReply(
        request_id, status, info.message, code, info.param, headers, overflow=info.overflow
    )


def _retry_headers(pause_s: float) -> dict[str, str]:
    return {
        "retry-after": str(max(1, math.ceil(pause_s))),
        "retry-after-ms": str(max(1, math.ceil(pause_s * 1000))),
    }


def _router_reply(error: HTTPException, request_id: str) -> ErrorReply:
    """The router's error; allowed methods are sorted, as the router's order varies between runs."""
    message, code = _ROUTER.get(error.status_code, (error.detail, None))
    reply = ErrorReply(request_id, error.status_code, message, code)
    for name, value in (error.headers or {}).items():
        if name.lower() == "allow":
            value = ", ".join(sorted(value.split(", ")))
        reply.headers[name.lower()] = value
    return reply


def echo(value: object) -> str:
    """A client's value as a message may repeat it: printable, at most 200 characters."""
    if not isinstance(value, (int, float)):
        value = str(value)[:_ECHO_LIMIT]
    text = repr(value)
    return text if len(text) <= _ECHO_LIMIT else text[: _ECHO_LIMIT - 3] + "..."
