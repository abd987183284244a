"""`jitney doctor`: what this machine has, and whether Jitney runs on it."""

from __future__ import annotations

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

from jitney.engine.cli.flags import Parser, add_settings, config_from
from jitney.engine.cli.listen import listen
from jitney.engine.config.platforms import check_platform
from jitney.engine.config.schema import (
    Config,
    cache_dir,
    compilation_cache_dir,
    platform_environment,
)
from jitney.engine.errors import JitneyError
from jitney.engine.executor.memory import claim_memory
from jitney.engine.process.main import refuse_open_folder
from jitney.engine.types import KernelProof

PACKAGES = (
    "jitney",
    "jax",
    "jaxlib",
    "flax",
    "transformers",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "libtpu",
    "jax-triton",
)
#: What a CPU needs to multiply bfloat16 in hardware.
CPU_FEATURES = ("avx512_bf16", "amx_bf16")
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ok None: neither good nor bad."""

    name: str
    value: str
    ok: bool | None = None


def run(arguments: Sequence[str]) -> int:
    """Print the findings; exit status 1 if one of them keeps Jitney from running here."""
    parser = Parser(
        "doctor", "Say what this machine has, and whether Jitney runs on it with these settings."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser)
    args = parser.parse(arguments)
    config = config_from(args)
    os.environ.update(platform_environment(config.engine))  # before the first import of jax
    claim_memory(os.environ)
    findings = list(examine(config))
    if args.json:
        print(json.dumps({f.name: {"value": f.value, "ok": f.ok} for f in findings}, indent=2))
    else:
        for finding in findings:
            print(f"{MARKS[finding.ok]:<5} {finding.name:<18} {finding.value}")
    return int(any(finding.ok is False for finding in findings))


MARKS = {True: "ok", False: "BAD", None: ""}


def examine(config: Config) -> Iterator[Finding]:
    """All findings in order; a check that raises becomes a bad finding, never the end of the
    report.
    """
    for name, check in CHECKS.items():
        try:
            yield from check(config)
        except Exception as error:
            text = (
                str(error) if isinstance(error, JitneyError) else f"{type(error).__name__}: {error}"
            )
            yield Finding(name, " ".join(text.split())[:500], False)


def versions(config: Config) -> Iterator[Finding]:
    yield Finding("python", platform.python_version())
    for package in PACKAGES:
        try:
            yield Finding(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, "not installed", False if package in PACKAGES[:5] else None)


def processor(config: Config) -> Iterator[Finding]:
    yield Finding("cpu", f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}")
    flags = _words("/proc/cpuinfo", "flags")
    has = [feature for feature in CPU_FEATURES if feature in flags]
    yield Finding(
        "cpu bfloat16", ", ".join(has) or "not in hardware: dtype auto means float32 on this CPU"
    )
    if kib := _words("/proc/meminfo", "MemAvailable:"):
        total = _words("/proc/meminfo", "MemTotal:")
        yield Finding(
            "memory",
            f"{int(kib[0]) * 1024 / GIB:.1f} GiB available of {int(total[0]) * 1024 / GIB:.1f}",
        )


def _words(file: str, key: str) -> list[str]:
    """The words after `key` on its first line of a /proc file; [] where there is none (not
    Linux).
    """
    path = Path(file)
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split()[1:] for line in lines if line.startswith(key)), [])


def devices(config: Config) -> Iterator[Finding]:
    check_platform(config.engine.platform)
    from jitney.engine.build import devices_of

    found, wanted = devices_of(config.engine.platform), config.engine.tensor_parallel
    if wanted > 1:
        yield Finding(
            "tensor parallel", f"{wanted} devices wanted, {len(found)} found", len(found) >= wanted
        )
    for device in found:
        stats = device.memory_stats() or {}
        memory = ""
        if "bytes_limit" in stats:
            free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
            memory = f", {free / GIB:.1f} GiB free of {stats['bytes_limit'] / GIB:.1f}"
        kind = "" if device.device_kind == device.platform else f" {device.device_kind}"
        yield Finding(f"device {device.id}", f"{device.platform}{kind}{memory}", True)


def folders(config: Config) -> Iterator[Finding]:
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        yield Finding("cache folder", str(folder), True)
    if config.engine.compilation_cache:
        refuse_open_folder(compilation_cache_dir())
        programs = sum(1 for _ in compilation_cache_dir().glob("*"))
        yield Finding("compiled programs", f"{programs} files in {compilation_cache_dir()}")


def port(config: Config) -> Iterator[Finding]:
    server = config.server
    listen(server.host, server.port).close()
    yield Finding("port", f"{server.port} on {server.host} is free", True)


def model(config: Config) -> Iterator[Finding]:
    here = is_here(config.model.id, config.model.revision)
    yield Finding("model", f"{config.model.id}: {'on this machine' if here else 'to be fetched'}")
    if here and config.engine.tensor_parallel > 1:
        yield from split(config)


def split(config: Config) -> Iterator[Finding]:
    """Whether the model can be divided; nothing of a repository's, whose resolution might fetch its
    weights.
    """
    from jitney.engine.checkpoints.sources import is_repository, resolve

    if not is_repository(config.model.id):
        own = resolve(config.model.id).config.local(config.engine.tensor_parallel)
        yield Finding(
            "model on each", f"{own.n_heads} query and {own.n_kv_heads} key-value heads", True
        )


def is_here(name: str, revision: str) -> bool:
    """True when running the model needs no network. Raises ModelError if there can be no such
    model.
    """
    from jitney.engine.checkpoints.sources import DEFAULT_MODEL, is_repository, resolve

    if name == DEFAULT_MODEL:
        return any((cache_dir() / "models").glob(f"{DEFAULT_MODEL}*.gguf"))
    if is_repository(name):
        from huggingface_hub import try_to_load_from_cache

        return isinstance(
            try_to_load_from_cache(name, "config.json", revision=revision or None), str
        )
    resolve(name)
    return True


def one_token(config: Config) -> Iterator[Finding]:
    """Runs the whole engine on a random model of a few kilobytes, on the platform and kernels that
    were asked for, and on as many of the devices as its few heads can be split over."""
    from jitney.engine.llm import LLM
    from jitney.engine.types import SamplingParams

    small = config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"id": "tiny-random", "revision": "", "context": 0}
            ),
            "engine": config.engine.model_copy(
                update={
                    "max_seats": 4,
                    "token_budget": 64,
                    "pages": 64,
                    "seat_buckets": (4,),
                    "token_buckets": (64,),
                    "tensor_parallel": math.gcd(config.engine.tensor_parallel, 4),
                }
            ),
        }
    )
    started = time.perf_counter()
    llm = LLM(small)
    try:
        yield Finding("kernels", llm.info.kernels, True)
        yield from (proof_finding(proof) for proof in llm.info.proofs)
        yield Finding("weights and KV", f"{llm.info.weights} and {llm.info.kv_dtype}", True)
        (output,) = llm.generate(
            [[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        )
        tokens = len(output.outputs[0].token_ids)
    finally:
        llm.close()
    yield Finding(
        "one token",
        f"computed in {time.perf_counter() - started:.1f} s, compilation included",
        tokens == 1,
    )


def proof_finding(proof: KernelProof) -> Finding:
    """The largest error of one kernel, and whether it may serve here."""
    if proof.reason:
        value = f"could not run: {proof.reason}"
    else:
        value = f"largest error {proof.error:.2g}, rounding explains {proof.limit:g}"
    if not proof.ok:
        value += "; taken out, the reference serves"
    return Finding(f"  {proof.kernel}", value, proof.ok)


CHECKS: dict[str, Callable[[Config], Iterator[Finding]]] = {
    "versions": versions,
    "cpu": processor,
    "devices": devices,
    "cache folder": folders,
    "port": port,
    "model": model,
    "one token": one_token,
}
