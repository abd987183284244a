"""A terminal's screen and keys, for output that is updated in place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console, RenderableType
from rich.text import Text

#: Another screen without a cursor, and back to the first (xterm's control sequences).
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[?25h\x1b[?1049l"
_CLEAR, _REST_OF_LINE = "\x1b[2J", "\x1b[K"


class Screen:
    """Shows pictures on a terminal. Only lines that have changed are written, so that a slow link
    has little to carry. Where the output is no terminal, the last picture is printed at the end.
    """

    def __init__(self, console: Console):
        self._console = console
        #: The screen's size and lines, as they were written.
        self._size = console.size
        self._lines: list[str] = []
        self._last: RenderableType | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lines:
            self._write(_LEAVE)
        elif self._last is not None:
            self._console.print(self._last)

    def show(self, picture: RenderableType, footer: Text) -> None:
        if not self._console.is_terminal:
            self._last = picture
            return
        size = self._console.size
        head = "" if self._lines else _ENTER
        if size != self._size:
            self._size, self._lines, head = size, [], head or _CLEAR
        room = size.height - 1
        lines = self._rendered(picture)[:room]
        lines += [""] * (room - len(lines)) + self._rendered(footer)[:1]
        before = self._lines or [""] * len(lines)
        changed = [
            f"\x1b[{number};1H{line}{_REST_OF_LINE}"
            for number, (line, old) in enumerate(zip(lines, before, strict=True), 1)
            if line != old
        ]
        self._lines = lines
        if head or changed:
            self._write(head + "".join(changed))

    def _rendered(self, picture: RenderableType) -> list[str]:
        with self._console.capture() as captured:
            self._console.print(picture)
        return captured.get().rstrip("\n").split("\n")

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


@contextmanager
def reading_keys(on_keys: Callable[[str], None]) -> Iterator[None]:
    """Call `on_keys` on the running event loop with keys as they are pressed, without Enter and
    without echo. Nothing is read where standard input is no terminal.
    """
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)

    def read() -> None:
        keys = os.read(keyboard, 64)
        if keys:
            on_keys(keys.decode(errors="replace"))
        else:  # the terminal is gone
            loop.remove_reader(keyboard)

    loop.add_reader(keyboard, read)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
