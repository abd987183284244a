"""What a fleet serves under one name: an interface, and the kind that engines stand behind."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import httpx

from jitney.engine.fleet.asked import Asked, prefix_key
from jitney.engine.fleet.config import ReplicasSection
from jitney.engine.fleet.forwarding import Answer, Exchange, Patience
from jitney.engine.fleet.metrics import FleetMetrics
from jitney.engine.fleet.replicas import Replica
from jitney.engine.fleet.routing import Ring, by_least_wait, by_prefix, by_turn
from jitney.engine.types import JsonDict

#: Share of a replica's seats that no brake keeps empty.
_SPARE = 0.25


class FleetModel(Protocol):
    """What a fleet serves under one name."""

    @property
    def ready(self) -> bool:
        """A request would be answered now."""
        ...

    @property
    def replicas(self) -> Sequence[Replica]:
        """The engines that are its own; none, where it is made of other models."""
        ...

    def card(self) -> JsonDict:
        """What /v1/models says of it beside its name."""
        ...

    def answer(self, asked: Asked) -> AbstractAsyncContextManager[Answer]:
        """Answer a request; what it gives is read inside of the context, and leaving that ends all
        that is open. Raises RequestError or HttpError.
        """
        ...

    async def keeper_of(self, asked: Asked, path: str) -> Replica | None:
        """The engine of its own that has something at this path for who sent the request."""
        ...


@dataclass(slots=True)
class ReplicatedModel:
    """Engines that answer alike."""

    name: str
    section: ReplicasSection
    client: httpx.AsyncClient
    metrics: FleetMetrics
    patience: Patience = field(default_factory=Patience)
    #: Whether requests get a seed.
    repeat_streams: bool = True
    #: What engines elsewhere are asked with, in place of the client's key; empty: with that.
    key: str = ""
    replicas: list[Replica] = field(default_factory=list)
    _turn: int = 0
    _ring: Ring = field(default_factory=lambda: Ring(()))

    @property
    def ready(self) -> bool:
        return bool(self._ready())

    def card(self) -> JsonDict:
        lengths = [each.context_length for each in self.replicas if each.context_length]
        return {"max_model_len": min(lengths, default=None), "kind": "replicas"}

    @asynccontextmanager
    async def answer(self, asked: Asked) -> AsyncIterator[Answer]:
        exchange = Exchange(self.client, self, self._upstream(asked), self.patience)
        async with exchange.answer() as answer:
            yield answer

    async def keeper_of(self, asked: Asked, path: str) -> Replica | None:
        """See `FleetModel`."""
        headers = (asked.with_key(self.key) if self.key else asked).headers
        for replica in self._ready().values():
            try:
                found = await self.client.get(replica.url + path, headers=headers)
            except httpx.TransportError:
                continue
            if found.status_code == 200:
                return replica
        return None

    def order(self, asked: Asked) -> Iterator[Replica]:
        """Those that are ready, in the order of the model's router."""
        ready = self._ready()
        if asked.keeper:
            ready = {name: each for name, each in ready.items() if name == asked.keeper}
        for name in self._names(asked, ready):
            yield ready[name]

    def attempted(self, replica: Replica, outcome: str) -> None:
        self.metrics.attempts.labels(self.name, replica.name, outcome).inc()
        if outcome == "answered":
            replica.answered += 1
        elif outcome == "died":
            replica.lost += 1

    def _ready(self) -> dict[str, Replica]:
        return {each.name: each for each in self.replicas if each.state == "ready"}

    def _names(self, asked: Asked, ready: dict[str, Replica]) -> Iterator[str]:
        """Full ones by their own word come last."""
        now = time.monotonic()
        names = list(self._routed(asked, ready))
        yield from (name for name in names if ready[name].full_until <= now)
        yield from (name for name in names if ready[name].full_until > now)

    def _routed(self, asked: Asked, ready: dict[str, Replica]) -> Iterator[str]:
        match self.section.router:
            case "prefix":
                return self._by_prefix(asked, ready)
            case "least-wait":
                return iter(self._by_least_wait(ready))
            case "round-robin":
                self._turn += 1
                return iter(by_turn(list(ready), self._turn))

    def _by_prefix(self, asked: Asked, ready: dict[str, Replica]) -> Iterator[str]:
        loads = _loads(ready)
        seats = min((each.seats for each in ready.values()), default=0)
        return by_prefix(
            self._ring_of_all(),
            prefix_key(asked, self.section.prefix_chars),
            loads,
            total=sum(loads.values()),
            brake=self.section.brake,
            spare=_SPARE * seats,
        )

    def _by_least_wait(self, ready: dict[str, Replica]) -> list[str]:
        now = time.monotonic()
        waits = {name: replica.predicted_wait(now) for name, replica in ready.items()}
        return by_least_wait(waits, _loads(ready))

    def _ring_of_all(self) -> Ring:
        """Of those that are gone too: their keys come back to them."""
        names = tuple(sorted(replica.name for replica in self.replicas))
        if names != self._ring.names:
            self._ring = Ring(names)
        return self._ring

    def _upstream(self, asked: Asked) -> Asked:
        """The request as its engines get it."""
        if self.repeat_streams:
            asked = asked.seeded()
        if self.section.upstream_model and asked.fields:
            asked = asked.with_fields(model=self.section.upstream_model)
        return asked.with_key(self.key) if self.key else asked


def _loads(ready: dict[str, Replica]) -> dict[str, float]:
    return {name: replica.load for name, replica in ready.items()}
