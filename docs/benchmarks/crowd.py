"""Whether the default model gives a request the same tokens alone and in a crowd of 32.

    python docs/benchmarks/crowd.py [--model smollm2-135m] [--weights plain int8] [--tokens 64]

32 prompts of 5 to 253 random tokens, greedy, in bfloat16: each alone, one after the other, and all
at once, in steps of up to 512 rows and of up to 96, which cut the prompts elsewhere. Exit status 1
if a token differs. Not where the CPU does not multiply pairs of bfloat16: there XLA's products add
up fewer rows in another order.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import Any

import numpy as np

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.machine import cpu_name

STREAMS = 32
BUDGETS = (512, 96)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(100, 40_000, 5 + 8 * number).tolist() for number in range(STREAMS)]


def tokens_of(llm: LLM, work: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(work, params)]


def differing(model: str, weights: str, n_tokens: int) -> int:
    """How many of the prompts have another answer in a crowd."""
    params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "bfloat16", "weights": weights, "prefix_cache": False}
    crowds, alone = [], []
    for budget in BUDGETS:
        with closing(LLM(model, max_seats=STREAMS, token_budget=budget, **options)) as llm:
            crowds.append(tokens_of(llm, prompts(), params))
            if not alone:
                alone = [tokens_of(llm, [prompt], params)[0] for prompt in prompts()]
            label = f"{llm.info.model.name}, {weights} weights, {llm.info.kernels.label} kernels"
    found = sum(any(crowd[i] != alone[i] for crowd in crowds) for i in range(STREAMS))
    print(f"{label}: {STREAMS - found} of {STREAMS} answers of {n_tokens} tokens are the same")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", nargs="+", default=["plain", "int8"])
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    print(cpu_name())
    found = [differing(args.model, weights, args.tokens) for weights in args.weights]
    return int(any(found))


if __name__ == "__main__":
    sys.exit(main())
