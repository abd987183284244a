"""Step times: curves fitted to measured steps, by bucket, with non-negative least
squares.

A step of bucket b takes

    fixed_b + per_key * keys + per_longest * longest + per_prompt * prompt rows + per_pair * pairs
        + per_decode * decode rows

(see `engine.core.scheduler.plan.StepWork`). All buckets of a kind (decode-only, mixed) are first
fitted together, each with its own fixed part. Then each bucket is fitted alone, pulled towards the
common slopes with the weight of PULL of its own points, so that a bucket with few measurements does
not get slopes without evidence. A bucket without measurements gets its fixed part from its
neighbours by linear interpolation over the rows, and the slopes of the nearest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict
from jitney.engine.core import Bucket, HostTimes, StepWork

#: Weight of the common slopes, in points of a bucket.
_PULL = 8.0
#: A step counts as stalled by other work on the machine if it takes this many times its fitted
#: time; rounds of the fit without the excess time.
_STALL, _ROUNDS = 4.0, 6
#: Most factors that are stored of the scatter of measured / fitted.
_NOISE_POINTS = 200

_COEFFICIENTS = ("fixed", "per_key", "per_longest", "per_prompt", "per_pair", "per_decode")


class _Point(NamedTuple):
    bucket: Bucket
    work: StepWork
    seconds: float


class Curve(msgspec.Struct, frozen=True):
    """Step time of one bucket, in seconds, from `points` measured steps."""

    tokens: int
    seats: int
    #: Seconds of the step itself; then seconds per key of the decode rows, key of the longest
    #: decode row, prompt row, pair of a prompt row and a key, decode row.
    fixed: float
    per_key: float = 0.0
    per_longest: float = 0.0
    per_prompt: float = 0.0
    per_pair: float = 0.0
    per_decode: float = 0.0
    points: int = 0

    @property
    def decode_only(self) -> bool:
        return self.tokens == self.seats

    def seconds(self, work: StepWork) -> float:
        return (
            self.fixed
            + self.per_key * work.keys
            + self.per_longest * work.longest
            + self.per_prompt * work.prompt
            + self.per_pair * work.pairs
            + self.per_decode * work.decode
        )


def host_times(records: np.ndarray) -> HostTimes:
    """Fit the host's times of step records over the number of seated sequences."""
    rows = np.column_stack((np.ones(len(records)), records["seats_busy"]))
    launched = records["plan_s"] + records["batch_s"] + records["launch_s"]
    before = _nonnegative(rows, launched.astype(float))
    after = _nonnegative(rows, records["commit_s"].astype(float))
    return HostTimes(*before.tolist(), *after.tolist())


#: Host times of zero.
_NO_HOST = HostTimes()


class _FitError(msgspec.Struct, frozen=True):
    """Error of the curves on the steps that they were fitted to: median of |fitted / measured -
    1|, and the ratio of the sums minus 1, over `points` steps."""

    points: int
    median: float
    total: float


