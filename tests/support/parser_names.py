"""All names of parsers of tool calls or reasoning that the settings accept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from jitney.engine.server.chat.conversation import families


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...


def _names(known: Iterable[_Named]) -> Iterator[str]:
    for each in known:
        yield from (each.name, *each.aliases)


TOOL_NAMES = ("auto", "none", *_names(families.TOOL_FORMATS))
REASONING_NAMES = (
    "auto",
    "none",
    *families.HARMONY_NAMES,
    *_names(families.REASONING_FORMATS),
)
