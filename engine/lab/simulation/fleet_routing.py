"""The ingress of a simulated fleet: what it knows of its replicas, and where it sends a request, by
the very functions that route in a real one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from jitney.engine.common.errors import ConfigError
from jitney.engine.fleet import KnownBeginnings, LeastWait, Ring, by_turn
from jitney.engine.lab.simulation.fleet_replica import FleetRequest

#: Share of its seats up to which a replica gets its own prefixes however few others have: as in the
#: real ingress.
_SPARE = 0.25
#: What the mean of a request's seconds keeps of itself with each new one.
_FADE = 0.9


@dataclass(slots=True)
class SimulatedIngress:
    """Which replicas can be had, by name, and how much each has to do."""

    ROUTERS: ClassVar = ("round-robin", "least-wait", "prefix")

    #: One of `ROUTERS`.
    router: str
    #: Of one replica.
    seats: int
    brake: float = Ring.brake
    #: Requests that are open at each replica that can be had, and their sum.
    loads: dict[str, float] = field(default_factory=dict[str, float])
    total: float = 0.0
    #: Seconds that a newcomer would wait at each: as it said when it was last asked, and what was
    #: sent there since.
    waits: dict[str, float] = field(default_factory=dict[str, float])
    #: Mean seconds of a request, newer ones count more; 0: none has ended.
    request_s: float = 0.0
    #: Those that have answered that they are full since they were last looked at.
    full: set[str] = field(default_factory=set[str])
    #: What each said when it was last asked: predicted wait and open requests.
    _said: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    _names: list[str] = field(default_factory=list[str])
    _ring: Ring = field(default_factory=lambda: Ring(()))
    #: What `least-wait` goes by, and what `prefix` remembers.
    _least: LeastWait = field(default_factory=LeastWait)
    _known: KnownBeginnings = field(default_factory=KnownBeginnings)
    _turn: int = 0

    def __post_init__(self) -> None:
        if self.router not in self.ROUTERS:
            raise ConfigError(f"unknown router {self.router!r}; known: {', '.join(self.ROUTERS)}")

    def set_replicas(self, names: Iterable[str]) -> None:
        """These can be had from now on, and no others."""
        self._names = list(names)
        for name in self.loads.keys() - set(self._names):
            self._least.drop(name)
        self.loads = {name: self.loads.get(name, 0.0) for name in self._names}
        self.waits = {name: self.waits.get(name, 0.0) for name in self._names}
        self._said = {name: self._said.get(name, (0.0, 0.0)) for name in self._names}
        self.total = sum(self.loads.values())
        self.full &= self.loads.keys()
        if self.router == "prefix":
            self._ring = Ring(self._names)
        for name in self._names:
            self._put(name)

    def looked_at(self, name: str, load: float, wait_s: float | None = None) -> None:
        """What a replica has to do now. wait_s: None where it was not asked."""
        self.total += load - self.loads[name]
        self.loads[name] = load
        if wait_s is not None:
            self._said[name] = wait_s, load
            self.full.discard(name)
        self._foresee(name)

    def refused(self, name: str) -> None:
        """It said that it is full."""
        self.full.add(name)
        self._put(name)

    def given(self, name: str, request: FleetRequest) -> None:
        """A request went there."""
        self._known.given(_beginnings(request), name)
        self.loads[name] += 1
        self.total += 1
        self._foresee(name)

    def ended(self, seconds: float) -> None:
        """A request has got its last token after so many seconds."""
        before = self.request_s or seconds
        self.request_s = _FADE * before + (1 - _FADE) * seconds

    def _foresee(self, name: str) -> None:
        """Whoever was sent there since it was asked, and found no seat, waits too."""
        wait_s, load_then = self._said[name]
        since = max(0.0, self.loads[name] - max(self.seats, load_then))
        self.waits[name] = wait_s + since * self.request_s / self.seats
        self._put(name)

    def _put(self, name: str) -> None:
        self._least.put(name, self.waits[name], self.loads[name], full=name in self.full)

    def order(self, request: FleetRequest) -> Iterator[str]:
        """Names of replicas, as they are to be tried; those that are full come last."""
        passed: list[str] = []
        for name in self._routed(request):
            if name in self.full:
                passed.append(name)
            else:
                yield name
        yield from passed

    def _routed(self, request: FleetRequest) -> Iterable[str]:
        if self.router == "prefix":
            return self._by_prefix(request)
        if self.router == "least-wait":
            return self._least.order()
        self._turn += 1
        return by_turn(self._names, self._turn)

    def _by_prefix(self, request: FleetRequest) -> Iterator[str]:
        known = _beginnings(request)
        key = f"alone {request.number}".encode()
        if known:
            key = known[0]
        return self._ring.order(
            key,
            self.loads,
            total=self.total,
            brake=self.brake,
            spare=_SPARE * self.seats,
            known=self._known.replica_of(known),
            seats=self.seats,
        )


def _beginnings(request: FleetRequest) -> list[bytes]:
    """Its conversation; requests without one begin like no other."""
    return [f"{request.conversation}".encode()] if request.conversation else []
