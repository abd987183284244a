"""The engines of one model, kept in order while they change, so that choosing one of thousands does
not look at all of them.
"""

from __future__ import annotations

import time

from jitney.engine.fleet.replicas import Replica
from jitney.engine.fleet.routing import LeastWait, Ring


class ReplicaSet:
    """Engines that answer alike. What is kept of each is brought up to date when it says that it
    changed (`Replica.on_change`).
    """

    def __init__(self, replicas: list[Replica]) -> None:
        self.all: list[Replica] = []
        #: Requests at each that is ready, and their sum.
        self.loads: dict[str, float] = {}
        self.total = 0.0
        #: Those that are ready, by the wait that they predict.
        self.waits = LeastWait()
        #: The same by the share of their seats that is taken, for lines of batches.
        self.rooms = LeastWait()
        #: Of those that are ready, the fewest seats that one says it has; 0: one does not say.
        self.least_seats = 0
        self._by_name: dict[str, Replica] = {}
        self._seats: dict[str, int] = {}
        # Names of those that are ready, and the ring; None: to be made anew.
        self._names: list[str] | None = None
        self._ring: Ring | None = None
        for replica in replicas:
            self.add(replica)

    def add(self, replica: Replica) -> None:
        """One more; no two have the same name."""
        self.all.append(replica)
        self._by_name[replica.name] = replica
        self._ring = None
        replica.on_change = self._note
        self._note(replica)

    def remove(self, replica: Replica) -> None:
        """It is no more one of them: what belonged to it goes to the others. Its open requests
        go on.
        """
        replica.on_change = None
        self._leave_out(replica.name)
        self.all.remove(replica)
        del self._by_name[replica.name]
        self._ring = None

    @property
    def names(self) -> list[str]:
        """Of those that are ready, in the order in which they were added: whoever goes away and
        comes back has its old turn.
        """
        if self._names is None:
            self._names = [each.name for each in self.all if each.name in self.loads]
        return self._names

    @property
    def ring(self) -> Ring:
        """Of those that are gone too: their keys come back to them."""
        if self._ring is None:
            self._ring = Ring(self._by_name)
        return self._ring

    def ready(self, name: str) -> Replica | None:
        """The one of this name, if it takes requests."""
        return self._by_name[name] if name in self.loads else None

    def _note(self, replica: Replica) -> None:
        if replica.state != "ready":
            self._leave_out(replica.name)
            return
        now = time.monotonic()
        name, load = replica.name, replica.load
        if name not in self.loads:
            self._names = None
        self.total += load - self.loads.get(name, 0.0)
        self.loads[name] = load
        full = replica.full_until > now
        self.waits.put(name, replica.predicted_wait(now), load, full=full)
        self.rooms.put(name, replica.taken, load, full=full)
        if self._seats.get(name) != replica.seats:
            self._seats[name] = replica.seats
            self.least_seats = min(self._seats.values())

    def _leave_out(self, name: str) -> None:
        if name not in self.loads:
            return
        self.total -= self.loads.pop(name)
        self._names = None
        self.waits.drop(name)
        self.rooms.drop(name)
        del self._seats[name]
        self.least_seats = min(self._seats.values(), default=0)
