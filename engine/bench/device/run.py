"""`jitney bench device`: every part in a process of its own, in the order of what matters most,
until the time is up.

The report is written anew after every row, so that a lease that ends early leaves what was
measured.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

import msgspec

from jitney.engine.bench.device.rows import TINY, About, Floors, PartJob, Row
from jitney.engine.bench.device.worker import OURS, PEERS, PartMessage
from jitney.engine.errors import ConfigError, JitneyError

#: In the order of what matters most: the goals first, then the peer that one goal names.
PARTS = {
    "floors": "copy bandwidth, product rate, launches",
    "steps": "whole decode steps of 1 to 32 seats, short contexts",
    "attention": "decode, prompt and mixed attention",
    "loop": "the engine in a closed loop, and its host gap",
    "transformers": "transformers' continuous batching on the same batch of requests",
    "graphs": "decode steps again, without CUDA graphs",
    "prefill": "steps of one prompt, 512 to 8,192 rows",
    "contexts": "decode steps of up to 256 seats and 32k contexts",
    "quantised": "decode steps with weights in fp8, int8 and int4",
    "products": "products with weights in each scheme",
    "write": "norm, rotation and write of keys and values",
    "sampling": "top-p threshold over the vocabulary",
    "torch": "attention and compiled decode steps in PyTorch",
}
#: What must be in the environment of a part; it is added to what is there.
_ENVIRONMENT = {"graphs": {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}}
#: A part may go on with the case that it is at for so long after its time, before its process is
#: ended.
_GRACE_S = 90.0
_Start = Callable[[PartJob, Mapping[str, str]], Iterator[PartMessage]]
_Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What to measure."""

    shape: str = ""  # one of NAMES; "": by the device
    dtype: str = "auto"
    kernels: str = "auto"
    against: str = ""  # a second kernel set, "" for none
    platform: str = "auto"
    page_size: int = 0  # 0: by the shape
    only: tuple[str, ...] = ()  # parts; (): all
    seconds: float = 1800.0  # for everything
    environment: Mapping[str, str] = field(default_factory=dict)  # of every part's process

    def parts(self) -> Iterator[str]:
        """The parts in order; floors are always measured."""
        return (part for part in PARTS if not self.only or part in self.only or part == "floors")


@dataclass(slots=True)
class DeviceResults:
    """What has been measured so far."""

    plan: DevicePlan
    about: About | None = None
    floors: Floors | None = None
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0  # since the start

    @property
    def shape(self) -> str:
        """The shape that is measured: what was asked for, else by the device."""
        if self.plan.shape:
            return self.plan.shape
        if self.about is None or self.about.platform == "cpu":
            return TINY
        return "llama-3.1-8b"

    @property
    def real(self) -> bool:
        """Whether goals are judged: not on a shape that only shows that all of it runs."""
        return self.shape != TINY

    def job(self, part: str, seconds: float) -> PartJob:
        """What a part is told; what was found first holds for all."""
        plan, about = self.plan, self.about
        page = 16 if self.shape == TINY else 64
        return PartJob(
            part=part,
            shape=plan.shape if part == "floors" else self.shape,
            dtype=about.dtype if about else plan.dtype,
            kernels=about.kernel_set if about else plan.kernels,
            page_size=plan.page_size or page,
            seconds=seconds,
            floors=self.floors,
            against=plan.against,
            platform=plan.platform,
        )


def measure(
    plan: DevicePlan,
    save: Callable[[DeviceResults], None],
    report: _Report,
    start: _Start | None = None,
) -> DeviceResults:
    """Run the parts; `save` is called after every row, `report` with a line of progress.

    start: runs a job, in a process of its own by default. Raises JitneyError if the floors cannot
    be measured, ConfigError for a shape too large.
    """
    started = time.monotonic()
    results = DeviceResults(plan)
    for part in plan.parts():
        left = plan.seconds - (time.monotonic() - started)
        for line in _lines_of(results, part, left, start or run_apart):
            _take(results, line, report)
            results.seconds = time.monotonic() - started
            save(results)
        if part == "floors":
            _check(results, report)
    return results


def _lines_of(
    results: DeviceResults, part: str, left: float, start: _Start
) -> Iterator[PartMessage]:
    """What a part says; a row why it says nothing, if it was not begun."""
    why = _unfit(results, part, left)
    if why:
        yield _note(part, "all", why)
        return
    environment = {**results.plan.environment, **_extended(_ENVIRONMENT.get(part, {}))}
    yield from start(results.job(part, left), environment)


