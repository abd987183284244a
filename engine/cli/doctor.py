"""`jitney doctor`: checks whether Jitney runs on this machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitney.engine.cli.config_command import digest_here
from jitney.engine.common.cache_folder import (
    cache_dir,
    compilation_cache_dir,
    make_folders,
    make_private,
)
from jitney.engine.common.engine_info import KernelProof, short_digest
from jitney.engine.common.errors import JitneyError
from jitney.engine.common.machine import bfloat16_features, own_processors
from jitney.engine.common.platforms import check_platform
from jitney.engine.common.terminal import visible
from jitney.engine.config import Command, Config, Flag, FlagGroup
from jitney.engine.lab import ServerSizes
from jitney.engine.server import listen

if TYPE_CHECKING:
    from jitney.engine.core import LLM

_REQUIRED = ("jitney", "jax", "jaxlib", "flax", "transformers")
_OPTIONAL = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "jax-triton")
_NO_BFLOAT16 = "not in hardware: dtype auto means float32 on this CPU"
_GIB = 1 << 30
#: Marks of the values of Finding.ok.
_MARKS = {True: "ok", False: "BAD", None: ""}


@dataclass(frozen=True, slots=True)
class _Finding:
    name: str
    value: str
    #: None: neither good nor bad.
    ok: bool | None = None


_COMMAND = Command(
    "doctor",
    "Check whether Jitney runs on this machine with these settings.",
    [FlagGroup([Flag.switch("--json", "print one JSON object")])],
    sections=Command.ALL_SECTIONS,
)


def run(arguments: Sequence[str]) -> int:
    """Print the findings; exit status 1 if Jitney cannot run here."""
    args = _COMMAND.parse(arguments)
    config = ServerSizes(args.load_layers()).as_served().config
    os.environ.update(config.engine.jax_environment)  # before the first import of jax
    findings = list(_examine(config))
    _show(findings, as_json=args.json)
    return int(any(finding.ok is False for finding in findings))


def _show(findings: list[_Finding], *, as_json: bool) -> None:
    if as_json:
        report = {finding.name: {"value": finding.value, "ok": finding.ok} for finding in findings}
        print(json.dumps(report, indent=2))
        return
    for finding in findings:
        print(visible(f"{_MARKS[finding.ok]:<5} {finding.name:<18} {finding.value}"))


def _examine(config: Config) -> Iterator[_Finding]:
    """Run all checks; an exception in one becomes a bad finding."""
    for name, check in _CHECKS.items():
        try:
            yield from check(config)
        except JitneyError as error:
            yield _failed(name, str(error))
        except Exception as error:
            yield _failed(name, f"{type(error).__name__}: {error}")


def _failed(name: str, reason: str) -> _Finding:
    one_line = " ".join(reason.split())
    return _Finding(name, one_line[:500], False)


def _versions(config: Config) -> Iterator[_Finding]:
    yield _Finding("python", platform.python_version())
    for package in _REQUIRED:
        yield _package(package, if_absent=False)
    for package in _OPTIONAL:
        yield _package(package, if_absent=None)


def _package(name: str, *, if_absent: bool | None) -> _Finding:
    try:
        return _Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return _Finding(name, "not installed", if_absent)


def _processor(config: Config) -> Iterator[_Finding]:
    yield _Finding("cpu", f"{len(own_processors())} cores, {platform.machine()}")
    yield _Finding("cpu bfloat16", ", ".join(bfloat16_features()) or _NO_BFLOAT16)


def _memory(config: Config) -> Iterator[_Finding]:
    with contextlib.suppress(FileNotFoundError):  # not Linux
        lines = Path("/proc/meminfo").read_text().splitlines()
        words = {name: text.split() for name, _, text in (line.partition(":") for line in lines)}
        if "MemAvailable" in words:
            available, total = _gib(words["MemAvailable"]), _gib(words["MemTotal"])
            yield _Finding("memory", f"{available} GiB available of {total}")


def _gib(words: list[str]) -> str:
    """A value of /proc/meminfo, which is in KiB, as GiB."""
    return f"{int(words[0]) * 1024 / _GIB:.1f}"


def _devices(config: Config) -> Iterator[_Finding]:
    check_platform(config.engine.platform)
    from jitney.engine.core import devices_of

    present = devices_of(config.engine)
    yield from _enough(config.engine.devices_here, len(present))
    for device in present:
        yield _Finding(f"device {device.id}", _describe(device), True)


def _enough(needed: int, present: int) -> Iterator[_Finding]:
    if needed > 1:
        counts = f"{needed} devices needed, {present} present"
        yield _Finding("tensor parallel", counts, present >= needed)


def _describe(device: Any) -> str:
    """Kind and free memory of one of jax's devices."""
    kind = device.platform
    if device.device_kind != device.platform:
        kind += f" {device.device_kind}"
    return kind + _device_memory(device.memory_stats() or {})


def _device_memory(stats: dict[str, int]) -> str:
    most = stats.get("bytes_limit")
    if most is None:
        return ""
    free = most - stats.get("bytes_in_use", 0)
    return f", {free / _GIB:.1f} GiB free of {most / _GIB:.1f}"


