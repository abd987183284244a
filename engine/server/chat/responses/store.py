"""Stored responses, to be read again or continued: in memory, bounded, separate per tenant."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import orjson

from jitney.engine.common.requests import JsonDict
from jitney.engine.common.slices import Work
from jitney.engine.server.http.errors import HttpError, echo

#: Bytes charged per response in addition to its content.
_PLACE_BYTES = 1024


@dataclass(slots=True, eq=False)
class KeptTurn:
    """One response's input and output; stored while a response or a later turn refers to it."""

    #: The previous turn; None: the conversation began with this one.
    before: KeptTurn | None
    #: JSON list of items, with their ids.
    input: bytes
    output: bytes = b"[]"
    #: Number of responses and turns that refer to it.
    needed_by: int = 0

    @property
    def n_bytes(self) -> int:
        return len(self.input) + len(self.output) + _PLACE_BYTES

    def turns(self) -> list[KeptTurn]:
        """All turns of the conversation up to this one, the first turn first."""
        return list(_chain(self))[::-1]

    def all_items(self) -> Work[list[JsonDict]]:
        """All items of the conversation up to this turn."""
        items: list[JsonDict] = []
        for turn in self.turns():
            items += orjson.loads(turn.input)
            items += orjson.loads(turn.output)
            yield
        return items


def _chain(turn: KeptTurn | None) -> Iterator[KeptTurn]:
    """A turn, and those before it."""
    while turn is not None:
        yield turn
        turn = turn.before


@dataclass(slots=True, eq=False)
class KeptResponse:
    """One stored response."""

    id: str
    turn: KeptTurn
    #: JSON.
    body: bytes
    #: Clock seconds.
    expires: float
    #: Ids of its items.
    item_ids: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Shelf:
    """One tenant's responses, the oldest first."""

    responses: dict[str, KeptResponse] = field(default_factory=dict)
    #: Item id -> the id of its response.
    items: dict[str, str] = field(default_factory=dict)
    #: Bytes of the responses and of the turns that they need.
    n_bytes: int = 0


@dataclass(slots=True, eq=False)
class ResponseStore:
    """Store bounded in number and bytes; evicts the oldest response of the largest tenant."""

    _most: int
    _most_bytes: int
    _ttl_s: float
    _clock: Callable[[], float] = time.monotonic
    _shelves: dict[str, _Shelf] = field(default_factory=dict[str, _Shelf], init=False)

    @property
    def count(self) -> int:
        return sum(len(shelf.responses) for shelf in self._shelves.values())

    @property
    def n_bytes(self) -> int:
        return sum(shelf.n_bytes for shelf in self._shelves.values())

    def put(self, tenant: str, id: str, turn: KeptTurn, body: bytes) -> None:
        """Keep a response, as JSON; one of that id is replaced."""
        self.discard(tenant, id)
        items = orjson.loads(turn.input) + orjson.loads(turn.output)
        item_ids = [item["id"] for item in items]
        expires = self._clock() + self._ttl_s
        response = KeptResponse(id, turn, body, expires, item_ids)
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.responses[id] = response
        shelf.items |= dict.fromkeys(item_ids, id)
        shelf.n_bytes += len(response.body)
        _need(shelf, turn)
        self._make_room()

    def get(self, tenant: str, id: str, param: str | None = None) -> KeptResponse:
        """Raises HttpError 404; param: the field that named it."""
        self._drop_old(tenant)
        shelf = self._shelves.get(tenant)
        response = shelf.responses.get(id) if shelf is not None else None
        if response is None:
            raise HttpError(
                404,
                f"no response {echo(id)}: it was not stored (store: false), or is no longer kept: "
                "the server keeps so many, in memory, for a time",
                code="response_not_found",
                param=param,
            )
        return response

    def item(self, tenant: str, id: str) -> JsonDict | None:
        """An item of a stored response; None if there is none of this id."""
        self._drop_old(tenant)
        shelf = self._shelves.get(tenant)
        if shelf is None or id not in shelf.items:
            return None
        turn = shelf.responses[shelf.items[id]].turn
        for item in orjson.loads(turn.input) + orjson.loads(turn.output):
            if item["id"] == id:
                return item
        return None

    def discard(self, tenant: str, id: str) -> None:
        """Forget a response, if it is there."""
        shelf = self._shelves.get(tenant)
        response = shelf.responses.pop(id, None) if shelf is not None else None
        if shelf is None or response is None:
            return
        for item_id in response.item_ids:
            shelf.items.pop(item_id, None)
        shelf.n_bytes -= len(response.body)
        _let_go(shelf, response.turn)
        if not shelf.responses:
            del self._shelves[tenant]

    def _drop_old(self, tenant: str) -> None:
        shelf = self._shelves.get(tenant)
        now = self._clock()
        while shelf is not None and shelf.responses:
            oldest = next(iter(shelf.responses.values()))
            if oldest.expires > now:
                return
            self.discard(tenant, oldest.id)

    def _make_room(self) -> None:
        for tenant in list(self._shelves):
            self._drop_old(tenant)
        while self.count > self._most:
            self._drop_oldest(lambda shelf: len(shelf.responses))
        while self.n_bytes > self._most_bytes:
            self._drop_oldest(lambda shelf: shelf.n_bytes)

    def _drop_oldest(self, size: Callable[[_Shelf], int]) -> None:
        """Discard the oldest response of the tenant whose shelf is the largest."""
        tenant = max(self._shelves, key=lambda name: size(self._shelves[name]))
        self.discard(tenant, next(iter(self._shelves[tenant].responses)))


def _need(shelf: _Shelf, turn: KeptTurn) -> None:
    """Count a reference to the turn, and to those before if it is new."""
    for needed in _chain(turn):
        needed.needed_by += 1
        if needed.needed_by > 1:
            return
        shelf.n_bytes += needed.n_bytes


def _let_go(shelf: _Shelf, turn: KeptTurn) -> None:
    """Drop a reference to the turn; without any, drop its reference to the one before."""
    for needless in _chain(turn):
        needless.needed_by -= 1
        if needless.needed_by:
            return
        shelf.n_bytes -= needless.n_bytes
