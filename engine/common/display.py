"""Progress of the start: bars on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Protocol

from jitney.engine.common.messages import Progress
from jitney.engine.common.terminal import VisibleFormatter, console

if TYPE_CHECKING:
    from rich.progress import TaskID

_log = logging.getLogger("jitney")

#: Titles of stages; others have their own name.
_STAGES = {
    "download": "downloading",
    "hosts": "waiting for hosts",
    "weights": "reading weights",
    "proof": "proving kernels",
    "compile": "compiling",
    "warmup": "warming up",
}
_MIB = 1 << 20
#: Seconds between two lines of a stage.
_LINE_S = 5.0


class Display(Protocol):
    """Shows progress; call `close` before printing anything else."""

    def progress(self, progress: Progress) -> None: ...
    def close(self) -> None: ...


def make_display(log_level: str = "info") -> Display:
    """The display for standard error; also sets up logging."""
    level = log_level.upper()
    return _Bars(level) if sys.stderr.isatty() else _Lines(level)


class _Pace:
    """The speed of a stage since its first report."""

    def __init__(self) -> None:
        self.stage = ""
        self._began = 0.0
        self._done = 0

    def take(self, progress: Progress, now: float) -> None:
        """Note a report. now: in seconds."""
        if progress.stage != self.stage:
            self.stage, self._began, self._done = progress.stage, now, progress.done

    def words(self, progress: Progress, now: float) -> str:
        """Seconds so far; of bytes their rate, and the seconds that remain until all are done.
        Empty before there is a rate.
        """
        seconds, done = now - self._began, progress.done - self._done
        if seconds <= 0 or done <= 0:
            return ""
        if progress.stage not in Progress.IN_BYTES:
            return f"{seconds:.1f} s"
        rate = f"{done / seconds / 1e9:.2f} GB/s"
        if progress.done >= progress.total:
            return f"{rate}, {seconds:.1f} s"
        return f"{rate}, {seconds * (progress.total - progress.done) / done:.0f} s left"


class _Lines:
    """A log line at the start and at the end of each stage, and every few seconds between them."""

    def __init__(self, level: str = "INFO") -> None:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(VisibleFormatter())
        logging.basicConfig(level=level, handlers=[handler])
        _quiet_libraries()
        self._pace = _Pace()
        self._is_done = False
        self._said_at = 0.0

    def progress(self, progress: Progress) -> None:
        now = time.monotonic()
        is_done = bool(progress.total) and progress.done >= progress.total
        if progress.stage == self._pace.stage and (
            self._is_done or not (is_done or now - self._said_at >= _LINE_S)
        ):
            return
        self._pace.take(progress, now)
        words = self._pace.words(progress, now)
        _log.info("%s", _line_of(progress, words, is_done=is_done))
        self._is_done, self._said_at = is_done, now

    def close(self) -> None:
        pass


def _line_of(progress: Progress, pace: str, *, is_done: bool) -> str:
    """reading weights: 1.9 of 15.3 GiB, 1.52 GB/s, 9 s left"""
    name = _name_of(progress)
    if is_done:
        return f"{name}: done{pace and f' ({pace})'}"
    if not pace:
        return f"{name} {progress.detail}".rstrip()
    return f"{name}: {progress.so_far}, {pace}"


def _name_of(progress: Progress) -> str:
    return _STAGES.get(progress.stage, progress.stage)


def _in_mib(progress: Progress) -> bool:
    return progress.stage in Progress.IN_BYTES and progress.total > _MIB


class _Bars:
    """One bar per stage."""

    def __init__(self, level: str) -> None:
        from rich.logging import RichHandler
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        shown = console(stderr=True)
        logging.basicConfig(
            level=level,
            format="%(message)s",
            handlers=[RichHandler(console=shown, show_path=False, markup=False)],
        )
        _quiet_libraries()
        self._bars = RichProgress(
            TextColumn("{task.description:<16}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
            console=shown,
        )
        self._tasks: dict[str, TaskID] = {}
        self._pace = _Pace()
        self._bars.start()

    def progress(self, progress: Progress) -> None:
        now = time.monotonic()
        self._pace.take(progress, now)
        scale = _MIB if _in_mib(progress) else 1
        self._bars.update(
            self._task(progress),
            completed=progress.done // scale,
            total=progress.total // scale or None,
            detail=progress.detail or self._pace.words(progress, now),
        )

    def _task(self, progress: Progress) -> TaskID:
        """The stage's bar."""
        if progress.stage not in self._tasks:
            unit = " (MiB)" if _in_mib(progress) else ""
            name = _name_of(progress) + unit
            self._tasks[progress.stage] = self._bars.add_task(name, detail="")
        return self._tasks[progress.stage]

    def close(self) -> None:
        self._bars.stop()


def _quiet_libraries() -> None:
    """Log only warnings of other packages."""
    for name in ("uvicorn", "httpx", "jax", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.WARNING)
