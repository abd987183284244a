"""The models of a fleet: their interface, and the models that replicas serve."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import httpx

from jitney.engine.common.requests import JsonDict
from jitney.engine.fleet.forwarding import Exchange, ProxiedAnswer, RetryPolicy
from jitney.engine.fleet.metrics import FleetMetrics
from jitney.engine.fleet.prompt_prefixes import prompt_prefixes
from jitney.engine.fleet.replica_set import ReplicaSet
from jitney.engine.fleet.replicas import Replica, Watch
from jitney.engine.fleet.request import ProxiedRequest
from jitney.engine.fleet.sections import ReplicasSection


class FleetModel(Protocol):
    """A model of a fleet."""

    @property
    def ready(self) -> bool: ...

    @property
    def replicas(self) -> Sequence[Replica]:
        """Its engines; none for a composed model."""
        ...

    def card(self) -> JsonDict:
        """Its fields in /v1/models, without the name."""
        ...

    def answer(self, request: ProxiedRequest) -> AbstractAsyncContextManager[ProxiedAnswer]:
        """Answer a request. The answer is read inside the context; leaving the context closes
        everything that is open. Raises RequestError or HttpError.
        """
        ...

    async def keeper_of(self, request: ProxiedRequest, path: str) -> Replica | None:
        """Its engine that has a resource at this path for the sender of the request, if any."""
        ...


@dataclass(slots=True)
class ReplicatedModel:
    """A model that is served by interchangeable engines."""

    #: The model's name in requests.
    name: str
    #: Its section of fleet.toml.
    section: ReplicasSection
    #: HTTP client for the engines; the client and `metrics` are shared by the whole fleet.
    client: httpx.AsyncClient
    metrics: FleetMetrics
    #: How often, and for how long, a request is retried.
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    #: Whether streams get a seed, so that another engine can resume them.
    repeat_streams: bool = True
    #: Its engines, with their states and loads.
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
    async def answer(self, request: ProxiedRequest) -> AsyncIterator[ProxiedAnswer]:
        exchange = Exchange(self.client, self, self._upstream(request), self.retries)
        async with exchange.answer() as answer:
            yield answer

    async def keeper_of(self, request: ProxiedRequest, path: str) -> Replica | None:
        """See `FleetModel`."""
        for replica in map(self.engines.ready, self.engines.names):
            if replica is None:  # it was lost while another one was asked
                continue
            try:
                headers = request.headers_for(replica.key)
                response = await self.client.get(replica.url + path, headers=headers)
            except httpx.TransportError:
                continue
            if response.status_code == 200:
                return replica
        return None

    async def meet(
        self,
        watch: Watch,
        known: Mapping[str, str],
        key: str,
        given: frozenset[str] = frozenset(),
    ) -> None:
        """Add new engines and remove engines that are gone. known: name -> URL of the engines that
        exist. key: their API key. given: names of engines that are never removed.
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

    def order(self, request: ProxiedRequest) -> Iterator[Replica]:
        """Ready replicas that may answer a request, the best first; full ones last."""
        if request.keeper:
            keeper = self.engines.ready(request.keeper)
            candidates = iter((keeper,) if keeper else ())
        elif request.background:
            candidates = self.engines.by_free_seats()
        else:
            candidates = self.engines.order(request.prefixes)
        return (replica for replica in candidates if replica.holds(request.adapter))

    def taken(self, request: ProxiedRequest, replica: Replica) -> None:
        """See `forwarding._ModelReplicas`."""
        choice = self.engines.sent(request.prefixes, replica.name)
        if choice is not None:
            self.metrics.choices.labels(self.name, choice).inc()

    def attempted(self, replica: Replica, outcome: str) -> None:
        """See `forwarding._ModelReplicas`."""
        self.metrics.attempts.labels(self.name, replica.name, outcome).inc()
        if outcome == "answered":
            replica.answered += 1
        elif outcome == "died":
            replica.lost += 1

    def _upstream(self, request: ProxiedRequest) -> ProxiedRequest:
        if self.section.router == "prefix" and not request.keeper and not request.background:
            prefixes = prompt_prefixes(request, self.section.prefix_chars)
            request = replace(request, prefixes=prefixes)
        if self.repeat_streams:
            request = request.seeded()
        if self.section.upstream_model and request.fields and not request.adapter:
            request = request.with_fields(model=self.section.upstream_model)
        return request
