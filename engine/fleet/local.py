"""The engines that a fleet starts itself: processes of this machine, each on a port of its own,
started again when they die.

They share the cache of compiled programs: of each model one is started first, and compiles; the
others find what it compiled.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from jitney.engine.config.layers import load_layers, settings
from jitney.engine.config.schema import cache_dir
from jitney.engine.errors import JitneyError
from jitney.engine.fleet.build import FleetParts
from jitney.engine.fleet.config import FleetConfig
from jitney.engine.fleet.models import ReplicatedModel
from jitney.engine.fleet.replicas import Replica
from jitney.engine.fleet.sections import CandidateSection, ReplicasSection
from jitney.engine.ports import free_port
from jitney.engine.process.children import child_environ, end_child, start_child

_log = logging.getLogger("jitney.fleet")

#: Runs `jitney serve` with its arguments, until the fleet is gone.
ENGINE_MODULE = "jitney.engine.cli.fleet_engine"
LOCALHOST = "127.0.0.1"
_MEASURED = "measured_sizes"
#: Seconds before an engine is started again, the first time and at most; restarts are counted
#: within a window, and after so many it is given up.
_BACKOFF_S, _WINDOW_S, _MOST_RESTARTS = (0.5, 30.0), 600.0, 5
#: Seconds beyond the drain's that an engine gets to end.
_GRACE_S = 10.0
#: Seconds between two looks at whether an engine is ready.
_LOOK_S = 0.1


def engine_arguments(
    config: FleetConfig,
    model: str,
    section: ReplicasSection,
    name: str,
    number: int,
    port: int,
    host: str = LOCALHOST,
) -> list[str]:
    """What `jitney serve` is given for the n-th engine of a model. name: the engine's own."""
    words = ["serve"]
    if section.config:
        words += ["--config", str(config.path(section.config))]
    for setting, value in section.settings.items():
        words += _flag(setting, value)
    if not _says_who_sizes(config, section):
        # Engines that start beside each other would time each other's steps.
        words += _flag(_MEASURED, value=False)
    if section.devices:
        words += ["--device", section.devices[number]]
    words += ["--data-dir", str(_data_dir(name))]
    words += ["--host", host, "--port", str(port), "--served-model-name", model]
    return [*words, "--drain-s", str(config.server.drain_s), "--insecure"]


def _says_who_sizes(config: FleetConfig, section: ReplicasSection) -> bool:
    """Whether it is given that engines of this model measure, or that they do not."""
    file = config.path(section.config) if section.config else None
    given = load_layers(file, flags=section.settings).origins
    return _MEASURED in given or settings()[_MEASURED].env in os.environ


def _data_dir(name: str) -> Path:
    """Where an engine keeps files, though a fleet sends it none: two may not share a folder."""
    return cache_dir() / "fleet" / quote(name, safe="")


def _flag(name: str, value: object) -> list[str]:
    """A setting as a flag."""
    flag = settings()[name].flag
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [flag, ",".join(map(str, value))]
    return [flag, str(value)]


@dataclass(eq=False, slots=True)
class _LocalEngine:
    """One engine of a model, over all of its processes."""

    config: FleetConfig
    model: ReplicatedModel
    number: int
    replica: Replica
    #: 0: any free one, another one for each process.
    port: int
    #: What its processes have beside our environment: the keys that it accepts.
    environ: dict[str, str]
    _process: asyncio.subprocess.Process | None = None
    _was_ready: bool = False
    _restarts: deque[float] = field(default_factory=deque)

    async def start(self) -> None:
        """Start a process. Raises JitneyError."""
        port = self.port or free_port()
        self.replica.url = f"http://{LOCALHOST}:{port}"
        section = self.model.section
        name, own = self.model.name, self.replica.name
        words = engine_arguments(self.config, name, section, own, self.number, port)
        try:
            self._process = await start_child(
                ENGINE_MODULE,
                *words,
                stdout=asyncio.subprocess.DEVNULL,
                env=child_environ() | self.environ,
            )
        except OSError as error:
            raise JitneyError(f"{self.replica.name} cannot be started: {error.strerror}") from None

    async def until_ready(self) -> None:
        """Raises JitneyError if it ends before."""
        process = self._process
        assert process is not None  # it was started
        while self.replica.state != "ready":
            if process.returncode is not None:
                raise JitneyError(
                    f"{self.replica.name} ended with status {process.returncode} before it was "
                    "ready; what it said stands above"
                )
            await asyncio.sleep(_LOOK_S)
        self._was_ready = True

    async def keep(self) -> None:
        """Start it again whenever it dies; returns when it is given up."""
        while True:
            process = self._process
            if process is None:  # a candidate's that could not be started
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
        """Seconds before the next start; None: no more."""
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > _WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= _MOST_RESTARTS:
            return None
        self._restarts.append(now)
        return min(_BACKOFF_S[0] * 2 ** (len(self._restarts) - 1), _BACKOFF_S[1])

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def close(self, limit_s: float) -> None:
        """Let it drain, at most so many seconds."""
        if self._process is None:
            return
        self.signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), limit_s)
        await end_child(self._process)


