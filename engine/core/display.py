"""Progress of the start: bars on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Protocol

from jitney.engine.common.messages import Progress
from jitney.engine.common.terminal import console, visible
from jitney.engine.config import Config

if TYPE_CHECKING:
    from rich.progress import TaskID

    from jitney.engine.core.llm import LLM

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
#: Stages that count bytes.
_IN_BYTES = frozenset({"download", "weights"})
_MIB = 1 << 20


class Display(Protocol):
    """Shows progress; call `close` before printing anything else."""

    def progress(self, progress: Progress) -> None: ...
    def close(self) -> None: ...


def make_display(log_level: str = "info") -> Display:
    """The display for standard error; also sets up logging."""
    level = log_level.upper()
    return _Bars(level) if sys.stderr.isatty() else _Lines(level)


class _Formatter(logging.Formatter):
    """Escapes control characters, which foreign names and messages may hold."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _Lines:
    """One log line at the start and one at the end of each stage."""

    def __init__(self, level: str = "INFO") -> None:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logging.basicConfig(level=level, handlers=[handler])
        _quiet_libraries()
        self._stage = ""
        self._is_done = False

    def progress(self, progress: Progress) -> None:
        is_done = bool(progress.total) and progress.done >= progress.total
        is_same = progress.stage == self._stage
        if is_same and (self._is_done or not is_done):
            return
        _log.info("%s", _line_of(progress, is_done))
        self._stage = progress.stage
        self._is_done = is_done

    def close(self) -> None:
        pass


def _line_of(progress: Progress, is_done: bool) -> str:
    name = _name_of(progress)
    return f"{name}: done" if is_done else f"{name} {progress.detail}".rstrip()


def _name_of(progress: Progress) -> str:
    return _STAGES.get(progress.stage, progress.stage)


def _in_mib(progress: Progress) -> bool:
    return progress.stage in _IN_BYTES and progress.total > _MIB


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
        self._bars.start()

    def progress(self, progress: Progress) -> None:
        scale = _MIB if _in_mib(progress) else 1
        self._bars.update(
            self._task(progress),
            completed=progress.done // scale,
            total=progress.total // scale or None,
            detail=progress.detail,
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


def load_llm(config: Config) -> LLM:
    """An engine in this process; shows the progress of loading."""
    from jitney.engine.core.llm import LLM

    display = make_display()
    try:
        return LLM(config, progress=display.progress)
    finally:
        display.close()
