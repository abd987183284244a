"""The ingress of a simulated fleet: what it knows of its replicas, and where it sends a request, by
the functions that route in a real one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.trace import Arrival
from jitney.engine.fleet import KnownBeginnings, LeastWait, Ring, by_turn

#: Share of its seats up to which a replica gets its own prefixes however few others have: as in the
#: real ingress.
_SPARE = 0.25
#: How much of its old value the mean time of a request keeps with each new one.
_DECAY = 0.9


@dataclass(slots=True)
class _Known:
    """A replica, as the ingress knows it."""

    #: Open requests.
    load: float = 0.0
    #: Seconds that a new request would wait there: `said_s` and what was sent there since.
    wait_s: float = 0.0
    #: Predicted wait and open requests when the replica was last asked.
    said_s: float = 0.0
    load_then: float = 0.0
    #: It has refused a request since it was last asked.
    full: bool = False


@dataclass(slots=True)
class SimulatedIngress:
    """Chooses replicas, by name."""

    ROUTERS: ClassVar = ("round-robin", "least-wait", "prefix")

    #: One of `ROUTERS`.
    router: str
    #: Of one replica.
    seats: int
    replicas: dict[str, _Known] = field(default_factory=dict[str, _Known])
    #: Mean seconds of a request, where newer ones count more; 0: none has ended.
    request_s: float = 0.0
    _ring: Ring = field(default_factory=lambda: Ring(()))
    _least: LeastWait = field(default_factory=LeastWait)
    _beginnings: KnownBeginnings = field(default_factory=KnownBeginnings)
    _turn: int = 0

    def __post_init__(self) -> None:
        if self.router not in self.ROUTERS:
            raise ConfigError(f"unknown router {self.router!r}; known: {', '.join(self.ROUTERS)}")

    def set_replicas(self, names: Iterable[str]) -> None:
        """Send requests to these replicas from now on, and to no others."""
        before = self.replicas
        self.replicas = {name: before.get(name, _Known()) for name in names}
        for name in before.keys() - self.replicas.keys():
            self._least.drop(name)
        if self.router == "prefix":
            self._ring = Ring(self.replicas)
        for name in self.replicas:
            self._update(name)

    def looked_at(self, name: str, load: float, wait_s: float | None = None) -> None:
        """A replica has so many open requests. wait_s: None where it was not asked."""
        known = self.replicas[name]
        known.load = load
        if wait_s is not None:
            known.said_s, known.load_then, known.full = wait_s, load, False
        self._update(name)

    def refused(self, name: str) -> None:
        """A replica said that it is full."""
        self.replicas[name].full = True
        self._update(name)

    def given(self, name: str, arrival: Arrival) -> None:
        """A request went there."""
        self._beginnings.given(_beginnings_of(arrival), name)
        self.replicas[name].load += 1
        self._update(name)

    def ended(self, seconds: float) -> None:
        """A request has ended after so many seconds."""
        self.request_s = _DECAY * (self.request_s or seconds) + (1 - _DECAY) * seconds

    def _update(self, name: str) -> None:
        """Requests that were sent there since it was asked, and found no seat, wait too."""
        known = self.replicas[name]
        since = max(0.0, known.load - max(self.seats, known.load_then))
        known.wait_s = known.said_s + since * self.request_s / self.seats
        self._least.put(name, known.wait_s, known.load, full=known.full)

    def order(self, arrival: Arrival) -> Iterator[str]:
        """Names of replicas, in the order in which to try them; full ones come last."""
        full: list[str] = []
        for name in self._routed(arrival):
            if self.replicas[name].full:
                full.append(name)
            else:
                yield name
        yield from full

    def _routed(self, arrival: Arrival) -> Iterator[str]:
        if self.router == "least-wait":
            return self._least.order()
        if self.router == "round-robin":
            self._turn += 1
            return by_turn(list(self.replicas), self._turn)
        beginnings = _beginnings_of(arrival)
        loads = {name: known.load for name, known in self.replicas.items()}
        return self._ring.order(
            beginnings[0] if beginnings else f"alone {arrival.at}".encode(),
            loads,
            total=sum(loads.values()),
            spare=_SPARE * self.seats,
            known=self._beginnings.replica_of(beginnings),
            seats=self.seats,
        )


def _beginnings_of(arrival: Arrival) -> list[bytes]:
    """Its conversation; requests without one begin like no other."""
    return [f"{arrival.conversation}".encode()] if arrival.conversation else []
