"""Compares engines that are served one after another on this machine, with one client over HTTP.

Every engine gets the same token ids as prompts, the same output lengths (greedy, the end of a text
is ignored), no prefix cache and the whole machine. The client is this process, on the same cores,
and its share of them is measured. The engine's own usage counts are compared with the lengths.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import msgspec

from jitney.engine.common.errors import JitneyError
from jitney.engine.common.machine import cpu_name
from jitney.engine.common.ports import free_port
from jitney.engine.common.reports.page import Table
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.common.summary import quantile_of, spread, token_gaps
from jitney.engine.common.trace import Arrival
from jitney.engine.lab.bench.client import Answer, EndpointClient, RemoteEndpoint
from jitney.engine.lab.bench.load import LoadResult, run_load
from jitney.engine.lab.bench.online import EngineAbout
from jitney.engine.lab.bench.peer_process import Peer
from jitney.engine.lab.bench.text import arrival_ids
from jitney.engine.lab.figures import TOO_FEW
from jitney.engine.lab.simulation.workload import (
    Closed,
    Fixed,
    Lengths,
    LengthSummary,
    LogNormal,
    synthesise,
)

#: Log-normal lengths around 96 and 64 tokens.
PROMPTS, OUTPUTS = LogNormal(96, 0.5, 4, 384), LogNormal(64, 0.5, 4, 256)
_LONG_PROMPT = 512
#: Number of long prompts, and how many of them are open at the same time.
_LONG_REQUESTS, _LONG_STREAMS = 24, 8
#: Requests of a single stream; fewer, since it is slow.
_SINGLE_REQUESTS = 16
_SEED = 0
#: Text -> token ids.
type _Encode = Callable[[str], list[int]]


class _Measurement(NamedTuple):
    #: Name: streams_<n> for a closed loop, prompts_<n> for long prompts.
    name: str
    #: Requests that are open at the same time.
    streams: int
    #: Token ids of each prompt.
    prompts: list[list[int]]
    #: Tokens of each output.
    outputs: list[int]

    def describe(self) -> JsonDict:
        prompts = LengthSummary.of(map(len, self.prompts))
        outputs = LengthSummary.of(self.outputs)
        return {
            "streams": self.streams,
            "requests": len(self.outputs),
            "prompt_lengths": msgspec.to_builtins(prompts),
            "output_lengths": msgspec.to_builtins(outputs),
        }

    def warm_up(self) -> _Measurement:
        """A copy with the first `streams` requests and short outputs."""
        few = max(2, self.streams)
        outputs = [min(8, n_output) for n_output in self.outputs[:few]]
        return _Measurement("warm-up", self.streams, self.prompts[:few], outputs)

    def arrivals(self) -> list[Arrival]:
        """The requests as arrivals of a closed loop."""
        lengths = zip(self.prompts, self.outputs, strict=True)
        return [Arrival(0.0, len(prompt), n_output) for prompt, n_output in lengths]


@dataclass(slots=True)
class _PeerResult:
    peer: Peer
    #: What the engine says of itself.
    about: EngineAbout = field(default_factory=EngineAbout)
    #: Seconds of each start.
    start_s: list[float] = field(default_factory=list)
    #: For each repetition: name of the measurement -> its figures.
    runs: list[dict[str, JsonDict]] = field(default_factory=list)
    #: Reason why it was left out after a failure; "" if it did not fail.
    failed: str = ""

    def as_json(self) -> JsonDict:
        return {
            "version": self.about.version,
            "device": self.about.device,
            "kernels": self.about.kernels,
            "settings": self.peer.settings,
            "start_s": self.start_s,
            "failed": self.failed or None,
            "medians": _medians_of(self.runs),
            "runs": self.runs,
        }


def make_measurements(encode: _Encode, streams: Sequence[int], requests: int) -> list[_Measurement]:
    """Closed loops with these numbers of streams, and long prompts with one output token each.

    requests: most requests of each measurement; slow ones have fewer.
    """

    def drawn(
        name: str, streams: int, count: int, prompts: Lengths, outputs: Lengths
    ) -> _Measurement:
        arrivals = synthesise(count, prompts, outputs, Closed(), _SEED)
        ids = [arrival_ids(encode, each, number, _SEED) for number, each in enumerate(arrivals)]
        return _Measurement(name, streams, ids, [arrival.n_output for arrival in arrivals])

    works = []
    for n_open in streams:
        count = min(requests, _SINGLE_REQUESTS) if n_open == 1 else requests
        works.append(drawn(f"streams_{n_open}", n_open, count, PROMPTS, OUTPUTS))
    lengths, count = (Fixed(_LONG_PROMPT), Fixed(1)), min(_LONG_REQUESTS, requests)
    return [*works, drawn(f"prompts_{_LONG_PROMPT}", _LONG_STREAMS, count, *lengths)]


#: Conditions that are the same for every engine.
_TERMS = {
    "client": "this process, on the same machine, over HTTP with streaming",
    "prompts": "token ids, the same for every engine",
    "settings": "greedy, the end of a text ignored, no prefix cache",
}


@dataclass(slots=True)
class PeerBench:
    """Starts engines in turn and measures each."""

    measurements: Sequence[_Measurement]
    #: Port on which engines listen; 0: any free one.
    port: int
    #: Called with the report so far, after every measurement.
    save: Callable[[JsonDict], None]
    #: Called with each line of progress.
    say: Callable[[str], None]
    results: list[_PeerResult] = field(default_factory=list)

    def compare(self, peers: Sequence[Peer], repetitions: int) -> JsonDict:
        """Start the engines in turn, `repetitions` times each, and measure them. Returns the
        report. An engine that fails is left out afterwards, and the report has the reason.
        """
        self.results = [_PeerResult(peer) for peer in peers]
        for repetition in range(repetitions):
            turn = f"repetition {repetition + 1} of {repetitions}"
            for result in self.results:
                if not result.failed:
                    self.say(f"{result.peer.name}: {turn}")
                    self._measure_once(result)
                    self.save(self.report())
        return self.report()

    def _measure_once(self, result: _PeerResult) -> None:
        result.runs.append({})
        began = time.monotonic()
        try:
            with result.peer.serving(self.port or free_port()) as url:
                result.start_s.append(round(time.monotonic() - began, 1))
                asyncio.run(self._measure_all(result, RemoteEndpoint(url, "")))
        except JitneyError as error:
            result.failed = str(error)
            self.say(f"{result.peer.name}: {error}")

    async def _measure_all(self, result: _PeerResult, endpoint: RemoteEndpoint) -> None:
        async with EndpointClient(endpoint) as client:
            result.about = await EngineAbout.read(client)
            await client.find_model()
            for measurement in self.measurements:
                await _drive(client, measurement.warm_up())
                figures = _figures_of(await _drive(client, measurement))
                result.runs[-1][measurement.name] = figures
                self.save(self.report())
                self.say(_progress_line(measurement.name, figures))

    def report(self) -> JsonDict:
        return {
            "machine": cpu_name(),
            **_TERMS,
            "work": {one.name: one.describe() for one in self.measurements},
            "engines": {result.peer.name: result.as_json() for result in self.results},
        }


def _progress_line(name: str, figures: JsonObject) -> str:
    return (
        f"  {name}: {figures['output_tok_s']:.0f} output tok/s, "
        f"{figures['prompt_tok_s']:.0f} prompt tok/s, "
        f"client {figures['client']['cpu_share']:.0%} of a core"
    )


async def _drive(client: EndpointClient, measurement: _Measurement) -> LoadResult:
    """Send the requests as a closed loop. Raises JitneyError if one fails or has another length."""

    async def send(number: int) -> Answer:
        body = client.endpoint.body("", measurement.outputs[number])
        body["prompt"] = measurement.prompts[number]
        return await client.ask(body)

    arrivals = measurement.arrivals()
    load = await run_load(send, arrivals, concurrency=measurement.streams, closed=True)
    for arrival, answer in zip(arrivals, load.answers, strict=True):
        _check_answer(measurement.name, arrival, answer)
    return load


def _check_answer(name: str, arrival: Arrival, answer: Answer) -> None:
    if not answer.served:
        raise JitneyError(f"{name}: a request ended with {answer.finish} {answer.detail}")
    counted = answer.n_prompt, answer.n_output
    expected = arrival.n_prompt, arrival.n_output
    if counted != expected:
        tokens = f"{counted} prompt and output tokens where {expected}"
        raise JitneyError(f"{name}: the engine counted {tokens} were asked for")


def _figures_of(load: LoadResult) -> JsonDict:
    """The figures of one measurement: tokens by the engine's usage counts, seconds from the start
    of the first request to the end of the last one.
    """
    figures = load.figures()
    return {
        "seconds": load.seconds,
        "output_tok_s": figures["output_tok_s"],
        "prompt_tok_s": figures["prompt_tokens"] / load.seconds,
        "ttft_s": figures["ttft_s"],
        "itl_s": spread(token_gaps(load.requests)),
        "client": load.sender.as_json(),
        "load_average": os.getloadavg()[0],
    }


#: Name of a figure with a median in the report -> function that reads it from a measurement; None
#: for too few values.
_MEDIANS: dict[str, Callable[[JsonObject], float | None]] = {
    "output_tok_s": lambda figures: figures["output_tok_s"],
    "prompt_tok_s": lambda figures: figures["prompt_tok_s"],
    "ttft_p50_s": lambda figures: figures["ttft_s"]["p50"],
    "ttft_p99_s": lambda figures: figures["ttft_s"]["p99"],
    "ttft_p999_s": lambda figures: quantile_of(figures["ttft_s"], "p999"),
    "client_cpu_share": lambda figures: figures["client"]["cpu_share"],
}


def _medians_of(runs: Sequence[Mapping[str, JsonObject]]) -> dict[str, JsonDict]:
    """Median, least and most of each measurement's figures over the repetitions."""
    medians: dict[str, JsonDict] = {}
    for name in dict.fromkeys(name for run in runs for name in run):  # in order, each once
        repetitions = [run[name] for run in runs if name in run]
        medians[name] = {}
        for figure, read in _MEDIANS.items():
            values = [value for value in map(read, repetitions) if value is not None]
            if values:
                spread = {"median": median(values), "least": min(values), "most": max(values)}
            else:
                spread = dict.fromkeys(("median", "least", "most"))
            medians[name][figure] = spread
    return medians


