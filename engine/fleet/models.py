"""What a fleet serves under one name: an interface, and the kind that engines stand behind."""

from __future__ import annotations

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
from jitney.engine.fleet.sections import ReplicasSection


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
    engines: ReplicaSet = field(default_factory=ReplicaSet)

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
        choosing = _Choosing(self, self._prefixes(asked))
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

    def order(self, asked: Asked, prefixes: Sequence[bytes]) -> Iterator[Replica]:
        """Ready replicas that may answer a request, the best first; full ones last."""
        if asked.keeper:
            keeper = self.engines.ready(asked.keeper)
            candidates = iter((keeper,) if keeper else ())
        elif asked.background:
            candidates = self.engines.by_free_seats()
        else:
            candidates = self.engines.order(prefixes)
        return (replica for replica in candidates if replica.holds(asked.adapter))

    def taken(self, prefixes: Sequence[bytes], replica: Replica) -> None:
        """A replica answers the prompt with these prefixes."""
        choice = self.engines.sent(prefixes, replica.name)
        if choice is not None:
            self.metrics.choices.labels(self.name, choice).inc()

    def attempted(self, replica: Replica, outcome: str) -> None:
        """See `forwarding._Choosing`."""
        self.metrics.attempts.labels(self.name, replica.name, outcome).inc()
        if outcome == "answered":
            replica.answered += 1
        elif outcome == "died":
            replica.lost += 1

    def _prefixes(self, asked: Asked) -> list[bytes]:
        """The prefixes of a prompt; none where the router does not read them."""
        if self.section.router != "prefix" or asked.keeper or asked.background:
            return []
        return asked.beginnings(self.section.prefix_chars)

    def _upstream(self, asked: Asked) -> Asked:
        """The request as its engines get it."""
        if self.repeat_streams:
            asked = asked.seeded()
        if self.section.upstream_model and asked.fields and not asked.adapter:
            asked = asked.with_fields(model=self.section.upstream_model)
        return asked


@dataclass(frozen=True, slots=True)
class _Choosing:
    """See `forwarding._Choosing`. prefixes: of the request's prompt."""

    model: ReplicatedModel
    prefixes: Sequence[bytes]

    def order(self, asked: Asked) -> Iterator[Replica]:
        return self.model.order(asked, self.prefixes)

    def taken(self, replica: Replica) -> None:
        self.model.taken(self.prefixes, replica)

    def attempted(self, replica: Replica, outcome: str) -> None:
        self.model.attempted(replica, outcome)
