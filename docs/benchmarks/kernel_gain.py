"""What each kernel of a set gives: closed loops with the whole set, and with each kernel in turn
replaced by the reference's, if the model has a use for it.

    python docs/benchmarks/kernel_gain.py [--model smollm2-135m] [--repeats 2] [--kernels norm head]

Ratios below 1 are what taking a kernel out costs. Sets take turns, and medians are printed.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from statistics import median
from typing import Any

from closed_loop import closed_loop, requests

from jitney.engine import LLM
from jitney.engine.common.machine import cpu_name
from jitney.engine.core import build
from jitney.kernels.interface import KernelSet
from jitney.kernels.proof import _FIELDS, without
from jitney.kernels.select import with_product_rows

#: Streams and lengths of the loops; the last one reads prompts.
STREAMS = (32, 8, 1)


def load(model: str, left_out: list[str]) -> LLM:
    """The engine with the reference's kernels in place of those left out, of which it must not
    choose anew who multiplies how many rows.
    """

    def chosen(kernels: KernelSet, rows: int) -> KernelSet:
        return without(with_product_rows(kernels, rows), left_out)

    build.with_product_rows = chosen
    return LLM(model, prefix_cache=False, max_seats=32)


def measured(llm: LLM) -> dict[str, float]:
    """Output tokens a second by streams, and prompt tokens a second."""
    found: dict[str, float] = {}
    for streams in STREAMS:
        work = requests(16 if streams == 1 else 64, 96, 64, spread=True)
        loop: dict[str, Any] = closed_loop(llm, work, streams)
        found[f"{streams} streams"] = loop["output_tok_s"]
    loop = closed_loop(llm, requests(24, 512, 1, spread=False), 8)
    found["prompts of 512"] = loop["prompt_tok_s"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kernels", nargs="+", default=list(_FIELDS), choices=list(_FIELDS))
    args = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {}
    with closing(load(args.model, [])) as llm:
        numbers = llm.info.formats.dtype
        label = f"{llm.info.kernels.label} kernels, {args.model} {numbers} on {cpu_name()}"
        proved = {proof.kernel for proof in llm.info.kernels.proofs}
    sets: dict[str, list[str]] = {"all of them": []}
    for name in args.kernels:
        if name in proved:
            sets[f"without {name}"] = [name]
    for _ in range(args.repeats):
        for name, left_out in sets.items():
            with closing(load(args.model, left_out)) as llm:
                runs.setdefault(name, []).append(measured(llm))
    print(label)
    best = {
        work: median(run[work] for run in runs["all of them"]) for work in runs["all of them"][0]
    }
    print(
        f"{'all of them':<20}"
        + "".join(f"{work}: {value:6.0f}     " for work, value in best.items())
    )
    for name in list(sets)[1:]:
        ratios = {
            work: median(run[work] for run in runs[name]) / value for work, value in best.items()
        }
        print(
            f"{name:<20}" + "".join(f"{work}: {ratio:6.2f}     " for work, ratio in ratios.items())
        )


if __name__ == "__main__":
    main()
