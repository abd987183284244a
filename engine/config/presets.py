"""`--for latency|balanced|throughput`: values for settings that no file, variable or flag gives."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

_Goal = Literal["latency", "balanced", "throughput"]
GOALS: tuple[_Goal, ...] = get_args(_Goal)

#: Setting -> value.
type _Values = dict[str, int | float]
#: Tight bounds on waiting send requests to another engine early; loose ones keep all seats busy.
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
#: Share of a CPU's free memory for the KV pool.
_ON_CPU: dict[_Goal, _Values] = {
    "latency": {"memory_share": 0.25},
    "balanced": {"memory_share": 0.5},
    "throughput": {"memory_share": 0.8},
}
#: Share of a GPU's or TPU's memory, with weights. Unused pages cost no time.
_ON_DEVICE: dict[_Goal, _Values] = {
    "latency": {},
    "balanced": {},
    "throughput": {"memory_share": 0.8},
}
#: Larger batches make tokens cheaper and later. Fewer rows per step delay first tokens (on an H100
#: p99 357 ms with 512 rows, 170 ms with 1,024).
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
#: Settings that must fit each other: if one of them is given, a preset sets none.
SIZES = {
    "max_seats",
    "token_budget",
    "seat_buckets",
    "token_buckets",
    "batch_size",
    "background_seats",
}
#: Settings of the KV pool's memory: if one of them is given, a preset sets none.
_MEMORY = {"memory_share", "memory_gib", "pages"}


def preset(goal: _Goal, set_names: Collection[str], *, on_device: bool) -> _Values:
    """Values of `goal` for settings not in `given`. on_device: it runs on a GPU or TPU."""
    values = dict(_EVERYWHERE[goal])
    if not _MEMORY & set(set_names):
        values |= (_ON_DEVICE if on_device else _ON_CPU)[goal]
    if not SIZES & set(set_names):
        values |= (_DEVICE_SIZES if on_device else _CPU_SIZES)[goal]
    return {name: value for name, value in values.items() if name not in set_names}
