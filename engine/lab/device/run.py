"""`jitney bench device`: every part in a process of its own, in the order of what matters most,
until the time is up.

What was found is saved after every row, so that a lease that ends early leaves what was measured,
and a later call goes on from there.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, ClassVar, Protocol

import msgspec

from jitney.engine.common.errors import ConfigError, JitneyError
from jitney.engine.lab.device.parts import PARTS
from jitney.engine.lab.device.rows import About, Floors, PartJob, Row
from jitney.engine.lab.device.worker import PartMessage

#: Seconds of one part, its process ended then: by these and `DevicePlan.TOTAL_S` a lease of half an
#: hour holds the whole, and a call of ten minutes at least one part.
_PART_S = 300.0
#: In a short call nothing takes all: of the call, for the part `check`; of what is left, for a part
#: that others wait behind.
_CHECK_SHARE, _PART_SHARE = 1 / 3, 1 / 2
#: Of a part's time: no case is begun in the last of it, which is for the one under way.
_LAST_CASE = 0.25
#: Less time than this is not worth starting a process for.
_LEAST_S = 5.0
_Start = Callable[[PartJob, Mapping[str, str]], Iterator[PartMessage]]
_Report = Callable[[str], None]


class _ResultStore(Protocol):
    """Where results are kept."""

    def take_up(self, results: DeviceResults) -> None:
        """Put what an earlier call measured into the results, once the device is known."""
        ...

    def save(self, results: DeviceResults) -> object:
        """Keep them."""
        ...


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The parts to measure, and how. Raises ConfigError, which lists the parts, for an unknown
    one.
    """

    #: Seconds of all parts together.
    TOTAL_S: ClassVar[float] = 1500.0
    shape: str = ""  # "tiny", or a key of SHAPES; "": by the device
    dtype: str = "auto"  # of weights and activations; auto: by the device
    kernels: str = "auto"
    against: str = ""  # a second kernel set, "" for none
    platform: str = "auto"  # auto, or the one whose devices jax must have
    page_size: int = 0  # 0: by the shape
    only: tuple[str, ...] = ()  # parts; (): all
    seconds: float = TOTAL_S  # for everything in this call
    environment: Mapping[str, str] = field(default_factory=dict)  # of every part's process

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in PARTS:
                raise ConfigError(f"--only: unknown part {name!r}; known: {', '.join(PARTS)}")

    def measure(
        self, store: _ResultStore, report: _Report, start: _Start | None = None
    ) -> DeviceResults:
        """Run the parts that no earlier call has finished; saved after every row, `report` is
        called with a line of progress.

        start: runs a job, in a process of its own by default. Raises JitneyError if the device
        cannot be described or its floors cannot be measured, ConfigError for a shape too large.
        """
        measuring = _Measuring(DeviceResults(self), store, report, start or _run_apart)
        measuring.describe()
        for part in self.parts():
            measuring.run(part)
        measuring.run_rest()
        return measuring.results

    def parts(self) -> Iterator[str]:
        """The parts in order, that of `only` if it is given; first the smoke, and the floors that
        others are compared with.
        """
        first = ["smoke"]
        if any(PARTS[part].needs_floors for part in self.only):
            first.append("floors")
        return iter(dict.fromkeys([*first, *self.only] if self.only else PARTS))


