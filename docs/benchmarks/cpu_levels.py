"""The native CPU kernels as smaller CPUs have them, each level beside the reference: closed loops
of the core, with XLA held to the same instructions.

    python docs/benchmarks/cpu_levels.py [--model smollm2-135m] [--weights plain] [--repeats 1]
        [--levels avx2 avx512] [--json FILE]

A level that this CPU runs and that is not its own: `native` is that level's library, in a process
whose XLA makes code for no more instructions (`xla_cpu_max_isa`); `reference` is the same process
without it, both in the dtype that such a CPU serves in. Ratios above 1 are what the kernels give
such a CPU. What it does not show: caches and
clocks are those of this machine, and libraries within XLA that look at the CPU themselves see all
of it. The figures are output tokens a second by streams, and prompt tokens a second; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from statistics import median

from closed_loop import closed_loop, requests

from jitney.engine import LLM
from jitney.engine.common.machine import cpu_name
from jitney.kernels.cpu import build

#: XLA's name for the instructions of a level.
ISAS = {
    "avx512_bf16": "AVX512_BF16",
    "avx512_vnni": "AVX512_VNNI",
    "avx512": "AVX512",
    "avx2": "AVX2",
}
KERNELS = ("native", "reference")
_CHILD = "--measure"
#: By streams: requests.
_REQUESTS = {32: 48, 8: 16, 1: 4}


def measure(model: str, weights: str, level: str, kernels: str) -> dict[str, float]:
    """One process's loops."""
    named = [each for each in build._LEVELS if each.name == level]
    build.Level.here = lambda: named
    found: dict[str, float] = {}
    dtype = "bfloat16" if "avx512_bf16" in named[0].needs else "float32"
    with closing(
        LLM(
            model,
            weights=weights,
            kernels=kernels,
            dtype=dtype,
            prefix_cache=False,
            max_seats=32,
        )
    ) as llm:
        for streams, count in _REQUESTS.items():
            loop = closed_loop(llm, requests(count, 96, 64, spread=True), streams)
            found[f"{streams} streams"] = loop["output_tok_s"]
        loop = closed_loop(llm, requests(12, 512, 1, spread=False), 8)
        found["prompts of 512"] = loop["prompt_tok_s"]
    return found


def in_process(args: argparse.Namespace, level: str, kernels: str) -> dict[str, float]:
    """`measure` where XLA knows the level's instructions alone."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa={ISAS[level]}"
    case = json.dumps([args.model, args.weights, level, kernels])
    done = subprocess.run(
        [sys.executable, __file__, _CHILD, case],
        env=os.environ | {"XLA_FLAGS": flags.strip()},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def report(runs: dict[str, list[dict[str, float]]], levels: list[str]) -> None:
    """The medians as a table."""
    columns = list(next(iter(runs.values()))[0])
    print("| | " + " | ".join(columns) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for level in levels:
        middle = {
            kernels: [median(run[name] for run in runs[f"{level} {kernels}"]) for name in columns]
            for kernels in KERNELS
        }
        for kernels, figures in middle.items():
            print(f"| {level}, {kernels} | " + " | ".join(f"{x:,.0f}" for x in figures) + " |")
        ratios = [own / other for own, other in zip(*middle.values(), strict=True)]
        print(f"| {level}, ratio | " + " | ".join(f"{x:.2f}" for x in ratios) + " |")


def main() -> None:
    here = [level.name for level in build.Level.here() if level.name in ISAS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="plain", choices=("plain", "int8"))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--levels", nargs="+", default=here, choices=here)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.repeats):
        for level in args.levels:
            for kernels in KERNELS:
                found = in_process(args, level, kernels)
                runs.setdefault(f"{level} {kernels}", []).append(found)
                print(level, kernels, found, file=sys.stderr, flush=True)
    print(f"{args.model}, weights {args.weights}, {cpu_name()}\n")
    report(runs, args.levels)
    if args.json:
        about = {"machine": cpu_name(), "model": args.model, "weights": args.weights}
        args.json.write_text(json.dumps(about | {"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == [_CHILD]:
        print(json.dumps(measure(*json.loads(sys.argv[2]))))
    else:
        main()
