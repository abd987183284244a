"""The actors of a fleet on Ray: engines, each with its own process, and the directory of their
addresses.

A replica over several hosts has one actor per host, one in each bundle of the replica's placement
group. Serve owns the first actor, which owns the others. If one of them is lost, all end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jitney.engine.common.child_process import child_environ, end_child, start_child
from jitney.engine.common.errors import JitneyError
from jitney.engine.common.ports import HostAddress, free_port
from jitney.engine.fleet.config import FleetConfig
from jitney.engine.fleet.launchers.autoscaling import EngineLoad
from jitney.engine.fleet.launchers.engine_process import (
    ENGINE_MODULE,
    ReplicaHost,
    engine_config,
    tell,
)
from jitney.engine.fleet.replicas import Replica, Watch
from jitney.engine.fleet.sections import CandidateSection
from jitney.engine.fleet.upstream import upstream_client
from jitney.engine.server import ServerSettings

_log = logging.getLogger("jitney.fleet")

_DIRECTORY = "jitney-fleet-directory"
#: Seconds without an announcement after which the directory no longer lists an engine.
_SILENT_S = 10.0
#: Seconds between two checks whether an engine is ready.
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class RayFleet:
    """Arguments of every actor of a fleet."""

    #: Seconds after the drain that an engine has to end.
    grace_s: ClassVar[float] = 10.0

    config: FleetConfig
    settings: ServerSettings
    #: Environment variables of engines, with the keys that they accept.
    environ: dict[str, str]
    #: API key that the fleet sends to its engines.
    key: str
    #: API key for engines of `urls`; empty: the client's own key is passed on.
    url_key: str = ""
    #: Python module that runs an engine.
    module: str = ENGINE_MODULE
    #: Address on which engines listen; empty: their node's address.
    host: str = ""
    #: Reads the fleet's file again, on the node of the ingress. Raises ConfigError. None: no
    #: reloads.
    read: Callable[[], FleetConfig] | None = None


class Directory:
    """Actor with the addresses of engines, name -> (arm, URL, time of the last announcement); the
    resting arms; and the state of reloads: it passes requests for a reload to the ingress, and the
    engines' keys from the ingress to the engines.
    """

    #: Namespace of all the fleet's Ray actors.
    namespace: ClassVar[str] = "jitney"
    #: Seconds between two announcements of an engine.
    announce_s: ClassVar[float] = 1.0

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str, float]] = {}
        self._resting: set[str] = set()
        self._environ: dict[str, dict[str, str]] = {}
        self._reloads = 0

    def announce(self, name: str, arm: str, url: str) -> bool:
        """Record the address of an engine. Returns whether its arm rests."""
        self._known[name] = (arm, url, time.monotonic())
        return arm in self._resting

    def leave(self, name: str) -> None:
        self._known.pop(name, None)

    def engines(self, arm: str) -> dict[str, str]:
        """Name -> URL of an arm's engines with a recent announcement."""
        now = time.monotonic()
        return {
            name: url
            for name, (of, url, at) in self._known.items()
            if of == arm and now - at < _SILENT_S
        }

    def let_rest(self, arm: str, rests: bool) -> None:
        """Set whether an arm rests: its engines are not needed for now."""
        if rests:
            self._resting.add(arm)
        else:
            self._resting.discard(arm)

    def rests(self, arm: str) -> bool:
        return arm in self._resting

    def ask_for_reload(self) -> None:
        self._reloads += 1

    def reloads(self) -> int:
        return self._reloads

    def set_environ(self, key: str, environ: dict[str, str]) -> None:
        """Set the environment variables that engines take over. key: the fleet's key for them."""
        self._environ = {key: environ}

    def environ(self, key: str) -> dict[str, str]:
        """The variables that engines take over; empty until their ingress has set them. The key
        tells fleets apart, since a fleet that crashed leaves its directory behind.
        """
        return self._environ.get(key, {})

    @classmethod
    def of_cluster(cls) -> Any:
        """The directory of this cluster; created if there is none. It is outside any placement
        group, since the group of the engine that creates it ends with that engine.
        """
        actor: Any = ray.remote(cls)
        no_group: Any = None  # documented by Ray, but not in its annotation
        return actor.options(
            num_cpus=0,
            name=_DIRECTORY,
            namespace=cls.namespace,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=no_group),
        ).remote()


