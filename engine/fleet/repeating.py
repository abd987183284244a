"""A stream whose replica died, gone on with at another one.

A token is decided by the seed and by the tokens before it (decision 64), so another replica of the
same settings writes the same stream again. What the client has of it is left out; where the new
stream says something else than what was sent, it cannot be gone on with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from jitney.engine.common.errors import JitneyError
from jitney.engine.common.requests import JsonDict

_DATA, _DONE = b"data:", b"[DONE]"
_END = b"\n\n"
#: Texts that stand there once, in place of being continued by the next chunk.
_ONCE = frozenset({"role", "finish_reason", "id", "type", "name", "stop_reason"})
#: What names a stream; of the first replica's, in all of it.
_HEAD = ("id", "created", "model", "system_fingerprint")
#: Errors of an engine that is going, in a stream: another one can go on.
_GOING = frozenset({"engine_dead", "draining"})

type _Path = tuple[str | int, ...]


class CannotGoOn(JitneyError):
    """The other replica writes something else."""


class Died(Exception):
    """A replica went away with a request."""


def _read_event(event: bytes) -> JsonDict | None:
    """The object of an event; None: it is a sign of life, the end, or nothing that we know."""
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


def _is_end(events: bytes) -> bool:
    """Whether these whole events have the last one of a stream that is complete."""
    return events.rstrip().endswith(_DONE)


def _is_going(value: JsonDict | None) -> bool:
    """The engine says in its stream that it cannot finish it."""
    error = value.get("error") if value else None
    return isinstance(error, dict) and error.get("code") in _GOING


@dataclass(slots=True)
class _Leaf:
    """One text or list of a stream, all of its chunks together."""

    #: What the client has of it.
    sent: list[Any] = field(default_factory=list)
    #: How much of that the new stream has written again: characters or items.
    again: int = 0

    def text(self) -> str:
        if len(self.sent) > 1:
            self.sent = ["".join(self.sent)]
        return self.sent[0] if self.sent else ""

    def rest_of_text(self, piece: str) -> str:
        """What is new of the next piece. Raises CannotGoOn."""
        known = self.text()[self.again : self.again + len(piece)]
        if not piece.startswith(known):
            raise CannotGoOn("another replica writes another answer")
        self.again += len(piece)
        rest = piece[len(known) :]
        if rest:
            self.sent.append(rest)
        return rest

    def rest_of_list(self, items: list[Any]) -> list[Any]:
        """The same of a list, whose items are only counted."""
        known = min(len(items), max(0, len(self.sent) - self.again))
        self.again += len(items)
        rest = items[known:]
        self.sent += [None] * len(rest)
        return rest


@dataclass(slots=True)
class SentStream:
    """What a client has been sent of a stream of chats or completions."""

    #: Of the first chunk.
    head: JsonDict = field(default_factory=dict)
    #: The replica that sends now has come to its end.
    is_whole: bool = False
    _leaves: dict[_Path, _Leaf] = field(default_factory=dict)

    def new_of(self, events: bytes, *, as_it_is: bool) -> bytes:
        """What the client does not have of whole events. as_it_is: it has nothing. Raises Died or
        CannotGoOn.
        """
        self.is_whole |= _is_end(events)
        kept: list[bytes] = []
        for event in events.split(_END)[:-1]:
            value = _read_event(event)
            if _is_going(value):
                raise Died("it says that it is going")
            if value is None or "choices" not in value:
                kept.append(event + _END)
            elif as_it_is:
                self.note(value)
                kept.append(event + _END)
            else:
                rest = self.rest_of(value)
                if rest is not None:
                    kept.append(b"data: " + orjson.dumps(rest) + _END)
        return b"".join(kept)

    def note(self, value: JsonDict) -> None:
        """A chunk is about to be sent as it is."""
        if not self.head:
            self.head = {name: value[name] for name in _HEAD if name in value}
        for choice in value.get("choices") or ():
            self._note(choice, (choice.get("index", 0),))

    def begin_again(self) -> None:
        """Another replica begins from the start."""
        self.is_whole = False
        for leaf in self._leaves.values():
            leaf.again = 0

    def rest_of(self, value: JsonDict) -> JsonDict | None:
        """What is new of a chunk of another replica, to be sent; None: nothing. Raises
        CannotGoOn.
        """
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
        """(what is to be sent of it, whether any of that is new)."""
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
        kept, any_new = {}, False
        for name, item in value.items():
            rest, is_new = self._rest(item, (*path, name))
            any_new |= is_new
            if is_new or name == "index" or not _left_out(item, rest, path):
                kept[name] = rest
        return kept, any_new

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
    """Whether something that says nothing new is not even named: in a delta, and of lists that come
    once.
    """
    is_emptied = isinstance(item, list) and bool(item) and not rest and len(path) == 1
    return "delta" in path or is_emptied


def _numbered(items: list[Any]) -> bool:
    return bool(items) and all(isinstance(item, dict) and "index" in item for item in items)
