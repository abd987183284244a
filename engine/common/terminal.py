"""Foreign text on a terminal: names of models, errors of other servers and answers of a model may
hold escape sequences, which a terminal would obey. They are shown instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

#: Control characters of both sets, but tab and line feed -> as they are shown.
_SHOWN = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}


def visible(text: str) -> str:
    """The text with its control characters escaped: ESC is shown as \\x1b."""
    return text.translate(_SHOWN)


def visible_on_terminal(text: str) -> str:
    """As `visible` where standard output is a terminal; a file or a program gets all of it."""
    return visible(text) if sys.stdout.isatty() else text


def console(**options: Any) -> Console:
    """A console of rich that shows control characters in whatever it prints. options: rich's."""
    return _visible_console()(**options)


@cache
def _visible_console() -> type[Console]:
    """rich takes a while to import."""
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
