"""What a step asks of the device, in the few numbers that its time depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from jitney.engine.plan import Chunk


class Work(msgspec.Struct, frozen=True, gc=False):
    """The rows of one step. decode, prompt: rows of each kind, padding excluded.

    keys: KV positions that the decode rows attend to, summed. longest: most that one of them attends to, because rows
    that are attended in groups take as long as the longest. pairs: query-key pairs of the prompt rows.
    """

    decode: int = 0
    prompt: int = 0
    keys: int = 0
    longest: int = 0
    pairs: int = 0


def work_of(chunks: Sequence[Chunk]) -> Work:
    """The work of some chunks, for plans made by hand; the scheduler counts while it plans."""
    ends = [chunk.end for chunk in chunks if chunk.decode]
    prompts = [chunk for chunk in chunks if not chunk.decode]
    return Work(len(ends), sum(chunk.count for chunk in prompts), sum(ends), max(ends, default=0),
                sum(chunk.count * (chunk.start + chunk.end + 1) // 2 for chunk in prompts))
