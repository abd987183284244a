"""Runs `jitney bench device`: every part in its own process, the most important first, until the
time is up.

Results are saved after every row, so that they survive a lease that ends early, and a later call
continues from there.
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

from jitney.engine.common.child_process import last_line
from jitney.engine.common.errors import ConfigError, JitneyError
from jitney.engine.lab.device.parts import PARTS
from jitney.engine.lab.device.rows import About, Floors, PartJob, Row
from jitney.engine.lab.device.worker import PartMessage

#: Timeout of one part, seconds. With this and `DevicePlan.TOTAL_S`, all parts fit into a lease of
#: half an hour, and at least one part into a call of ten minutes.
_PART_S = 300.0
#: Limits in a short call: share of the call for the part `check`; share of the remaining time for a
#: part with others after it.
_CHECK_SHARE, _PART_SHARE = 1 / 3, 1 / 2
#: Last share of a part's time in which no case begins, so that the running one can end.
_LAST_CASE = 0.25
#: Least seconds for which a process is started.
_LEAST_S = 5.0
_Start = Callable[[PartJob, Mapping[str, str]], Iterator[PartMessage]]
_Report = Callable[[str], None]


class _ResultStore(Protocol):
    def take_up(self, results: DeviceResults) -> None:
        """Add an earlier call's measurements to the results, once the device is known."""
        ...

    def save(self, results: DeviceResults) -> object: ...


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The parts to measure, and their settings. Raises ConfigError with the list of parts for an
    unknown one.
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
        """Run the parts that no earlier call has finished. Results are saved after every row, and
        `report` is called with lines of progress.

        start: runs a job, by default in a separate process. Raises JitneyError if the device cannot
        be described or its floors cannot be measured, ConfigError if the shape is too large.
        """
        measuring = _Measuring(DeviceResults(self), store, report, start or _run_apart)
        measuring.describe()
        for part in self.parts():
            measuring.run(part)
        measuring.run_rest()
        return measuring.results

    def parts(self) -> Iterator[str]:
        """The parts in order, or in that of `only` if it is set. The smoke test and the floors,
        with which others are compared, come first.
        """
        first = ["smoke"]
        if any(PARTS[part].needs_floors for part in self.only):
            first.append("floors")
        return iter(dict.fromkeys([*first, *self.only] if self.only else PARTS))


@dataclass(slots=True)
class DeviceResults:
    """The results so far, of this call and of earlier ones."""

    plan: DevicePlan
    about: About | None = None  #: of the device; None until it was asked
    floors: Floors | None = None  #: None until they were measured
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0  # of all calls
    before: float = 0.0  # of those before this one
    calls: int = 1
    #: Parts that are complete.
    finished: list[str] = field(default_factory=list)

    @property
    def shape(self) -> str:
        """The measured shape: the requested one, else the default for the device."""
        if self.plan.shape:
            return self.plan.shape
        if self.about is None or self.about.platform == "cpu":
            return PartJob.TINY
        return "llama-3.1-8b"

    @property
    def device(self) -> str:
        return self.about.device if self.about else "unknown"

    @property
    def real(self) -> bool:
        """Whether goals are judged; not for the tiny shape, which only tests that all parts run."""
        return self.shape != PartJob.TINY

    @property
    def page_size(self) -> int:
        """KV positions per page."""
        return self.plan.page_size or (16 if self.shape == PartJob.TINY else 64)

    @property
    def wrong(self) -> list[Row]:
        return [row for row in self.rows if row.wrong]

    def job(self, part: str, limit_s: float) -> PartJob:
        """The job of a part, with the first part's results. limit_s: its timeout."""
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
        """Add a row, which replaces an earlier attempt at the same case."""
        self.rows = [old for old in self.rows if old.of != row.of or old.settled]
        self.rows.append(row)


@dataclass(slots=True)
class _Measuring:
    """One running call."""

    results: DeviceResults
    store: _ResultStore
    report: _Report
    start: _Start
    started: float = field(default_factory=time.monotonic)
    #: Whether a part leaves some of the time to later ones.
    shares: bool = True

    @property
    def left(self) -> float:
        """Seconds until the time of this call is up."""
        return self.results.plan.seconds - (time.monotonic() - self.started)

    def describe(self) -> None:
        """Run the part that describes the device, and load its earlier results."""
        for message in self.start(
            self.results.job(PartJob.ABOUT, _PART_S), self.results.plan.environment
        ):
            self._take(message)
        _check(self.results, self.report)
        self.store.take_up(self.results)
        if self.results.finished:
            self.report(f"measured before: {', '.join(self.results.finished)}")

    def run(self, part: str) -> None:
        """Run a part unless it is finished."""
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
        """Run parts again that were shortened for others, each with all of the remaining time."""
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
        """Messages of a part; a row with the reason if it was not started."""
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
        """Timeout of a part's process, seconds."""
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
    """A message with a row without figures."""
    return PartMessage(row=Row(part=part, name=PARTS[part].about, case=case, by="", note=why))


def _extended(flags: Mapping[str, str]) -> dict[str, str]:
    """Environment variables, each with its present value in front."""
    return {name: f"{os.environ.get(name, '')} {text}".strip() for name, text in flags.items()}


def _outcome(row: Row) -> str:
    if row.seconds is None:
        return row.note
    text = f"{1e3 * row.seconds:.3f} ms"
    if row.fraction is not None:
        text += f", {row.fraction:.0%} of the floor's rate"
    return text


def _check(results: DeviceResults, report: _Report) -> None:
    """Report the device. Refuse a shape that is too large for a CPU, and the reference kernels
    unless they were requested.
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
    """Run a job in a separate process with the job's timeout. If it dies, the last line of its
    standard error becomes a row's note.
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
                why = f"failed: the process ended with status {status}: {last_line(errors)}"
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
    with suppress(BrokenPipeError):  # it died at once, as its status shows
        process.stdin.write(msgspec.json.encode(job))
        process.stdin.close()
    return process


def _read_lines(stream: IO[bytes], until: float) -> Iterator[PartMessage]:
    """The messages until the stream ends. Raises TimeoutError at time.monotonic() `until`."""
    lines: queue.Queue[bytes] = queue.Queue()

    def copy_lines() -> None:
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
        if text.startswith(b"{"):  # libraries may print other lines
            yield msgspec.json.decode(text, type=PartMessage)
