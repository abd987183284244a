"""Builds a fleet from its fleet.toml: models, the HTTP client, and the polling of engines."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from jitney.engine.common.ports import HostAddress
from jitney.engine.common.tasks import beside
from jitney.engine.config import Section
from jitney.engine.fleet.compositions.composed import COMPOSED_KINDS, ComposedModels
from jitney.engine.fleet.compositions.composed_model import NamedComposition
from jitney.engine.fleet.compositions.engines import FleetEngines
from jitney.engine.fleet.config import FleetConfig
from jitney.engine.fleet.fleet import Fleet
from jitney.engine.fleet.forwarding import RetryPolicy
from jitney.engine.fleet.metrics import FleetMetrics
from jitney.engine.fleet.models import FleetModel, ReplicatedModel
from jitney.engine.fleet.quotas import FleetQuotas
from jitney.engine.fleet.replica_set import ReplicaSet
from jitney.engine.fleet.replicas import Replica, Watch
from jitney.engine.fleet.rollout.candidate import ModelWithCandidate
from jitney.engine.fleet.rollout.rollout import Rollout
from jitney.engine.fleet.rollout.rollout_keeper import RolloutKeeper
from jitney.engine.fleet.sections import ReplicasSection
from jitney.engine.fleet.upstream import upstream_client

_log = logging.getLogger("jitney.fleet")

_HTTP_PORT = 80
#: Seconds between two lookups of a DNS name: Kubernetes lets resolvers cache addresses as long.
_LOOK_S = 5.0


@dataclass(slots=True)
class FleetParts:
    """The parts that models are built from."""

    config: FleetConfig
    client: httpx.AsyncClient
    metrics: FleetMetrics
    watch: Watch
    #: API key for engines of `urls`; empty: the client's key is passed on.
    key: str
    #: The composed models.
    composed: ComposedModels
    #: All models by name; filled while they are built, since composed models call others.
    models: dict[str, FleetModel] = field(default_factory=dict)
    #: Groups of interchangeable engines by their names in `FleetConfig.arms`.
    arms: dict[str, ReplicatedModel] = field(default_factory=dict)
    #: One keeper per model with a candidate.
    rollouts: list[RolloutKeeper] = field(default_factory=list)
    #: Models whose engines are looked up by DNS names.
    found: list[_FoundEngines] = field(default_factory=list)

    def use_key(self, key: str) -> None:
        """Send this key to engines of `urls` from now on."""
        for model in self.arms.values():
            for replica in model.replicas:
                if replica.key == self.key:
                    replica.key = key
        for engines in self.found:
            engines.key = key
        self.key = key


type _Maker = Callable[[FleetParts, str, Any], FleetModel]


def _replicated(
    parts: FleetParts, name: str, section: ReplicasSection
) -> ReplicatedModel | ModelWithCandidate:
    own_arm, *other_arm = parts.config.arms_of(name)
    stable, other = _arm(parts, name, section, own_arm), section.candidate
    if other is None:
        return stable
    model = ModelWithCandidate(
        stable,
        _arm(parts, name, other, other_arm[0]),
        Rollout(name, other.name, other.rule),
        {"stable": other.stable_price_per_hour, "candidate": other.price_per_hour},
        timeout_s=other.timeout_s,
    )
    folder = parts.config.fleet.state_dir
    state_dir = parts.config.path(folder) if folder else None
    parts.rollouts.append(RolloutKeeper(model, parts.client, state_dir))
    return model


def _arm(parts: FleetParts, name: str, section: ReplicasSection, arm: str) -> ReplicatedModel:
    """A model with its engines of `urls`; engines that are started here are added when they start.
    arm: name of the group of engines.
    """
    fleet, looked_for = parts.config.fleet, section.found_urls
    replicas = [Replica.at(url, parts.key) for url in section.urls if url not in looked_for]
    model = ReplicatedModel(
        name=name,
        section=section,
        client=parts.client,
        metrics=parts.metrics,
        retries=RetryPolicy(fleet.attempts, fleet.resume_wait_s),
        repeat_streams=fleet.repeat_streams,
        engines=ReplicaSet(replicas, section.router, section.brake),
    )
    parts.watch.begin(model.replicas)
    if looked_for:
        names = frozenset(replica.name for replica in replicas)
        parts.found.append(_FoundEngines(model, parts.watch, looked_for, parts.key, names))
    parts.arms[arm] = model
    return model


def _composed(parts: FleetParts, name: str, section: Section) -> NamedComposition:
    """A composed model, which calls its parts by name."""
    return NamedComposition(name, parts.composed, parts.models, parts.metrics)


#: Class of section in `config._KINDS` -> function that builds its model.
_MAKERS: dict[type[Section], _Maker] = {
    ReplicasSection: _replicated,
    **dict.fromkeys(COMPOSED_KINDS.values(), _composed),
}


@asynccontextmanager
async def open_fleet(
    config: FleetConfig, key: str = "", transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[tuple[Fleet, FleetParts]]:
    """A fleet whose engines of `urls` are polled until the context is left.

    key: sent to engines instead of the client's key. transport: only passed by tests.
    """
    models: dict[str, FleetModel] = {}
    keepers: list[RolloutKeeper] = []
    metrics = FleetMetrics(
        lambda: {name: list(models[name].replicas) for name in models},
        lambda: [keeper.model.rollout for keeper in keepers],
    )
    async with (
        upstream_client(transport) as client,
        _compositions(config, models) as composed,
    ):
        section = config.fleet
        watch = Watch(client, poll_s=section.poll_s, lost_after_s=section.lost_after_s)
        parts = FleetParts(
            config=config,
            client=client,
            metrics=metrics,
            watch=watch,
            key=key,
            composed=composed,
            models=models,
            rollouts=keepers,
        )
        try:
            for name, table in config.models.items():
                models[name] = _MAKERS[type(table)](parts, name, table)
            async with AsyncExitStack() as looking:
                for keeper in parts.rollouts:
                    await looking.enter_async_context(keeper.running())
                for engines in parts.found:
                    await looking.enter_async_context(beside(engines.look_regularly()))
                server = config.server
                quotas = FleetQuotas(server.key_max_concurrent, server.key_tokens_per_minute)
                yield Fleet(models, metrics, quotas, config.adapters), parts
        finally:
            await watch.close()


@asynccontextmanager
async def _compositions(
    config: FleetConfig, models: Mapping[str, FleetModel]
) -> AsyncIterator[ComposedModels]:
    """The composed models, started. models: all models; filled while they are built."""
    composed = ComposedModels(config.models, FleetEngines(models), config.file.parent)
    try:
        await composed.start()
        yield composed
    finally:
        await composed.close()


@dataclass(slots=True)
class _FoundEngines:
    """Looks up engines of one model while the fleet runs: every address of a DNS name is one, such
    as the pods behind a headless service of Kubernetes.
    """

    model: ReplicatedModel
    watch: Watch
    #: URLs of the form dns+http://NAME:PORT.
    urls: tuple[str, ...]
    #: API key that is sent to the engines.
    key: str
    #: Names of the model's other engines.
    given: frozenset[str]

    async def look_regularly(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Look up engines once. If a name cannot be resolved, all engines stay."""
        url_by_name: dict[str, str] = {}
        for url in self.urls:
            parts = urlsplit(url)
            try:
                addresses = await _addresses(parts.hostname or "", parts.port or _HTTP_PORT)
            except OSError as error:
                _log.warning("%s: its engines are not found: %s", url, error)
                return
            url_by_name |= {address: f"http://{address}" for address in addresses}
        await self.model.meet(self.watch, url_by_name, self.key, self.given)


async def _addresses(name: str, port: int) -> list[str]:
    """All addresses of a DNS name as HOST:PORT. Raises OSError if it has none."""
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = {str(address[0]) for *_, address in infos}
    return [str(HostAddress(host, port)) for host in sorted(hosts)]
