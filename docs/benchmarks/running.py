"""Servers and fleets that the benchmarks start: processes of this machine on free ports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import psutil

from jitney.engine.common.ports import free_port

#: The command `jitney` in this Python.
JITNEY = (
    sys.executable,
    "-P",
    "-c",
    "import sys; from jitney.engine.cli import main; sys.exit(main())",
)
#: Most seconds until a server is ready with an empty compile cache, and until it has ended.
READY_S, STOP_S = 900.0, 120.0
#: Seconds between two checks, and the read timeout of a connection.
_LOOK_S, _SILENCE_S = 0.05, 300.0
_CORE = "jitney.engine.core.process"


class Server:
    """A `jitney serve` or `jitney fleet serve` process started here."""

    def __init__(self, url: str, started: subprocess.Popen[Any], model: str):
        self.url = url
        self.model = model
        self.started = started
        self.process = psutil.Process(started.pid)

    @cached_property
    def client(self) -> httpx.AsyncClient:
        """An HTTP client for one event loop; each request has a connection of its own."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(_SILENCE_S, connect=10.0)
        return httpx.AsyncClient(base_url=self.url, timeout=timeout, limits=limits, trust_env=False)

    def core(self) -> psutil.Process:
        """The process of the engine's core. Raises LookupError if there is none."""
        for child in self.process.children():
            with suppress(psutil.Error):
                if _CORE in child.cmdline():
                    return child
        raise LookupError("no core runs")

    def cpu_s(self) -> float:
        """User and system seconds of the process that answers HTTP."""
        times = self.process.cpu_times()
        return times.user + times.system

    def get(self, path: str, key: str = "") -> httpx.Response:
        """GET a path. Raises httpx.HTTPError for any status but 200."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = httpx.get(self.url + path, headers=headers, timeout=60, trust_env=False)
        return answer.raise_for_status()

    def wait_ready(self, path: str = "/readyz") -> None:
        """Wait until the path answers 200. Ends this program if the server ends, or is late."""
        until = time.monotonic() + READY_S
        while time.monotonic() < until and self.started.poll() is None:
            with suppress(httpx.HTTPError):
                self.get(path)
                return
            time.sleep(_LOOK_S)
        raise SystemExit(f"{self.url} did not become ready; its status is {self.started.poll()}")


@contextmanager
def started(
    command: Sequence[str],
    url: str,
    log: Path | None = None,
    environment: Mapping[str, str] = {},
    model: str = "",
    ready: str = "/readyz",
) -> Iterator[Server]:
    """A ready server, stopped at the end of the block. log: None: standard error alone."""
    with open(log or os.devnull, "ab") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output if log else None,
            env=os.environ | dict(environment),
        )
        server = Server(url, process, model)
        try:
            server.wait_ready(ready)
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def serving(
    model: str,
    folder: Path,
    *flags: str,
    program: Sequence[str] = JITNEY,
    cache: Path | None = None,
) -> AbstractContextManager[Server]:
    """Run `jitney serve` on a free port; its data and its log, `log.txt`, are in `folder`.

    cache: its cache folder; None: this user's own.
    """
    port = free_port()
    words = ("serve", "--model", model, "--port", str(port), "--data-dir", str(folder / "data"))
    environment = {"JITNEY_CACHE": str(cache)} if cache else {}
    url = f"http://127.0.0.1:{port}"
    return started((*program, *words, *flags), url, folder / "log.txt", environment, model)


@contextmanager
def running_fleet(
    table: str,
    *,
    model: str = "m",
    on: str = "processes",
    lines: str = "log_level = 'error'\npoll_s = 0.2\n",
    ready: str = "/startupz",
) -> Iterator[Server]:
    """Run `jitney fleet serve` with one model, described by `table`. lines: of [fleet]."""
    with tempfile.TemporaryDirectory(prefix="jitney-fleet-") as folder:
        port, file = free_port(), Path(folder) / "fleet.toml"
        file.write_text(f"[fleet]\nport = {port}\n{lines}[models.'{model}']\n{table}")
        words = (*JITNEY, "fleet", "serve", str(file), "--on", on)
        log = Path(folder) / "log.txt"
        with started(words, f"http://127.0.0.1:{port}", log, model=model, ready=ready) as fleet:
            yield fleet


def ready_engines(fleet: Server, key: str = "") -> dict[str, str]:
    """Name -> URL of the ready engines of model `m`."""
    replicas = fleet.get("/fleet/replicas", key).json()["models"]["m"]
    return {each["name"]: each["url"] for each in replicas if each["state"] == "ready"}


def wait_engines(fleet: Server, count: int, key: str = "") -> dict[str, str]:
    """The engines, once `count` are ready. Ends this program if the fleet is late."""
    until = time.monotonic() + READY_S
    while time.monotonic() < until and fleet.started.poll() is None:
        with suppress(httpx.HTTPError, KeyError):
            engines = ready_engines(fleet, key)
            if len(engines) == count:
                return engines
        time.sleep(_LOOK_S)
    raise SystemExit("the engines did not become ready")
