"""What the next turn of a conversation waits for, with and without the pages of the last answer.

    python docs/benchmarks/next_turn.py [--answer 200] [--turns 8]

Prints the median time to the first token of a turn whose prompt holds all that was said before, in
ms, for `share_outputs` on and off, and whether the answers are those of an engine that keeps no
pages at all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.machine import cpu_name

QUESTION = "Go on, and say one thing more about it. "
FIRST = "Tell me how bread is made, from the flour to the oven. "


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--answer", type=int, default=200, help="tokens of each answer")
    flags.add_argument("--turns", type=int, default=8)
    args = flags.parse_args()
    params = SamplingParams(temperature=0.0, max_tokens=args.answer, ignore_eos=True)
    print(f"{cpu_name()}, {args.turns} turns, answers of {args.answer} tokens")
    _, cold = talk(LLM(prefix_cache=False), params, [None] * args.turns)
    for setting in ("on", "off"):
        times, answers = talk(LLM(share_outputs=setting), params, cold)
        same = sum(ours == theirs for ours, theirs in zip(answers, cold, strict=True))
        print(
            f"share_outputs {setting}: first token after {1000 * statistics.median(times):.1f} ms; "
            f"{same} of {args.turns} answers as without a prefix cache"
        )


def talk(
    llm: LLM, params: SamplingParams, said: Sequence[list[int] | None]
) -> tuple[list[float], list[list[int]]]:
    """(seconds to the first token of each turn but the first, the answers' ids).

    said: for each turn the answer that the next one's prompt holds, None for the engine's own.
    """
    ids = llm.tokenizer.encode(FIRST)
    question = llm.tokenizer.encode(QUESTION)
    times: list[float] = []
    answers: list[list[int]] = []
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for given in said:
        started = time.perf_counter()
        llm.generate([ids], one)
        times.append(time.perf_counter() - started)
        answer = llm.generate([ids], params)[0].outputs[0].token_ids
        answers.append(answer)
        ids = [*ids, *(given or answer), *question]
    llm.close()
    return times[1:], answers


if __name__ == "__main__":
    main()
