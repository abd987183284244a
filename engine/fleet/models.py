"""What a fleet serves under one name: an interface, and the kind that engines stand behind."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import httpx

from jitney.engine.common.requests import JsonDict
from jitney.engine.fleet.asked import Asked
from jitney.engine.fleet.forwarding import Exchange, Patience, ProxiedAnswer
from jitney.engine.fleet.metrics import FleetMetrics
from jitney.engine.fleet.replica_set import ReplicaSet
from jitney.engine.fleet.replicas import Replica, Watch
from jitney.engine.fleet.routing import KnownBeginnings, by_turn
from jitney.engine.fleet.sections import ReplicasSection

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

    def answer(self, asked: Asked) -> AbstractAsyncContextManager[ProxiedAnswer]:
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

    #: What clients ask for it by.
    name: str
    #: Its part of the fleet's file.
    section: ReplicasSection
    #: Asks the engines; its connections, and the counts below, are the whole fleet's.
    client: httpx.AsyncClient
    metrics: FleetMetrics
    #: How often, and how long, an engine is tried for one request.
    patience: Patience = field(default_factory=Patience)
    #: Whether requests get a seed.
    repeat_streams: bool = True
    #: Its engines, whether they answer now or not, and what is known of each.
    engines: ReplicaSet = field(default_factory=lambda: ReplicaSet([]))
    #: Requests that were given out in turn.
    _turn: int = 0
    #: By router = "prefix".
    _known: KnownBeginnings = field(default_factory=KnownBeginnings)

    @property
    def replicas(self) -> Sequence[Replica]:
        """See `FleetModel`."""
        return self.engines.all

    @property
    def ready(self) -> bool:
        return bool(self.engines.loads)

    def card(self) -> JsonDict:
        lengths = [each.context_length for each in self.replicas if each.context_length]
        return {"max_model_len": min(lengths, default=None), "kind": "replicas"}

    @asynccontextmanager
    async def answer(self, asked: Asked) -> AsyncIterator[ProxiedAnswer]:
        choosing = _Choosing(self, self._beginnings(asked))
        exchange = Exchange(self.client, choosing, self._upstream(asked), self.patience)
        async with exchange.answer() as answer:
            yield answer

    async def keeper_of(self, asked: Asked, path: str) -> Replica | None:
        """See `FleetModel`."""
        for replica in map(self.engines.ready, self.engines.names):
            if replica is None:  # it went away while another one was asked
                continue
            try:
                headers = asked.headers_for(replica.key)
                found = await self.client.get(replica.url + path, headers=headers)
            except httpx.TransportError:
                continue
            if found.status_code == 200:
                return replica
        return None

    async def meet(
        self,
        watch: Watch,
        known: Mapping[str, str],
        key: str,
        given: frozenset[str] = frozenset(),
    ) -> None:
        """Ask engines that came, and no more those that went. known: name -> URL, of those that
        there are. key: that they are asked with. given: names of engines that are not looked
        for.
        """
        for replica in list(self.replicas):
            if replica.name not in known and replica.name not in given:
                self.engines.remove(replica)
                await watch.end(replica)
        here = {replica.name for replica in self.replicas}
        for name, url in known.items():
            if name not in here:
                replica = Replica(name, url, key)
                self.engines.add(replica)
                watch.begin([replica])

    def order(self, asked: Asked, prompt: Sequence[bytes]) -> Iterator[Replica]:
        """Those that are ready, in the order of the model's router; full ones by their own word
        come last. prompt: its beginnings.
        """
        names = self._names(asked, prompt)
        full: list[Replica] = []
        for replica in map(self.engines.ready, names):
            if replica is None or not replica.holds(asked.adapter):
                continue
            if replica.full_until > time.monotonic():
                full.append(replica)
            else:
                yield replica
        yield from full

    def taken(self, prompt: Sequence[bytes], replica: Replica) -> None:
        """This replica answers the prompt with these beginnings."""
        if not prompt:
            return
        known = self._known.replica_of(prompt)
        if known is not None:
            choice = "known" if replica.name == known else "moved"
        else:
            owner = next(self.engines.ring.walk(prompt[0]))
            choice = "hashed" if replica.name == owner else "spread"
        self.metrics.choices.labels(self.name, choice).inc()
        self._known.given(prompt, replica.name)

    def attempted(self, replica: Replica, outcome: str) -> None:
        """See `forwarding._Choosing`."""
        self.metrics.attempts.labels(self.name, replica.name, outcome).inc()
        if outcome == "answered":
            replica.answered += 1
        elif outcome == "died":
            replica.lost += 1

    def _beginnings(self, asked: Asked) -> list[bytes]:
        """Of a prompt; none where there is nothing to choose by them."""
        if self.section.router != "prefix" or asked.keeper or asked.background:
            return []
        return asked.beginnings(self.section.prefix_chars)

    def _names(self, asked: Asked, prompt: Sequence[bytes]) -> Iterator[str]:
        if asked.keeper:
            return iter((asked.keeper,))
        if asked.background:  # whatever the router: it goes where seats are left
            return self.engines.rooms.order()
        return self._routed(prompt)

    def _routed(self, prompt: Sequence[bytes]) -> Iterator[str]:
        match self.section.router:
            case "prefix":
                return self._by_prefix(prompt)
            case "least-wait":
                return self.engines.waits.order()
            case "round-robin":
                self._turn += 1
                return by_turn(self.engines.names, self._turn)

    def _by_prefix(self, prompt: Sequence[bytes]) -> Iterator[str]:
        return self.engines.ring.order(
            prompt[0],
            self.engines.loads,
            total=self.engines.total,
            brake=self.section.brake,
            spare=_SPARE * self.engines.least_seats,
            known=self._known.replica_of(prompt),
            seats=self.engines.least_seats,
        )

    def _upstream(self, asked: Asked) -> Asked:
        """The request as its engines get it."""
        if self.repeat_streams:
            asked = asked.seeded()
        if self.section.upstream_model and asked.fields and not asked.adapter:
            asked = asked.with_fields(model=self.section.upstream_model)
        return asked


@dataclass(frozen=True, slots=True)
class _Choosing:
    """Where one request may go; see `forwarding._Choosing`. prompt: its beginnings."""

    model: ReplicatedModel
    prompt: Sequence[bytes]

    def order(self, asked: Asked) -> Iterator[Replica]:
        return self.model.order(asked, self.prompt)

    def taken(self, replica: Replica) -> None:
        self.model.taken(self.prompt, replica)

    def attempted(self, replica: Replica, outcome: str) -> None:
        self.model.attempted(replica, outcome)
