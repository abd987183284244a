"""`--for latency|balanced|throughput`: settings that nobody gave, filled in for what the engine is
for.

A preset is the lowest layer but the defaults: what a file, the environment or a flag says stands.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Literal, get_args

from jitney.engine.common.errors import ConfigError
from jitney.engine.config.platforms import check_platform

_Goal = Literal["latency", "balanced", "throughput"]
GOALS: tuple[_Goal, ...] = get_args(_Goal)

#: By names of settings.
type _Values = dict[str, int | float]
#: Names of settings and their values. A wait that is bounded tightly sends requests to another
#: engine early; one that is not keeps every seat taken.
_EVERYWHERE: dict[_Goal, _Values] = {
    "latency": {"max_waiting_requests": 32, "max_predicted_wait_s": 5.0},
    "balanced": {},
    "throughput": {
        "max_waiting_requests": 1024,
        "max_waiting_tokens": 1 << 20,
        "max_predicted_wait_s": 300.0,
        "prefill_share": 1.0,
    },
}
#: Of a CPU's free memory, which is the KV pool's alone.
_ON_CPU: dict[_Goal, _Values] = {
    "latency": {"memory_share": 0.25},
    "balanced": {"memory_share": 0.5},
    "throughput": {"memory_share": 0.8},
}
#: Of all memory of a GPU or TPU, weights included: a share for less than throughput would leave a
#: large model no pages at all, and pages that nobody uses cost no time.
_ON_DEVICE: dict[_Goal, _Values] = {
    "latency": {},
    "balanced": {},
    "throughput": {"memory_share": 0.8},
}
#: Seats, and rows of a step: the larger the batch, the cheaper each token, and the later. With
#: fewer rows first tokens come later (512 rows on an H100: p99 357 ms where 1,024 have 170 ms).
_CPU_SIZES: dict[_Goal, _Values] = {
    "latency": {"max_seats": 8},
    "balanced": {"max_seats": 16},
    "throughput": {"max_seats": 32},
}
_DEVICE_SIZES: dict[_Goal, _Values] = {
    "latency": {"max_seats": 64, "token_budget": 1024},
    "balanced": {"max_seats": 128, "token_budget": 1024},
    "throughput": {"max_seats": 256, "token_budget": 2048},
}
#: Settings that must fit each other: whoever gives one of them decides on all.
SIZES = {
    "max_seats",
    "token_budget",
    "seat_buckets",
    "token_buckets",
    "batch_size",
    "background_seats",
}
#: Settings that say how much memory there is, likewise.
_MEMORY = {"memory_share", "memory_gib", "pages"}


def preset(goal: _Goal, given: Collection[str], *, on_device: bool) -> _Values:
    """Values by name of the settings that `goal` asks for and that nobody has given.

    given: names of settings that a file, the environment or flags have. on_device: it runs on a GPU
    or TPU.
    """
    values = dict(_EVERYWHERE[goal])
    if not _MEMORY & set(given):
        values |= (_ON_DEVICE if on_device else _ON_CPU)[goal]
    if not SIZES & set(given):
        values |= (_DEVICE_SIZES if on_device else _CPU_SIZES)[goal]
    return {name: value for name, value in values.items() if name not in given}


def runs_on_device(platform: str) -> bool:
    """Whether an engine with this setting `platform` should find a GPU or TPU; as far as can be
    told without jax.
    """
    if platform != "auto":
        return platform != "cpu"
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return False
    return any(map(_may_be_here, ("cuda", "tpu")))


def _may_be_here(platform: str) -> bool:
    try:
        check_platform(platform)
    except ConfigError:
        return False
    return True
