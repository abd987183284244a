"""Running totals of one engine, which metrics and pages read."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from jitney.engine.common.messages import CanaryFinding, GrammarWork
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.records import ROW_KINDS

_STEP_KINDS = ("decode", "mixed")
#: Causes of a core's end, see `faults.CoreEnd`.
_CAUSES = ("died", "failed", "hung", "not started")
#: Upper bounds in seconds of the step-time histograms.
_STEP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_GAP_BOUNDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1)
_FILL_BOUNDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(eq=False, slots=True)
class Histogram:
    """Counts per upper bound plus one for the rest."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    #: Sum of the values.
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def _zeros(names: Iterable[str]) -> Callable[[], dict[str, int]]:
    """Makes a count of each."""
    return lambda: dict.fromkeys(names, 0)


@dataclass(eq=False)
class EngineCounters:
    """Running totals over the life of the API process; written only by the client."""

    #: Steps by kind: decode, mixed.
    steps: dict[str, int] = field(default_factory=_zeros(_STEP_KINDS))
    #: Rows by ROW_KINDS.
    rows: dict[str, int] = field(default_factory=_zeros(ROW_KINDS))
    preemptions: int = 0
    #: Compilations since the engine was ready.
    compiles: int = 0
    #: Sequences that ended because a logit was not finite.
    nan_rows: int = 0
    #: Restarts of the core, in all and by the cause of its end.
    engine_restarts: int = 0
    restart_causes: dict[str, int] = field(default_factory=_zeros(_CAUSES))
    #: Requests continued by another core.
    resumed: int = 0
    #: Sequences that the canary computed again with the reference kernels.
    canary_checked: int = 0
    #: Those that differed by more than rounding explains.
    canary_mismatched: int = 0
    #: Largest difference of two log-probabilities.
    canary_worst: float = 0.0
    #: Grammars: masks and compilations with their seconds; compiled grammars in the cache.
    masks: int = 0
    mask_seconds: float = 0.0
    grammars_compiled: int = 0
    grammar_seconds: float = 0.0
    grammars_kept: int = 0
    #: Waiting sequences, and their prompt tokens.
    waiting: int = 0
    waiting_tokens: int = 0
    #: Predicted wait in seconds of a request behind all waiting ones.
    predicted_wait: float = 0.0
    #: Seconds from one step's result to the next one's, by (kind of step, rows of its program).
    step_seconds: dict[tuple[str, int], Histogram] = field(
        default_factory=lambda: defaultdict(lambda: Histogram(_STEP_BOUNDS))
    )
    #: Seconds before each step in which the device had nothing to do.
    host_gap_seconds: Histogram = field(default_factory=lambda: Histogram(_GAP_BOUNDS))
    #: Share of occupied seats in each step.
    seat_fill_ratio: Histogram = field(default_factory=lambda: Histogram(_FILL_BOUNDS))
    #: The newest record (numpy scalar of `records.STEP_DTYPE`), for the gauges.
    last: Any = None

    def observe_step(self, record: Any) -> None:
        """Add one step record (a numpy scalar with the fields of `records.STEP_DTYPE`)."""
        values = dict(zip(record.dtype.names, record.item(), strict=True))
        kind = "mixed" if values["mixed"] else "decode"
        self.steps[kind] += 1
        for name in ROW_KINDS:
            self.rows[name] += values[name]
        self.preemptions += values["preempted"]
        self.compiles += values["compiled"]
        self.waiting, self.waiting_tokens = values["waiting"], values["waiting_tokens"]
        program = kind, values["bucket_tokens"]
        self.step_seconds[program].observe(values["device_s"] + values["gap_s"])
        self.host_gap_seconds.observe(values["gap_s"])
        self.seat_fill_ratio.observe(values["seats_busy"] / max(1, values["seats"]))
        self.last = record

    def observe_outputs(self, outputs: Iterable[SequenceOutput]) -> None:
        """Count sequences that ended because of logits that are not finite."""
        for output in outputs:
            if output.error_code == "nan_logits":
                self.nan_rows += 1

    def observe_canary(self, findings: Iterable[CanaryFinding]) -> None:
        """Count sequences that were computed again."""
        for finding in findings:
            self.canary_checked += 1
            self.canary_mismatched += not finding.right
            self.canary_worst = max(self.canary_worst, finding.apart)

    def observe_grammars(self, work: GrammarWork) -> None:
        """Add the cost of grammars."""
        self.masks += work.masks
        self.mask_seconds += work.mask_s
        self.grammars_compiled += work.compiled
        self.grammar_seconds += work.compile_s
        self.grammars_kept = work.cached

    def observe_idle(self, waiting: int) -> None:
        """Note an idle tick or a lost core: no seat is occupied. waiting: queued sequences."""
        self.waiting, self.waiting_tokens = waiting, 0
        self.predicted_wait = 0.0
        if self.last is not None:
            self.last = self.last.copy()
            self.last["seats_busy"] = self.last["pages_used"] = 0

    def observe_restart(self, cause: str, resumed: int) -> None:
        """Count a restart of the core. resumed: number of requests that the new core continues."""
        self.engine_restarts += 1
        self.restart_causes[cause] += 1
        self.resumed += resumed

    def gauge(self, name: str) -> int:
        """A field of the newest record, 0 before the first step."""
        return 0 if self.last is None else int(self.last[name])