class StepTable:
    """`StepTimes` from fitted curves of buckets. source: one line with the numbers' origin."""

    def __init__(
        self,
        curves: Sequence[Curve],
        host: HostTimes = _NO_HOST,
        noise: dict[str, list[float]] | None = None,
        errors: dict[str, _FitError] | None = None,
        source: str = "",
    ):
        if not curves:
            raise ConfigError("a step table needs at least one measured bucket")
        self.curves, self.host, self.source = tuple(curves), host, source
        self.noise, self.errors = noise or {}, errors or {}
        #: Names of the timed model and device; empty if unknown.
        self.model = self.device = ""
        self._by_shape = {(curve.tokens, curve.seats): curve for curve in curves}

    @property
    def padding_is_free(self) -> bool:
        """Whether the time of measured steps with prompts depends on their rows rather than on
        their buckets' rows (see `Buckets`), judged by the larger part of the seconds.
        """
        by_rows = by_bucket = 0.0
        for curve in self.curves:
            if not curve.decode_only:
                by_rows += curve.points * curve.per_prompt * curve.tokens
                by_bucket += curve.points * curve.fixed
        return by_rows > by_bucket

    def seconds(self, bucket: Bucket, work: StepWork) -> float:
        """Expected device seconds of a step."""
        shape = bucket.tokens, bucket.seats
        if shape not in self._by_shape:
            self._by_shape[shape] = _between(self.curves, bucket)
        return self._by_shape[shape].seconds(work)

    def draft_seconds(self, work: StepWork, drafts: int) -> float:
        """Always 0: measured steps include the time of drafting."""
        return 0.0

    @classmethod
    def _from_points(
        cls,
        points: Sequence[_Point],
        host: HostTimes = _NO_HOST,
        source: str = "",
        noise: dict[str, list[float]] | None = None,
    ) -> StepTable:
        """Fit measured steps. noise: None: computed from the residuals."""
        kinds: dict[str, list[_Point]] = {}
        for point in sorted(points, key=lambda each: not each.bucket.decode_only):
            kinds.setdefault(point.bucket.kind, []).append(point)
        curves = [curve for group in kinds.values() for curve in _fit_steadily(group)]
        table = cls(curves, host, noise, source=source)
        for kind, group in kinds.items():
            ratios, table.errors[kind] = _residuals(table, group)
            if noise is None:
                table.noise[kind] = ratios
        return table

    @classmethod
    def from_repeats(
        cls,
        repeats: Iterable[tuple[Bucket, StepWork, Sequence[float]]],
        host: HostTimes,
        source: str,
    ) -> StepTable:
        """Fit steps that were each measured several times, in seconds: curves of the medians, and
        the scatter around them.
        """
        ratios: dict[str, list[float]] = {}
        points = []
        for bucket, work, seconds in repeats:
            middle = median(seconds)
            points.append(_Point(bucket, work, middle))
            ratios.setdefault(bucket.kind, []).extend(np.divide(seconds, middle))
        noise = {kind: _noise_factors(np.array(values)) for kind, values in ratios.items()}
        return cls._from_points(points, host, source, noise)

    @classmethod
    def from_records(cls, records: np.ndarray, source: str = "step records") -> StepTable:
        """Fit step records of a run (`records.STEP_DTYPE`). Raises ConfigError without any."""
        usable = records[(records["device_s"] > 0) & (records["compiled"] == 0)]
        if not len(usable):
            raise ConfigError(
                "no step records to calibrate from: record a run with at least one step"
            )
        buckets = map(Bucket, usable["bucket_tokens"].tolist(), usable["bucket_seats"].tolist())
        points = list(map(_Point, buckets, works_of(usable), usable["device_s"].tolist()))
        host = host_times(usable)
        return cls._from_points(points, host, f"{source} ({len(usable)} steps)")

    def contents(self) -> JsonDict:
        contents = _Contents(list(self.curves), self.source, self.host, self.noise, self.errors)
        return msgspec.to_builtins(contents)

    @classmethod
    def load(cls, file: str | Path) -> StepTable:
        """Read the "table" of a file of `jitney bench step`. Raises ConfigError."""
        try:
            report = msgspec.json.decode(Path(file).read_bytes(), type=_TableFile)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{file}: not a step table (write one with jitney bench step --json): {error}"
            ) from None
        read = report.table
        table = cls(read.curves, read.host, read.noise, read.errors, read.source)
        table.model, table.device = report.model, report.device
        return table


class _Contents(msgspec.Struct):
    curves: list[Curve]
    #: One line with the origin of the numbers.
    source: str = ""
    host: HostTimes = _NO_HOST
    #: Kind of step -> `_noise_factors` of measured / fitted.
    noise: dict[str, list[float]] = {}
    #: Kind of step -> error of its curves.
    errors: dict[str, _FitError] = {}


class _TableFile(msgspec.Struct):
    """The part of a `jitney bench step` report that a simulation needs."""

    table: _Contents
    #: Names of the timed model and device; empty if the report has none.
    model: str = ""
    device: str = ""


def works_of(records: np.ndarray) -> Iterable[StepWork]:
    """The work of each step. Prompt rows are the ledger's prefill and recomputed rows."""
    prompt = np.where(records["mixed"] == 1, records["prefill"] + records["recomputed"], 0)
    decode = records["bucket_tokens"] - records["padding"] - prompt
    return map(
        StepWork,
        decode.tolist(),
        prompt.tolist(),
        records["keys"].tolist(),
        records["longest"].tolist(),
        records["pairs"].tolist(),
    )


def _fit_steadily(points: Sequence[_Point]) -> list[Curve]:
    """Curves of one kind that are robust against a few stalled steps: time beyond STALL times the
    fitted time does not shape a curve. It is spread over all curves, so that the sum of all steps
    is preserved.
    """
    curves, measured = _fit_kind(points), np.array([point.seconds for point in points])
    for _ in range(_ROUNDS):
        most = _STALL * _fitted_to(curves, points)
        if np.all(measured <= most):
            break
        clipped = np.minimum(measured, most).tolist()
        curves = _fit_kind(
            [point._replace(seconds=each) for point, each in zip(points, clipped, strict=True)]
        )
    scale = float(measured.sum() / _fitted_to(curves, points).sum())
    return [
        msgspec.structs.replace(
            curve, **{name: scale * getattr(curve, name) for name in _COEFFICIENTS}
        )
        for curve in curves
    ]


