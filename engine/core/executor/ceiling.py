"""Measures the limits of a device: how fast it reads memory, and how fast it multiplies. The result
is stored in the cache folder, so that later starts need not measure.

Both use the kernel set that serves: XLA's own products on a CPU reach a fifth of its speed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.typing import DTypeLike

from jitney.engine.common.cache_folder import keep, kept_file
from jitney.engine.common.machine import own_processors, processor_name
from jitney.engine.common.other_work import OtherWork
from jitney.engine.common.step_cost import DeviceCeiling
from jitney.kernels.interface import KernelSet

_log = logging.getLogger("jitney.core")

#: Bytes to read, and (rows, side) of the product, by whether the device is a CPU. Smaller sizes on
#: faster devices would measure the launch.
_READ_BYTES = {True: 1 << 27, False: 1 << 28}
_PRODUCT = {True: (512, 2048), False: (8192, 8192)}
#: Rows of the product that measures how fast weights are read: XLA:CPU is slow with fewer.
_FEW_ROWS = 4
#: Number of timed runs after a first untimed one; the quickest counts.
_TURNS = 4


def measure_ceiling(kernels: KernelSet, dtype: DTypeLike, n_devices: int = 1) -> DeviceCeiling:
    """Measure `n_devices` devices like jax's first one. dtype: of the products."""
    on_cpu = jax.default_backend() == "cpu"
    bandwidth = _streaming(kernels, dtype) if on_cpu else _copying()
    rows, side = _PRODUCT[on_cpu]
    spent = _product_seconds(kernels, dtype, rows, (side, side))
    return DeviceCeiling(
        bytes_s=n_devices * bandwidth, operations_s=n_devices * 2 * rows * side * side / spent
    )


def ceiling_or_none(kernels: KernelSet, dtype: DTypeLike, n_devices: int) -> DeviceCeiling | None:
    """The measured limits; None if the measurement does not fit the device's memory."""
    try:
        return measure_ceiling(kernels, dtype, n_devices)
    except jax.errors.JaxRuntimeError as error:
        _log.info("what the device can do at most is not measured: %s", str(error).splitlines()[0])
        return None


def kept_ceiling(kernels: KernelSet, dtype: DTypeLike, n_devices: int) -> DeviceCeiling | None:
    """The limits measured now, or stored by an earlier start with the same devices, kernels and
    versions. A measurement beside other programs' work is not stored.
    """
    file = kept_file("ceilings", _facts(kernels, dtype, n_devices))
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(file.read_bytes(), type=DeviceCeiling)
    others = OtherWork(own_processors())
    ceiling = ceiling_or_none(kernels, dtype, n_devices)
    if ceiling is None or others.share() > OtherWork.most:
        return ceiling
    reason = keep(ceiling, file)
    if reason:
        _log.info("what the device can do at most is measured at every start: %s", reason)
    return ceiling


def _facts(kernels: KernelSet, dtype: DTypeLike, n_devices: int) -> dict[str, object]:
    """All that a measurement depends on."""
    device = jax.local_devices()[0]
    on_cpu = device.platform == "cpu"
    return {
        "device": processor_name() if on_cpu else device.device_kind,
        "processors": len(own_processors()) if on_cpu else 0,
        "devices": n_devices,
        "kernels": kernels.label,
        "dtype": jnp.dtype(dtype).name,
        "work": [_READ_BYTES[on_cpu], _PRODUCT[on_cpu], _FEW_ROWS],
        "versions": [version(name) for name in ("jitney", "jax", "jaxlib")],
    }


def _copying() -> float:
    """Bytes/s that an addition to a large array reads and writes."""
    size = _READ_BYTES[False]
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(size // 4, jnp.float32)
    return 2 * size / _least_seconds(add_one, x)


def _streaming(kernels: KernelSet, dtype: DTypeLike) -> float:
    """Bytes/s of weights that a product of few rows reads. (Timing a copy would include stores,
    which are slower on a CPU, and a step has hardly any.)
    """
    size_in = 8192
    size_out = _READ_BYTES[True] // size_in // jnp.dtype(dtype).itemsize
    spent = _product_seconds(kernels, dtype, _FEW_ROWS, (size_in, size_out))
    return _READ_BYTES[True] / spent


def _product_seconds(
    kernels: KernelSet, dtype: DTypeLike, rows: int, shape: tuple[int, int]
) -> float:
    """Seconds of multiplying `rows` rows by a matrix [I, O] that is packed for the kernels."""
    weights = jnp.ones(shape, dtype)
    if kernels.pack is not None:
        weights = kernels.pack(weights)
    x = jnp.ones((rows, shape[0]), dtype)
    multiply = jax.jit(lambda x, weights: kernels.matmul(x, weights, dtype))
    return _least_seconds(lambda _: multiply(x, weights), x)


def _least_seconds(step: Callable[[Any], Any], x: Any) -> float:
    """The shortest time of x = step(x), s."""
    x = jax.block_until_ready(step(x))
    least = np.inf
    for _ in range(_TURNS):
        started = time.perf_counter()
        x = jax.block_until_ready(step(x))
        least = min(least, time.perf_counter() - started)
    return least