@dataclass(slots=True)
class DeviceResults:
    """The results so far, of this call and of those before it."""

    plan: DevicePlan
    about: About | None = None  #: of the device; None until it was asked
    floors: Floors | None = None  #: None until they were measured
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0  # of all calls
    before: float = 0.0  # of those before this one
    calls: int = 1
    #: Parts that left nothing undone.
    finished: list[str] = field(default_factory=list)

    @property
    def shape(self) -> str:
        """The shape that is measured: what was asked for, else by the device."""
        if self.plan.shape:
            return self.plan.shape
        if self.about is None or self.about.platform == "cpu":
            return PartJob.TINY
        return "llama-3.1-8b"

    @property
    def device(self) -> str:
        """Its name."""
        return self.about.device if self.about else "unknown"

    @property
    def real(self) -> bool:
        """Whether goals are judged: not on a shape that only shows that all of it runs."""
        return self.shape != PartJob.TINY

    @property
    def page_size(self) -> int:
        """KV positions per page."""
        return self.plan.page_size or (16 if self.shape == PartJob.TINY else 64)

    @property
    def wrong(self) -> list[Row]:
        """Rows with wrong answers."""
        return [row for row in self.rows if row.wrong]

    def job(self, part: str, limit_s: float) -> PartJob:
        """The job of a part, with what the first part found. limit_s: it is ended then."""
        plan, about = self.plan, self.about
        shape, dtype, kernels = plan.shape, plan.dtype, plan.kernels
        if about is not None:
            shape, dtype, kernels = self.shape, about.dtype, about.kernel_set
        return PartJob(
            part=part,
            shape=shape,
            dtype=dtype,
            kernels=kernels,
            page_size=self.page_size,
            seconds=(1 - _LAST_CASE) * limit_s,
            limit_s=limit_s,
            settled=frozenset(row.of for row in self.rows if row.settled),
            floors=self.floors,
            against=plan.against,
            platform=plan.platform,
        )

    def add(self, row: Row) -> None:
        """A row, in the place of an earlier attempt at the same."""
        self.rows = [old for old in self.rows if old.of != row.of or old.settled]
        self.rows.append(row)


@dataclass(slots=True)
class _Measuring:
    """One call under way."""

    results: DeviceResults
    store: _ResultStore
    report: _Report
    start: _Start
    started: float = field(default_factory=time.monotonic)
    #: Whether a part leaves some of the time to those behind it.
    shares: bool = True

    @property
    def left(self) -> float:
        """Seconds until the time of this call is up."""
        return self.results.plan.seconds - (time.monotonic() - self.started)

    def describe(self) -> None:
        """Ask what the device is, and take up what is known of it."""
        for message in self.start(
            self.results.job(PartJob.ABOUT, _PART_S), self.results.plan.environment
        ):
            self._take(message)
        _check(self.results, self.report)
        self.store.take_up(self.results)
        if self.results.finished:
            self.report(f"measured before: {', '.join(self.results.finished)}")

    def run(self, part: str) -> None:
        """A part, unless it is finished."""
        results = self.results
        if part in results.finished:
            return
        begun = len(results.rows)
        for message in self._messages(part):
            self._take(message)
            self._save()
        if part == "floors" and results.floors is None:
            raise JitneyError(
                "the device could not be measured: see the messages above, and jitney doctor"
            )
        rows = [row for row in results.rows[begun:] if row.part == part]
        died = [row for row in rows if row.note.startswith("failed: the process")]
        if not died and not any(Row.NO_TIME in row.note for row in rows):
            results.finished.append(part)
        self._save()

    def run_rest(self) -> None:
        """Once more the parts that were cut short for others, each with all that is left."""
        self.shares = False
        results = self.results
        for part in results.plan.parts():
            rows = [row for row in results.rows if row.part == part]
            if self.left > _LEAST_S and any(Row.NO_TIME in row.note for row in rows):
                unsettled = [row for row in rows if not row.settled]
                results.rows = [row for row in results.rows if row not in unsettled]
                self.run(part)

    def _save(self) -> None:
        self.results.seconds = self.results.before + time.monotonic() - self.started
        self.store.save(self.results)

    def _messages(self, part: str) -> Iterator[PartMessage]:
        """Messages of a part; a row with the reason, if it was not begun."""
        results = self.results
        assert results.about is not None  # else nothing is measured
        platform = results.about.platform
        if PARTS[part].nvidia and platform not in ("gpu", "cuda"):
            why = f"not run: it is about NVIDIA's GPUs, this is {platform}"
            yield _note(part, "all", why)
            return
        if part != "floors" and self.left <= _LEAST_S:
            yield _note(part, "all", f"not run: {Row.NO_TIME}")
            return
        environment = {**results.plan.environment, **_extended(PARTS[part].environment)}
        limit_s = self._limit_of(part)
        yield from self.start(results.job(part, limit_s), environment)

    def _limit_of(self, part: str) -> float:
        """Seconds after which its process is ended."""
        plan = self.results.plan
        if part == "floors":
            return _PART_S
        limit_s = min(_PART_S, self.left)
        if not self.shares or part == list(plan.parts())[-1]:
            return limit_s
        if part == "check":
            return min(limit_s, _CHECK_SHARE * plan.seconds)
        return min(limit_s, max(_LEAST_S, _PART_SHARE * self.left))

    def _take(self, message: PartMessage) -> None:
        results, report = self.results, self.report
        if message.about is not None:
            results.about = message.about
            about = message.about
            report(f"{about.device}: {about.kernels} kernels, {about.dtype}")
        if message.floors is not None:
            floors = results.floors = message.floors
            report(
                f"copy {floors.copy_bytes_s / 1e9:,.1f} GB/s, products "
                f"{floors.product_flops_s / 1e12:,.2f} TFLOP/s, a launch "
                f"{1e6 * floors.launch_s:.1f} us"
            )
        if message.row is not None:
            row = message.row
            results.add(row)
            report(f"{row.part}: {row.name}, {row.case}: {_outcome(row)}")