def kernel_ratios(report: JsonObject, engines: Sequence[str]) -> dict[str, float]:
    """For each measurement, the first engine's median divided by the second's: of prompt tokens if
    outputs are one token long, else of output tokens. Empty if one of them was not measured.
    """
    by_engine = report["engines"]
    if not by_engine.keys() >= set(engines):
        return {}
    first, second = (by_engine[engine]["medians"] for engine in engines)
    return {
        name: _speed(first, name)["median"] / _speed(second, name)["median"]
        for name in first
        if name in second
    }


def _speed(medians: JsonObject, name: str) -> JsonDict:
    """Median, least and most of the tokens a second that the measurement reports."""
    return medians[name]["prompt_tok_s" if name.startswith("prompts_") else "output_tok_s"]


#: Figure of a measurement -> its name in the table.
_WAITS = {"ttft_p50_s": "p50", "ttft_p99_s": "p99", "ttft_p999_s": "p99.9"}


def markdown(report: JsonObject) -> str:
    """The report as a Markdown table, with the machine above it. report: `PeerBench.report`."""
    caption = (
        f"{report['machine']}; over HTTP with streaming, the client on the same machine; "
        "medians (least - most)."
    )
    work = report["work"]
    loops = [name for name in work if name.startswith("streams_")]
    busiest = max(loops, key=lambda name: work[name]["streams"])
    heads = [_head(name, sent) for name, sent in work.items()]
    engines = [engine["medians"] for engine in report["engines"].values()]
    measured = [medians[busiest] for medians in engines if busiest in medians]
    # Reports of version 0.2.0 and before have no p99.9.
    waits = [wait for wait in _WAITS if all(wait in figures for figures in measured)]
    percentiles = " / ".join(_WAITS[wait] for wait in waits)
    wait_head = f"first token at {work[busiest]['streams']} streams, {percentiles}"
    rows = []
    for name, engine in report["engines"].items():
        medians = engine["medians"]
        if medians:
            speeds = [_speed_cell(medians, each) for each in work]
            title = f"{name} {engine['version']}".strip()
            rows.append([title, *speeds, _wait_cell(medians.get(busiest), waits)])
    table = Table(["", *heads, wait_head], rows)
    return "\n".join([caption, "", *table.markdown_lines(), ""])


def _head(name: str, sent: JsonObject) -> str:
    if name.startswith("prompts_"):
        return f"prompt tok/s, {sent['prompt_lengths']['longest']}-token prompts"
    plural = "" if sent["streams"] == 1 else "s"
    return f"{sent['streams']} stream{plural}, output tok/s"


def _speed_cell(medians: JsonObject, name: str) -> str:
    """Median, with least and most in brackets if they differ; empty if not measured."""
    if name not in medians:
        return ""
    figure = _speed(medians, name)
    is_one = figure["least"] == figure["most"]
    cell = "{median:,.0f}" if is_one else "{median:,.0f} ({least:,.0f} - {most:,.0f})"
    return cell.format_map(figure)


def _wait_cell(figures: JsonObject | None, waits: Iterable[str]) -> str:
    """Medians of these figures of a measurement; empty if not measured."""
    if figures is None:
        return ""
    seconds = [figures[wait]["median"] for wait in waits]
    cells = [TOO_FEW if each is None else f"{1e3 * each:,.0f}" for each in seconds]
    return f"{' / '.join(cells)} ms"
