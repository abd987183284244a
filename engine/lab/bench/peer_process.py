"""Starts and stops engines as processes on this machine, and writes the int8 model folder for one
of them.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
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
import numpy as np

from jitney.engine.common.errors import JitneyError, ModelError
from jitney.engine.common.requests import JsonDict
from jitney.engine.core import SafetensorsFolder, read_json

#: Timeout of an engine's start (some compile for minutes at the first one), and of its end,
#: seconds.
_START_S, _STOP_S = 900.0, 30.0
_LOOK_EVERY_S = 0.5
#: Memory allocator that vLLM's CPU build recommends.
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


#: Files of a model folder that are copied unchanged.
_BESIDE = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHTS = "model.safetensors"
_MOST = 127
_SCALED_INTS: JsonDict = {"num_bits": 8, "type": "int", "symmetric": True}


class Peer(NamedTuple):
    """An engine that can be started."""

    #: Name in the table.
    name: str
    #: Command without host and port.
    command: tuple[str, ...]
    #: Additional environment variables.
    environment: Mapping[str, str]
    #: Settings that a reader of the table should know.
    settings: str

    @classmethod
    def ours(
        cls, model: str, kernels: str, dtype: str, weights: str = "", more: Sequence[str] = ()
    ) -> Peer:
        """Jitney, started by `jitney serve`. weights: "" for the default. more: further flags."""
        program = "import sys; from jitney.engine.cli import main; sys.exit(main())"
        words = ("serve", model, "--dtype", dtype, "--no-prefix-cache", "--kernels", kernels, *more)
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
        """vLLM's CPU build on a Hugging Face folder of the same model. name: in the table."""
        flags = (*_VLLM_FLAGS, "--dtype", dtype)
        preload = _preload(executable)
        names = ", ".join(Path(path).name for path in preload)
        preloading = {"LD_PRELOAD": ":".join(preload)} if preload else {}
        return cls(
            name=name,
            command=(executable, "serve", folder, *flags),
            environment=_VLLM_ENVIRONMENT | preloading,
            settings=f"vllm serve {' '.join(flags)}; preloaded: {names or 'nothing'}",
        )

    @classmethod
    def vllm_w8a8(cls, executable: str, folder: Path, target: Path, dtype: str) -> Peer:
        """vLLM's CPU build on a copy of the folder, written to `target`, with int8 by int8
        products. Raises ModelError if the folder holds no model, or a quantised one.
        """
        _write_w8a8(folder, target)
        return cls.vllm(executable, str(target), dtype, name="vLLM, CPU, w8a8")

    @contextmanager
    def serving(self, port: int) -> Iterator[str]:
        """Start the engine and yield its address once it is ready; stop it at the end. Raises
        JitneyError.
        """
        url = f"http://127.0.0.1:{port}"
        with tempfile.TemporaryFile() as log, _terminable():
            process = _start(self, port, log)
            try:
                _wait_ready(process, url, log)
                yield url
            finally:
                _stop(process)


def _preload(executable: str) -> list[str]:
    """Libraries to preload, if present: the allocator, and OpenMP from vLLM's environment."""
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
    """Turn SIGTERM into an exception, so that the started engine is stopped, too."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    """Wait until /health answers 200. Raises JitneyError with the end of the engine's output."""
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
    """Terminate the engine and all its child processes; kill them after a timeout."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its own session: the group holds nothing else
    process.wait()


def _write_w8a8(folder: Path, target: Path) -> None:
    """Write the model in `folder` to a new folder `target` in the "int-quantized" format of the
    compressed-tensors library: every matrix of the layers as integers from -127 to 127 with one
    scale per output, and rows quantised at run time, each with its own scale. This is the same as
    `--weights int8` on a CPU. The embedding, the head and the norms stay unchanged.
    """
    config = read_json(folder, "config.json")
    if "quantization_config" in config:
        raise ModelError(f"{folder.name} is quantised already")
    source = SafetensorsFolder(folder)
    tensors: dict[str, np.ndarray] = {}
    for name in source.shapes:
        tensors |= _stored(name, source.read(name))
    target.mkdir()
    for pattern in _BESIDE:
        for file in folder.glob(pattern):
            shutil.copyfile(file, target / file.name)
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    config["quantization_config"] = _scheme()
    (target / "config.json").write_text(json.dumps(config, indent=1))
    _save(tensors, target / _WEIGHTS)


def _stored(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """The tensor unchanged; a layer's matrix [O, I] as int8 with scales [O, 1]."""
    if ".layers." not in name or tensor.ndim != 2 or not name.endswith(".weight"):
        return {name: tensor}
    wide = tensor.astype(np.float32)
    scales = np.maximum(np.abs(wide).max(axis=1, keepdims=True), 1e-12) / _MOST
    scales = scales.astype(tensor.dtype)
    codes = np.rint(wide / scales.astype(np.float32))
    return {
        name: np.clip(codes, -_MOST, _MOST).astype(np.int8),
        f"{name}_scale": scales,
    }


def _scheme() -> JsonDict:
    weights = _SCALED_INTS | {"strategy": "channel", "dynamic": False}
    rows = _SCALED_INTS | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _save(tensors: dict[str, np.ndarray], file: Path) -> None:
    from safetensors.numpy import save_file

    whole = {name: np.ascontiguousarray(each) for name, each in tensors.items()}
    save_file(whole, file, metadata={"format": "pt"})
