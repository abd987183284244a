"""What a long prompt does to the streams that run beside it: their inter-token times alone, and
while it is read.

    python docs/benchmarks/long_prompt.py [--model smollm2-135m] [--streams 16] [--prompt 4000]
    [--prefill-share auto]

All streams generate alone first; then a request with a long prompt and one output token arrives.
Printed: median and p99 of the time between two tokens of a stream in both phases, the ratio of the
p99s, and how long the prompt took.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np

from jitney.engine import LLM, SamplingParams
from jitney.engine.machine import cpu_name
from jitney.engine.types import EngineRequest


class Watch:
    """Steps an engine and keeps the gaps between the tokens of each sequence, in seconds."""

    def __init__(self, llm: LLM):
        self.core = llm.core
        self.last: dict[str, float] = {}
        self.gaps: list[float] = []
        self.ended: set[str] = set()

    def add(self, name: str, prompt: list[int], tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self.core.add(
            EngineRequest(id=name, prompt=prompt, sampling=params, arrival=time.monotonic())
        )

    def step(self) -> None:
        for output in self.core.step().outputs:
            now = time.perf_counter()
            if output.request_id in self.last:
                self.gaps.append(now - self.last[output.request_id])
            self.last[output.request_id] = now
            if output.finish is not None:
                self.ended.add(output.request_id)

    def phase(self, going_on: object) -> np.ndarray:
        """Gaps in milliseconds that end while `going_on()` is true."""
        assert callable(going_on)
        self.gaps = []
        while going_on():
            self.step()
        return 1e3 * np.array(self.gaps)


def measure(llm: LLM, streams: int, prompt: int, alone_steps: int) -> dict[str, float]:
    """One run: figures in milliseconds, prompt_s in seconds."""
    rng = np.random.default_rng(0)
    watch = Watch(llm)
    for stream in range(streams):
        watch.add(f"stream-{stream}", rng.integers(100, 40000, 64).tolist(), 2000)
    watch.phase(lambda: len(watch.last) < streams)
    for _ in range(20):
        watch.step()
    count = iter(range(alone_steps))
    alone = watch.phase(lambda: next(count, None) is not None)
    started = time.perf_counter()
    watch.add("long", rng.integers(100, 40000, prompt).tolist(), 1)
    beside = watch.phase(lambda: "long" not in watch.ended)
    prompt_s = time.perf_counter() - started
    for stream in range(streams):
        llm.core.abort(f"stream-{stream}")
    llm.core.run_until_idle()
    (p50, p99), (q50, q99) = np.percentile(alone, [50, 99]), np.percentile(beside, [50, 99])
    return {
        "alone_p50_ms": p50,
        "alone_p99_ms": p99,
        "beside_p50_ms": q50,
        "beside_p99_ms": q99,
        "p99_ratio": q99 / p99,
        "prompt_s": prompt_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--prefill-share", default="auto")
    parser.add_argument("--alone-steps", type=int, default=150)
    parser.add_argument(
        "--runs",
        type=int,
        default=2,
        help="the first one also teaches the scheduler the step times",
    )
    parser.add_argument("--json")
    args = parser.parse_args()
    llm = LLM(args.model, prefix_cache=False, prefill_share=args.prefill_share)
    runs = [measure(llm, args.streams, args.prompt, args.alone_steps) for _ in range(args.runs)]
    for run in runs:
        print(" ".join(f"{name}={value:.3g}" for name, value in run.items()))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {
                    "machine": cpu_name(),
                    "arguments": vars(args),
                    "load": os.getloadavg(),
                    "runs": runs,
                },
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
