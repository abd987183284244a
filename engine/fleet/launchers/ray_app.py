"""A fleet on Ray Serve (extra `ray`): the ingress, each model and each model's candidate are
deployments; replicas of the latter two are actors that own one engine each.

Requests go from the ingress to the engines over HTTP, not through Serve's router, which supports
neither prefixes nor resumed streams. Engines announce their addresses once a second to a named
actor, the directory, which drops an engine after some time without an announcement. Serve starts,
places, watches and replaces the actors, and scales them by the predicted wait that they report
(`autoscaling.WaitPolicy`, by Serve's custom metrics and policies).

An application keeps its deployments as long as it runs, so a candidate that is rolled back keeps
its actors. Its engines drain and end, and start again when the candidate gets requests again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from starlette.types import Receive, Scope, Send

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.terminal import hang_up
from jitney.engine.fleet.build import FleetParts, open_fleet
from jitney.engine.fleet.config import FleetConfig
from jitney.engine.fleet.fleet import Fleet
from jitney.engine.fleet.ingress import create_ingress
from jitney.engine.fleet.launchers.autoscaling import WaitPolicy
from jitney.engine.fleet.launchers.engine_process import (
    ENGINE_MODULE,
    engine_keys,
    keys_environ,
)
from jitney.engine.fleet.launchers.ray_engines import Directory, EngineActor, RayFleet
from jitney.engine.fleet.models import ReplicatedModel
from jitney.engine.fleet.page import fleet_page_routes
from jitney.engine.fleet.reread import FleetReader
from jitney.engine.fleet.rollout.rollout import Rollout
from jitney.engine.fleet.sections import CandidateSection, ReplicasSection
from jitney.engine.server import HttpServer, ServerSettings

_log = logging.getLogger("jitney.fleet")

_APPLICATION = "jitney"
#: Seconds between two checks for a signal.
_LOOK_S = 0.1
#: Seconds between two of Serve's health checks of an engine.
_HEALTH_S = 1.0
#: Path of the page of all engines.
_PAGE = "/dashboard"


class _IngressApp:
    """The ingress as an ASGI application, whose fleet is open during the lifespan."""

    def __init__(self, fleet: RayFleet):
        self._fleet = fleet
        #: Environment variables that engines take over.
        self._environ = fleet.environ
        self._app: Callable[[Scope, Receive, Send], Awaitable[None]] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        arguments = self._fleet
        async with AsyncExitStack() as stack:
            fleet, parts = await stack.enter_async_context(
                open_fleet(arguments.config, arguments.url_key)
            )
            following = [
                asyncio.create_task(self._follow(parts, arm, _rollout_of(fleet, model)))
                for arm, model in parts.arms.items()
                if model.section.replicas
            ]
            # Without connections: Serve has them.
            http = HttpServer(arguments.config.server, arguments.settings)
            price, keys = arguments.config.fleet.price_per_hour, http.accepted
            page = fleet_page_routes(fleet, arguments.settings, _PAGE, price, keys)
            self._app = create_ingress(fleet, arguments.settings, extra_routes=page, keys=keys)
            if arguments.read is not None:
                read = FleetReader(arguments.config, arguments.read, parts)
                reload = http.reloads(fleet, read, self._take_keys)
                following.append(asyncio.create_task(self._follow_reloads(reload.aloud)))
            await send({"type": "lifespan.startup.complete"})
            await receive()
            fleet.begin_drain()
            await fleet.drained()
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    def _take_keys(self, _: JsonDict, admins: tuple[str, ...]) -> None:
        self._environ = keys_environ(admins, self._fleet.key)

    async def _follow_reloads(self, reload: Callable[[], Awaitable[None]]) -> None:
        """Read the files again when the directory has a request for it, and send it the engines'
        keys. Also done at the start: an ingress that replaces another one has the old keys.
        """
        directory, done = Directory.of_cluster(), -1
        while True:
            try:
                requested = await directory.reloads.remote()
                if requested != done:
                    done = requested
                    await reload()
                await directory.set_environ.remote(self._fleet.key, self._environ)
            except RayError as error:
                _log.warning("the directory of engines does not answer: %s", error)
                directory = Directory.of_cluster()
            await asyncio.sleep(Directory.announce_s)

    async def _follow(self, parts: FleetParts, arm: str, rollout: Rollout | None) -> None:
        """Update a model's engines from the directory regularly. rollout: of a candidate."""
        model = parts.arms[arm]
        directory = Directory.of_cluster()
        while True:
            try:
                if rollout is not None:
                    await directory.let_rest.remote(arm, rollout.state == "rolled_back")
                url_by_name = await directory.engines.remote(arm)
            except RayError as error:
                _log.warning("the directory of engines does not answer: %s", error)
                directory = Directory.of_cluster()
            else:
                await model.meet(parts.watch, url_by_name, self._fleet.key)
            await asyncio.sleep(Directory.announce_s)


