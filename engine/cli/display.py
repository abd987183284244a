"""What a person sees while the model loads: bars on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Protocol

from jitney.engine.cli.flags import interactive
from jitney.engine.config.schema import Config
from jitney.engine.messages import Progress

if TYPE_CHECKING:
    from jitney.engine.llm import LLM

log = logging.getLogger("jitney")

#: What each stage is called, and whether it counts bytes.
STAGES = {
    "download": ("downloading", True),
    "weights": ("reading weights", True),
    "proof": ("proving kernels", False),
    "compile": ("compiling", False),
    "warmup": ("warming up", False),
}


class Display(Protocol):
    """Told about start-up news; `close` before anything else is printed."""

    def progress(self, news: Progress) -> None: ...
    def close(self) -> None: ...


def make_display() -> Display:
    """The display that suits standard error; also sets up logging to go with it."""
    return Bars() if interactive() else Lines()


class Lines:
    """One log line when a stage starts and one when it ends: a log file wants no bars."""

    def __init__(self) -> None:
        logging.basicConfig(
            level=logging.INFO,
            stream=sys.stderr,
            format="%(asctime)s %(name)s %(levelname)s %(message)s",
        )
        quiet_libraries()
        self._said = ("", False)

    def progress(self, news: Progress) -> None:
        state = (news.stage, bool(news.total) and news.done >= news.total)
        if state == self._said or self._said == (news.stage, True):
            return
        name, _ = STAGES.get(news.stage, (news.stage, False))
        log.info("%s", f"{name}: done" if state[1] else f"{name} {news.detail}".rstrip())
        self._said = state

    def close(self) -> None:
        pass


class Bars:
    """One bar per stage."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.logging import RichHandler
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        console = Console(stderr=True)
        logging.basicConfig(
            level=logging.INFO,
            format="%(message)s",
            handlers=[RichHandler(console=console, show_path=False, markup=False)],
        )
        quiet_libraries()
        self._bars = RichProgress(
            TextColumn("{task.description:<16}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
        )
        self._tasks = {}
        self._bars.start()

    def progress(self, news: Progress) -> None:
        name, in_bytes = STAGES.get(news.stage, (news.stage, False))
        scale = 1 << 20 if in_bytes and news.total > 1 << 20 else 1
        if news.stage not in self._tasks:
            self._tasks[news.stage] = self._bars.add_task(
                name + (" (MiB)" if scale > 1 else ""), detail=""
            )
        self._bars.update(
            self._tasks[news.stage],
            completed=news.done // scale,
            total=news.total // scale or None,
            detail=news.detail,
        )

    def close(self) -> None:
        self._bars.stop()


def quiet_libraries() -> None:
    """Keep other packages' chatter out of the log; their warnings stay."""
    for name in ("uvicorn", "httpx", "jax", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.WARNING)


def load_llm(config: Config) -> LLM:
    """An engine in this process, with its loading shown."""
    from jitney.engine.llm import LLM

    display = make_display()
    try:
        return LLM(config, progress=display.progress)
    finally:
        display.close()
