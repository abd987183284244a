"""What the core tells of a plan beyond tokens: who boarded, who was preempted, whose prompt was computed."""

from __future__ import annotations

from jitney.engine.plan import Plan
from jitney.engine.wire import Life, PromptRows


def life_of(plan: Plan, started: float) -> list[Life]:
    """Who was preempted for the plan, then who boarded in it; the seat of the preempted is known to who kept count."""
    return [*(Life("preempted", seq.request.id, seq.index, -1, plan.number, started, seq.n_prompt, seq.n_output)
              for seq in plan.preempted),
            *(Life("seated", seq.request.id, seq.index, seq.seat, plan.number, started, seq.n_prompt, seq.n_output)
              for seq in plan.boarded)]


def released_at(seats: list[int], step: int, t: float) -> list[Life]:
    """Seats that a batch kept are free again; whoever sat there has ended before, or waits."""
    return [Life("released", "", 0, seat, step, t, 0, 0) for seat in seats]


def prompt_rows(plan: Plan) -> list[PromptRows]:
    """The prompt chunks of a plan, which come after its decode rows."""
    rows = []
    for chunk in reversed(plan.chunks):
        if chunk.decode:
            break
        rows.append(PromptRows(chunk.seq.request.id, chunk.seq.index, chunk.start, chunk.count, chunk.recomputed))
    return rows[::-1]
