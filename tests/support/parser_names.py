"""Every name that the settings may give a parser of calls or thoughts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from jitney.engine.conversation import formats


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...


def _names(known: Iterable[_Named]) -> Iterator[str]:
    for each in known:
        yield from (each.name, *each.aliases)


TOOL_NAMES = ("auto", "none", *_names(formats._TOOL_FORMATS))
REASONING_NAMES = (
    "auto",
    "none",
    *formats._HARMONY_NAMES,
    *_names(formats._REASONING_FORMATS),
)
