"""A fleet on Ray Serve (extra `ray`): the ingress is one deployment, each model another one, and so
is each model's candidate; their replicas are actors that own an engine each.

Requests go from the ingress to the engines over HTTP, past Serve's own router: that one knows
nothing of prefixes and of a stream that is gone on with elsewhere. Where the engines are, they tell
a named actor, the directory, once a second; who is silent for a while is struck off. Serve starts,
places, watches and replaces the actors, and scales them by the predicted wait that they report
(`autoscaling.WaitPolicy`, by Serve's custom metrics and policies).

An application's deployments are its for as long as it runs, so that a candidate that is rolled back
keeps its actors; its engines drain and end, and start again when it is to have requests again.
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
from jitney.engine.server import (
    AcceptedKeys,
    ApiKeys,
    Connections,
    FreshSettings,
    Reloader,
    ServerSettings,
    hang_up,
)

_log = logging.getLogger("jitney.fleet")

_APPLICATION = "jitney"
#: Seconds between two looks at whether we are to stop.
_LOOK_S = 0.1
#: Seconds between two of Serve's looks at whether an engine's process lives.
_HEALTH_S = 1.0
#: Where the page of all engines is.
_PAGE = "/dashboard"


class _IngressApp:
    """The ingress as an ASGI application; its fleet lives as long as the lifespan."""

    def __init__(self, fleet: RayFleet):
        self._fleet = fleet
        #: What engines take over of their environment.
        self._environ = fleet.environ
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
                asyncio.create_task(self._follow(parts, arm, _rollout_of(fleet, model)))
                for arm, model in parts.arms.items()
                if model.section.replicas
            ]
            price, keys = given.config.fleet.price_per_hour, ApiKeys(given.settings)
            page = fleet_page_routes(fleet, given.settings, _PAGE, price, keys)
            self._app = create_ingress(fleet, given.settings, extra_routes=page, keys=keys)
            if given.read is not None:
                fleet.reload = reload = self._reloader(given.read, keys, fleet, parts)
                following.append(asyncio.create_task(self._follow_reloads(reload)))
            await send({"type": "lifespan.startup.complete"})
            await receive()
            fleet.begin_drain()
            await fleet.drained()
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    def _reloader(
        self, read: Callable[[], FleetConfig], keys: ApiKeys, fleet: Fleet, parts: FleetParts
    ) -> Reloader:
        given = self._fleet

        def take(_: FreshSettings, accepted: AcceptedKeys) -> None:
            self._environ = keys_environ(accepted.admins, given.key)

        return Reloader(
            given.config.server,
            FleetReader(given.config, read, parts),
            keys,
            Connections(given.settings),  # none: they are Serve's
            fleet,
            tls=lambda: None,
            on_taken=take,
        )

    async def _follow_reloads(self, reload: Reloader) -> None:
        """Read the files again whenever the directory says so, and tell it the engines' keys; also
        once at the start: an ingress that replaces another one has the keys of the fleet's start.
        """
        directory, done = Directory.of_cluster(), -1
        while True:
            try:
                asked = await directory.reloads.remote()
                if asked != done:
                    done = asked
                    await reload.aloud()
                await directory.set_environ.remote(self._fleet.key, self._environ)
            except RayError as error:
                _log.warning("the directory of engines does not answer: %s", error)
                directory = Directory.of_cluster()
            await asyncio.sleep(Directory.announce_s)

    async def _follow(self, parts: FleetParts, arm: str, rollout: Rollout | None) -> None:
        """Keep the model's engines as the directory has them. rollout: of a candidate."""
        model = parts.arms[arm]
        directory = Directory.of_cluster()
        while True:
            try:
                if rollout is not None:
                    await directory.let_rest.remote(arm, rollout.state == "rolled_back")
                known = await directory.engines.remote(arm)
            except RayError as error:
                _log.warning("the directory of engines does not answer: %s", error)
                directory = Directory.of_cluster()
            else:
                await model.meet(parts.watch, known, self._fleet.key)
            await asyncio.sleep(Directory.announce_s)


def _rollout_of(fleet: Fleet, engines: ReplicatedModel) -> Rollout | None:
    """That of a candidate's engines; None: they are no candidate's."""
    for model in fleet.rolled_out:
        if model.candidate is engines:
            return model.rollout
    return None


def _ingress_deployment(fleet: RayFleet, engines: Sequence[Any]) -> Any:
    """engines: the deployments that are started beside it."""

    class Ingress:
        def __init__(self, *engines: Any):
            """The engines are asked over HTTP; they are named so that Serve starts them."""

    deployment: Any = serve.deployment(
        name="ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=fleet.settings.max_connections,
        graceful_shutdown_timeout_s=fleet.config.server.drain_s + fleet.grace_s,
    )
    return deployment(serve.ingress(lambda: _IngressApp(fleet))(Ingress)).bind(*engines)


def _engines_deployment(fleet: RayFleet, arm: str) -> Any:
    """Deployment of a model's engines, or of its candidate's."""
    model, section = fleet.config.arms[arm]
    kind = "candidate" if isinstance(section, CandidateSection) else "model"
    wanted = section.ray
    asked = {"CPU": wanted.cpus, "GPU": wanted.gpus, **wanted.resources}
    bundle = {what: count for what, count in asked.items() if count}
    if section.n_hosts > 1 and not bundle:
        raise ConfigError(f"[models.{arm}] ray: hosts are placed by what each gets; give cpus")
    options: dict[str, Any] = {
        "name": f"{kind}-{model}",
        "ray_actor_options": wanted.actor_options,
        "placement_group_bundles": [bundle] * section.n_hosts,
        # Hosts lie close together; those that take all chips of a node have one each.
        "placement_group_strategy": "STRICT_PACK" if section.n_hosts == 1 else "PACK",
        "health_check_period_s": _HEALTH_S,
        "graceful_shutdown_timeout_s": fleet.config.server.drain_s + 2 * fleet.grace_s,
    }
    if not bundle:
        del options["placement_group_bundles"], options["placement_group_strategy"]
    if wanted.max_replicas > section.replicas:
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
    """The Serve application. admins: keys of its administrators. url_key: that engines of `urls`
    are asked with. module: runs an engine. host: where engines listen; empty: at their node's
    address. read: the fleet's file as it is then, for reloads; None: there are none. Raises
    ConfigError for settings that only processes of one machine can have.
    """
    if config.server.ssl_certfile:
        raise ConfigError("[fleet] ssl_certfile: on Ray, end TLS before the fleet")
    if config.server.port == 0:
        raise ConfigError("[fleet] port: Ray does not tell which free port it took; give a number")
    # Without keys of clients too: engines are reached over the network.
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
    """There is no cluster yet: one of this machine alone is made."""
    return not os.environ.get("RAY_ADDRESS")


def run_on_ray(application: Any, host: str, port: int) -> None:
    """Serve on the cluster of RAY_ADDRESS, else on this machine, until SIGINT or SIGTERM; SIGHUP
    has the fleet's files read again.
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
