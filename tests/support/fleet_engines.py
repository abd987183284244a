"""Fake engines of a fleet: real servers on their own ports, which a test can make die."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from api_fakes import FakeClient, Script, make_app, served, until
from server_settings import server_settings
from starlette.applications import Starlette

from jitney.engine.fleet.build import FleetParts, open_fleet
from jitney.engine.fleet.config import FleetConfig
from jitney.engine.fleet.fleet import Fleet
from jitney.engine.fleet.ingress import create_ingress
from jitney.engine.fleet.replicas import Replica
from jitney.engine.server.http.service import Service
from jitney.engine.server.http.streaming import StreamingWriter

#: A line of a model's table: its engines are used in turn.
ROUND_ROBIN = 'router = "round-robin"'
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Where to?"}], "max_tokens": 40}


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream."""
    frames = [frame.removeprefix("data: ") for frame in text.split("\n\n") if "data: " in frame]
    assert frames[-1] == "[DONE]"
    return [json.loads(frame) for frame in frames[:-1]]


def said(text: str) -> str:
    """The text of a streamed chat. Fails for one that ends with an error."""
    chunks = events(text)
    errors = [event["error"] for event in chunks if "error" in event]
    assert not errors, errors
    return "".join(
        choice["delta"].get("content") or "" for event in chunks for choice in event["choices"]
    )


class _Killed(Exception):
    """Raised to break the connection, as when a process is killed."""


@dataclass
class FakeEngine:
    """A scripted engine behind a real server; records `client.requests` and `heads`."""

    client: FakeClient = field(default_factory=lambda: FakeClient(Script(delay_s=0.001)))
    settings: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    #: Number of body parts after which it breaks off an answer of a generation route; None: never.
    dies_after: int | None = None
    #: Number of answers that it breaks off.
    deaths: float = math.inf
    #: Headers of the requests that generate.
    heads: list[dict[str, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.url.removeprefix("http://")

    @property
    def service(self) -> Service:
        return self._inner.state.service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            self.heads.append({name.decode(): value.decode() for name, value in scope["headers"]})
            if self.dies_after is not None:  # every part goes through `send`
                scope.get("state", {}).pop(StreamingWriter.DIRECT, None)
            send = self._breaking(send)
        await self._inner(scope, receive, send)

    def __post_init__(self) -> None:
        self.set()

    def set(self, **settings: Any) -> None:
        """Change settings of the engine before it is served."""
        self.settings |= settings
        self._inner = make_app(self.client, **self.settings)

    def _breaking(self, send: Any) -> Any:
        parts, dies = 0, bool(self.deaths)
        self.deaths -= dies

        async def counted(message: dict[str, Any]) -> None:
            nonlocal parts
            if message["type"] == "http.response.body":
                if dies and self.dies_after is not None and parts >= self.dies_after:
                    raise _Killed
                parts += 1
            await send(message)

        return counted


@contextlib.contextmanager
def engines(*fakes: FakeEngine) -> Iterator[list[FakeEngine]]:
    """Serve each of these engines on its own port, and set its URL."""
    with contextlib.ExitStack() as stack:
        for fake in fakes:
            fake.url, _ = stack.enter_context(served(fake))
        yield list(fakes)


@dataclass
class Served:
    """A served fleet: its URL, and its objects, which belong to the server's event loop."""

    url: str
    fleet: Fleet
    parts: FleetParts

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=False, **options)

    def replicas(self, model: str = "m") -> dict[str, Replica]:
        return {replica.name: replica for replica in self.fleet.models[model].replicas}

    def wait_ready(self, *names: str) -> None:
        """Wait until these replicas, of any model, are ready."""
        until(lambda: set(names) <= self._ready())

    def _ready(self) -> set[str]:
        return {
            replica.name
            for replicas in self.fleet.replicas.values()
            for replica in replicas
            if replica.state == "ready"
        }


def toml(urls: Sequence[str], model: str = "", fleet: str = "") -> str:
    """A fleet.toml with one model `m`. model, fleet: more lines of these tables."""
    listed = ", ".join(f'"{url}"' for url in urls)
    return f"[fleet]\npoll_s = 0.2\n{fleet}\n[models.m]\nurls = [{listed}]\n{model}\n"


@contextlib.contextmanager
def fleet_of(folder: Path, text: str, key: str = "", **settings: Any) -> Iterator[Served]:
    """A served fleet with this fleet.toml; its replicas need not be ready yet."""
    file = folder / "fleet.toml"
    file.write_text(text)
    config = FleetConfig.read(file)
    started: list[tuple[Fleet, FleetParts]] = []
    limits = server_settings(**settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with open_fleet(config, key) as (fleet, parts):
            started.append((fleet, parts))
            ingress = create_ingress(fleet, limits)
            inner.append(ingress)
            async with ingress.router.lifespan_context(ingress):
                yield

    inner: list[Starlette] = []
    outer = Starlette(lifespan=lifespan)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await outer(scope, receive, send)
        else:
            await inner[0](scope, receive, send)

    with served(app, limits) as (url, _):
        until(lambda: bool(started))
        yield Served(url, *started[0])


@contextlib.contextmanager
def serving(
    folder: Path,
    *fakes: FakeEngine,
    model: str = "",
    fleet: str = "",
    key: str = "",
    **settings: Any,
) -> Iterator[tuple[Served, httpx.Client]]:
    """A fleet over these engines, which are served and ready, and a client of the fleet. model,
    fleet: more lines of these tables in fleet.toml.
    """
    with engines(*fakes):
        text = toml([fake.url for fake in fakes], model, fleet)
        with fleet_of(folder, text, key, **settings) as served, served.http() as http:
            served.wait_ready(*(fake.name for fake in fakes))
            yield served, http