class LocalEngines:
    """All engines that a fleet starts. users, admins: the keys that its clients have; engines
    accept them too, so that what each client may see is told apart there.
    """

    def __init__(
        self,
        config: FleetConfig,
        parts: FleetParts,
        users: Sequence[str] = (),
        admins: Sequence[str] = (),
    ):
        self._parts = parts
        self._drain_s = config.server.drain_s
        self._key, self._environ = engine_keys(users, admins)
        self._ports = _ports(config.fleet.engine_port)
        #: By arm (`FleetParts.arms`), in the order in which they start.
        self.engines: dict[str, list[_LocalEngine]] = {}
        for arm, model in parts.arms.items():
            if model.section.replicas:
                numbers = range(model.section.replicas)
                self.engines[arm] = [self._make(config, arm, number) for number in numbers]

    def _make(self, config: FleetConfig, arm: str, number: int) -> _LocalEngine:
        replica = Replica(f"{arm}-{number}", key=self._key)
        model = self._parts.arms[arm]
        return _LocalEngine(config, model, number, replica, next(self._ports), self._environ)

    async def start(self) -> None:
        """Start all, and wait until they are ready. Raises JitneyError; not for a candidate, which
        must not keep its model from being served.
        """
        await asyncio.gather(*map(self._start_arm, self.engines.values()))

    async def _start_arm(self, engines: list[_LocalEngine]) -> None:
        try:
            await self._start_model(engines)
        except JitneyError as error:
            if not isinstance(engines[0].model.section, CandidateSection):
                raise
            _log.error("candidate: %s", error)

    async def _start_model(self, engines: list[_LocalEngine]) -> None:
        first, *others = engines
        await self._start_engine(first)
        await asyncio.gather(*map(self._start_engine, others))

    async def _start_engine(self, engine: _LocalEngine) -> None:
        await engine.start()
        engine.model.engines.add(engine.replica)
        self._parts.watch.begin([engine.replica])
        await engine.until_ready()

    async def watch(self) -> None:
        """Start again what dies; never returns."""
        keeping = [asyncio.create_task(engine.keep()) for engine in self._all()]
        try:
            await asyncio.gather(*keeping)
            await asyncio.Event().wait()
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    def kill(self) -> None:
        """End all at once."""
        for engine in self._all():
            engine.signal(signal.SIGKILL)

    async def close(self) -> None:
        """End all, letting them drain."""
        limit_s = self._drain_s + _GRACE_S
        await asyncio.gather(*(engine.close(limit_s) for engine in self._all()))

    def _all(self) -> list[_LocalEngine]:
        return [engine for engines in self.engines.values() for engine in engines]


def engine_keys(users: Sequence[str], admins: Sequence[str]) -> tuple[str, dict[str, str]]:
    """(the key that engines are watched with, what their environment says of keys). Without keys
    of clients there are none: engines listen to this machine alone.
    """
    if not users and not admins:
        return "", {}
    own = secrets.token_urlsafe(32)
    return own, {
        "JITNEY_API_KEYS": ",".join(users),
        "JITNEY_ADMIN_KEYS": ",".join([*admins, own]),
    }


def _ports(first: int) -> Iterator[int]:
    """One for each engine; 0: any free one."""
    return itertools.count(first) if first else itertools.repeat(0)
