"""From a configuration to a running core: weights, kernels, pool, executables. Only the core's process imports this."""

from __future__ import annotations

import ctypes
import logging
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jitney import engine
from jitney.engine import wire
from jitney.engine.buckets import Buckets, make_buckets
from jitney.engine.config import Config, compilation_cache_dir
from jitney.engine.core import EngineCore
from jitney.engine.errors import ConfigError
from jitney.engine.ledger import Ledger
from jitney.engine.memory import GIB, free_bytes, page_count
from jitney.engine.models.config import ModelConfig
from jitney.engine.models.llama import Llama
from jitney.engine.pages import PagePool
from jitney.engine.runner import Runner
from jitney.engine.scheduler import Scheduler, SchedulerLimits
from jitney.engine.types import EngineInfo
from jitney.engine.weights.load import load_model
from jitney.engine.weights.sources import ModelSource
from jitney.kernels.select import KernelError, KernelSet, select

log = logging.getLogger("jitney.core")

#: Parameters of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
Report = Callable[[wire.Progress], None]


def build_engine(config: Config, source: ModelSource, progress: Report) -> tuple[EngineCore, EngineInfo]:
    """Load, size, compile and warm up; reports weights and compile stages. Raises JitneyError in one line."""
    settings = config.engine
    device = start_jax(config)
    dtype = choose_dtype(config.model.dtype, device.platform)
    kernels = choose_kernels(device.platform, settings.kernels)
    model = load_model(source, source.config, dtype, lambda stage, done, total, detail: progress(
        wire.Progress(stage, done, total, detail)))
    context = choose_context(config.model.context, source.config)
    buckets = make_buckets(max_seats=settings.max_seats, token_budget=settings.token_budget,
                           seat_sizes=settings.seat_buckets, token_sizes=settings.token_buckets)
    end_ids = tuple(source.config.eos_ids)

    def make_runner(n_pages: int) -> Runner:
        return Runner(model, buckets, kernels, n_pages=n_pages, page_size=settings.page_size,
                      context_length=context, kv_dtype=dtype, end_ids=end_ids)

    n_pages = size_pool(config, model, context, device, make_runner)
    runner = make_runner(n_pages)
    runner.compile(lambda done, total, what: progress(wire.Progress("compile", done, total, what)))
    if device.platform == "cpu":
        keep_freed_memory()
    pool = PagePool(n_pages, settings.page_size, retain=settings.prefix_cache)
    limits = SchedulerLimits.of(settings, context_length=context)
    scheduler = Scheduler(limits, buckets, pool, eos_ids=end_ids, vocab_size=source.config.vocab_size)
    info = describe(config, source, device, kernels, context, n_pages, dtype, runner, buckets)
    return EngineCore(scheduler, runner, Ledger()), info


def start_jax(config: Config) -> Any:
    """Set jax up for this run and return its default device."""
    if config.engine.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(compilation_cache_dir()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    libc = glibc()
    if libc:
        libc.mallopt(M_ARENA_MAX, 2)  # every thread's own arena would keep its own freed temporaries
    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        raise ConfigError(f"platform {config.engine.platform}: {str(error).splitlines()[0]}") from error
    return device


def keep_freed_memory() -> None:
    """Give what loading and compiling left behind back to the kernel, and from then on keep what steps free.

    XLA:CPU allocates temporaries anew in every step; unmapping and faulting them in again costs 5 to 7 % of it.
    """
    libc = glibc()
    if libc:
        libc.malloc_trim(0)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def glibc() -> ctypes.CDLL | None:
    """The C library, where it is the one whose allocator can be tuned."""
    return ctypes.CDLL("libc.so.6") if sys.platform == "linux" and platform.libc_ver()[0] == "glibc" else None


def choose_kernels(platform_name: str, name: str) -> KernelSet:
    """The kernel set of that name; a name that cannot run here is the user's error, in one line."""
    try:
        return select(platform_name, name)
    except KernelError as error:
        raise ConfigError(f"kernels: {error}") from error


def choose_dtype(name: str, platform_name: str) -> Any:
    """jnp dtype of weights, activations and KV; auto: bfloat16 where the device multiplies it natively."""
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


def size_pool(config: Config, model: Llama, context: int, device: Any, make_runner: Callable[[int], Runner]) -> int:
    """Pages of the KV pool, from the configuration or from free memory; logs what that holds."""
    settings, shape = config.engine, model.config
    dtype = model.embed[...].dtype
    page_bytes = shape.n_layers * settings.page_size * 2 * shape.n_kv_heads * shape.head_dim * dtype.itemsize
    per_seat = -(-context // settings.page_size)
    limit = int(settings.memory_gib * GIB)
    if not limit and not settings.pages:
        limit = free_bytes(device, 0 if device.platform == "cpu" else make_runner(2).largest_temp_bytes())
    useful = settings.max_seats * per_seat + 1 if device.platform == "cpu" else sys.maxsize
    n_pages = page_count(wanted=settings.pages, limit_bytes=limit, page_bytes=page_bytes, useful=useful)
    tokens = (n_pages - 1) * settings.page_size
    log.info("KV pool: %d pages of %d tokens = %d tokens in %.2f GiB; %d sequences of the whole context (%d), or %d "
             "tokens for each of %d seats", n_pages - 1, settings.page_size, tokens, n_pages * page_bytes / GIB,
             tokens // context, context, tokens // settings.max_seats, settings.max_seats)
    return n_pages


def describe(config: Config, source: ModelSource, device: Any, kernels: KernelSet, context: int, n_pages: int,
             dtype: Any, runner: Runner, buckets: Buckets) -> EngineInfo:
    """What the API, the page and `doctor` show of a running engine."""
    settings = config.engine
    return EngineInfo(
        model=source.name, context_length=context, vocab_size=source.config.vocab_size, seats=settings.max_seats,
        pages=n_pages - 1, page_size=settings.page_size, token_budget=buckets.token_budget, policy=settings.policy,
        order=settings.order, kernels=kernels.name, platform=device.platform, device=device.device_kind,
        dtype=str(dtype), kv_dtype=str(dtype), prefix_cache=settings.prefix_cache, version=engine.__version__,
        max_waiting_requests=settings.max_waiting_requests, executables=len(runner.executables),
        compile_seconds=runner.compile_seconds)