def _folders(config: Config) -> Iterator[_Finding]:
    folder = cache_dir()
    make_folders(folder)
    tempfile.TemporaryFile(dir=folder).close()
    yield _Finding("cache folder", str(folder), True)
    if config.engine.compilation_cache:
        yield _Finding("compiled programs", _kept_programs())


def _kept_programs() -> str:
    folder = compilation_cache_dir()
    reason = make_private(folder)
    if reason:
        return f"not kept: {reason}"
    files = [path for path in folder.rglob("*") if path.is_file()]  # a GPU has a folder of its own
    return f"{len(files)} files in {folder}"


def _port(config: Config) -> Iterator[_Finding]:
    server = config.server
    listen(server.host, server.port).close()
    yield _Finding("port", f"{server.port} on {server.host} is free", True)


def _model(config: Config) -> Iterator[_Finding]:
    from jitney.engine.core import ModelSource

    is_here = ModelSource.is_here(config.model.id, config.model.revision or None)
    where = "on this machine" if is_here else "to be fetched"
    yield _Finding("model", f"{config.model.id}: {where}")
    if is_here and config.engine.tensor_parallel * config.engine.data_parallel > 1:
        yield from _split(config)
    digest = digest_here(config)
    if digest:
        yield _Finding("configuration", short_digest(digest))


def _split(config: Config) -> Iterator[_Finding]:
    """Check that a local model can be split over the devices."""
    from jitney.engine.core import ModelSource

    engine = config.engine
    source = ModelSource.local(config.model.id)
    if source is not None:
        whole = source.config.in_groups(engine.expert_parallel, engine.data_parallel)
        own = whole.local(engine.tensor_parallel)
        heads = f"{own.n_heads} query and {own.n_kv_heads} key-value heads"
        yield _Finding("model on each", heads, True)


def _kernels(config: Config) -> Iterator[_Finding]:
    """Compare every kernel with its definition, in the shapes of the model and these settings.

    Loads no weights. A model that is not on this machine is replaced by a tiny random one.
    """
    check_platform(config.engine.platform)
    from jitney.engine.core import ModelSource, prove_kernels

    model = config.model.id
    source = ModelSource.of_shapes(model, config.model.revision or None)
    shapes = f"in the shapes of {model}"
    if source is None:
        config = _tiny_model(config)
        source = ModelSource.resolve(config.model.id)
        shapes = f"in the shapes of {source.name}, as {model} is not on this machine"
    label, proofs = prove_kernels(config, source)
    yield _Finding("kernels", f"{label}, {shapes}", True)
    yield from map(_proof_finding, proofs)


def _one_token(config: Config) -> Iterator[_Finding]:
    """Generate a token with a tiny random model on the configured platform and kernels, and on as
    many devices as its few heads can be split over.
    """
    from jitney.engine.core import LLM

    started = time.perf_counter()
    with contextlib.closing(LLM(_tiny(config))) as llm:
        info = llm.info
        tokens = _generated_tokens(llm)
    yield _Finding("weights and KV", f"{info.formats.weights} and {info.formats.kv_dtype}", True)
    seconds = time.perf_counter() - started
    yield _Finding("one token", f"computed in {seconds:.1f} s, compilation included", tokens == 1)


def _generated_tokens(llm: LLM) -> int:
    from jitney.engine.common.requests import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate([[1, 2, 3]], params)
    return len(output.outputs[0].token_ids)


def _tiny(config: Config) -> Config:
    """The same settings for a tiny model, with few and small programs."""
    small = _tiny_model(config)
    engine = small.engine.model_copy(update=_TINY_ENGINE)
    return small.model_copy(update={"engine": engine})


def _tiny_model(config: Config) -> Config:
    """The same settings for a tiny model, on as many of this host's devices as can share it."""
    kernels = config.engine.kernels
    if kernels == "flashinfer":
        kernels = "triton"  # FlashInfer cannot attend with heads of 16
    changes = {"tensor_parallel": math.gcd(config.engine.devices_here, 4), "kernels": kernels}
    model = config.model.model_copy(update=_TINY_MODEL)
    engine = config.engine.model_copy(update=_ONE_HOST | changes)
    return config.model_copy(update={"model": model, "engine": engine})


#: Settings of the tiny model; adapters are removed, since their shapes would not fit.
_TINY_MODEL = {"id": "tiny-random", "revision": "", "context": 0, "adapters": ()}
_ONE_HOST = {
    "expert_parallel": 1,
    "data_parallel": 1,
    "coordinator": "",
    "n_hosts": 1,
    "host_id": 0,
}
_TINY_ENGINE = {
    "max_seats": 4,
    "token_budget": 64,
    "pages": 64,
    "seat_buckets": (4,),
    "token_buckets": (64,),
}


def _proof_finding(proof: KernelProof) -> _Finding:
    value = f"largest error {proof.error:.2g}, rounding explains {proof.limit:g}"
    if proof.reason:
        value = f"could not run: {proof.reason}"
    if not proof.ok:
        value += "; not used, another kernel replaces it"
    return _Finding(f"  {proof.kernel}", value, proof.ok)


_CHECKS: dict[str, Callable[[Config], Iterator[_Finding]]] = {
    "versions": _versions,
    "cpu": _processor,
    "memory": _memory,
    "devices": _devices,
    "cache folder": _folders,
    "port": _port,
    "model": _model,
    "kernels": _kernels,
    "one token": _one_token,
}
