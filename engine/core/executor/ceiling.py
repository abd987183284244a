"""What a device can do at most, measured: how fast it reads memory, and how fast it multiplies.

Both go through the kernel set that serves: XLA's own products on a CPU reach a fifth of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jitney.engine.common.step_cost import DeviceCeiling
from jitney.kernels.interface import KernelSet

_log = logging.getLogger("jitney.core")

#: Bytes of what is read, and rows and side of the product, on a CPU and on anything faster, where
#: smaller ones would time the launch.
_READ_BYTES = {True: 1 << 27, False: 1 << 28}
_PRODUCT = {True: (512, 2048), False: (8192, 8192)}
#: Rows of the product that is as fast as its weights can be read: XLA:CPU is slow with fewer.
_FEW_ROWS = 4
#: Each is run so often after once that does not count; the quickest counts.
_TURNS = 4


def measure_ceiling(kernels: KernelSet, dtype: DTypeLike, n_devices: int = 1) -> DeviceCeiling:
    """Of so many devices like jax's first one. dtype: of what is multiplied."""
    on_cpu = jax.default_backend() == "cpu"
    bandwidth = _streaming(kernels, dtype) if on_cpu else _copying()
    rows, side = _PRODUCT[on_cpu]
    spent = _product_seconds(kernels, dtype, rows, (side, side))
    return DeviceCeiling(
        bytes_s=n_devices * bandwidth, operations_s=n_devices * 2 * rows * side * side / spent
    )


def ceiling_or_none(kernels: KernelSet, dtype: DTypeLike, n_devices: int) -> DeviceCeiling | None:
    """As `measure_ceiling`; None where the device's memory has no room for it."""
    try:
        return measure_ceiling(kernels, dtype, n_devices)
    except jax.errors.JaxRuntimeError as error:
        _log.info("what the device can do at most is not measured: %s", str(error).splitlines()[0])
        return None


def _copying() -> float:
    """Bytes/s that an addition over a large array reads and writes."""
    size = _READ_BYTES[False]
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(size // 4, jnp.float32)
    return 2 * size / _least_seconds(add_one, x)


def _streaming(kernels: KernelSet, dtype: DTypeLike) -> float:
    """Bytes/s of weights that a product of few rows reads: the stores of a copy are slower on a
    CPU, and a step hardly has any.
    """
    size_in = 8192
    size_out = _READ_BYTES[True] // size_in // jnp.dtype(dtype).itemsize
    spent = _product_seconds(kernels, dtype, _FEW_ROWS, (size_in, size_out))
    return _READ_BYTES[True] / spent


def _product_seconds(
    kernels: KernelSet, dtype: DTypeLike, rows: int, shape: tuple[int, int]
) -> float:
    """Of rows times a matrix [I, O], laid out as the kernels multiply it fastest."""
    weights = jnp.ones(shape, dtype)
    if kernels.pack is not None:
        weights = kernels.pack(weights)
    x = jnp.ones((rows, shape[0]), dtype)
    multiply = jax.jit(lambda x, weights: kernels.matmul(x, weights, dtype))
    return _least_seconds(lambda _: multiply(x, weights), x)


def _least_seconds(step: Callable[[Any], Any], x: Any) -> float:
    """Of x = step(x)."""
    x = jax.block_until_ready(step(x))
    least = np.inf
    for _ in range(_TURNS):
        started = time.perf_counter()
        x = jax.block_until_ready(step(x))
        least = min(least, time.perf_counter() - started)
    return least
