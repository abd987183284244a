"""Resumes a stream of a lost replica at another one.

A token depends only on the seed and the tokens before it (decision 64), so another replica with
the same settings generates the same stream again. `StreamState` leaves out the part that the client
has, and raises `ResumeMismatch` if the new stream differs from that part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from jitney.engine.common.errors import JitneyError
from jitney.engine.common.requests import JsonDict

_DATA, _DONE = b"data:", b"[DONE]"
_END = b"\n\n"
#: Text fields that are sent once, not continued by the next chunk.
_ONCE = frozenset({"role", "finish_reason", "id", "type", "name", "stop_reason"})
#: Fields that identify a stream; all chunks have the values of the first replica.
_HEAD = ("id", "created", "model", "system_fingerprint")
#: Error codes in the stream of an engine that shuts down: another engine can resume the stream.
_GOING = frozenset({"engine_dead", "draining"})

type _Path = tuple[str | int, ...]


class ResumeMismatch(JitneyError):
    """The other replica's stream differs from what the client has."""


class ReplicaLost(Exception):
    """A replica was lost while it had a request."""


def _read_event(event: bytes) -> JsonDict | None:
    """The JSON object of an event; None for a keep-alive, the end, or an unknown event."""
    data = event.strip()
    if not data.startswith(_DATA):
        return None
    text = data[len(_DATA) :].strip()
    if text == _DONE:
        return None
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _is_going(value: JsonDict | None) -> bool:
    """Whether the event is an error that says that the engine cannot finish the stream."""
    error = value.get("error") if value else None
    return isinstance(error, dict) and error.get("code") in _GOING


@dataclass(slots=True)
class _Leaf:
    """One text or list of a stream, joined over all chunks."""

    #: The pieces that the client has.
    sent: list[Any] = field(default_factory=list)
    #: Number of its characters or items that the new stream has repeated so far.
    again: int = 0

    def text(self) -> str:
        if len(self.sent) > 1:
            self.sent = ["".join(self.sent)]
        return self.sent[0] if self.sent else ""

    def rest_of_text(self, piece: str) -> str:
        """The new part of the next piece. Raises ResumeMismatch."""
        sent_already = self.text()[self.again : self.again + len(piece)]
        if not piece.startswith(sent_already):
            raise ResumeMismatch("another replica writes another answer")
        self.again += len(piece)
        rest = piece[len(sent_already) :]
        if rest:
            self.sent.append(rest)
        return rest

    def rest_of_list(self, items: list[Any]) -> list[Any]:
        """The new items of a list. Items are counted, not compared."""
        sent_already = min(len(items), max(0, len(self.sent) - self.again))
        self.again += len(items)
        rest = items[sent_already:]
        self.sent += [None] * len(rest)
        return rest


@dataclass(slots=True)
class StreamState:
    """The part of a chat or completion stream that the client has received."""

    #: The `_HEAD` fields of the first chunk.
    head: JsonDict = field(default_factory=dict)
    #: Whether the current replica's stream has ended with [DONE].
    is_whole: bool = False
    _leaves: dict[_Path, _Leaf] = field(default_factory=dict)

    def new_of(self, events: bytes, *, as_it_is: bool) -> bytes:
        """The part of whole events that the client lacks. Raises ReplicaLost, ResumeMismatch."""
        self.is_whole |= events.rstrip().endswith(_DONE)
        unsent: list[bytes] = []
        for event in events.split(_END)[:-1]:
            value = _read_event(event)
            if _is_going(value):
                raise ReplicaLost("it shuts down")
            if value is None or "choices" not in value:
                unsent.append(event + _END)
            elif as_it_is:
                self.note(value)
                unsent.append(event + _END)
            else:
                rest = self.rest_of(value)
                if rest is not None:
                    unsent.append(b"data: " + orjson.dumps(rest) + _END)
        return b"".join(unsent)

    def note(self, value: JsonDict) -> None:
        if not self.head:
            self.head = {name: value[name] for name in _HEAD if name in value}
        for choice in value.get("choices") or ():
            self._note(choice, (choice.get("index", 0),))

    def begin_again(self) -> None:
        """Start over: another replica generates the stream from its first token."""
        self.is_whole = False
        for leaf in self._leaves.values():
            leaf.again = 0

    def rest_of(self, value: JsonDict) -> JsonDict | None:
        """The part of a chunk that the client lacks; None if it has all. Raises ResumeMismatch."""
        choices = value.get("choices") or []
        new = [cut for choice in choices if (cut := self._rest_of_choice(choice)) is not None]
        if choices and not new:
            return None
        return value | self.head | {"choices": new}

    def _note(self, value: Any, path: _Path) -> None:
        match value:
            case dict():
                for name, item in value.items():
                    self._note(item, (*path, name))
            case list() if _numbered(value):
                for item in value:
                    self._note(item, (*path, item["index"]))
            case list():
                self._leaf(path).sent += [None] * len(value)
            case str():
                self._leaf(path).sent.append(value)

    def _rest_of_choice(self, choice: JsonDict) -> JsonDict | None:
        cut, is_new = self._rest(choice, (choice.get("index", 0),))
        return cut if is_new else None

    def _rest(self, value: Any, path: _Path) -> tuple[Any, bool]:
        """(the part of a value to send, whether any of it is new)."""
        match value:
            case dict():
                return self._rest_of_dict(value, path)
            case list() if _numbered(value):
                return self._rest_of_numbered(value, path)
            case list():
                rest = self._leaf(path).rest_of_list(value)
                return rest, bool(rest)
            case str() if path[-1] in _ONCE:
                return self._rest_once(value, path)
            case str():
                text = self._leaf(path).rest_of_text(value)
                return text, bool(text)
        return value, False

    def _rest_of_dict(self, value: JsonDict, path: _Path) -> tuple[JsonDict, bool]:
        unsent, any_new = {}, False
        for name, item in value.items():
            rest, is_new = self._rest(item, (*path, name))
            any_new |= is_new
            if is_new or name == "index" or not _left_out(item, rest, path):
                unsent[name] = rest
        return unsent, any_new

    def _rest_of_numbered(self, value: list[JsonDict], path: _Path) -> tuple[list[Any], bool]:
        rests = [self._rest(item, (*path, item["index"])) for item in value]
        new = [rest for rest, is_new in rests if is_new]
        return new, bool(new)

    def _rest_once(self, value: str, path: _Path) -> tuple[str | None, bool]:
        leaf = self._leaf(path)
        if leaf.sent:
            return None, False
        leaf.sent.append(value)
        return value, True

    def _leaf(self, path: _Path) -> _Leaf:
        return self._leaves.setdefault(path, _Leaf())


def _left_out(item: Any, rest: Any, path: _Path) -> bool:
    """Whether a field with nothing new is left out: in a delta, and if its whole list was sent."""
    is_emptied = isinstance(item, list) and bool(item) and not rest and len(path) == 1
    return "delta" in path or is_emptied


def _numbered(items: list[Any]) -> bool:
    return bool(items) and all(isinstance(item, dict) and "index" in item for item in items)
