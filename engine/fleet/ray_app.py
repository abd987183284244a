"""A fleet on Ray Serve (extra `ray`): the ingress is one deployment, each model another one, whose
replicas are actors that own an engine each.

Requests go from the ingress to the engines over HTTP, past Serve's own router: that one knows
nothing of prefixes and of a stream that is gone on with elsewhere. Where the engines are, they tell
a named actor, the directory, once a second; who is silent for a while is struck off. Serve starts,
places, watches and replaces the actors, and scales them by the predicted wait that they report
(`autoscaling.wanted_engines`, by Serve's custom metrics and policies).
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
from jitney.engine.fleet.config import FleetConfig
from jitney.engine.fleet.found import meet
from jitney.engine.fleet.ingress import create_ingress
from jitney.engine.fleet.local import ENGINE_MODULE, engine_arguments, engine_keys
from jitney.engine.fleet.models import ReplicatedModel
from jitney.engine.fleet.page import fleet_page_routes
from jitney.engine.fleet.replicas import Replica, Watch
from jitney.engine.fleet.sections import ReplicasSection
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
    """Where the engines are: name -> (model, URL, when it last said so)."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str, float]] = {}

    def tell(self, name: str, model: str, url: str) -> None:
        self._known[name] = (model, url, time.monotonic())

    def leave(self, name: str) -> None:
        self._known.pop(name, None)

    def engines(self, model: str) -> dict[str, str]:
        """Name -> URL, of those that are heard of."""
        now = time.monotonic()
        return {
            name: url
            for name, (of, url, at) in self._known.items()
            if of == model and now - at < _SILENT_S
        }


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
    """One engine: its process, for as long as Serve keeps the actor."""

    async def __init__(self, fleet: RayFleet, model: str):
        self._fleet, self._model = fleet, model
        self._name = f"{model}-{_actor_id()[:8]}"
        self._directory = _directory()
        self._process: asyncio.subprocess.Process | None = None
        self._telling: asyncio.Task[None] | None = None
        host = fleet.host or _node_address()
        port = free_port(host)
        url_host = f"[{host}]" if ":" in host else host
        self._replica = Replica(self._name, f"http://{url_host}:{port}", fleet.key)
        self._client = upstream_client()
        timing = fleet.config.fleet
        self._watch = Watch(self._client, poll_s=timing.poll_s, lost_after_s=timing.lost_after_s)
        self._process = await self._start(host, port)
        self._watch.begin([self._replica])
        await self._until_ready()
        self._telling = asyncio.create_task(self._tell())

    async def _start(self, host: str, port: int) -> asyncio.subprocess.Process:
        fleet = self._fleet
        section = fleet.config.models[self._model]
        assert isinstance(section, ReplicasSection)  # only those have a deployment
        words = engine_arguments(fleet.config, self._model, section, self._name, 0, port, host)
        environ = child_environ() | fleet.environ
        devnull = asyncio.subprocess.DEVNULL
        return await start_child(fleet.module, *words, stdout=devnull, env=environ)

    async def _until_ready(self) -> None:
        """Serve bounds the wait by what it bounds the start of an actor with."""
        while self._replica.state != "ready":
            await self.check_health()
            await asyncio.sleep(_LOOK_S)

    async def _tell(self) -> None:
        while self._process is not None and not _has_ended(self._process):
            try:
                await self._directory.tell.remote(self._name, self._model, self._replica.url)
            except RayError as error:
                _log.warning("the directory of engines does not answer: %s", error)
                self._directory = _directory()
            await asyncio.sleep(_TELL_S)

    async def check_health(self) -> None:
        """Serve replaces the actor if this raises."""
        if self._process is not None and _has_ended(self._process):
            raise JitneyError(f"the process of {self._name} ended")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's policy is told."""
        replica = self._replica
        wait_s = replica.predicted_wait(time.monotonic())
        return {WAIT: wait_s, LOAD: replica.load, SEATS: float(max(1, replica.seats))}

    async def __del__(self) -> None:
        """Leave the directory, let the engine finish what it has, and end it."""
        if self._telling is not None:
            self._telling.cancel()
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
            following = [
                asyncio.create_task(self._follow(parts, model)) for model in parts.arms.values()
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

    async def _follow(self, parts: FleetParts, model: ReplicatedModel) -> None:
        """Ask engines that come, and no more those that go."""
        if not model.section.replicas:
            return
        if not self._fleet.has_keys:
            model.key = self._fleet.key
        directory = _directory()
        while True:
            try:
                known = await directory.engines.remote(model.name)
            except RayError as error:
                _log.warning("the directory of engines does not answer: %s", error)
            else:
                await meet(model, parts.watch, known, self._fleet.key)
            await asyncio.sleep(_TELL_S)


def _ingress_deployment(fleet: RayFleet, models: Sequence[Any]) -> Any:
    """models: the deployments that are started beside it."""

    class Ingress:
        def __init__(self, *models: Any):
            """The engines are asked over HTTP; they are named so that Serve starts them."""

    deployment: Any = serve.deployment(
        name="ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=fleet.settings.max_connections,
        graceful_shutdown_timeout_s=fleet.config.server.drain_s + _GRACE_S,
    )
    return deployment(serve.ingress(lambda: IngressApp(fleet))(Ingress)).bind(*models)


def _model_deployment(fleet: RayFleet, name: str, section: ReplicasSection) -> Any:
    wanted = section.ray
    bundle = {"CPU": wanted.cpus, "GPU": wanted.gpus, **wanted.resources}
    options: dict[str, Any] = {
        "name": f"model-{name}",
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
    return serve.deployment(EngineActor, **options).bind(fleet, name)


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
    models = []
    for name, section in config.models.items():
        if isinstance(section, ReplicasSection):
            _check(name, section)
            if section.replicas:
                models.append(_model_deployment(fleet, name, section))
    return _ingress_deployment(fleet, models)


def _check(name: str, section: ReplicasSection) -> None:
    where = f"[models.{name}]"
    if section.devices:
        raise ConfigError(f"{where} devices: Ray gives GPUs and TPUs out; give ray.gpus instead")
    if section.candidate is not None and section.candidate.replicas:
        raise ConfigError(f"{where} candidate: on Ray its engines must be given by urls")


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
