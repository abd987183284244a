"""What a step asks of the device, in the few numbers that its time depends on."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from jitney.engine.plan import Plan

START = attrgetter("start")


class Work(NamedTuple):
    """The rows of one step. decode, prompt: rows of each kind, padding excluded.

    keys: KV positions that the decode rows attend to, summed. longest: most that one of them attends to, because rows
    that are attended in groups take as long as the longest. pairs: query-key pairs of the prompt rows.
    """

    decode: int = 0
    prompt: int = 0
    keys: int = 0
    longest: int = 0
    pairs: int = 0


def work_of(plan: Plan) -> Work:
    """The work of a plan; decode rows come first in it."""
    decode, prompt, pairs = plan.n_decode, 0, 0
    starts = list(map(START, plan.chunks[:decode]))
    for chunk in plan.chunks[decode:]:
        prompt += chunk.count
        pairs += chunk.count * (chunk.start + chunk.end + 1) // 2
    return Work(decode, prompt, sum(starts) + decode, max(starts, default=-1) + 1, pairs)
