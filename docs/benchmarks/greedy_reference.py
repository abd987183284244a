"""Compares the default model's greedy answers with those of transformers in float32, with every
kernel set that runs on this CPU and with the CPU kernels compiled for other CPUs by name.

    python docs/benchmarks/greedy_reference.py [--dtype bfloat16] [CPU ...]

Weights are rounded to bfloat16 first, as the reference's were (tests/data/smollm2_greedy.json). An
answer is equal if all tokens are, up to a token at which the reference's own best two were within
1e-3. Kernels for a CPU whose instructions this one lacks are compiled and not run. Half a minute a
CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.machine import cpu_name
from jitney.engine.core.executor.runner import Runner
from jitney.kernels.cpu import build, library

TESTS = Path(__file__).parents[2] / "tests"
TIE = 1e-3


def answers(kernels: str, dtype: str) -> tuple[int, int, float]:
    """(equal answers, answers, largest top-5 log-probability difference) of a kernel set. dtype: of
    weights and activations.
    """
    jax.clear_caches()  # cached programs call the kernels of another set
    items = json.loads((TESTS / "data" / "smollm2_greedy.json").read_text())["items"]
    llm = LLM(
        "smollm2-135m",
        dtype=dtype,
        max_seats=8,
        token_budget=64,
        context=256,
        seat_buckets=[8],
        token_buckets=[64],
        pages=200,
        kernels=kernels,
    )
    runner = llm.core.runner
    assert isinstance(runner, Runner)
    if dtype == "float32":
        runner.leaves = [leaf.astype(jnp.bfloat16).astype(jnp.float32) for leaf in runner.leaves]
    params = [
        SamplingParams(
            temperature=0, max_tokens=len(item["output_ids"]), ignore_eos=True, logprobs=5
        )
        for item in items
    ]
    outputs = llm.generate([item["prompt_ids"] for item in items], params)
    llm.close()
    equal = 0
    apart = 0.0
    for item, output in zip(items, outputs, strict=True):
        done = output.outputs[0]
        assert done.logprobs is not None
        same = True
        for at, (token, top5) in enumerate(zip(done.token_ids, item["top5"], strict=True)):
            reference = top5["logprobs"]
            if token != item["output_ids"][at]:
                same = reference[0] - reference[1] < TIE
                break
            logprobs = done.logprobs[at].top_logprobs
            apart = max(apart, float(np.max(np.abs(np.subtract(logprobs, reference)))))
        equal += same
    return equal, len(items), apart


def report(name: str, kernels: str, dtype: str) -> None:
    equal, count, apart = answers(kernels, dtype)
    print(f"{name:<28} {equal} of {count} equal, log-probabilities within {apart:.1e}", flush=True)


def compiled_for(cpu: str) -> tuple[library._Library | None, str]:
    """The kernels compiled for a CPU's name; if they cannot run here, None and the reason."""
    sys.path[:0] = [str(TESTS / "support"), str(TESTS / "kernels" / "cpu")]
    from test_native_cpus import level_of  # pyright: ignore[reportMissingImports]

    level = level_of(cpu)
    path = Path(tempfile.mkdtemp()) / f"{cpu}.so"
    level.compile(path, build.compiler())
    missing = sorted(level.needs - build._cpu_flags())
    if missing:
        return None, f"compiled; this CPU lacks {', '.join(missing)}"
    return library._register(path, cpu), ""


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("cpus", nargs="*", metavar="CPU", help="names as g++ -march takes them")
    args = parser.parse_args()
    compiler = subprocess.run([*build.compiler(), "--version"], capture_output=True, text=True)
    print(f"{cpu_name()}; {compiler.stdout.splitlines()[0]}")
    report("reference", "reference", args.dtype)
    for level in build.Level.here():
        build.build([level])
        loaded = library._opened(level)
        library.load = lambda loaded=loaded: loaded
        report(f"native ({level.name})", "native", args.dtype)
    for cpu in args.cpus:
        made, why_not = compiled_for(cpu)
        if made is None:
            print(f"{cpu:<28} {why_not}", flush=True)
            continue
        library.load = lambda made=made: made
        report(f"native, for {cpu}", "native", args.dtype)


if __name__ == "__main__":
    main()
