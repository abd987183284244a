"""The one table of errors, and the one function that turns any of them into an answer."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jitney.engine.errors import ErrorInfo, JitneyError, RequestError

log = logging.getLogger("jitney.api")

#: Most characters of a message, whatever it quotes.
MESSAGE_LIMIT = 1000
#: Most characters of a client's own input that any message repeats.
ECHO_LIMIT = 200

#: HTTP status -> error type.
TYPES = {401: "authentication_error", 429: "rate_limit_error"}
#: Request error code -> (status, the code shown to the client, seconds for Retry-After when the
#: error knows none).
CODES: dict[str, tuple[int, str | None, float | None]] = {
    "invalid_value": (400, None, None),
    "context_length_exceeded": (400, "context_length_exceeded", None),
    "unsupported_parameter": (400, "unsupported_parameter", None),
    "queue_full": (429, "queue_full", 1.0),
    "rate_limit": (429, "rate_limit", 1.0),
    "draining": (503, "draining", 5.0),
    "loading": (503, "loading", 5.0),
    "engine_dead": (503, "engine_dead", 5.0),
    "deadline_exceeded": (504, "deadline_exceeded", None),
    "deadline_unreachable": (504, "deadline_unreachable", None),
    "nan_logits": (500, "nan_logits", None),
    "internal_error": (500, "internal_error", None),
}
#: Messages for what the router refuses.
ROUTER = {404: ("no such route", "not_found"), 405: ("this route does not take that method", None)}


class HttpError(JitneyError):
    """A request refused by the HTTP side itself. close: the connection is of no further use (unread
    body).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        close: bool = False,
    ):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {}) | ({"connection": "close"} if close else {})


def describe(error: BaseException, request_id: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of the answer to any exception; what we did not raise on purpose is
    a bare 500.
    """
    match error:
        case HttpError():
            return (
                error.status,
                _body(error.status, str(error), error.code, error.param),
                error.headers,
            )
        case RequestError(info=info) if info.code != "internal_error":
            status, code, pause = CODES[info.code]
            pause = pause if info.retry_after is None else info.retry_after
            return status, _body(status, info.message, code, info.param), _retry_headers(pause)
        case HTTPException(status_code=status):
            message, code = ROUTER.get(status, (error.detail, None))
            return status, _body(status, message, code, None), _sorted_allow(error.headers)
    if not isinstance(error, RequestError):
        log.error("request %s failed", request_id, exc_info=error)
    return (
        500,
        _body(
            500,
            f"internal error; the log names it by request id {request_id}",
            "internal_error",
            None,
        ),
        {},
    )


def error_response(error: BaseException, request_id: str) -> Response:
    status, body, headers = describe(error, request_id)
    return Response(orjson.dumps(body), status, headers, "application/json")


def error_event(error: BaseException, request_id: str) -> bytes:
    """The same error inside a stream that has already begun: one SSE event."""
    return b"data: " + orjson.dumps(describe(error, request_id)[1]) + b"\n\n"


def from_output(error: ErrorInfo | None, finish: str) -> RequestError:
    """What a sequence's bad end means for its request."""
    if error is not None:
        return RequestError.from_info(error)
    if finish == "deadline":
        return RequestError("the request's time ran out", code="deadline_exceeded")
    if finish == "abort":
        return RequestError("the server ended this request while shutting down", code="draining")
    return RequestError("the engine gave no reason", code="internal_error")


def echo(value: object) -> str:
    """A client's value as a message may repeat it: printable, at most ECHO_LIMIT characters."""
    text = repr(value if isinstance(value, (int, float)) else str(value)[:ECHO_LIMIT])
    return text if len(text) <= ECHO_LIMIT else text[: ECHO_LIMIT - 3] + "..."


def _body(status: int, message: str, code: str | None, param: str | None) -> dict[str, Any]:
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {
        "error": {
            "message": message[:MESSAGE_LIMIT],
            "type": kind,
            "param": None if param is None else param[:ECHO_LIMIT],
            "code": code,
        }
    }


def _retry_headers(pause: float | None) -> dict[str, str]:
    if pause is None:
        return {}
    return {
        "retry-after": str(max(1, math.ceil(pause))),
        "retry-after-ms": str(max(1, math.ceil(pause * 1000))),
    }


def _sorted_allow(headers: Mapping[str, str] | None) -> dict[str, str]:
    """The router lists the allowed methods in the order of a set; ours is the same on every run."""
    return {
        name.lower(): ", ".join(sorted(value.split(", "))) if name.lower() == "allow" else value
        for name, value in (headers or {}).items()
    }
