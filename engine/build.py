"""From a configuration to a running core: weights, kernels, pool, executables. Only the core's
process imports this.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from flax import nnx
from jax.sharding import Mesh

from jitney.engine import messages
from jitney.engine.canary import LIMITS, MOST_TOKENS, CanaryCore
from jitney.engine.checkpoints.model_config import ModelConfig
from jitney.engine.checkpoints.sampling_defaults import sampling_defaults
from jitney.engine.checkpoints.sources import ModelSource
from jitney.engine.config.platforms import DEVICE_PLATFORMS, INSTALL
from jitney.engine.config.schema import Config, EngineSection, compilation_cache_dir
from jitney.engine.core import EngineCore
from jitney.engine.errors import ConfigError
from jitney.engine.executor.memory import (
    GIB,
    claim_memory,
    free_bytes,
    in_one_line,
    likely_temp_bytes,
    page_count,
)
from jitney.engine.executor.program import StateSizes
from jitney.engine.executor.proving import proven, served_by
from jitney.engine.executor.runner import Runner
from jitney.engine.loading.load import describe_weights, load_model
from jitney.engine.loading.quantising import choose_kv_dtype, choose_weight_storage, load_kv_scales
from jitney.engine.machine import cpu_name
from jitney.engine.models.llama import Llama
from jitney.engine.models.sharding import make_mesh
from jitney.engine.records import Ledger
from jitney.engine.scheduler.buckets import Buckets, make_buckets
from jitney.engine.scheduler.kv_pages import PagePool
from jitney.engine.scheduler.scheduler import Scheduler, SchedulerLimits
from jitney.engine.types import EngineInfo, KernelProof
from jitney.kernels.interface import KernelError, KernelSet
from jitney.kernels.select import reference, select

log = logging.getLogger("jitney.core")

#: Parameters of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
#: A pool of at least this share of what fits is not worth compiling the largest step a second time
#: for.
ENOUGH = 0.97
#: Most rows of a step of the canary's core: more would hold up the steps that serve.
CANARY_ROWS = 64
Report = Callable[[messages.Progress], None]


def build_engine(
    config: Config, source: ModelSource, progress: Report
) -> tuple[EngineCore, EngineInfo]:
    """Load, size, compile and warm up; reports weights and compile stages. Raises JitneyError in
    one line.
    """
    settings = config.engine
    defaults = sampling_defaults(config.sampling, source)
    devices = start_jax(config)
    device, mesh = devices[0], make_mesh(devices) if len(devices) > 1 else None
    own = source.config.local(len(devices))
    dtype = choose_dtype(config.model.dtype, device.platform)
    kv_dtype = choose_kv_dtype(settings.kv_dtype, dtype, device)
    kernels = choose_kernels(device.platform, settings.kernels)
    with in_one_line("loading weights"):
        model = load_model(
            source,
            source.config,
            dtype,
            lambda stage, done, total, detail: progress(
                messages.Progress(stage, done, total, detail)
            ),
            mesh=mesh,
            storage=choose_weight_storage(config.model.weights, device.platform, kernels),
        )
    if settings.kv_dtype != "auto":
        load_kv_scales(model, source, kv_dtype, mesh)
    context = choose_context(config.model.context, source.config)
    buckets = buckets_for(settings, device.platform, kernels)
    page = StateSizes(settings.max_seats, 1, settings.page_size, context, kv_dtype)
    progress(messages.Progress("proof", 0, 1, kernels.label))
    kernels, proofs = proven(
        kernels, served_by(model, own, page, buckets, dtype), named=settings.kernels != "auto"
    )
    buckets = buckets_for(settings, device.platform, kernels)
    alone = None
    if settings.canary_every:
        alone = core_alone(config, model, context, kv_dtype, mesh)
    if mesh is None:
        model.arrange(kernels)
    end_ids = tuple(source.config.eos_ids)

    def make_runner(n_pages: int) -> Runner:
        return Runner(
            model,
            buckets,
            kernels,
            n_pages=n_pages,
            page_size=settings.page_size,
            context_length=context,
            kv_dtype=kv_dtype,
            end_ids=end_ids,
            mesh=mesh,
            plain_mixed=device.platform in ("gpu", "cuda"),
        )

    runner = sized_runner(
        config, own, context, devices, buckets, page.pool_bytes(own, kernels), make_runner
    )
    with in_one_line("making the KV pool"):
        runner.compile(
            lambda done, total, what: progress(messages.Progress("compile", done, total, what))
        )
    if device.platform == "cpu":
        keep_freed_memory()
    pool = PagePool(runner.n_pages, settings.page_size, retain=settings.prefix_cache)
    limits = SchedulerLimits.of(settings, context_length=context)
    scheduler = Scheduler(
        limits,
        buckets,
        pool,
        eos_ids=end_ids,
        vocab_size=source.config.vocab_size,
        window=source.config.window,
    )
    info = describe(
        config,
        source,
        device,
        kernels,
        context,
        dtype,
        kv_dtype,
        describe_weights(model, source),
        runner,
        buckets,
        proofs,
    )
    info = msgspec.structs.replace(info, sampling_defaults=defaults)
    if alone is None:
        return EngineCore(scheduler, runner, Ledger()), info
    limit = LIMITS[jnp.dtype(dtype).name]
    return CanaryCore(
        scheduler, runner, Ledger(), alone=alone, every=settings.canary_every, limit=limit
    ), info


def core_alone(
    config: Config, model: Llama, context: int, kv_dtype: Any, mesh: Mesh | None
) -> EngineCore:
    """A core of one seat with the reference kernels and the weights as loaded, for the canary."""
    own = nnx.merge(*nnx.split(model))  # the arrays are shared until the model's are arranged
    longest = min(context, MOST_TOKENS)
    page_size = config.engine.page_size
    n_pages = -(-longest // page_size) + 2  # the trash page, and one to grow into
    buckets = make_buckets(max_seats=1, token_budget=CANARY_ROWS, token_sizes=(CANARY_ROWS,))
    end_ids = tuple(model.config.eos_ids)
    runner = Runner(
        own,
        buckets,
        reference(),
        n_pages=n_pages,
        page_size=page_size,
        context_length=longest,
        kv_dtype=kv_dtype,
        end_ids=end_ids,
        mesh=mesh,
    )
    runner.compile()
    limits = SchedulerLimits(max_seats=1, context_length=longest)
    pool = PagePool(n_pages, page_size, retain=False)
    scheduler = Scheduler(
        limits, buckets, pool, eos_ids=end_ids, vocab_size=model.config.vocab_size
    )
    return EngineCore(scheduler, runner, Ledger())


def buckets_for(settings: EngineSection, platform_name: str, kernels: KernelSet) -> Buckets:
    """The sizes to compile for. XLA:CPU's own product is ten times slower at one row than at
    four.
    """
    xla_multiplies = kernels.matmul is reference().matmul
    return make_buckets(
        max_seats=settings.max_seats,
        token_budget=settings.token_budget,
        seat_sizes=settings.seat_buckets,
        token_sizes=settings.token_buckets,
        on_device=platform_name != "cpu",
        smallest=4 if xla_multiplies else 1,
    )


def start_jax(config: Config) -> list[Any]:
    """Set jax up for this run and return the devices to run on, as many as `tensor_parallel`
    says.
    """
    if config.engine.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(compilation_cache_dir()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    claim_memory(os.environ)
    libc = glibc()
    if libc:
        libc.mallopt(
            M_ARENA_MAX, 2
        )  # every thread's own arena would keep its own freed temporaries
    devices = devices_of(config.engine.platform)
    wanted = config.engine.tensor_parallel
    if len(devices) < wanted:
        raise ConfigError(
            f"tensor_parallel {wanted} needs as many devices; jax sees {len(devices)} "
            f"({devices[0].platform})"
        )
    return devices[:wanted]


def devices_of(name: str) -> list[Any]:
    """jax's devices, which are those of platform `name` (auto: whatever jax runs on); ConfigError
    if they are not.

    jax falls back to the CPU in silence where a named platform's plugin is missing or does not
    start.
    """
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise ConfigError(f"platform {name}: {str(error).splitlines()[0]}") from error
    found = devices[0].platform
    if name != "auto" and found not in DEVICE_PLATFORMS[name]:
        how = f": {INSTALL[name]}" if name in INSTALL else ""
        raise ConfigError(
            f"platform {name}: jax runs on {found} here; see what jitney doctor says, and install "
            "what "
            f"the platform needs{how}"
        )
    return devices


def keep_freed_memory() -> None:
    """Give what loading and compiling left behind back to the kernel, and from then on keep what
    steps free.

    XLA:CPU allocates temporaries anew in every step; unmapping and faulting them in again costs 5
    to 7 % of it.
    """
    libc = glibc()
    if libc:
        libc.malloc_trim(0)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def glibc() -> ctypes.CDLL | None:
    """The C library, where it is the one whose allocator can be tuned."""
    return (
        ctypes.CDLL("libc.so.6")
        if sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
        else None
    )


def choose_kernels(platform_name: str, name: str) -> KernelSet:
    """The kernel set of that name; a name that cannot run here is the user's error, in one line."""
    try:
        return select(platform_name, name)
    except KernelError as error:
        raise ConfigError(f"kernels: {error}") from error


