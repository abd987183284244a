"""Checks whether a body is an answer of the API: it has the requested media type, and is JSON with
the field that holds a route's answers. Other programs can answer 200 too, such as a proxy or
another server at the same port.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

import msgspec

from jitney.engine.fleet.forwarding import STREAMS
from jitney.engine.fleet.request import WRITING, ProxiedRequest

_JSON = "application/json"
#: Longest body that is checked, in bytes: vectors may have tens of megabytes, error pages do not.
_CHECKED_BYTES = 1 << 20
#: Start of the data of a server-sent event; data of the last event in some forms.
_DATA, _DONE = b"data:", b"[DONE]"
#: The last event of a complete stream contains one of these.
_ENDS = (
    b"data: [DONE]",
    b"message_stop",
    b"response.completed",
    b"response.incomplete",
    b"response.failed",
    b'"done":true',
    b'"done": true',
    b'"stop":true',
)
#: Prefix of Ollama's routes, which stream unless the request disables it.
_OLLAMA = "/api/"


class _Text(msgspec.Struct):
    text: str


class _Message(msgspec.Struct):
    message: dict[str, msgspec.Raw]


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Text], msgspec.Meta(min_length=1)]


class _Chat(msgspec.Struct):
    choices: Annotated[list[_Message], msgspec.Meta(min_length=1)]


class _Chunk(msgspec.Struct):
    """A chunk. choices: empty in a chunk with only the usage."""

    choices: list[msgspec.Raw]


class _Response(msgspec.Struct):
    output: list[msgspec.Raw]


class _Turn(msgspec.Struct):
    content: list[msgspec.Raw]


class _Event(msgspec.Struct):
    type: str


class _Generated(msgspec.Struct):
    response: str


class _Vectors(msgspec.Struct):
    embeddings: list[msgspec.Raw]


class _Vector(msgspec.Struct):
    embedding: list[msgspec.Raw]


class _Data(msgspec.Struct):
    data: list[msgspec.Raw]


class _Results(msgspec.Struct):
    results: list[msgspec.Raw]


class _Answer(msgspec.Struct):
    """Any JSON object."""


#: Route -> (form of an answer without streaming, form of an event of a stream).
_SHAPES: Mapping[str, tuple[type[msgspec.Struct], type[msgspec.Struct]]] = {
    "/v1/completions": (_Completion, _Chunk),
    "/v1/chat/completions": (_Chat, _Chunk),
    "/v1/responses": (_Response, _Event),
    "/v1/messages": (_Turn, _Event),
    "/api/chat": (_Message, _Message),
    "/api/generate": (_Generated, _Generated),
    "/api/embed": (_Vectors, _Answer),
    "/api/embeddings": (_Vector, _Answer),
    "/v1/embeddings": (_Data, _Answer),
    "/v1/score": (_Data, _Answer),
    "/score": (_Data, _Answer),
    "/v1/rerank": (_Results, _Answer),
    "/v2/rerank": (_Results, _Answer),
    "/rerank": (_Results, _Answer),
}


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """The form that the answer to one request must have."""

    #: Form of an answer without streaming, and of an event of a stream.
    _plain: type[msgspec.Struct]
    _event: type[msgspec.Struct]
    #: Whether the client asked for a stream.
    streams: bool

    @classmethod
    def of(cls, request: ProxiedRequest) -> Self:
        plain, event = _SHAPES.get(request.route, (_Answer, _Answer))
        stream = request.fields.get("stream")
        asks = stream is True or (stream is None and request.route.startswith(_OLLAMA))
        return cls(plain, event, request.route in WRITING and asks)

    def is_of_its_kind(self, media_type: str) -> bool:
        """Whether an answer of status 200 may have this media type."""
        return media_type in STREAMS if self.streams else media_type == _JSON

    def fits(self, body: bytes) -> bool:
        """Whether the complete body of a 200 without streaming may be an answer of the route."""
        return len(body) > _CHECKED_BYTES or _is_json(body, self._plain)

    @staticmethod
    def is_error(body: bytes) -> bool:
        """Whether the body of a refusal is JSON as in the API, unlike the page of a proxy."""
        return _is_json(body, _Answer)

    def fits_events(self, part: bytes) -> bool | None:
        """Whether the first event with data has the form of the route's stream; None if no event
        has data. part: whole events.
        """
        for line in part.splitlines():
            data = line.removeprefix(_DATA).strip()
            if line.startswith(_DATA) or line.startswith(b"{"):
                return data != _DONE and _is_json(data, self._event)
            if line.strip() and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                return False
        return None

    @staticmethod
    def has_data(part: bytes) -> bool:
        """Whether the events hold data, not only keep-alives."""
        return _DATA in part or part.lstrip().startswith(b"{")

    @staticmethod
    def ends(part: bytes) -> bool:
        """Whether a stream that ends with these events is complete."""
        return any(end in part for end in _ENDS)


def _is_json(data: bytes, shape: type[msgspec.Struct]) -> bool:
    try:
        msgspec.json.decode(data, type=shape)
    except msgspec.DecodeError:  # not JSON, or another form
        return False
    return True
