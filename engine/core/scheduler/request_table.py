"""The open requests, by id and by deadline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.scheduler.queues import overgrown
from jitney.engine.core.scheduler.sequence import Sequence


@dataclass(slots=True, eq=False)
class Siblings:
    """The open sequences of one request."""

    request: EngineRequest
    open: list[Sequence]
    #: The sequence that computes the prompt.
    leader: Sequence
    #: Sequences that wait until the leader's prompt is computed, to share its pages.
    held: list[Sequence]
    #: Whether one of them has had a seat.
    boarded: bool = False


class RequestTable:
    """Finds open requests and their sequences."""

    def __init__(self) -> None:
        self._by_id: dict[str, Siblings] = {}
        # A heap of (deadline, number of the request, siblings), pruned lazily.
        self._deadlines: list[tuple[float, int, Siblings]] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Siblings]:
        return iter(self._by_id.values())

    @property
    def sequences(self) -> Iterator[Sequence]:
        """All open sequences."""
        for siblings in self:
            yield from siblings.open

    @property
    def held(self) -> list[Sequence]:
        """All sequences that wait for their leader's prompt."""
        return [seq for siblings in self for seq in siblings.held]

    @property
    def next_deadline(self) -> float:
        """Clock seconds of the earliest deadline, whose request may have ended already; inf without
        deadlines.
        """
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def refuse_duplicate(self, request: EngineRequest) -> None:
        """Raise RequestError if the id belongs to an open request."""
        if request.id in self._by_id:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")

    def add(self, siblings: Siblings) -> None:
        """Add an admitted request."""
        request = siblings.request
        self._by_id[request.id] = siblings
        if request.deadline is not None:
            entry = request.deadline, siblings.leader.rank[1], siblings
            heappush(self._deadlines, entry)

    def of(self, seq: Sequence) -> Siblings:
        """The siblings of an open sequence, itself included."""
        return self._by_id[seq.request_id]

    def open_of(self, request_id: str) -> list[Sequence]:
        """The open sequences of a request, none if it has ended."""
        siblings = self._by_id.get(request_id)
        return list(siblings.open) if siblings else []

    def remove(self, siblings: Siblings) -> None:
        """Remove a request whose sequences have all ended."""
        del self._by_id[siblings.request.id]
        if overgrown(self._deadlines, self._by_id):
            self._deadlines = [entry for entry in self._deadlines if entry[2].open]
            heapify(self._deadlines)

    def take_expired(self, now: float) -> list[Sequence]:
        """The open sequences of requests past their deadline, each returned once."""
        expired: list[Sequence] = []
        while self.next_deadline <= now:
            expired += heappop(self._deadlines)[2].open
        return expired