def _note(part: str, case: str, why: str) -> PartMessage:
    """A row for a part that has no figures."""
    return PartMessage(row=Row(part=part, name=PARTS[part].about, case=case, by="", note=why))


def _extended(wanted: Mapping[str, str]) -> dict[str, str]:
    """Variables with what the environment already says in front."""
    return {name: f"{os.environ.get(name, '')} {text}".strip() for name, text in wanted.items()}


def _outcome(row: Row) -> str:
    if row.seconds is None:
        return row.note
    text = f"{1e3 * row.seconds:.3f} ms"
    if row.fraction is not None:
        text += f", {row.fraction:.0%} of the floor's rate"
    return text


def _check(results: DeviceResults, report: _Report) -> None:
    """Say on what this runs; refuse a shape that a CPU cannot be asked for, and to measure the
    reference unless it was asked for.
    """
    about = results.about
    if about is None:
        raise JitneyError(
            "the device could not be described: see the messages above, and jitney doctor"
        )
    if about.kernel_set == "reference" and results.plan.kernels == "auto":
        if about.platform != "cpu":
            raise ConfigError(
                f"there are no kernels of our own for {about.platform}; --kernels reference "
                "measures the reference"
            )
        report("the CPU's own kernels cannot run here: the REFERENCE kernels are measured")
    if about.platform in ("gpu", "cuda") and not about.choices:
        report("what XLA measures is not kept, as compiled programs are not: see jitney doctor")
    if about.platform == "cpu":
        if results.real:
            raise ConfigError(
                f"--shape {results.shape} needs a GPU or TPU, and jax finds none here: leave it "
                "out for the tiny shape"
            )
        report(
            "no GPU or TPU here: the tiny shape on the CPU shows that everything runs, not how "
            "fast a device is"
        )


def _run_apart(job: PartJob, environment: Mapping[str, str]) -> Iterator[PartMessage]:
    """A job in a process of its own, which ends at the job's limit. What it says last on standard
    error becomes a row's note if it dies.
    """
    until = time.monotonic() + job.limit_s
    with tempfile.TemporaryFile() as errors:
        process = _start_worker(job, environment, errors)
        assert process.stdout is not None
        why = ""
        try:
            yield from _read_lines(process.stdout, until)
            status = process.wait(max(1.0, until - time.monotonic()))
            if status:
                why = f"failed: the process ended with status {status}: {_last_line(errors)}"
        except (TimeoutError, subprocess.TimeoutExpired):
            why = f"not finished: {Row.NO_TIME}"
        finally:
            process.kill()
            process.wait()
        if why and job.part == PartJob.ABOUT:
            raise JitneyError(f"the device could not be described: {why}")
        if why:
            yield _note(job.part, "the rest", why)


def _start_worker(
    job: PartJob, environment: Mapping[str, str], errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "jitney.engine.lab.device.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={**os.environ, **environment},
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it died at once: its status says so
        process.stdin.write(msgspec.json.encode(job))
        process.stdin.close()
    return process


def _read_lines(stream: IO[bytes], until: float) -> Iterator[PartMessage]:
    """The lines until the stream ends; TimeoutError if that is after `until` (monotonic)."""
    lines: queue.Queue[bytes] = queue.Queue()

    def copy_lines() -> None:
        """Every line, then an empty one."""
        for line in stream:
            lines.put(line)
        lines.put(b"")

    threading.Thread(target=copy_lines, daemon=True).start()
    while True:
        try:
            text = lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None
        if not text:
            return
        if text.startswith(b"{"):  # a library may print what it likes
            yield msgspec.json.decode(text, type=PartMessage)


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip().splitlines()
    return said[-1][:200] if said else "nothing said"
