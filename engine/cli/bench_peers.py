"""`jitney bench peers`: this engine and others on this machine, one after another, driven by one
client over HTTP."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jitney.engine.bench.peers import (
    Encode,
    Peer,
    compare,
    kernel_ratios,
    make_work,
    markdown,
    ours,
    vllm,
)
from jitney.engine.cli.bench_flags import check_numbers, check_writable, write_json
from jitney.engine.cli.flags import Parser
from jitney.engine.errors import ConfigError

ENGINES = {
    "auto": "this engine with the kernels that it chooses",
    "reference": "this engine with its plain JAX path",
    "vllm": "vLLM's CPU build",
}


def run(arguments: Sequence[str]) -> int:
    """Measure the engines in turn and print the table; exit status 0, 1 if an engine failed."""
    known = make_parser().parse(arguments)
    check_writable(known, "json", "markdown")
    check_numbers(known, repetitions=1, requests=1, port=0)
    streams = streams_of(known.streams)
    peers = peers_of(known)
    works = make_work(encoder(known.model), streams, known.requests)
    report = compare(
        peers,
        works,
        known.repetitions,
        port=known.port,
        save=lambda report: (
            write_json(known.json, report) if known.json and known.json != "-" else None
        ),
        say=say,
    )
    report["auto_over_reference"] = kernel_ratios(
        report,
        (
            ours(known.model, "auto", known.dtype).name,
            ours(known.model, "reference", known.dtype).name,
        ),
    )
    deliver(known, report)
    return int(any(engine["failed"] for engine in report["engines"].values()))


def make_parser() -> Parser:
    engines = "; ".join(f"{name}: {about}" for name, about in ENGINES.items())
    parser = Parser(
        "bench peers",
        "Serve this engine and others in turn on this machine and drive each over HTTP with the "
        "same requests: closed "
        "loops, and 512-token prompts with one output token. Prompts are token ids, outputs have "
        "fixed lengths, no "
        "engine has a prefix cache. About 20 minutes with three engines on two cores.",
    )
    add = parser.add_argument
    add(
        "--engines",
        default=",".join(ENGINES),
        metavar="A,B",
        help=f"{engines} [{','.join(ENGINES)}]",
    )
    add(
        "--model", default="smollm2-135m", metavar="NAME", help="this engine's model [smollm2-135m]"
    )
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of every engine [bfloat16]",
    )
    add("--vllm", default="", metavar="FILE", help="the vllm program [the one on the path]")
    add(
        "--vllm-model",
        default="",
        metavar="FOLDER",
        help="the same model as a Hugging Face folder, for vLLM",
    )
    add(
        "--streams",
        default="32,8,1",
        metavar="A,B,...",
        help="requests open at a time, one closed loop each [32,8,1]",
    )
    add(
        "--requests",
        type=int,
        default=96,
        metavar="N",
        help="of each closed loop; a single stream has 16 at most [96]",
    )
    add(
        "--repetitions",
        type=int,
        default=3,
        metavar="N",
        help="times that every engine is started and measured [3]",
    )
    add(
        "--port",
        type=int,
        default=0,
        metavar="N",
        help="where the engines listen; 0: any free port [0]",
    )
    add(
        "--json",
        metavar="FILE",
        help="write all figures, again after every measurement; - is standard output",
    )
    add("--markdown", metavar="FILE", help="write the table")
    return parser


def streams_of(text: str) -> list[int]:
    """Streams in the order given, each once. ConfigError for anything else than positive whole
    numbers."""
    try:
        streams = list(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        streams = [0]
    if min(streams) < 1:
        raise ConfigError("--streams: must be positive whole numbers separated by commas")
    return streams


def peers_of(known: argparse.Namespace) -> list[Peer]:
    """The engines to measure; one line for each that is not here."""
    names = list(dict.fromkeys(word.strip() for word in known.engines.split(",") if word.strip()))
    unknown = [name for name in names if name not in ENGINES]
    if unknown or not names:
        raise ConfigError(
            f"--engines: {', '.join(unknown) or 'nothing'} is none of {', '.join(ENGINES)}"
        )
    peers = []
    for name in names:
        if name != "vllm":
            peers.append(ours(known.model, name, known.dtype))
            continue
        program = shutil.which(known.vllm or "vllm")
        if program is None:
            say("vLLM is not installed here and is left out; --vllm FILE names its program")
        elif not Path(known.vllm_model, "config.json").is_file():
            raise ConfigError(
                "--vllm-model must name a Hugging Face folder of the same model, for vLLM"
            )
        else:
            peers.append(vllm(program, known.vllm_model, known.dtype))
    if not peers:
        raise ConfigError("--engines: none of them is installed here")
    return peers


def encoder(model: str) -> Encode:
    """How the model's text becomes ids."""
    from jitney.engine.checkpoints.sources import resolve
    from jitney.engine.text.tokenizer import load_tokenizer

    return load_tokenizer(resolve(model)).encode


def deliver(known: argparse.Namespace, report: Mapping[str, Any]) -> None:
    """Print the table and write the files that were asked for."""
    table = markdown(report)
    if known.markdown:
        try:
            Path(known.markdown).write_text(table, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--markdown {known.markdown}: {error.strerror or error}") from None
    if known.json:
        write_json(known.json, report)
    if known.json == "-":
        return
    print(table)
    for line in remarks(report):
        print(line)


def remarks(report: Mapping[str, Any]) -> list[str]:
    """What a reader of the table has to know beside it."""
    lines = []
    for name, engine in report["engines"].items():
        if engine["failed"]:
            lines.append(f"{name} failed: {engine['failed']}")
        shares = [figures["client_cpu_share"]["median"] for figures in engine["medians"].values()]
        if shares:
            lines.append(
                f"{name}: the client used {min(shares):.0%} to {max(shares):.0%} of a core; "
                f"{engine['settings']}"
            )
    ratios = report["auto_over_reference"]
    if ratios:
        each = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
        below = [name for name, ratio in ratios.items() if ratio < 1]
        verdict = (
            f"BELOW the reference: {', '.join(below)}" if below else "none below the reference"
        )
        lines.append(f"auto over reference kernels: {each}; {verdict}")
    return lines


def say(news: str) -> None:
    """A line of progress, at once."""
    print(news, file=sys.stderr, flush=True)
