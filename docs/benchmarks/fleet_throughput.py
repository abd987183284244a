"""Compares the throughput of two engines behind one endpoint with twice that of one engine, in the
schedulers' own counts: tokens a step, and the steps by which the engines differ.

    python docs/benchmarks/fleet_throughput.py [--on ray] [--model smollm2-135m] [--streams 8 12]

The engines of one machine share its processors, so tokens a second would show nothing. If each had
a machine of its own, steps would take the same time everywhere, and the throughput of a fleet would
be all tokens divided by the steps of the engine with most steps. Beside other programs one engine
may get more of the processors and make more steps. So the sum of each engine's tokens per step of
its own is printed too; it ignores the time in which an engine has no work and makes no steps. The
clients (`--streams` for each engine) send their next request after an answer: prompts around 60
tokens, answers of 16 to 112, greedy. Counts of the first seconds are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from running import Server, ready_engines, running_fleet, wait_engines

from jitney.engine.common.machine import cpu_name

KEY = "the operator's key"
#: Seconds before counting starts.
_SETTLE_S = 6.0
SEATS = 8


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counters of one engine."""

    tokens: float
    steps: float
    #: Seats taken, summed over the steps.
    seats: float

    def __sub__(self, other: _Counts) -> _Counts:
        return _Counts(
            self.tokens - other.tokens, self.steps - other.steps, self.seats - other.seats
        )


def fleet_of(
    model: str, engines: int, on: str, router: str, folder: Path, ray: str = "cpus = 0.1"
) -> AbstractContextManager[Server]:
    """A fleet with one model and `engines` engines. ray: fields of the model's `ray` table."""
    key = folder / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    settings = f"{{ model = '{model}', max_seats = {SEATS}, log_level = 'warning' }}"
    table = f"replicas = {engines}\nrouter = '{router}'\nsettings = {settings}\n"
    lines = f"admin_key_file = '{key}'\npoll_s = 0.2\nlog_level = 'error'\n"
    return running_fleet(f"{table}ray = {{ {ray} }}\n", on=on, lines=lines)


def _metrics(engine: str) -> str:
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.get(engine + "/metrics", headers=headers, timeout=60, trust_env=False).text


def _counts(engine: str) -> _Counts:
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(_metrics(engine)):
        for sample in family.samples:
            name = sample.name
            if name == "jitney_rows_total":
                name = sample.labels["kind"]
            samples[name] = samples.get(name, 0.0) + sample.value
    return _Counts(
        samples["decode"],
        samples["jitney_steps_total"],
        samples["jitney_seat_fill_ratio_sum"] * SEATS,
    )


async def _stream(http: httpx.AsyncClient, number: int) -> None:
    """Send one request after another until cancelled."""
    chance = random.Random(number)
    while True:
        words = " ".join(f"{chance.randrange(1000)}" for _ in range(chance.randint(10, 30)))
        body = {
            "model": "m",
            "prompt": words,
            "max_tokens": chance.randint(16, 112),
            "temperature": 0,
            "ignore_eos": True,
        }
        (await http.post("/v1/completions", json=body)).raise_for_status()


async def _load(fleet: Server, streams: int, seconds: float) -> Mapping[str, _Counts]:
    """Counts of each engine under `streams` streams, by the engine's URL."""
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        base_url=fleet.url, headers=headers, timeout=600, trust_env=False
    ) as http:
        running = [asyncio.create_task(_stream(http, number)) for number in range(streams)]
        engines = list(ready_engines(fleet, KEY).values())
        await asyncio.sleep(_SETTLE_S)
        before = {engine: await asyncio.to_thread(_counts, engine) for engine in engines}
        await asyncio.sleep(seconds)
        after = {engine: await asyncio.to_thread(_counts, engine) for engine in engines}
        for task in running:
            if task.done():
                task.result()  # raises the error that ended the stream
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return {engine: after[engine] - before[engine] for engine in engines}


def _tokens_a_step(counts: Sequence[_Counts]) -> float:
    """All tokens divided by the steps of the engine with most steps."""
    return sum(each.tokens for each in counts) / max(each.steps for each in counts)


def _sum_of_each(counts: Sequence[_Counts]) -> float:
    """Sum over the engines of tokens per step of each one's own."""
    return sum(each.tokens / each.steps for each in counts)


def _measured(args: argparse.Namespace, engines: int, on: str) -> list[list[_Counts]]:
    """For each number of streams, the counts of each engine."""
    results = []
    with (
        tempfile.TemporaryDirectory() as folder,
        fleet_of(args.model, engines, on, args.router, Path(folder)) as fleet,
    ):
        wait_engines(fleet, engines, KEY)
        for streams in args.streams:
            counts = asyncio.run(_load(fleet, streams * engines, args.seconds))
            results.append(list(counts.values()))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--on", choices=("processes", "ray"), default="processes")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--router", default="prefix")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 12], help="for each engine")
    parser.add_argument("--seconds", type=float, default=40.0)
    args = parser.parse_args()
    print(f"{cpu_name()}; {args.model}, {SEATS} seats; engines on {args.on}, router {args.router}")
    alone = _measured(args, 1, "processes")
    fleet = _measured(args, args.engines, args.on)
    for streams, one, several in zip(args.streams, alone, fleet, strict=True):
        ideal = args.engines * _tokens_a_step(one)
        measured = _tokens_a_step(several)
        steps = ", ".join(f"{each.steps:.0f}" for each in several)
        seats = ", ".join(f"{each.seats / each.steps:.2f}" for each in several)
        print(
            f"{streams} streams an engine: {measured:.2f} tokens a step of {ideal:.2f}: "
            f"{measured / ideal:.3f}; by the steps of each {_sum_of_each(several) / ideal:.3f}; "
            f"seats taken {seats} ({one[0].seats / one[0].steps:.2f} alone); steps {steps}"
        )


if __name__ == "__main__":
    main()
