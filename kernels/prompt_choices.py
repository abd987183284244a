"""Whose kernels attend to prompts on which GPU: what devices measured, as data.

`prompt_choices.json` has an entry for each compute capability and head dim that somebody measured,
written by `jitney bench device`. Where there is none, ours serve.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypedDict


class PromptChoice(TypedDict):
    """One entry of the table."""

    sm: int  # compute capability, 90 for 9.0
    head_dim: int
    by: str  # one of PromptChoices.serving
    #: Seconds of prompt attention over all measured sizes, by whose kernels: those that serve, and
    #: others that cannot serve.
    seconds: dict[str, float]
    rows: list[int]  # of the prompts that were measured
    device: str
    versions: dict[str, str]  # of the packages that decide the figures


@dataclass(frozen=True)
class PromptChoices:
    """The table: an entry for each compute capability and head dim, in order."""

    #: The kernel sets that can be chosen, ours first: whose prompts are measured and can be served.
    serving: ClassVar[tuple[str, str]] = ("triton", "flashinfer")
    #: Its file.
    file: ClassVar[Path] = Path(__file__).with_suffix(".json")

    entries: Sequence[PromptChoice]

    @classmethod
    def read(cls, table: Path = file) -> PromptChoices:
        """Of a file. Raises OSError, and ValueError for what is no such table."""
        entries = json.loads(table.read_text(encoding="utf-8"))
        if not isinstance(entries, list):
            raise ValueError("it is no list of entries")
        for entry in entries:
            missing = [name for name in PromptChoice.__annotations__ if name not in entry]
            if missing:
                raise ValueError(f"an entry has no {missing[0]}")
            if entry["by"] not in cls.serving:
                raise ValueError(f"by {entry['by']!r} is none of {', '.join(cls.serving)}")
        return cls(entries)

    def chosen(self, sm: int, head_dim: int) -> str:
        """The kernel set that serves prompts there: one of `serving`."""
        for choice in self.entries:
            if (choice["sm"], choice["head_dim"]) == (sm, head_dim):
                return choice["by"]
        return self.serving[0]

    def with_choice(self, new: PromptChoice) -> PromptChoices:
        """The table with an entry in the place of an older one of the same."""
        key = new["sm"], new["head_dim"]
        kept = [choice for choice in self.entries if (choice["sm"], choice["head_dim"]) != key]
        ordered = sorted([*kept, new], key=lambda choice: (choice["sm"], choice["head_dim"]))
        return PromptChoices(ordered)
