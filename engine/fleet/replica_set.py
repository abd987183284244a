"""The replicas of one model and the order in which they are tried for a request. The order is
updated with each change, so that choosing one of thousands does not look at all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

from jitney.engine.fleet.replicas import Replica
from jitney.engine.fleet.routing import HashRing, LeastWait, PrefixIndex, RouterName, round_robin

#: Share of a replica's seats up to which the prefix router has no brake.
_SPARE = 0.25

#: How much longer than the shortest predicted wait a prompt waits to reach its prefix, divided by
#: the mean seconds of a request: at the replica of its turn before, and at the one of its hash.
_WORTH_KNOWN, _WORTH_HASHED = 0.25, 0.05

#: Why a replica got a prompt: it had the prefix before (known), another replica had it (moved), no
#: replica had it and the hash points to this one (hashed) or to another one (spread).
type _PrefixChoice = Literal["known", "moved", "hashed", "spread"]


class ReplicaSet:
    """Interchangeable replicas and their router.

    Each replica's entry is updated when it calls `Replica.on_change`. brake: load, divided by the
    mean load, from which the prefix router sends prompts elsewhere.
    """

    def __init__(
        self,
        replicas: Iterable[Replica] = (),
        router: RouterName = "prefix",
        brake: float = HashRing.brake,
    ) -> None:
        self.all: list[Replica] = []
        self.router: RouterName = router
        self._brake = brake
        #: Requests at each ready replica, and their sum.
        self.loads: dict[str, float] = {}
        self.total = 0.0
        #: Ready replicas by `Replica.routing_wait`.
        self.waits = LeastWait()
        #: Ready replicas by `Replica.seat_fill`, for lines of batches.
        self.fills = LeastWait()
        #: Fewest seats of a ready replica; 0 if a replica does not report its seats.
        self.least_seats = 0
        self._turn = 0
        self._prefixes = PrefixIndex()
        self._by_name: dict[str, Replica] = {}
        self._seats: dict[str, int] = {}
        # Names of ready replicas, and the ring; None until built.
        self._names: list[str] | None = None
        self._ring: HashRing | None = None
        for replica in replicas:
            self.add(replica)

    def add(self, replica: Replica) -> None:
        """Add a replica; names are unique."""
        self.all.append(replica)
        self._by_name[replica.name] = replica
        self._ring = None
        replica.on_change = self._note
        self._note(replica)

    def remove(self, replica: Replica) -> None:
        """Remove a replica: its keys go to the others, its open requests continue."""
        replica.on_change = None
        self._leave_out(replica.name)
        self.all.remove(replica)
        del self._by_name[replica.name]
        self._ring = None

    @property
    def names(self) -> list[str]:
        """Names of ready replicas in the order in which they were added."""
        if self._names is None:
            self._names = [each.name for each in self.all if each.name in self.loads]
        return self._names

    @property
    def ring(self) -> HashRing:
        """The ring of all replicas. A replica that is gone for a while gets its keys back."""
        if self._ring is None:
            self._ring = HashRing(self._by_name)
        return self._ring

    def ready(self, name: str) -> Replica | None:
        return self._by_name[name] if name in self.loads else None

    def order(self, prefixes: Sequence[bytes]) -> Iterator[Replica]:
        """Ready replicas in the router's order, those that refuse requests last. prefixes: prefixes
        of the prompt, the shortest first; only the prefix router reads them.
        """
        return self._full_last(self._routed(prefixes))

    def by_free_seats(self) -> Iterator[Replica]:
        """Ready replicas, those with the smallest share of taken seats first, full ones last."""
        return self._full_last(self.fills.order())

    def sent(self, prefixes: Sequence[bytes], name: str) -> _PrefixChoice | None:
        """Record the replica that took a prompt. Returns why it got it; None if not by prefix."""
        if self.router != "prefix" or not prefixes:
            return None
        known = self._prefixes.replica_of(prefixes)
        self._prefixes.note(prefixes, name)
        if known is not None:
            return "known" if name == known else "moved"
        return "hashed" if name == next(self.ring.walk(prefixes[0])) else "spread"

    def _routed(self, prefixes: Sequence[bytes]) -> Iterator[str]:
        match self.router:
            case "prefix":
                known = self._prefixes.replica_of(prefixes)
                return self.ring.order(
                    prefixes[0],
                    self.loads,
                    total=self.total,
                    brake=self._brake,
                    spare=_SPARE * self.least_seats,
                    known=known,
                    seats=self.least_seats,
                    gives_way=partial(self._gives_way, known),
                )
            case "least-wait":
                return self.waits.order()
            case "round-robin":
                self._turn += 1
                return round_robin(self.names, self._turn)

    def _gives_way(self, known: str | None, name: str) -> bool:
        """Whether the wait at a replica costs more than the prefix there saves. known: the replica
        that had the conversation's turn before.
        """
        replica = self._by_name[name]
        if name == known:
            wait_s, worth = replica.predicted_wait, _WORTH_KNOWN
        elif replica.load < _SPARE * self.least_seats:
            return False
        else:
            wait_s, worth = replica.routing_wait(self.total / len(self.loads)), _WORTH_HASHED
        return wait_s - self.waits.least_s > worth * replica.request_s

    def _full_last(self, names: Iterator[str]) -> Iterator[Replica]:
        full: list[Replica] = []
        for name in names:
            replica = self.ready(name)
            if replica is None:  # it was lost while another one was tried
                continue
            if replica.is_full:
                full.append(replica)
            else:
                yield replica
        yield from full

    def _note(self, replica: Replica) -> None:
        if replica.state != "ready":
            self._leave_out(replica.name)
            return
        name, load = replica.name, replica.load
        if name not in self.loads:
            self._names = None
        self.total += load - self.loads.get(name, 0.0)
        self.loads[name] = load
        wait_s = replica.routing_wait(self.total / len(self.loads))
        self.waits.put(name, wait_s, load, full=replica.is_full)
        self.fills.put(name, replica.seat_fill, load, full=replica.is_full)
        if self._seats.get(name) != replica.seats:
            self._seats[name] = replica.seats
            self.least_seats = min(self._seats.values())

    def _leave_out(self, name: str) -> None:
        if name not in self.loads:
            return
        self.total -= self.loads.pop(name)
        self._names = None
        self.waits.drop(name)
        self.fills.drop(name)
        del self._seats[name]
        self.least_seats = min(self._seats.values(), default=0)
