"""The compiled programs of an engine: runs, padding and time of each size in the last minutes, and
the parts of a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jitney.engine.common.engine_info import BucketCompilation, EngineInfo
from jitney.engine.common.requests import JsonDict
from jitney.engine.core import Bucket

#: Fields of a step's record that are seconds of its parts, in their order.
_PARTS = ("plan_s", "batch_s", "launch_s", "device_s", "fetch_s", "commit_s", "gap_s")


def programs(records: np.ndarray, info: EngineInfo | None) -> JsonDict:
    """Sizes and parts of these steps, `records.STEP_DTYPE`. Sizes that no step had are listed with
    0 steps.
    """
    compiled = {one.bucket: one for one in info.kernels.compilations} if info else {}
    sizes = _compiled_sizes(info)
    keys = np.stack((records["bucket_tokens"], records["bucket_seats"]), axis=1)
    for tokens, seats in {tuple(key) for key in keys.tolist()}:
        sizes.setdefault(Bucket(tokens, seats), None)
    rows = [
        _size(bucket, records[(keys == bucket).all(axis=1)], compiled.get(str(bucket)))
        for bucket in sorted(sizes)
    ]
    return {
        "steps": len(records),
        "sizes": rows,
        "parts": {
            kind: _parts(records[records["mixed"] == mixed])
            for mixed, kind in enumerate(("decode", "mixed"))
        },
    }


def _compiled_sizes(info: EngineInfo | None) -> dict[Bucket, None]:
    if info is None:
        return {}
    sizes = info.sizes
    decode = [Bucket(seats, seats) for seats in sizes.seat_buckets]
    mixed = [Bucket.mixed(tokens, sizes.seats) for tokens in sizes.token_buckets]
    return dict.fromkeys([*decode, *mixed])


def _size(bucket: Bucket, steps: np.ndarray, compilation: BucketCompilation | None) -> JsonDict:
    """The row of a size. late: steps that had to compile it first; their time counts only in
    late_s. compile_s, from_cache: of its programs before the engine was ready.
    """
    late = steps["compiled"] > 0
    ran = steps[~late]
    rows = int(steps["bucket_tokens"].sum(dtype=np.int64))
    padding = int(steps["padding"].sum(dtype=np.int64))
    return {
        "name": str(bucket),
        "steps": len(steps),
        "rows": rows,
        "padding": padding,
        "device_s": _sum(ran["device_s"]),
        "mean_s": _sum(ran["device_s"]) / len(ran) if len(ran) else None,
        "compile_s": compilation and round(compilation.seconds, 3),
        "from_cache": compilation and compilation.from_cache,
        "late": int(late.sum()),
        "late_s": _sum(steps[late]["device_s"]) + _sum(steps[late]["launch_s"]),
    }


def _parts(steps: np.ndarray) -> dict[str, Any] | None:
    """Mean and 95th percentile of each part, seconds; None without steps."""
    steps = steps[steps["compiled"] == 0]
    if not len(steps):
        return None
    return {
        name.removesuffix("_s"): {
            "mean": round(float(steps[name].mean(dtype=np.float64)), 7),
            "p95": round(float(np.quantile(steps[name], 0.95)), 7),
        }
        for name in _PARTS
    }


def _sum(seconds: np.ndarray) -> float:
    return round(float(seconds.sum(dtype=np.float64)), 6)
