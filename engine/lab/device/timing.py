"""Times device work with long calls, many of them in flight, and one wait at the end.

A call has so many repeats of the work, each with the previous one's result as input, that its
launch costs little in comparison. The next call is launched while the last one runs, so launches
are hidden, not subtracted. Inputs rotate among copies that together exceed the device's cache, and
are random, since zeros can run faster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jitney.engine.lab.device.rows import Floors, Sizes

_REPEATS = 7
#: Least device seconds of one call, by its floor.
_CALL_S = 1e-3
#: Most repeats of the work in one call.
_MOST_UNROLLED = 16


def timed(
    step: Callable[[Any, Any], Any],
    carry: Any,
    copies: Sequence[Any],
    *,
    floor_s: float,
    sample_s: float,
) -> list[float]:
    """Time carry = step(carry, one of the copies), the repeats chained through `carry`, which is
    donated -> seconds of one run of the step, for each repeat.
    """
    unrolled = max(len(copies), min(_MOST_UNROLLED, math.ceil(_CALL_S / max(floor_s, 1e-9))))

    def program(carry: Any, copies: Sequence[Any]) -> Any:
        for turn in range(unrolled):
            carry = step(carry, copies[turn % len(copies)])
        return carry

    call = jax.jit(program, donate_argnums=0).lower(carry, copies).compile()
    calls = repeated(lambda carry: call(carry, copies), carry, sample_s)
    return [spent / unrolled for spent in calls]


def repeated(call: Callable[[Any], Any], carry: Any, sample_s: float) -> list[float]:
    """Seconds of one call, measured REPEATS times with as many calls in flight as take `sample_s`,
    then one wait.
    """
    carry = jax.block_until_ready(call(carry))
    carry, one = _seconds_of(call, carry, 1)
    calls = max(2, math.ceil(sample_s / max(one, 1e-7)))
    samples = []
    for _ in range(_REPEATS):
        carry, seconds = _seconds_of(call, carry, calls)
        samples.append(seconds / calls)
    return samples


def _seconds_of(call: Callable[[Any], Any], carry: Any, calls: int) -> tuple[Any, float]:
    """(result of the last call, seconds of all calls)."""
    started = time.perf_counter()
    for _ in range(calls):
        carry = call(carry)
    jax.block_until_ready(carry)
    return carry, time.perf_counter() - started


def measure_floors(sizes: Sizes, dtype: DTypeLike) -> Floors:
    """Measure the device's rates of copying, multiplying and launching."""
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0)
    words = jax.random.normal(jax.random.key(0), (sizes.copy_bytes // 4,), jnp.float32)
    copying = repeated(add_one, words, sizes.sample_s)
    multiplying = _time_products(sizes, dtype)
    launching = repeated(add_one, jnp.zeros((8,)), sizes.sample_s)
    return Floors(
        copy_bytes_s=2 * sizes.copy_bytes / median(copying),
        product_flops_s=2 * sizes.product_side**3 / median(multiplying),
        launch_s=median(launching),
    )


def _time_products(sizes: Sizes, dtype: DTypeLike) -> list[float]:
    side = sizes.product_side
    # Entries have variance 1 / side, so that a chain of products neither vanishes nor overflows.
    a, b = (
        jax.random.normal(key, (side, side), dtype) / jnp.sqrt(side).astype(dtype)
        for key in jax.random.split(jax.random.key(0))
    )
    multiply = jax.jit(
        lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32).astype(dtype),
        donate_argnums=0,
    )
    return repeated(lambda x: multiply(x, b), a, sizes.sample_s)


@jax.jit
def distance(ours: jax.Array, theirs: jax.Array) -> jax.Array:
    """||ours - theirs|| / ||theirs||; NaN if either contains NaN."""
    wide, reference = ours.astype(jnp.float32), theirs.astype(jnp.float32)
    return jnp.linalg.norm((wide - reference).ravel()) / jnp.linalg.norm(reference.ravel())
