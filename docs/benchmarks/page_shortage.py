"""More seats than pages: output tokens a second, the longest stall of a stream that began, and what
preemption cost.

    python docs/benchmarks/page_shortage.py [--model smollm2-135m] [--pages 200]
        [--seats 8 10 12 32] [--requests 64] [--outputs 50 800] [--repeats 3]

32 streams in a closed loop, prompts around 96 tokens, outputs drawn evenly; greedy, end-of-sequence
ignored, prefix cache off. Every number of seats gets the same requests, one after the other, and
all that as often as --repeats says; at the end the medians stand, and each beside the best one's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict

import numpy as np
from closed_loop import lengths

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.requests import EngineRequest

STREAMS = 32


def measure(llm: LLM, work: list[tuple[list[int], int]]) -> dict[str, float]:
    """Run the work with STREAMS requests open at a time; stall_s: longest time between two tokens
    of one.
    """
    core, waiting, open_now = llm.core, list(enumerate(work))[::-1], 0
    before = dict(core.ledger.totals)
    last: dict[str, float] = {}
    stall, started = 0.0, time.perf_counter()
    while waiting or core.has_work:
        while waiting and open_now < STREAMS:
            number, (prompt, output) = waiting.pop()
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
            core.add(
                EngineRequest(
                    id=str(number), prompt=prompt, sampling=params, arrival=time.monotonic()
                )
            )
            open_now += 1
        for output in core.step().outputs:
            now = time.perf_counter()
            stall = max(stall, now - last.get(output.request_id, now))
            last[output.request_id] = now
            open_now -= output.finish is not None
    seconds = time.perf_counter() - started
    after = core.ledger.totals
    return {
        "output_tok_s": sum(output for _, output in work) / seconds,
        "stall_s": stall,
        "preempted": after["preempted"] - before["preempted"],
        "recomputed": after["recomputed"] - before["recomputed"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--seats", type=int, nargs="+", default=[8, 10, 12, 32])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--outputs", type=int, nargs=2, default=[50, 800])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    outputs = rng.integers(*args.outputs, args.requests, endpoint=True).tolist()
    prompts = [
        rng.integers(100, 40000, count).tolist() for count in lengths(rng, 96, args.requests)
    ]
    work = list(zip(prompts, outputs, strict=True))
    runs = defaultdict(list)
    for _ in range(args.repeats):
        for seats in args.seats:
            llm = LLM(args.model, prefix_cache=False, max_seats=seats, pages=args.pages + 1)
            figures = measure(llm, work)
            llm.close()
            runs[seats].append(figures)
            show(f"{seats} seats", figures)
    medians = {seats: median_of(figures) for seats, figures in runs.items()}
    best = max(figures["output_tok_s"] for figures in medians.values())
    for seats, figures in medians.items():
        share = figures["output_tok_s"] / best
        show(f"{seats} seats, median of {args.repeats}", figures | {"of_best": share})


def median_of(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def show(title: str, figures: dict[str, float]) -> None:
    values = " ".join(f"{name}={value:.4g}" for name, value in figures.items())
    print(f"{title}: {values}", flush=True)


if __name__ == "__main__":
    main()
