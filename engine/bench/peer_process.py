"""Engines as processes of this machine: how each is started, when it is ready, how it is ended."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import httpx

from jitney.engine.errors import JitneyError

#: Seconds that an engine gets to be ready (the first start of some compiles for minutes), and to
#: stop.
_START_S, _STOP_S = 900.0, 30.0
_LOOK_EVERY_S = 0.5
#: Memory allocator that vLLM's CPU build asks for.
_TCMALLOC = "/usr/lib/*/libtcmalloc_minimal.so.4"
#: Last bytes of an engine's output that are shown when it fails.
_LOG_TAIL = 1500
_VLLM_FLAGS = (
    *("--served-model-name", "m"),
    *("--max-model-len", "2048"),
    *("--max-num-seqs", "32"),
    "--no-enable-prefix-caching",
    "--disable-uvicorn-access-log",
)
_VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONPATH": "",
}


class Peer(NamedTuple):
    """An engine that can be started."""

    #: In the table.
    name: str
    #: But for its host and port.
    command: tuple[str, ...]
    #: What its environment has beside ours.
    environment: Mapping[str, str]
    #: What a reader should know of how it runs.
    settings: str

    @classmethod
    def ours(cls, model: str, kernels: str, dtype: str, weights: str = "") -> Peer:
        """This engine, as `jitney serve` starts it; weights: how they are kept, "" for the
        default.
        """
        program = "import sys; from jitney.engine.cli import main; sys.exit(main())"
        words = ("serve", model, "--dtype", dtype, "--no-prefix-cache", "--kernels", kernels)
        name = f"Jitney, {kernels} kernels"
        if weights:
            words = (*words, "--weights", weights)
            name = f"Jitney, {weights}"
        return cls(
            name=name,
            command=(sys.executable, "-c", program, *words),
            environment={},
            settings=f"jitney {' '.join(words)}",
        )

    @classmethod
    def vllm(cls, executable: str, folder: str, dtype: str, name: str = "vLLM, CPU") -> Peer:
        """vLLM's CPU build on a Hugging Face folder of the same model; name: in the table."""
        flags = (*_VLLM_FLAGS, "--dtype", dtype)
        preload = _preload(executable)
        return cls(
            name=name,
            command=(executable, "serve", folder, *flags),
            environment=_VLLM_ENVIRONMENT | _preloading(preload),
            settings=f"vllm serve {' '.join(flags)}; preloaded: {_file_names(preload)}",
        )

    @contextmanager
    def serving(self, port: int) -> Iterator[str]:
        """The engine's address once it is ready; it is stopped at the end. JitneyError if it does
        not get ready.
        """
        url = f"http://127.0.0.1:{port}"
        with tempfile.TemporaryFile() as log, _terminable():
            process = _start(self, port, log)
            try:
                _wait_ready(process, url, log)
                yield url
            finally:
                _stop(process)


def _file_names(paths: Sequence[str]) -> str:
    return ", ".join(Path(path).name for path in paths) or "nothing"


def _preloading(libraries: Sequence[str]) -> dict[str, str]:
    return {"LD_PRELOAD": ":".join(libraries)} if libraries else {}


def _preload(executable: str) -> list[str]:
    """The allocator, and the OpenMP that vLLM's environment brings, as far as they are here."""
    openmp = str(Path(executable).resolve().parent.parent / "lib" / "libiomp5.so")
    return sorted(glob.glob(_TCMALLOC))[:1] + glob.glob(glob.escape(openmp))


def _start(peer: Peer, port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [*peer.command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=os.environ | dict(peer.environment),
            start_new_session=True,
        )
    except OSError as error:
        raise JitneyError(f"it cannot be started: {error.strerror or error}") from None


@contextmanager
def _terminable() -> Iterator[None]:
    """Have SIGTERM end this process as an exception, so that the engine it started is stopped
    too.
    """

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    """Return when /health answers 200. JitneyError, with the end of the engine's output, if that
    never happens.
    """
    until = time.monotonic() + _START_S
    while not _is_healthy(url):
        if process.poll() is not None:
            status = f"it ended with status {process.returncode} before it was ready"
            raise JitneyError(f"{status}: {_tail(log)}")
        if time.monotonic() > until:
            raise JitneyError(f"{_NEVER_READY}: {_tail(log)}")
        time.sleep(_LOOK_EVERY_S)


_NEVER_READY = (
    f"it was not ready after {_START_S:g} s; if it compiles at its first start, its own "
    "compile cache may now be broken and has to be deleted"
)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=_LOOK_EVERY_S).status_code == 200
    except httpx.HTTPError:
        return False


def _tail(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL))
    return " ".join(log.read().decode(errors="replace").split())


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the engine and whatever it started, politely at first."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its own session: nobody else is in the group
    process.wait()
