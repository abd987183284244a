"""A fleet on Ray Serve (extra `ray`): the ingress is one deployment, each model another one, and so
is each model's candidate; their replicas are actors that own an engine each.

Requests go from the ingress to the engines over HTTP, past Serve's own router: that one knows
nothing of prefixes and of a stream that is gone on with elsewhere. Where the engines are, they tell
a named actor, the directory, once a second; who is silent for a while is struck off. Serve starts,
places, watches and replaces the actors, and scales them by the predicted wait that they report
(`autoscaling.wanted_engines`, by Serve's custom metrics and policies).

An application's deployments are its for as long as it runs, so that a candidate that is rolled back
keeps its actors; its engines drain and end, and start again when it is to have requests again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from starlette.types import Receive, Scope, Send

from jitney.engine.api.settings import ServerSettings
from jitney.engine.errors import ConfigError, JitneyError
from jitney.engine.fleet.autoscaling import LOAD, SEATS, WAIT, WaitPolicy
from jitney.engine.fleet.build import FleetParts, open_fleet
from jitney.engine.fleet.config import FleetConfig, candidate_arm
from jitney.engine.fleet.found import meet
from jitney.engine.fleet.ingress import create_ingress
from jitney.engine.fleet.local import ENGINE_MODULE, engine_arguments, engine_keys
from jitney.engine.fleet.page import fleet_page_routes
from jitney.engine.fleet.replicas import Replica, Watch
from jitney.engine.fleet.rollout import Rollout
from jitney.engine.fleet.rollout_routes import rolled_out
from jitney.engine.fleet.sections import CandidateSection, ReplicasSection
from jitney.engine.fleet.upstream import upstream_client
from jitney.engine.ports import free_port
from jitney.engine.process.children import child_environ, end_child, start_child

_log = logging.getLogger("jitney.fleet")

_APPLICATION = "jitney"
_DIRECTORY, _NAMESPACE = "jitney-fleet-directory", "jitney"
#: Seconds between two words of an engine to the directory, and after which one that says nothing is
#: struck off.
_TELL_S, _SILENT_S = 1.0, 10.0
#: Seconds beyond the drain's that an engine gets to end.
_GRACE_S = 10.0
#: Seconds between two looks at whether an engine is ready, or whether we are to stop.
_LOOK_S = 0.1
#: Seconds between two of Serve's looks at whether an engine's process lives.
_HEALTH_S = 1.0
#: Where the page of all engines is.
_PAGE = "/dashboard"


@dataclass(frozen=True, slots=True)
class RayFleet:
    """What every actor of a fleet is given."""

    config: FleetConfig
    settings: ServerSettings
    #: The environment of engines: the keys that they accept.
    environ: dict[str, str]
    #: The key that engines are looked at with.
    key: str
    #: Whether clients show keys of their own; else engines are asked with ours.
    has_keys: bool
    #: That engines of `urls` are asked with; empty: the client's own.
    url_key: str = ""
    #: Runs an engine.
    module: str = ENGINE_MODULE
    #: Where engines listen; empty: at their node's address.
    host: str = ""


class Directory:
    """Where the engines are: name -> (arm, URL, when it last said so); and which arms rest."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str, float]] = {}
        self._resting: set[str] = set()

    def tell(self, name: str, arm: str, url: str) -> bool:
        """Where an engine is. Returns whether its arm rests."""
        self._known[name] = (arm, url, time.monotonic())
        return arm in self._resting

    def leave(self, name: str) -> None:
        self._known.pop(name, None)

    def engines(self, arm: str) -> dict[str, str]:
        """Name -> URL, of those that are heard of."""
        now = time.monotonic()
        return {
            name: url
            for name, (of, url, at) in self._known.items()
            if of == arm and now - at < _SILENT_S
        }

    def let_rest(self, arm: str, rests: bool) -> None:
        """Whether no engines of an arm are wanted for now."""
        if rests:
            self._resting.add(arm)
        else:
            self._resting.discard(arm)

    def rests(self, arm: str) -> bool:
        return arm in self._resting


