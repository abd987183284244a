"""Printing progress, and text that may hold escape sequences, which a terminal must not obey."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

#: Seconds between two lines of progress.
_REPORT_S = 10.0
#: Control characters except tab and line feed -> escaped text.
_SHOWN = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}


def visible(text: str) -> str:
    """The text with control characters escaped: ESC becomes \\x1b."""
    return text.translate(_SHOWN)


def visible_on_terminal(text: str) -> str:
    """`visible` if standard output is a terminal, else the text unchanged."""
    return visible(text) if sys.stdout.isatty() else text


class VisibleFormatter(logging.Formatter):
    """Formats log lines; escapes control characters, which foreign names and messages may hold."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(name)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def console(**options: Any) -> Console:
    """A rich console that escapes control characters. options: rich's."""
    return _visible_console()(**options)


@cache
def _visible_console() -> type[Console]:
    """The class of `console`; made on first use, since importing rich is slow."""
    from rich.console import Console
    from rich.segment import Segment

    class VisibleConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                text, style, control = segment
                yield segment if control else Segment(visible(text), style)

    return VisibleConsole


def say(message: str) -> None:
    """Print a line of progress to standard error."""
    print(visible(message), file=sys.stderr, flush=True)


def progress_reporter(unit: str) -> Callable[[int, int], None]:
    """A function that prints "DONE of TOTAL unit", at most every _REPORT_S seconds."""
    reported_at = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= _REPORT_S:
            reported_at = time.monotonic()
            say(f"{done} of {total} {unit}")

    return report


def hang_up(stop: Callable[[int], None], reload: Callable[[], None]) -> Callable[[], None]:
    """A handler of SIGHUP: `reload`, or `stop` if the terminal that there was is gone, which sends
    it too.
    """
    has_terminal = _has_terminal()

    def handle() -> None:
        if has_terminal and not _has_terminal():
            stop(signal.SIGHUP)
        else:
            reload()

    return handle


def _has_terminal() -> bool:
    """Whether stderr is an open terminal."""
    try:
        return os.isatty(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