def _fitted_to(curves: Sequence[Curve], points: Sequence[_Point]) -> np.ndarray:
    """The curves' seconds for the points, at least 1e-9."""
    by_shape = {(curve.tokens, curve.seats): curve for curve in curves}
    shapes = [(point.bucket.tokens, point.bucket.seats) for point in points]
    seconds = [
        by_shape[shape].seconds(point.work) for shape, point in zip(shapes, points, strict=True)
    ]
    return np.maximum(seconds, 1e-9)


def _fit_kind(points: Sequence[_Point]) -> list[Curve]:
    """Curves of all buckets of one kind, rows ascending."""
    shapes = np.array([(point.bucket.tokens, point.bucket.seats) for point in points])
    buckets, which = np.unique(shapes, axis=0, return_inverse=True)
    which = which.reshape(-1)
    works = [point.work for point in points]
    slopes = np.array([(w.keys, w.longest, w.prompt, w.pairs, w.decode) for w in works], float)
    # A column that is constant in every bucket is part of the fixed time instead.
    groups = [slopes[which == bucket] for bucket in range(len(buckets))]
    slopes[:, ~np.any([np.ptp(group, axis=0) > 0 for group in groups], axis=0)] = 0.0
    fixed = (which[:, None] == np.arange(len(buckets))).astype(float)
    seconds = np.array([point.seconds for point in points])
    common = _nonnegative(np.hstack((fixed, slopes)), seconds)
    curves = []
    for at, (tokens, seats) in enumerate(buckets.tolist()):
        mine = which == at
        prior = np.array([common[at], *common[len(buckets) :]])
        design = np.column_stack((np.ones(mine.sum()), slopes[mine]))
        own = _nonnegative(design, seconds[mine], prior)
        curves.append(Curve(tokens, seats, *own.tolist(), points=int(mine.sum())))
    return curves


def _nonnegative(
    design: np.ndarray, target: np.ndarray, prior: np.ndarray | None = None
) -> np.ndarray:
    """Non-negative least squares (Lawson and Hanson) of design [n, k] @ x = target [n]. With a
    prior, x is pulled to it with the weight of PULL more rows with typical column values."""
    from scipy.optimize import nnls

    # Columns differ by ten orders of magnitude (1 and query-key pairs), so they are scaled for the
    # solver.
    scale = np.sqrt(np.mean(design**2, axis=0))
    scale[scale == 0] = 1.0
    rows, targets = design / scale, target
    if prior is not None:
        rows = np.vstack((rows, np.sqrt(_PULL) * np.eye(design.shape[1])))
        targets = np.concatenate((target, np.sqrt(_PULL) * prior * scale))
    return nnls(rows, targets)[0] / scale


def _residuals(table: StepTable, points: Sequence[_Point]) -> tuple[list[float], _FitError]:
    """(factors of scatter, error) of the table over the points."""
    measured = np.array([point.seconds for point in points])
    fitted = _fitted_to(table.curves, points)
    error = _FitError(
        len(points),
        float(np.median(np.abs(fitted / measured - 1))),
        float(fitted.sum() / measured.sum() - 1),
    )
    return _noise_factors(measured / fitted), error


def _noise_factors(ratios: np.ndarray) -> list[float]:
    """At most NOISE_POINTS equally likely factors, ascending, of mean 1: means of equal shares of
    the sorted ratios.

    Means are used instead of quantiles, so that a rare stall has exactly its weight.
    """
    shares = np.array_split(np.sort(ratios), min(_NOISE_POINTS, len(ratios)))
    factors = np.array([share.mean() for share in shares])
    return (factors / factors.mean()).tolist()


def _between(curves: Sequence[Curve], bucket: Bucket) -> Curve:
    """The curve of a bucket without measurements, from the buckets of its kind (from all if there
    are none). Beyond the largest measured bucket, the fixed part grows as between the last two.
    """
    kin = [curve for curve in curves if curve.decode_only == bucket.decode_only] or list(curves)
    kin.sort(key=lambda curve: curve.tokens)
    nearest = min(kin, key=lambda curve: abs(curve.tokens - bucket.tokens))
    rows, fixed = [curve.tokens for curve in kin], [curve.fixed for curve in kin]
    seconds = float(np.interp(bucket.tokens, rows, fixed))
    if bucket.tokens > rows[-1] and len(kin) > 1:
        slope = max(0.0, (fixed[-1] - fixed[-2]) / max(1, rows[-1] - rows[-2]))
        seconds += slope * (bucket.tokens - rows[-1])
    return msgspec.structs.replace(
        nearest, tokens=bucket.tokens, seats=bucket.seats, points=0, fixed=seconds
    )
