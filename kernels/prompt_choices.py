"""The table of measured choices between kernel sets for prompt attention on GPUs.

`jitney bench device` writes `prompt_choices.json`, with an entry for each measured compute
capability and head dim. Without an entry, the Triton kernels are used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypedDict


class PromptChoice(TypedDict):
    """An entry of the table."""

    sm: int  # compute capability, 90 for 9.0
    head_dim: int
    by: str  # one of PromptChoices.serving
    #: Kernel set -> seconds of prompt attention over all measured sizes; includes sets that cannot
    #: be chosen.
    seconds: dict[str, float]
    rows: list[int]  # of the measured prompts
    device: str
    versions: dict[str, str]  # of the packages that affect the times


@dataclass(frozen=True)
class PromptChoices:
    """The table: an entry for each compute capability and head dim, in order."""

    #: The kernel sets that can be chosen; the default first.
    serving: ClassVar[tuple[str, str]] = ("triton", "flashinfer")
    #: File of the table.
    file: ClassVar[Path] = Path(__file__).with_suffix(".json")

    entries: Sequence[PromptChoice]

    @classmethod
    def read(cls, table: Path = file) -> PromptChoices:
        """Read the table from a file. Raises OSError, and ValueError if it is invalid."""
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
        """The kernel set for prompts, one of `serving`."""
        for choice in self.entries:
            if (choice["sm"], choice["head_dim"]) == (sm, head_dim):
                return choice["by"]
        return self.serving[0]

    def with_choice(self, new: PromptChoice) -> PromptChoices:
        """The table with an entry added, or replaced."""
        key = new["sm"], new["head_dim"]
        others = [choice for choice in self.entries if (choice["sm"], choice["head_dim"]) != key]
        ordered = sorted([*others, new], key=lambda choice: (choice["sm"], choice["head_dim"]))
        return PromptChoices(ordered)
