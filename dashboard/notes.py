"""Things a person should be told of, found by comparing one look at the engine with those before
it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from jitney.dashboard.snapshot import Look

#: Preemptions and refusals are counted over so many seconds, and told of again after so many.
WINDOW_S, QUIET_S = 5.0, 30.0
#: Refusals within the window that are worth a note.
MANY_REFUSALS = 10
KEPT = 20


class Notes:
    """The newest notes, oldest first (`kept`): {"level", "code", "msg", "t"}."""

    def __init__(self) -> None:
        self.kept: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._before: Look | None = None
        self._counts: dict[str, deque[tuple[float, int]]] = {}
        self._told: dict[str, float] = {}

    def compare(self, look: Look, records: np.ndarray) -> list[dict[str, Any]]:
        """New notes. records: the steps since the look before."""
        before, self._before = self._before, look
        if before is None:
            self._bursts(look)  # what the counting starts from
            return []
        new = [*self._steps(look, records), *self._totals(before, look), *self._bursts(look)]
        self.kept.extend(new)
        return new

    def _steps(self, look: Look, records: np.ndarray) -> list[dict[str, Any]]:
        return [
            _note(
                look,
                "warn",
                "compile",
                f"step {record['step']} had to compile a program for "
                f"{record['bucket_tokens']} rows and took "
                f"{record['device_s'] + record['launch_s']:.1f} s",
            )
            for record in records[records["compiled"] > 0]
        ]

    def _totals(self, before: Look, look: Look) -> list[dict[str, Any]]:
        new = []
        if look.scalars["restarts"] > before.scalars["restarts"]:
            new.append(
                _note(
                    look,
                    "error",
                    "restart",
                    "the engine process died and is started again; open requests "
                    "have ended with an error",
                )
            )
        if (rows := look.scalars["nan_rows"] - before.scalars["nan_rows"]) > 0:
            new.append(
                _note(
                    look,
                    "error",
                    "nan",
                    f"logits were not finite in {rows} rows; their requests have ended",
                )
            )
        wrong = look.scalars["canary"][1] - before.scalars["canary"][1]
        if wrong > 0:
            new.append(
                _note(
                    look,
                    "error",
                    "canary",
                    "computed again with the reference kernels, so many "
                    f"answers came out otherwise: {wrong}. `jitney doctor` compares every kernel",
                )
            )
        if look.state == "dead" != before.state:
            new.append(_note(look, "error", "dead", "the engine is dead and is not started again"))
        return new

    def _bursts(self, look: Look) -> list[dict[str, Any]]:
        new = []
        many = max(4, len(look.seats.state) // 4) if look.seats is not None else 4
        if self._burst("preemption_storm", look, look.scalars["preemptions"], many):
            new.append(
                _note(
                    look,
                    "warn",
                    "preemption_storm",
                    "sequences lose their seats for lack of KV pages: fewer "
                    "seats, shorter contexts or more pages would compute less twice",
                )
            )
        if self._burst("rejections", look, sum(look.scalars["rejected"].values()), MANY_REFUSALS):
            new.append(
                _note(
                    look, "warn", "rejections", "requests are being refused because too many wait"
                )
            )
        return new

    def _burst(self, code: str, look: Look, total: int, many: int) -> bool:
        """True if the total has grown by `many` within the window, and that was not told a moment
        ago.
        """
        seen = self._counts.setdefault(code, deque())
        seen.append((look.t, total))
        while seen[0][0] < look.t - WINDOW_S:
            seen.popleft()
        if total - seen[0][1] < many or look.t - self._told.get(code, -QUIET_S) < QUIET_S:
            return False
        self._told[code] = look.t
        return True


def _note(look: Look, level: str, code: str, text: str) -> dict[str, Any]:
    return {"level": level, "code": code, "msg": text, "t": round(look.t, 4)}
