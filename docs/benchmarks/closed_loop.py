"""Measures closed-loop throughput of the engine's core in this process, without HTTP, text or a
client, and the parts of its step time. `jitney bench peers` measures a served engine.

    python docs/benchmarks/closed_loop.py [--model smollm2-135m] [--streams 32 8 1] [--json FILE]

Set GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment to get the huge pages that a served
core has.

96 requests, prompts around 96 tokens and outputs around 64 (log-normal), greedy, end-of-sequence
ignored, prefix cache off; `streams` of them are open at any time. Then prompts of 512 tokens with
one output token each: prompt tokens per second. Lengths and ids come from a fixed seed.
host_ms_median: plan, batch and commit together; the parts are means.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.machine import cpu_name
from jitney.engine.common.requests import EngineRequest

PARTS = ("plan_s", "batch_s", "launch_s", "fetch_s", "commit_s")
#: The host's own work; the other parts start the device's work or wait for it.
HOST = ("plan_s", "batch_s", "commit_s")


def lengths(rng: np.random.Generator, mean: int, count: int) -> list[int]:
    """Log-normal lengths of the given mean, sigma 0.5, at least 4 and at most 4 means."""
    draws = rng.lognormal(np.log(mean) - 0.125, 0.5, count)
    return np.clip(draws.round(), 4, 4 * mean).astype(int).tolist()


def requests(count: int, prompt: int, output: int, *, spread: bool) -> list[tuple[list[int], int]]:
    """(prompt ids, output tokens) of each request."""
    rng = np.random.default_rng(0)
    prompts = lengths(rng, prompt, count) if spread else [prompt] * count
    outputs = lengths(rng, output, count) if spread else [output] * count
    return [
        (rng.integers(100, 40000, n).tolist(), m) for n, m in zip(prompts, outputs, strict=True)
    ]


def closed_loop(llm: LLM, work: list[tuple[list[int], int]], streams: int) -> dict[str, float]:
    """Run the work with `streams` requests open at a time; returns figures of the whole run."""
    core, ledger = llm.core, llm.core.ledger
    first_step = ledger.steps
    waiting = list(enumerate(work))[::-1]
    open_now, started = 0, time.perf_counter()
    while waiting or core.has_work:
        while waiting and open_now < streams:
            number, (prompt, output) = waiting.pop()
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
            core.add(
                EngineRequest(
                    id=f"{first_step}-{number}",
                    prompt=prompt,
                    sampling=params,
                    arrival=time.monotonic(),
                )
            )
            open_now += 1
        open_now -= sum(output.finish is not None for output in core.step().outputs)
    seconds = time.perf_counter() - started
    records = ledger.since(first_step)
    rows = {kind: int(records[kind].sum()) for kind in ("prefill", "decode", "padding")}
    return {
        "seconds": seconds,
        "output_tok_s": sum(output for _, output in work) / seconds,
        "prompt_tok_s": sum(len(prompt) for prompt, _ in work) / seconds,
        "steps": len(records),
        "padding_share": rows["padding"] / max(1, sum(rows.values())),
        "device_ms_per_step": 1e3 * float(records["device_s"].mean()),
        "host_ms_median": 1e3 * float(np.median(sum(records[part] for part in HOST))),
        **{part.replace("_s", "_ms"): 1e3 * float(records[part].mean()) for part in PARTS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 8, 1])
    parser.add_argument("--token-budget", type=int, default=512)
    parser.add_argument("--prefill-only", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    started = time.perf_counter()
    llm = LLM(args.model, prefix_cache=False, token_budget=args.token_budget)
    ready = time.perf_counter() - started
    print(
        f"in process: {args.model} {llm.info.formats.dtype}, "
        f"{llm.info.kernels.label} kernels on {cpu_name()}; "
        f"ready in {ready:.1f} s"
    )
    results = {}
    closed_loop(llm, requests(8, 96, 8, spread=False), 8)  # warm caches
    if not args.prefill_only:
        for streams in args.streams:
            work = requests(96 if streams > 1 else 16, 96, 64, spread=True)
            results[f"streams_{streams}"] = closed_loop(llm, work, streams)
    results["prompts_512"] = closed_loop(llm, requests(24, 512, 1, spread=False), 1)
    for name, figures in results.items():
        print(
            f"{name:12}",
            " ".join(
                f"{key}={value:.3g}" if value < 100 else f"{key}={value:.0f}"
                for key, value in figures.items()
            ),
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {
                    "what": "the core called in process",
                    "machine": cpu_name(),
                    "kernels": llm.info.kernels.label,
                    "model": args.model,
                    "ready_s": ready,
                    "load": os.getloadavg(),
                    **results,
                },
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