def _directory() -> Any:
    """The one of this cluster; made if there is none. Outside any placement group: that of the
    engine that makes it ends with that engine.
    """
    actor: Any = ray.remote(Directory)
    no_group: Any = None  # as documented; the annotation does without
    return actor.options(
        num_cpus=0,
        name=_DIRECTORY,
        namespace=_NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=no_group),
    ).remote()


def _actor_id() -> str:
    """Of the actor that asks."""
    own = ray.get_runtime_context().get_actor_id()
    assert own is not None  # only actors ask
    return own


def _node_address() -> str:
    """Of the node that an actor is on, as the cluster knows it."""
    own = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)


class EngineActor:
    """One engine: its process, for as long as Serve keeps the actor. arm: `FleetConfig.arms`."""

    async def __init__(self, fleet: RayFleet, arm: str):
        self._fleet, self._arm = fleet, arm
        self._model, self._section = fleet.config.arms[arm]
        self._name = f"{arm}-{_actor_id()[:8]}"
        self._directory = _directory()
        self._host = fleet.host or _node_address()
        #: As it is looked at; another one for each process.
        self._replica = Replica(self._name, key=fleet.key)
        self._client = upstream_client()
        timing = fleet.config.fleet
        self._watch = Watch(self._client, poll_s=timing.poll_s, lost_after_s=timing.lost_after_s)
        self._process: asyncio.subprocess.Process | None = None
        #: That the process is to end, or has, is no failure.
        self._rests = False
        self._living: asyncio.Task[None] | None = None
        if isinstance(self._section, CandidateSection):
            # Serve waits for no candidate: the model is served without it.
            self._living = asyncio.create_task(self._live_as_candidate())
            return
        await self._start()
        await self._until_ready()
        self._living = asyncio.create_task(self._tell())

    async def _start(self) -> None:
        """Start the engine's process. Raises OSError."""
        fleet, host = self._fleet, self._host
        port = free_port(host)
        url_host = f"[{host}]" if ":" in host else host
        self._replica = Replica(self._name, f"http://{url_host}:{port}", fleet.key)
        words = engine_arguments(
            fleet.config, self._model, self._section, self._name, 0, port, host
        )
        self._process = await start_child(
            fleet.module,
            *words,
            stdout=asyncio.subprocess.DEVNULL,
            env=child_environ() | fleet.environ,
        )
        self._watch.begin([self._replica])

    async def _until_ready(self) -> None:
        """Serve bounds the wait by what it bounds the start of an actor with. Raises
        JitneyError.
        """
        while self._replica.state != "ready":
            await self.check_health()
            await asyncio.sleep(_LOOK_S)

    async def _tell(self) -> None:
        """Until the process ends, or is to end since its arm rests."""
        while self._process is not None and not _has_ended(self._process):
            try:
                if await self._directory.tell.remote(self._name, self._arm, self._replica.url):
                    return
            except RayError as error:
                self._lost_directory(error)
            await asyncio.sleep(_TELL_S)

    async def _live_as_candidate(self) -> None:
        """Start the engine whenever the candidate is to have requests, and let it go when it is
        not. One that cannot start is given up: it would not next time either.
        """
        while True:
            await self._until_wanted()
            try:
                await self._start()
                await self._until_ready()
            except (JitneyError, OSError) as error:
                self._process = None
                await self._watch.end(self._replica)
                _log.error("candidate: %s before it was ready", error)
                return
            await self._tell()
            if self._process is None or _has_ended(self._process):
                return  # Serve hears of it by `check_health`
            await self._rest(self._process)

    async def _until_wanted(self) -> None:
        while True:
            try:
                if not await self._directory.rests.remote(self._arm):
                    return
            except RayError as error:
                self._lost_directory(error)
            await asyncio.sleep(_TELL_S)

    async def _rest(self, process: asyncio.subprocess.Process) -> None:
        """Let the engine finish what it has, and end it."""
        _log.info("candidate: %s ends, since it is to have no requests", self._name)
        self._rests = True
        await self._watch.end(self._replica)
        self._replica = Replica(self._name, key=self._fleet.key)
        with suppress(RayError):
            await self._directory.leave.remote(self._name)
        await self._drain(process)
        self._process, self._rests = None, False

    def _lost_directory(self, error: RayError) -> None:
        """It is made anew."""
        _log.warning("the directory of engines does not answer: %s", error)
        self._directory = _directory()

    async def check_health(self) -> None:
        """Serve replaces the actor if this raises."""
        if self._process is not None and not self._rests and _has_ended(self._process):
            raise JitneyError(f"the process of {self._name} ended")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's policy is told."""
        replica = self._replica
        wait_s = replica.predicted_wait(time.monotonic())
        return {WAIT: wait_s, LOAD: replica.load, SEATS: float(max(1, replica.seats))}

    async def __del__(self) -> None:
        """Leave the directory, let the engine finish what it has, and end it."""
        if self._living is not None:
            self._living.cancel()
            with suppress(RayError):
                await self._directory.leave.remote(self._name)
        await self._watch.close()
        await self._client.aclose()
        if self._process is not None:
            await self._drain(self._process)

    async def _drain(self, process: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            limit_s = self._fleet.config.server.drain_s + _GRACE_S
            await asyncio.wait_for(process.wait(), limit_s)
        await end_child(process)


def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """Asked of the system itself: the loop, which is Serve's, may hear of a child's end late."""
    if process.returncode is not None:
        return True
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # somebody has asked for its status already
        return True
    return found is not None


class IngressApp:
    """The ingress as an ASGI application that is made where it runs: its fleet lives from the
    lifespan's start to its end.
    """

    def __init__(self, fleet: RayFleet):
        self._fleet = fleet
        self._app: Callable[[Scope, Receive, Send], Awaitable[None]] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        given = self._fleet
        async with AsyncExitStack() as stack:
            fleet, parts = await stack.enter_async_context(open_fleet(given.config, given.url_key))
            rollouts = {
                candidate_arm(model.rollout.model): model.rollout for model in rolled_out(fleet)
            }
            following = [
                asyncio.create_task(self._follow(parts, arm, rollouts.get(arm)))
                for arm, model in parts.arms.items()
                if model.section.replicas
            ]
            price = given.config.fleet.price_per_hour
            page = fleet_page_routes(fleet, given.settings, _PAGE, price)
            self._app = create_ingress(fleet, given.settings, extra_routes=page)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            fleet.begin_drain()
            await fleet.drained()
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _follow(self, parts: FleetParts, arm: str, rollout: Rollout | None) -> None:
        """Ask engines that come, and no more those that go. rollout: of an arm that is a
        candidate.
        """
        model = parts.arms[arm]
        if not self._fleet.has_keys:
            model.key = self._fleet.key
        directory = _directory()
        while True:
            try:
                if rollout is not None:
                    await directory.let_rest.remote(arm, rollout.state == "rolled_back")
                known = await directory.engines.remote(arm)
            except RayError as error:
                _log.warning("the directory of engines does not answer: %s", error)
                directory = _directory()
            else:
                await meet(model, parts.watch, known, self._fleet.key)
            await asyncio.sleep(_TELL_S)


def _ingress_deployment(fleet: RayFleet, engines: Sequence[Any]) -> Any:
    """engines: the deployments that are started beside it."""

    class Ingress:
        def __init__(self, *engines: Any):
            """The engines are asked over HTTP; they are named so that Serve starts them."""

    deployment: Any = serve.deployment(
        name="ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=fleet.settings.max_connections,
        graceful_shutdown_timeout_s=fleet.config.server.drain_s + _GRACE_S,
    )
    return deployment(serve.ingress(lambda: IngressApp(fleet))(Ingress)).bind(*engines)


def _engines_deployment(fleet: RayFleet, arm: str) -> Any:
    """Of a model's engines, or of its candidate's."""
    model, section = fleet.config.arms[arm]
    kind = "candidate" if isinstance(section, CandidateSection) else "model"
    wanted = section.ray
    bundle = {"CPU": wanted.cpus, "GPU": wanted.gpus, **wanted.resources}
    options: dict[str, Any] = {
        "name": f"{kind}-{model}",
        # The engine is a child of the actor, so the group's one bundle holds what it needs.
        "ray_actor_options": {"num_cpus": wanted.cpus, "num_gpus": wanted.gpus}
        | ({"resources": wanted.resources} if wanted.resources else {}),
        "placement_group_bundles": [{what: count for what, count in bundle.items() if count}],
        "placement_group_strategy": "STRICT_PACK",
        "health_check_period_s": _HEALTH_S,
        "graceful_shutdown_timeout_s": fleet.config.server.drain_s + 2 * _GRACE_S,
    }
    if not any(bundle.values()):
        del options["placement_group_bundles"], options["placement_group_strategy"]
    if wanted.max_replicas > section.replicas:
        options["autoscaling_config"] = _scaling(section)
    else:
        options["num_replicas"] = section.replicas
    return serve.deployment(EngineActor, **options).bind(fleet, arm)


def _scaling(section: ReplicasSection) -> dict[str, Any]:
    """Serve's autoscaling by what engines report."""
    return {
        "min_replicas": section.replicas,
        "max_replicas": section.ray.max_replicas,
        "policy": {
            "policy_function": WaitPolicy,
            "policy_kwargs": {"target_wait_s": section.ray.target_wait_s},
        },
    }


def build_application(
    config: FleetConfig,
    settings: ServerSettings,
    users: Sequence[str] = (),
    admins: Sequence[str] = (),
    url_key: str = "",
    module: str = ENGINE_MODULE,
    host: str = "",
) -> Any:
    """The Serve application. url_key: that engines of `urls` are asked with. module: runs an
    engine. host: where engines listen; empty: at their node's address. Raises ConfigError for what
    only processes of one machine can have.
    """
    if config.server.ssl_certfile:
        raise ConfigError("[fleet] ssl_certfile: on Ray, end TLS before the fleet")
    if config.server.port == 0:
        raise ConfigError("[fleet] port: Ray does not tell which free port it took; give a number")
    has_keys = bool(users or admins)
    key, environ = engine_keys(users, admins)
    if not has_keys:  # engines are reached over the network, so they have a key all the same
        key = secrets.token_urlsafe(32)
        environ = {"JITNEY_ADMIN_KEYS": key}
    fleet = RayFleet(
        config=config,
        settings=settings,
        environ=environ,
        key=key,
        has_keys=has_keys,
        url_key=url_key,
        module=module,
        host=host,
    )
    started = []
    for arm, (_, section) in config.arms.items():
        if section.devices:
            raise ConfigError(
                f"[models.{arm}] devices: Ray gives GPUs and TPUs out; give ray.gpus instead"
            )
        if section.replicas:
            started.append(_engines_deployment(fleet, arm))
    return _ingress_deployment(fleet, started)


def is_one_machine() -> bool:
    """There is no cluster yet: one of this machine alone is made."""
    return not os.environ.get("RAY_ADDRESS")


def run_on_ray(application: Any, host: str, port: int) -> None:
    """Serve on the cluster that RAY_ADDRESS names, else on one of this machine alone, until SIGINT
    or SIGTERM.
    """
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))
    ray.init(namespace=_NAMESPACE, include_dashboard=False if is_one_machine() else None)
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(application, name=_APPLICATION)
        print(f"Jitney's fleet serves on Ray at http://{host}:{port}/v1", flush=True)
        while not stop:
            time.sleep(_LOOK_S)
    finally:
        serve.shutdown()
        ray.kill(_directory())
        ray.shutdown()
