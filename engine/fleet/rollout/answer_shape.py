"""Whether what an engine says is an answer of the API: of the media type that was asked for, and
JSON with the field that holds a route's answers. Anything can answer 200: a proxy's page, another
program behind the same port.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

import msgspec

from jitney.engine.fleet.forwarding import STREAMS
from jitney.engine.fleet.request import ProxiedRequest

_JSON = "application/json"
#: Begins the data of a server-sent event; and the last one's, in some forms.
_DATA, _DONE = b"data:", b"[DONE]"
#: One of these stands in the last event of a stream that has come to its end.
_ENDS = (
    b"data: [DONE]",
    b"message_stop",
    b"response.completed",
    b"response.incomplete",
    b"response.failed",
    b'"done":true',
    b'"done": true',
)
#: Routes of Ollama's API stream unless they are told not to.
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
    """choices: none in one that only has the usage."""

    choices: list[msgspec.Raw]


class _Response(msgspec.Struct):
    output: list[msgspec.Raw]


class _Turn(msgspec.Struct):
    content: list[msgspec.Raw]


class _Event(msgspec.Struct):
    type: str


class _Generated(msgspec.Struct):
    response: str


class _Answer(msgspec.Struct):
    """Any JSON object."""


#: Route -> a plain answer, and an event of a stream.
_SHAPES: Mapping[str, tuple[type[msgspec.Struct], type[msgspec.Struct]]] = {
    "/v1/completions": (_Completion, _Chunk),
    "/v1/chat/completions": (_Chat, _Chunk),
    "/v1/responses": (_Response, _Event),
    "/v1/messages": (_Turn, _Event),
    "/api/chat": (_Message, _Message),
    "/api/generate": (_Generated, _Generated),
}


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """The form that the answer to one request must have."""

    #: None: the route's answers are JSON, and more is not looked at.
    _plain: type[msgspec.Struct] | None
    _event: type[msgspec.Struct]
    #: The client asked for a stream.
    streams: bool

    @classmethod
    def of(cls, request: ProxiedRequest) -> Self:
        plain, event = _SHAPES.get(request.route, (None, _Answer))
        stream = request.fields.get("stream")
        by_default = plain is not None and request.route.startswith(_OLLAMA)
        return cls(plain, event, stream is True or (by_default and stream is not False))

    def is_of_its_kind(self, media_type: str) -> bool:
        """Whether a 200 of this media type can be the answer."""
        if self._plain is None:
            return media_type in STREAMS or media_type == _JSON
        return media_type in STREAMS if self.streams else media_type == _JSON

    def fits(self, body: bytes) -> bool:
        """Whether the whole body of a 200 that is no stream is an answer of the route."""
        return self._plain is None or _is_json(body, self._plain)

    @staticmethod
    def is_error(body: bytes) -> bool:
        """Whether the body of a refusal is the API's: a page of a proxy is not."""
        return _is_json(body, _Answer)

    def fits_events(self, part: bytes) -> bool | None:
        """Whether the first event of these that has data is one of the route's stream; None: none
        has any. part: whole events.
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
        """Whether these events say more than that the server lives."""
        return _DATA in part or part.lstrip().startswith(b"{")

    @staticmethod
    def ends(part: bytes) -> bool:
        """Whether a stream that ended with these events has come to its end."""
        return any(end in part for end in _ENDS)


def _is_json(data: bytes, shape: type[msgspec.Struct]) -> bool:
    try:
        msgspec.json.decode(data, type=shape)
    except msgspec.DecodeError:  # not JSON, or of another shape
        return False
    return True