def _note(part: str, case: str, why: str) -> PartMessage:
    """A row for a part that has no figures."""
    return PartMessage(row=Row(part=part, name=PARTS[part], case=case, by="", note=why))


def _unfit(results: DeviceResults, part: str, left: float) -> str:
    """Why a part is not begun; empty if it is."""
    if part == "floors":
        return ""
    assert results.about is not None  # else the floors would have ended the run
    platform = results.about.platform
    if part == "graphs" and platform not in ("gpu", "cuda"):
        return f"not run: CUDA graphs are of NVIDIA GPUs, this is {platform}"
    if left <= 0:
        return "not run: the time was up"
    return ""


def _extended(wanted: Mapping[str, str]) -> dict[str, str]:
    """Variables with what the environment already says in front."""
    extended = {}
    for name, text in wanted.items():
        extended[name] = f"{os.environ.get(name, '')} {text}".strip()
    return extended


def _take(results: DeviceResults, line: PartMessage, report: _Report) -> None:
    if line.about is not None:
        results.about = line.about
        report(f"{line.about.device}: {line.about.kernels} kernels, {line.about.dtype}")
    if line.floors is not None:
        results.floors = line.floors
        report(_describe(line.floors))
    if line.row is not None:
        results.rows.append(line.row)
        report(f"{line.row.part}: {line.row.name}, {line.row.case}: {_outcome(line.row)}")


def _describe(floors: Floors) -> str:
    return (
        f"copy {floors.copy_bytes_s / 1e9:,.1f} GB/s, products "
        f"{floors.product_flops_s / 1e12:,.2f} TFLOP/s, a launch {1e6 * floors.launch_s:.1f} us"
    )


def _outcome(row: Row) -> str:
    if row.seconds is None:
        return row.note
    text = f"{1e3 * row.seconds:.3f} ms"
    if row.fraction is not None:
        text += f", {row.fraction:.0%} of the floor's rate"
    return text


def _check(results: DeviceResults, report: _Report) -> None:
    """Say on what this runs; refuse a shape that a CPU cannot be asked for."""
    if results.about is None or results.floors is None:
        raise JitneyError(
            "the device could not be measured: see the messages above, and jitney doctor"
        )
    if results.about.platform == "cpu":
        if results.real:
            raise ConfigError(
                f"--shape {results.shape} needs a GPU or TPU, and jax finds none here: leave it "
                "out for the tiny shape"
            )
        report(
            "no GPU or TPU here: the tiny shape on the CPU shows that everything runs, not how "
            "fast a device is"
        )


def run_apart(job: PartJob, environment: Mapping[str, str]) -> Iterator[PartMessage]:
    """A job in a process of its own. What it says last on standard error becomes a row's note if it
    dies.
    """
    with tempfile.TemporaryFile() as errors:
        process = _start_worker(job, environment, errors)
        assert process.stdout is not None
        why = ""
        try:
            yield from _read_lines(process.stdout, job.seconds + _GRACE_S)
            status = process.wait(_GRACE_S)
            if status:
                why = f"failed: the process ended with status {status}: {_last_line(errors)}"
        except (TimeoutError, subprocess.TimeoutExpired):
            why = "not finished: the time was up"
        finally:
            process.kill()
            process.wait()
        if why:
            yield _note(job.part, "the rest", why)


def _start_worker(
    job: PartJob, environment: Mapping[str, str], errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "jitney.engine.bench.device.worker"],
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


def _read_lines(stream: IO[bytes], seconds: float) -> Iterator[PartMessage]:
    """The lines until the stream ends; TimeoutError if that takes longer."""
    lines: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_copy_lines, args=(stream, lines), daemon=True).start()
    until = time.monotonic() + seconds
    while True:
        try:
            text = lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None
        if not text:
            return
        if text.startswith(b"{"):  # a library may print what it likes
            yield msgspec.json.decode(text, type=PartMessage)


def _copy_lines(stream: IO[bytes], lines: queue.Queue[bytes]) -> None:
    """Every line, then an empty one."""
    for line in stream:
        lines.put(line)
    lines.put(b"")


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip().splitlines()
    if not said:
        return "nothing said"
    return said[-1][:200]


def check_parts(names: Sequence[str]) -> tuple[str, ...]:
    """The names, which must be parts; ConfigError lists them."""
    for name in names:
        if name not in PARTS:
            raise ConfigError(f"--only: unknown part {name!r}; known: {', '.join(PARTS)}")
    return tuple(names)


assert set(PARTS) == {"floors", *OURS, *PEERS}
