"""The engines that a fleet starts itself: processes on this machine, each with its own port, which
are restarted if they die.

They share the cache of compiled programs: one engine of each model starts first and compiles; the
others load its programs from the cache.

A replica with `n_hosts` has that many processes: one engine over all of them, served by its first
host, or with `data_parallel` engines that share experts, each of which serves. They start and end
together. If one of them dies meanwhile, only it is restarted, and the others wait for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
from msgspec import convert

from jitney.engine.common.child_process import ADMIN_KEYS, child_environ, end_child, start_child
from jitney.engine.common.errors import JitneyError
from jitney.engine.common.ports import free_port
from jitney.engine.common.tasks import beside
from jitney.engine.fleet.build import FleetParts
from jitney.engine.fleet.config import FleetConfig
from jitney.engine.fleet.launchers.engine_process import (
    ADAPTERS,
    ENGINE_MODULE,
    LOCALHOST,
    ReplicaHost,
    adapters_environ,
    engine_config,
    engine_keys,
    keys_environ,
    tell,
    without_adapters,
)
from jitney.engine.fleet.models import ReplicatedModel
from jitney.engine.fleet.replicas import Replica, Watch
from jitney.engine.fleet.sections import CandidateSection, ReplicasSection
from jitney.engine.server import AdapterNews

_log = logging.getLogger("jitney.fleet")

#: First and longest backoff before a restart, seconds; window in which restarts are counted,
#: seconds; most restarts in it, after which an engine is not restarted.
_BACKOFF_S, _WINDOW_S, _MOST_RESTARTS = (0.5, 30.0), 600.0, 5
#: Seconds after the drain that an engine has to end.
_GRACE_S = 10.0
#: Seconds between two checks whether an engine is ready.
_LOOK_S = 0.1
#: Timeout of an engine's reload of adapters, seconds.
_RELOAD_S = 300.0


@dataclass(eq=False, slots=True)
class _EngineProcess:
    """One engine of a model, or one host of an engine, including its restarted processes."""

    config: FleetConfig
    model: ReplicatedModel
    #: Index among all processes of the model.
    number: int
    replica: Replica
    #: Port; 0: a free one, chosen for each process.
    port: int
    #: Additional environment variables with the keys that it accepts; shared by all engines of a
    #: fleet.
    environ: dict[str, str]
    #: Its host in a replica on several hosts; None: a replica on one host.
    place: ReplicaHost | None = None
    #: Environment variables that name adapters.
    adapters: dict[str, str] = field(default_factory=dict[str, str])
    _process: asyncio.subprocess.Process | None = None
    _restarts: deque[float] = field(default_factory=deque)

    async def start(self) -> None:
        """Start a process. Raises JitneyError."""
        port = self.port or free_port()
        self.replica.url = f"http://{LOCALHOST}:{port}"
        words = self.config.engine_arguments(
            self.model.name,
            without_adapters(self.model.section),
            self.replica.name,
            self.number,
            port,
            place=self.place,
        )
        try:
            self._process = await start_child(
                ENGINE_MODULE,
                *words,
                stdout=asyncio.subprocess.DEVNULL,
                env=child_environ() | self.environ | self.adapters,
            )
        except OSError as error:
            raise JitneyError(f"{self.replica.name} cannot be started: {error.strerror}") from None
        self.replica.became("starting", "its process was started, and does not answer yet")

    def check(self) -> None:
        process = self._process
        assert process is not None  # set by start
        if process.returncode is not None:
            self.replica.became("gone", f"it ended with status {process.returncode}")
            raise JitneyError(
                f"{self.replica.name} ended with status {process.returncode} before it was ready; "
                "what it said stands above"
            )

    async def keep(self) -> None:
        """Restart it whenever it dies; returns after too many restarts."""
        while True:
            process = self._process
            if process is None:  # a candidate's engine that failed to start
                return
            status = await process.wait()
            self.replica.became("gone", f"it ended with status {status}")
            pause = self._pause()
            if pause is None:
                _log.error("replica %s is given up: it died too often", self.replica.name)
                return
            await asyncio.sleep(pause)
            await self.start()

    def _pause(self) -> float | None:
        """Seconds before the next restart; None: no more restarts."""
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > _WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= _MOST_RESTARTS:
            return None
        self._restarts.append(now)
        return min(_BACKOFF_S[0] * 2 ** (len(self._restarts) - 1), _BACKOFF_S[1])

    def tell_keys(self) -> None:
        """Make the process accept the keys of `environ` from now on."""
        self._tell({ADMIN_KEYS: self.environ[ADMIN_KEYS]})

    async def set_adapters(self, adapters: dict[str, str]) -> AdapterNews:
        """Make the process serve other adapters, and read the files of unchanged ones again. If it
        refuses, it serves the previous ones; raises JitneyError that names the engine.
        """
        before, self.adapters = self.adapters, adapters
        if self._process is None or self._process.returncode is not None:
            return AdapterNews()  # the next process starts with the new ones
        if self.replica.state != "ready":
            self.adapters = before
            if adapters == before:
                return AdapterNews()
            raise JitneyError(
                f"{self.replica.name} is {self.replica.state}, and takes other adapters once it is "
                "ready; reload then"
            )
        try:
            return await self._reload()
        except JitneyError:
            self.adapters = before
            self._tell_adapters()
            raise

    async def _reload(self) -> AdapterNews:
        self._tell_adapters()
        headers = {"authorization": f"Bearer {self.replica.key}"} if self.replica.key else {}
        try:
            answer = await self.model.client.post(
                f"{self.replica.url}/admin/reload", headers=headers, timeout=_RELOAD_S
            )
            report = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise JitneyError(f"{self.replica.name} did not answer: {error}") from None
        if answer.status_code != 200:
            raise JitneyError(f"{self.replica.name}: {report['error']['message']}")
        return convert(report["adapters"], AdapterNews)

    def _tell_adapters(self) -> None:
        self._tell({ADAPTERS: self.adapters.get(ADAPTERS, os.environ.get(ADAPTERS))})

    def _tell(self, environ: dict[str, str | None]) -> None:
        if self._process is not None:
            tell(self._process, environ)

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def close(self, limit_s: float) -> None:
        """Let it drain for at most `limit_s` seconds, then end it."""
        if self._process is None:
            return
        self.signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), limit_s)
        await end_child(self._process)


@dataclass(frozen=True, slots=True)
class _LocalReplica:
    """The processes of one replica of a model, in the order of its hosts."""

    model: ReplicatedModel
    processes: list[_EngineProcess]
    #: The processes that serve HTTP: only the first, or all if they share experts.
    serving: list[_EngineProcess]

    async def start(self, watch: Watch) -> None:
        """Start all processes, and wait until they are ready. Raises JitneyError."""
        for process in self.processes:
            await process.start()
        replicas = [process.replica for process in self.serving]
        for replica in replicas:
            self.model.engines.add(replica)
        watch.begin(replicas)
        while any(replica.state != "ready" for replica in replicas):
            for process in self.processes:
                process.check()
            await asyncio.sleep(_LOOK_S)

    async def close(self, limit_s: float) -> None:
        """Drain for at most `limit_s` seconds. Hosts without HTTP end together with the first."""
        await asyncio.gather(*(process.close(limit_s) for process in self.serving))
        others = [process for process in self.processes if process not in self.serving]
        await asyncio.gather(*(process.close(_GRACE_S) for process in others))


class LocalEngines:
    """All engines that a fleet starts. users, admins: API keys of its clients. Without any, engines
    have no key either, since they only accept connections from this machine.
    """

    def __init__(
        self,
        config: FleetConfig,
        parts: FleetParts,
        users: Sequence[str] = (),
        admins: Sequence[str] = (),
    ):
        self._config = config
        self._parts = parts
        self._drain_s = config.server.drain_s
        self._key, self._environ = engine_keys(admins) if users or admins else ("", {})
        self._ports = _ports(config.fleet.engine_port)
        #: Models whose engines had adapters at the last reload.
        self._adapted = {*config.adapters.values()}
        #: Arm (`FleetParts.arms`) -> its replicas in the order in which they start.
        self.replicas: dict[str, list[_LocalReplica]] = {}
        for arm, model in parts.arms.items():
            if model.section.replicas:
                numbers = range(model.section.replicas)
                self.replicas[arm] = [self._make(arm, number) for number in numbers]

    def _make(self, arm: str, number: int) -> _LocalReplica:
        model = self._parts.arms[arm]
        processes = [
            self._make_process(model, name, number * model.section.n_hosts + place.host_id, place)
            for name, place in _hosts_of(f"{arm}-{number}", model.section.n_hosts)
        ]
        config = engine_config(self._config.file, arm, model.section)
        shares_experts = config.engine.data_parallel > 1
        return _LocalReplica(model, processes, processes if shares_experts else processes[:1])

    def _make_process(
        self, model: ReplicatedModel, name: str, number: int, place: ReplicaHost
    ) -> _EngineProcess:
        return _EngineProcess(
            config=self._config,
            model=model,
            number=number,
            replica=Replica(name, key=self._key),
            port=next(self._ports),
            environ=self._environ,
            place=place if model.section.n_hosts > 1 else None,
            adapters=adapters_environ(model.section),
        )

    async def start(self) -> None:
        """Start all engines, and wait until they are ready. Raises JitneyError, except for a
        candidate, whose failure must not keep its model from being served.
        """
        await asyncio.gather(*map(self._start_arm, self.replicas.values()))

    async def _start_arm(self, replicas: list[_LocalReplica]) -> None:
        try:
            await self._start_model(replicas)
        except JitneyError as error:
            if not isinstance(replicas[0].model.section, CandidateSection):
                raise
            _log.error("candidate: %s", error)

    async def _start_model(self, replicas: list[_LocalReplica]) -> None:
        first, *others = replicas
        watch = self._parts.watch
        await first.start(watch)
        await asyncio.gather(*(replica.start(watch) for replica in others))

    async def watch(self) -> None:
        """Restart processes that die; never returns."""
        async with beside(*(process.keep() for process in self.processes())) as keeping:
            await asyncio.gather(*keeping)
            await asyncio.Event().wait()

    def accept(self, admins: Sequence[str]) -> None:
        """Make engines accept these administrators' keys in addition to the fleet's own key."""
        if not self._key:
            return
        self._environ |= keys_environ(admins, self._key)
        for process in self.processes():
            process.tell_keys()

    async def set_adapters(self, fresh: FleetConfig) -> AdapterNews:
        """Make engines serve the adapters of a new configuration. If one refuses, all serve the
        previous ones; raises JitneyError.
        """
        done: list[tuple[_EngineProcess, dict[str, str]]] = []
        news: list[AdapterNews] = []
        for arm in self.replicas.keys() & fresh.models.keys():
            section = fresh.models[arm]
            if not isinstance(section, ReplicasSection):
                continue
            if arm not in {*fresh.adapters.values(), *self._adapted}:
                continue
            for process in self.processes(arm):
                before = process.adapters
                try:
                    new = before if process.place is not None else adapters_environ(section)
                    news.append(await process.set_adapters(new))
                except JitneyError:
                    for other, old in done:
                        with suppress(JitneyError):
                            await other.set_adapters(old)
                    raise
                done.append((process, before))
        self._adapted = {*fresh.adapters.values()}
        return AdapterNews(
            added=sorted({name for each in news for name in each.added}),
            removed=sorted({name for each in news for name in each.removed}),
            replaced=sorted({name for each in news for name in each.replaced}),
            needs_restart=sorted({name for each in news for name in each.needs_restart}),
        )

    def kill(self) -> None:
        for process in self.processes():
            process.signal(signal.SIGKILL)

    async def close(self) -> None:
        limit_s = self._drain_s + _GRACE_S
        replicas = [replica for own in self.replicas.values() for replica in own]
        await asyncio.gather(*(replica.close(limit_s) for replica in replicas))

    def processes(self, *arms: str) -> list[_EngineProcess]:
        """All processes of these arms; of all arms if none is named."""
        return [
            process
            for arm in arms or self.replicas
            for replica in self.replicas[arm]
            for process in replica.processes
        ]


def _hosts_of(name: str, n_hosts: int) -> Iterator[tuple[str, ReplicaHost]]:
    """(name, host) of each process of a replica. name: the replica's and its first host's."""
    coordinator = f"{LOCALHOST}:{free_port()}"
    for host_id in range(n_hosts):
        own = f"{name}.{host_id}" if host_id else name
        yield own, ReplicaHost(coordinator, host_id)


def _ports(first: int) -> Iterator[int]:
    """The port of each engine in order, from `first` on; always 0 (a free port) if it is 0."""
    return itertools.count(first) if first else itertools.repeat(0)