def _actor_id() -> str:
    own = ray.get_runtime_context().get_actor_id()
    assert own is not None  # only actors call this
    return own


def _node_address() -> str:
    own = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)


class _EngineChild:
    """The process of an engine, or of one host of it, as a child of an actor. Itself the actor for
    a replica's host other than the first.
    """

    def __init__(self, fleet: RayFleet, arm: str, name: str):
        self._fleet, self._arm = fleet, arm
        self.name = name
        #: Environment variables with the keys that it accepts.
        self._environ = fleet.environ
        #: Address on which it listens.
        self.host = fleet.host or _node_address()
        self.url = ""
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, place: ReplicaHost | None) -> str:
        """Start the process and return its URL. place: its host in a replica on several hosts.
        Raises OSError.
        """
        fleet = self._fleet
        model, section = fleet.config.arms[self._arm]
        port = free_port(self.host)
        self.url = f"http://{HostAddress(self.host, port)}"
        words = fleet.config.engine_arguments(model, section, self.name, 0, port, self.host, place)
        self._process = await start_child(
            fleet.module,
            *words,
            stdout=asyncio.subprocess.DEVNULL,
            env=child_environ() | self._environ,
        )
        return self.url

    def take(self, environ: dict[str, str]) -> None:
        """Accept other keys from now on."""
        if environ == self._environ:
            return
        self._environ = environ
        if self._process is not None:
            tell(self._process, environ)

    def has_ended(self) -> bool:
        return self._process is not None and _has_ended(self._process)

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def drain(self) -> None:
        """Let it finish its requests, then end it."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            limit_s = self._fleet.config.server.drain_s + self._fleet.grace_s
            await asyncio.wait_for(process.wait(), limit_s)
        await end_child(process)


class EngineActor:
    """Actor for one replica of an arm (`FleetConfig.arms`): an engine, an engine on several hosts,
    or several engines that share experts.
    """

    async def __init__(self, fleet: RayFleet, arm: str):
        self._fleet, self._arm = fleet, arm
        section = fleet.config.arms[arm].section
        self._n_hosts, self._wanted = section.n_hosts, section.ray
        settings = engine_config(fleet.config.file, arm, section).engine
        #: Whether every host serves HTTP, as engines that share experts do.
        self._all_serve = settings.data_parallel > 1
        self._name = f"{arm}-{_actor_id()[:8]}"
        self._directory = Directory.of_cluster()
        self._client = upstream_client()
        timing = fleet.config.fleet
        self._watch = Watch(self._client, poll_s=timing.poll_s, lost_after_s=timing.lost_after_s)
        self._child = _EngineChild(fleet, arm, self._name)
        #: Actors of the other hosts.
        self._others: list[Any] = []
        #: Its engines, with polled states.
        self._replicas: list[Replica] = []
        self._living: asyncio.Task[None] | None = None
        if isinstance(section, CandidateSection):
            # Serve does not wait for a candidate, since the model can be served without it.
            self._living = asyncio.create_task(self._live_as_candidate())
            return
        await self._start()
        await self._until_ready()
        self._living = asyncio.create_task(self._announce())

    async def _start(self) -> None:
        """Start the processes of all hosts. Raises OSError or RayError."""
        await self._take_keys()
        places: list[ReplicaHost] = []
        if self._n_hosts == 1:
            await self._child.start(None)
        else:
            host = self._child.host
            coordinator = str(HostAddress(host, free_port(host)))
            await self._child.start(ReplicaHost(coordinator, 0))
            places = [ReplicaHost(coordinator, host_id) for host_id in range(1, self._n_hosts)]
            self._others = [self._make_host(place.host_id) for place in places]
            await self._take_keys()
        pairs = zip(self._others, places, strict=True)
        started = await asyncio.gather(*(other.start.remote(place) for other, place in pairs))
        urls = {self._name: self._child.url}
        if self._all_serve:
            urls |= {self._name_of(host_id): url for host_id, url in enumerate(started, 1)}
        self._replicas = [Replica(name, url, self._fleet.key) for name, url in urls.items()]
        self._watch.begin(self._replicas)

    def _make_host(self, host_id: int) -> Any:
        """Create the actor for another host, in its bundle of the replica's placement group."""
        actor: Any = ray.remote(_EngineChild)
        group = get_current_placement_group()
        assert group is not None  # set by `build_application`
        return actor.options(
            **self._wanted.actor_options,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=host_id
            ),
        ).remote(self._fleet, self._arm, self._name_of(host_id))

    def _name_of(self, host_id: int) -> str:
        return f"{self._name}.{host_id}"

    async def _until_ready(self) -> None:
        """Wait until all engines are ready; Serve has the timeout. Raises JitneyError."""
        while any(replica.state != "ready" for replica in self._replicas):
            await self.check_health()
            await asyncio.sleep(_LOOK_S)

    async def _announce(self) -> None:
        """Announce the engines regularly until the process ends or the arm rests."""
        while not self._child.has_ended():
            try:
                await self._take_keys()
                for replica in self._replicas:
                    own = (replica.name, self._arm, replica.url)
                    if await self._directory.announce.remote(*own):
                        return
            except RayError as error:
                self._lost_directory(error)
            await asyncio.sleep(Directory.announce_s)

    async def _take_keys(self) -> None:
        """Accept the keys of the last reload. Raises RayError."""
        environ = await self._directory.environ.remote(self._fleet.key)
        if environ:
            self._child.take(environ)
            updates = [other.take.remote(environ) for other in self._others]
            await asyncio.gather(
                *updates, return_exceptions=True
            )  # `check_health` finds lost hosts

    async def _live_as_candidate(self) -> None:
        """Run the engine while the candidate gets requests, and end it while its arm rests. After a
        failed start it is not started again, since it would fail again.
        """
        while True:
            await self._until_wanted()
            try:
                await self._start()
                await self._until_ready()
            except (JitneyError, OSError, RayError) as error:
                await self._end()
                _log.error("candidate: %s before it was ready", error)
                return
            await self._announce()
            if self._child.has_ended():
                return  # Serve learns of it by `check_health`
            _log.info("candidate: %s ends, since it is to have no requests", self._name)
            await self._end()

    async def _until_wanted(self) -> None:
        while True:
            try:
                if not await self._directory.rests.remote(self._arm):
                    return
            except RayError as error:
                self._lost_directory(error)
            await asyncio.sleep(Directory.announce_s)

    def _lost_directory(self, error: RayError) -> None:
        """Get the directory again after an error, since Ray restarts it."""
        _log.warning("the directory of engines does not answer: %s", error)
        self._directory = Directory.of_cluster()

    async def check_health(self) -> None:
        """Raise JitneyError if a process has ended; Serve then replaces the actor."""
        lost = await self._lost()
        if lost is None:
            return
        # The other hosts wait for the lost one for ever, so they are killed.
        self._child.kill()
        for other in self._others:
            with suppress(RayError):
                await other.kill.remote()
        raise JitneyError(f"the process of {lost} ended")

    async def _lost(self) -> str | None:
        if self._child.has_ended():
            return self._name
        for host_id, other in enumerate(self._others, 1):
            if await _is_lost(other):
                return self._name_of(host_id)
        return None

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The metrics for Serve's autoscaling policy."""
        waits = [replica.predicted_wait for replica in self._replicas]
        loads = [replica.load for replica in self._replicas]
        seats = [replica.seats for replica in self._replicas]
        load = EngineLoad(min(waits, default=0.0), sum(loads), float(max(1, sum(seats))))
        return load.reported()

    async def __del__(self) -> None:
        if self._living is not None:
            self._living.cancel()
        await self._end()
        await self._watch.close()
        await self._client.aclose()

    async def _end(self) -> None:
        """Leave the directory, drain the engine and end it, then end the other hosts."""
        replicas, self._replicas = self._replicas, []
        others, self._others = self._others, []
        with suppress(RayError):
            for replica in replicas:
                await self._directory.leave.remote(replica.name)
        for replica in replicas:
            await self._watch.end(replica)
        if self._all_serve:
            await asyncio.gather(self._child.drain(), *map(_drain_host, others))
            return
        await self._child.drain()
        await asyncio.gather(*map(_drain_host, others))


async def _is_lost(host: Any) -> bool:
    """Whether the process or the actor of another host has ended."""
    try:
        return await host.has_ended.remote()
    except RayError:
        return True


async def _drain_host(host: Any) -> None:
    with suppress(RayError):
        await host.drain.remote()
    ray.kill(host)


def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """Whether a process has ended, asked from the system: Serve's event loop may notice it late."""
    if process.returncode is not None:
        return True
    try:
        status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # its status was read already
        return True
    return status is not None