def _rollout_of(fleet: Fleet, engines: ReplicatedModel) -> Rollout | None:
    """The rollout of a candidate's engines; None for other engines."""
    for model in fleet.rolled_out:
        if model.candidate is engines:
            return model.rollout
    return None


def _ingress_deployment(fleet: RayFleet, engines: Sequence[Any]) -> Any:
    """Deployment of the ingress. engines: the deployments that Serve starts with it."""

    class Ingress:
        def __init__(self, *engines: Any):
            """Take the engines as arguments only to make Serve start them: requests use HTTP."""

    deployment: Any = serve.deployment(
        name="ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=fleet.settings.max_connections,
        graceful_shutdown_timeout_s=fleet.config.server.drain_s + fleet.grace_s,
    )
    return deployment(serve.ingress(lambda: _IngressApp(fleet))(Ingress)).bind(*engines)


def _engines_deployment(fleet: RayFleet, arm: str) -> Any:
    model, section = fleet.config.arms[arm]
    kind = "candidate" if isinstance(section, CandidateSection) else "model"
    ray_section = section.ray
    resources = {"CPU": ray_section.cpus, "GPU": ray_section.gpus, **ray_section.resources}
    bundle = {what: count for what, count in resources.items() if count}
    if section.n_hosts > 1 and not bundle:
        raise ConfigError(f"[models.{arm}] ray: hosts are placed by what each gets; give cpus")
    options: dict[str, Any] = {
        "name": f"{kind}-{model}",
        "ray_actor_options": ray_section.actor_options,
        "placement_group_bundles": [bundle] * section.n_hosts,
        # Hosts are placed close together; a host that needs all chips of a node gets its own node.
        "placement_group_strategy": "STRICT_PACK" if section.n_hosts == 1 else "PACK",
        "health_check_period_s": _HEALTH_S,
        "graceful_shutdown_timeout_s": fleet.config.server.drain_s + 2 * fleet.grace_s,
    }
    if not bundle:
        del options["placement_group_bundles"], options["placement_group_strategy"]
    if ray_section.max_replicas > section.replicas:
        options["autoscaling_config"] = _scaling(section)
    else:
        options["num_replicas"] = section.replicas
    return serve.deployment(EngineActor, **options).bind(fleet, arm)


def _scaling(section: ReplicasSection) -> dict[str, Any]:
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
    admins: Sequence[str] = (),
    url_key: str = "",
    module: str = ENGINE_MODULE,
    host: str = "",
    read: Callable[[], FleetConfig] | None = None,
) -> Any:
    """The Serve application. admins: administrators' API keys. url_key: key for engines of `urls`.
    module: runs an engine. host: address on which engines listen; empty: their node's address.
    read: reads the fleet's file again, for reloads; None: no reloads. Raises ConfigError for
    settings that Ray does not support.
    """
    if config.server.ssl_certfile:
        raise ConfigError("[fleet] ssl_certfile: on Ray, end TLS before the fleet")
    if config.server.port == 0:
        raise ConfigError("[fleet] port: Ray does not tell which free port it took; give a number")
    # Engines get a key even if clients have none, since they are reachable over the network.
    key, environ = engine_keys(admins)
    fleet = RayFleet(
        config=config,
        settings=settings,
        environ=environ,
        key=key,
        url_key=url_key,
        module=module,
        host=host,
        read=read,
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
    """Whether no cluster is configured, so that Ray starts one on this machine only."""
    return not os.environ.get("RAY_ADDRESS")


def run_on_ray(application: Any, host: str, port: int) -> None:
    """Serve on the cluster of RAY_ADDRESS, else on this machine, until SIGINT or SIGTERM. SIGHUP
    requests that the fleet's files are read again.
    """
    stop: list[int] = []
    reloads: list[int] = []
    on_hang_up = hang_up(stop=stop.append, reload=lambda: reloads.append(signal.SIGHUP))
    signal.signal(signal.SIGHUP, lambda number, frame: on_hang_up())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))
    ray.init(namespace=Directory.namespace, include_dashboard=False if is_one_machine() else None)
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(application, name=_APPLICATION)
        print(f"Jitney's fleet serves on Ray at http://{host}:{port}/v1", flush=True)
        while not stop:
            if reloads:
                reloads.clear()
                ray.get(Directory.of_cluster().ask_for_reload.remote())
            time.sleep(_LOOK_S)
    finally:
        serve.shutdown()
        ray.kill(Directory.of_cluster())
        ray.shutdown()