def choose_dtype(name: str, platform_name: str) -> Any:
    """jnp dtype of weights, activations and KV; auto: bfloat16 where the device multiplies it
    natively.
    """
    if name == "auto":
        name = "bfloat16" if platform_name != "cpu" or cpu_multiplies_bfloat16() else "float32"
    return jnp.dtype(name)


def cpu_multiplies_bfloat16() -> bool:
    """True on x86 with avx512_bf16 or amx_bf16, and on Arm with bf16 (/proc/cpuinfo)."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def choose_context(wanted: int, model: ModelConfig) -> int:
    """Tokens a sequence may have; more than the model was trained for is refused."""
    if wanted > model.context_length:
        raise ConfigError(f"context {wanted} is more than the model's {model.context_length}")
    return wanted or model.context_length


def sized_runner(
    config: Config,
    own: ModelConfig,
    context: int,
    devices: Sequence[Any],
    buckets: Buckets,
    page_bytes: int,
    make_runner: Callable[[int], Runner],
) -> Runner:
    """A runner with as many KV pages as are configured, or as the free memory holds; logs what that
    is.

    own: the model of one device. page_bytes: of a page of all layers, on one device.
    """
    settings, on_cpu = config.engine, devices[0].platform == "cpu"
    per_seat = -(-context // settings.page_size)

    def pages(temp_bytes: int) -> int:
        limit = int(settings.memory_gib * GIB)
        if not limit and not settings.pages:
            limit = min(free_bytes(device, temp_bytes) for device in devices)
        return page_count(
            wanted=settings.pages,
            limit_bytes=limit,
            page_bytes=page_bytes,
            useful=settings.max_seats * per_seat + 1 if on_cpu else sys.maxsize,
        )

    runner = make_runner(pages(0 if on_cpu else likely_temp_bytes(own, buckets)))
    if not (on_cpu or settings.pages or settings.memory_gib):
        # A step's temporaries are known once it is compiled, and it is compiled for one size of
        # pool: the likely one.
        fit = pages(runner.largest_temp_bytes())
        if not ENOUGH * fit <= runner.n_pages <= fit:
            runner = make_runner(fit)
    tokens = (runner.n_pages - 1) * settings.page_size
    log.info(
        "KV pool: %d pages of %d tokens = %d tokens in %.2f GiB%s; %d sequences of the whole "
        "context (%d), or %d "
        "tokens for each of %d seats",
        runner.n_pages - 1,
        settings.page_size,
        tokens,
        runner.n_pages * page_bytes / GIB,
        f" on each of {len(devices)} devices" if len(devices) > 1 else "",
        tokens // context,
        context,
        tokens // settings.max_seats,
        settings.max_seats,
    )
    return runner


def describe(
    config: Config,
    source: ModelSource,
    device: Any,
    kernels: KernelSet,
    context: int,
    dtype: Any,
    kv_dtype: Any,
    weights: str,
    runner: Runner,
    buckets: Buckets,
    proofs: list[KernelProof],
) -> EngineInfo:
    """What the API, the page and `doctor` show of a running engine."""
    settings = config.engine
    count = f"{settings.tensor_parallel} x " if settings.tensor_parallel > 1 else ""
    chip = cpu_name() if device.platform == "cpu" else device.device_kind
    return EngineInfo(
        model=source.name,
        context_length=context,
        vocab_size=source.config.vocab_size,
        seats=settings.max_seats,
        pages=runner.n_pages - 1,
        page_size=settings.page_size,
        token_budget=buckets.token_budget,
        policy=settings.policy,
        order=settings.order,
        kernels=kernels.label,
        platform=device.platform,
        device=f"{count}{chip}",
        dtype=str(dtype),
        weights=weights,
        kv_dtype=str(kv_dtype),
        prefix_cache=settings.prefix_cache,
        version=version("jitney"),
        max_waiting_requests=settings.max_waiting_requests,
        executables=len(runner.executables),
        compile_seconds=runner.compile_seconds,
        tensor_parallel=settings.tensor_parallel,
        proofs=proofs,
        canary_every=settings.canary_every,
        seat_buckets=tuple(bucket.seats for bucket in buckets.decode),
        token_buckets=tuple(bucket.tokens for bucket in buckets.mixed),
    )
