"""Use of the device: bytes and operations per second of the last steps, compared with measured
maxima. Computed from step records on request.
"""

from __future__ import annotations

import msgspec
import numpy as np

from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.records import RecordRing
from jitney.engine.common.step_cost import StepCost, StepRows

#: Length of the window in seconds.
WINDOW_S = 15.0


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use over the last WINDOW_S seconds. None: unknown, or there was no step."""

    #: Share of the time in which a step ran.
    busy: float
    #: Bytes read and written, and operations, a second of the time in which steps ran.
    bytes_s: float | None = None
    operations_s: float | None = None
    #: Measured maxima of the same.
    ceiling_bytes_s: float | None = None
    ceiling_operations_s: float | None = None
    #: Shares of the maxima; slightly above 1 if the measurement was disturbed.
    bandwidth: float | None = None
    operations: float | None = None

    @classmethod
    def of(cls, info: EngineInfo | None, records: RecordRing, now: float) -> DeviceUse:
        """Use by an engine with this info. now: seconds of time.monotonic()."""
        steps, _ = records.between(now - WINDOW_S, now)
        seconds = float(steps["device_s"].sum(dtype=np.float64))
        busy = min(1.0, seconds / WINDOW_S)
        ceiling = info.ceiling if info is not None else None
        use = cls(
            busy=busy,
            ceiling_bytes_s=ceiling and ceiling.bytes_s,
            ceiling_operations_s=ceiling and ceiling.operations_s,
        )
        if info is None or info.step_cost is None or seconds <= 0:
            return use
        work = _work_of(steps, info.step_cost, info.sizes.padding_is_free)
        moved, operations = (float(np.sum(amounts)) for amounts in work)
        return msgspec.structs.replace(
            use,
            bytes_s=moved / seconds,
            operations_s=operations / seconds,
            bandwidth=_share(moved / seconds, use.ceiling_bytes_s),
            operations=_share(operations / seconds, use.ceiling_operations_s),
        )

    @staticmethod
    def least_seconds(info: EngineInfo | None, steps: np.ndarray) -> np.ndarray | None:
        """float64[steps]: seconds at the measured ceiling, the longer one; None: not known."""
        if info is None or info.step_cost is None or info.ceiling is None:
            return None
        moved, operations = _work_of(steps, info.step_cost, info.sizes.padding_is_free)
        seconds = moved / info.ceiling.bytes_s
        if info.ceiling.operations_s is not None:
            seconds = np.maximum(seconds, operations / info.ceiling.operations_s)
        return seconds


def _work_of(
    steps: np.ndarray, cost: StepCost, padding_is_free: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, operations), float64[steps], of the programs of these steps, `records.STEP_DTYPE`."""
    rows = steps["bucket_tokens"].astype(np.float64)
    logit_rows = steps["bucket_seats"].astype(np.float64)
    if padding_is_free:
        rows -= steps["padding"]
        # Each row with logits belongs to a seated sequence, which bounds their number.
        logit_rows = np.minimum(rows, steps["seats_busy"])
    prompt = steps["prefill"] + steps["recomputed"]
    counts = steps["decode"], prompt, steps["keys"], steps["pairs"]
    work = StepRows(*[count.astype(np.float64) for count in counts])
    weights, kv = cost.read_bytes(rows, work)
    layers, rest = cost.operations(rows, logit_rows, work)
    return np.asarray(weights + kv), np.asarray(layers + rest)


def _share(value: float, most: float | None) -> float | None:
    return value / most if most else None
