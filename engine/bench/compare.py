"""The three ways to batch on the same requests: who wins, by how much, and whether the answers are
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jitney.engine.bench.offline import Bench, Measured, Request

POLICIES = ("static", "dynamic", "continuous")
#: What others report for in-flight batching over each of these, as (least, most) times the
#: throughput; over dynamic batching at high concurrency.
PUBLISHED = {"static": (1.6, 3.4), "dynamic": (3.0, 5.0)}
#: Told what runs (a policy, or "capacity"), and how many of how many requests have ended.
Watch = Callable[[str, int, int], None]


class Difference(NamedTuple):
    """A request whose tokens under two policies part at output position `at`."""

    request: int
    policies: tuple[str, str]
    at: int


def run_policies(
    bench: Bench,
    requests: Sequence[Request],
    policies: Sequence[str] = POLICIES,
    *,
    concurrency: int = 0,
    watch: Watch = lambda policy, done, total: None,
    **limits: Any,
) -> dict[str, Measured]:
    """Serve the same requests once under each policy, in that order. limits: as in `Bench.run`, for
    all of them.
    """
    return {
        policy: bench.run(
            requests,
            concurrency=concurrency,
            policy=policy,
            watch=lambda done, total, policy=policy: watch(policy, done, total),
            **limits,
        )
        for policy in policies
    }


def differences(runs: Mapping[str, Measured]) -> list[Difference]:
    """Requests that did not get the same tokens under every policy; the first policy is the one
    compared with.
    """
    (first, reference), *others = runs.items()
    return [
        Difference(number, (first, policy), part(ours, theirs))
        for policy, run in others
        for number, (ours, theirs) in enumerate(zip(reference.tokens, run.tokens, strict=True))
        if ours != theirs
    ]


def part(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The first position at which two different outputs differ, or at which the shorter one
    ends.
    """
    pairs = zip(ours, theirs, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def ratios(
    figures: Mapping[str, Mapping[str, Any]], best: str = "continuous"
) -> dict[str, dict[str, Any]]:
    """What `best` gains over each other policy: times its throughput, and how many times shorter
    its waits are.
    """
    if best not in figures:
        return {}
    ours = figures[best]
    return {
        name: {
            "output_tok_s": ratio(ours["output_tok_s"], theirs["output_tok_s"]),
            "req_s": ratio(ours["req_s"], theirs["req_s"]),
            **{
                f"{what}_{q}": ratio(at(theirs, what, q), at(ours, what, q))
                for what in ("ttft_s", "e2e_s")
                for q in ("p50", "p99")
            },
            "published_output_tok_s": PUBLISHED.get(name),
        }
        for name, theirs in figures.items()
        if name != best
    }


def at(figures: Mapping[str, Any], what: str, quantile: str) -> float | None:
    """One percentile of a distribution among the figures; None if it is not known."""
    return figures[what][quantile] if figures.get(what) else None


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def capacity(
    bench: Bench,
    requests: Sequence[Request],
    seats: int,
    watch: Watch = lambda policy, done, total: None,
) -> tuple[float, Measured]:
    """(requests a second that continuous batching serves when there is always a next one, the run
    that showed it).

    Measured on the first requests, four for each seat at most, as a closed loop with twice as many
    open as seats; only the time in which all seats could be busy counts.
    """
    some = requests[: 4 * seats]
    run = bench.run(
        some,
        concurrency=2 * seats,
        policy="continuous",
        watch=lambda done, total: watch("capacity", done, total),
    )
    ends = sorted(times.finished for times in run.times)
    full = max(1, len(ends) - 2 * seats)  # from then on the queue is empty and seats stay free
    return full / max(1e-9, ends[full - 1] - run.started), run
