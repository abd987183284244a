"""What structured output costs: tokens a second of 32 seats, all held to a schema of 20 fields and
none; and what one row that is held to it costs its 31 neighbours. Both ways in turn, so that what
else the machine does is in both.

    python docs/benchmarks/structured.py [speed] [neighbours] [schemas=N]

schemas=N: N random schemas with the default model; every finished answer is validated.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"
sys.path[:0] = [str(SUPPORT)]

from jitney.engine import LLM, SamplingParams  # noqa: E402
from jitney.engine.common.errors import RequestError  # noqa: E402
from jitney.engine.common.machine import cpu_name  # noqa: E402
from jitney.engine.common.requests import Grammar  # noqa: E402
from jitney.engine.core.grammar import grammar  # noqa: E402

SEATS, TOKENS, ROUNDS = 32, 60, 4
KINDS = ("string", "integer", "number", "boolean")
FIELDS = {f"field_{number}": {"type": KINDS[number % 4]} for number in range(20)}
SCHEMA = {
    "type": "object",
    "properties": FIELDS,
    "required": list(FIELDS),
    "additionalProperties": False,
}
WANTED = grammar.json_schema(SCHEMA)


def params(wanted: Grammar | None, seed: int, tokens: int = TOKENS) -> SamplingParams:
    """Sampled, so that both ways take the same program; an answer without a grammar is as long."""
    return SamplingParams(
        max_tokens=tokens, temperature=0.8, seed=seed, ignore_eos=True, grammar=wanted
    )


def prompt(llm: LLM, number: int) -> list[int]:
    return llm.chat_ids([{"role": "user", "content": f"Fill in form number {number}, as JSON."}])


def run(llm: LLM, held: int, neighbours: int) -> tuple[float, list[float], int, float]:
    """Output tokens a second while all decode, seconds between the steps, tokens in all, and
    processor seconds of this process for each, which what else runs does not change much.

    held: how many answers are held to the schema; neighbours: how many are not.
    """
    wanted = [WANTED] * held + [None] * neighbours
    requests = [
        llm._request(prompt(llm, number), params(one, number)) for number, one in enumerate(wanted)
    ]
    for request in requests:
        llm.core.add(request)
    gaps: list[float] = []
    tokens, before, cpu, cpu_before = 0, None, 0.0, 0.0
    while llm.core.has_work:
        found = sum(len(output.tokens) for output in llm.core.step().outputs)
        now, cpu_now = time.perf_counter(), time.process_time()
        if found == held + neighbours:  # all sit, and none has ended
            if before is not None:
                gaps.append(now - before)
                cpu += cpu_now - cpu_before
                tokens += found
            before, cpu_before = now, cpu_now
        else:
            before = None
    return tokens / sum(gaps), gaps, tokens, cpu / tokens


def speed(llm: LLM) -> None:
    """All seats held to the schema, and none."""
    ratios: list[float] = []
    work: list[float] = []
    for number in range(ROUNDS):
        order = (True, False) if number % 2 else (False, True)
        found = {held: run(llm, SEATS if held else 0, 0 if held else SEATS) for held in order}
        ratios.append(found[True][0] / found[False][0])
        work.append(found[False][3] / found[True][3])
        print(
            f"held {found[True][0]:7.1f} tok/s   free {found[False][0]:7.1f} tok/s   "
            f"ratio {ratios[-1]:.3f}, of tokens a processor second {work[-1]:.3f}"
        )
    print(f"medians: {statistics.median(ratios):.3f} and {statistics.median(work):.3f}")


def neighbours(llm: LLM) -> None:
    """One row of 32 held to the schema, and none."""
    speeds: list[float] = []
    gaps: list[float] = []
    work: list[float] = []
    for number in range(ROUNDS):
        order = (1, 0) if number % 2 else (0, 1)
        found = {held: run(llm, held, SEATS - held) for held in order}
        speeds.append(found[1][0] / found[0][0])
        medians = {held: statistics.median(found[held][1]) for held in order}
        gaps.append(medians[1] / medians[0])
        work.append(found[0][3] / found[1][3])
        print(
            f"one held: step {medians[1] * 1000:6.2f} ms   none: {medians[0] * 1000:6.2f} ms   "
            f"ratio of tokens a second {speeds[-1]:.3f}, of the median step {gaps[-1]:.3f}, of "
            f"tokens a processor second {work[-1]:.3f}"
        )
    print("medians:", *[f"{statistics.median(found):.3f}" for found in (speeds, gaps, work)])


def schemas(llm: LLM, count: int) -> None:
    """Random schemas; whether every finished answer validates."""
    import jsonschema
    from hypothesis import HealthCheck, given, seed, settings
    from schemas import SCHEMAS

    drawn: list[dict[str, Any]] = []

    @seed(1)
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(SCHEMAS)
    def draw(schema: dict[str, Any]) -> None:
        drawn.append(schema)

    draw()
    outcomes = {"finished": 0, "cut": 0, "refused": 0, "wrong": 0}
    draft = jsonschema.Draft202012Validator
    for batch in itertools.batched(drawn[:count], SEATS):
        taken: list[tuple[dict[str, Any], SamplingParams]] = []
        for number, schema in enumerate(batch):
            one = params(grammar.json_schema(schema), number, 200)
            try:
                llm._request([1], one)
            except RequestError:
                outcomes["refused"] += 1
                continue
            taken.append((schema, one))
        prompts = [
            llm.chat_ids([{"role": "user", "content": f"An example of {json.dumps(schema)}"}])[
                -600:
            ]
            for schema, _ in taken
        ]
        answers = llm.generate(prompts, [one for _, one in taken])
        for (schema, _), answer in zip(taken, answers, strict=True):
            choice = answer.outputs[0]
            if choice.finish_reason != "stop":
                outcomes["cut"] += 1
                continue
            try:
                draft(schema, format_checker=draft.FORMAT_CHECKER).validate(json.loads(choice.text))
                outcomes["finished"] += 1
            except (ValueError, jsonschema.ValidationError) as error:
                outcomes["wrong"] += 1
                print(f"WRONG: {json.dumps(schema)}\n  {choice.text!r}\n  {error}")
    print(f"{len(drawn[:count])} schemas: {outcomes}")


def main() -> None:
    parts = sys.argv[1:] or ["speed", "neighbours"]
    llm = LLM("smollm2-135m", max_seats=SEATS, context=1024)
    print(f"{llm.info.model.name}, {llm.info.sizes.seats} seats, {cpu_name()}", flush=True)
    run(llm, SEATS, 0)  # caches, and the grammar
    for part in parts:
        name, _, count = part.partition("=")
        print(f"\n{part}", flush=True)
        match name:
            case "speed":
                speed(llm)
            case "neighbours":
                neighbours(llm)
            case "schemas":
                schemas(llm, int(count))
            case _:
                sys.exit(f"no part {part}")
    assert not llm.core.runner.compiles, "nothing compiles after the start"


if __name__ == "__main__":
    main()
