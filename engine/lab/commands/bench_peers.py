"""`jitney bench peers`: compares this engine with others on this machine, with one HTTP client."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.common.terminal import say, visible
from jitney.engine.common.text_file import write_text
from jitney.engine.config import Arguments, Command, Flag, FlagGroup
from jitney.engine.lab.bench.peer_process import Peer
from jitney.engine.lab.bench.peers import PeerBench, kernel_ratios, make_measurements, markdown

_ENGINES = {
    "auto": "this engine with the kernels that it chooses",
    "reference": "this engine with its plain JAX path",
    "vllm": "vLLM's CPU build",
    "int8": "this engine with --weights int8",
    "vllm-w8a8": "vLLM's CPU build on the same model in int8, which is made of its folder",
}
_DEFAULT_ENGINES = ("auto", "reference", "vllm")
_FLAGS = (
    Flag.of(
        "--engines",
        "; ".join(f"{name}: {about}" for name, about in _ENGINES.items()),
        ",".join(_DEFAULT_ENGINES),
        metavar="A,B",
    ),
    Flag.of("--model", "this engine's model", "smollm2-135m", metavar="NAME"),
    Flag.of("--dtype", "of every engine", "bfloat16", choices=("bfloat16", "float32")),
    Flag.of("--vllm", "the vllm program [the one on the path]", "", metavar="FILE"),
    Flag.of(
        "--vllm-model", "the same model as a Hugging Face folder, for vLLM", "", metavar="FOLDER"
    ),
    Flag.of(
        "--streams", "requests open at a time, one closed loop each", "32,8,1", metavar="A,B,..."
    ),
    Flag.whole("--requests", "of each closed loop; a single stream has 16 at most", 96, least=1),
    Flag.whole("--repetitions", "times that every engine is started and measured", 3, least=1),
    Flag.whole("--port", "where the engines listen; 0: any free port", 0, least=0),
    Flag.output("--json", "write all figures, again after every measurement; - is standard output"),
    Flag.output("--markdown", "write the table"),
)


_COMMAND = Command(
    "bench peers",
    "Serve this engine and others in turn on this machine and drive each over HTTP with the "
    "same requests: closed loops, and 512-token prompts with one output token. Prompts are "
    "token ids, outputs have fixed lengths, no engine has a prefix cache. About 20 minutes "
    "with three engines on two cores.",
    [FlagGroup(_FLAGS)],
)


def bench_peers(arguments: Sequence[str]) -> int:
    """Measure the engines in turn and print the table; exit status 0, or 1 if an engine failed."""
    args = _COMMAND.parse(arguments)
    report = _measured(args)
    _deliver(args, report)
    return int(any(engine["failed"] for engine in report["engines"].values()))


def _measured(args: Arguments) -> JsonDict:
    """Measure all figures; the report is written after every measurement."""
    from jitney.engine.core import ModelSource, Tokenizer

    streams = args.numbers_of("streams", int)
    with TemporaryDirectory() as folder:
        peers = _peers_from(args, Path(folder))
        encode = Tokenizer.load(ModelSource.resolve(args.model)).encode
        measurements = make_measurements(encode, streams, args.requests)
        bench = PeerBench(measurements, args.port, save=partial(_save, args), say=say)
        report = bench.compare(peers, args.repetitions)
    pair = [Peer.ours(args.model, kernels, args.dtype).name for kernels in ("auto", "reference")]
    return report | {"auto_over_reference": kernel_ratios(report, pair)}


def _save(args: Arguments, report: JsonObject) -> None:
    if args.json != "-":
        args.write_report(report)


def _peers_from(args: Arguments, folder: Path) -> list[Peer]:
    """The engines to measure; prints a line for each missing one. folder: for their files."""
    names = args.names_of("engines", _ENGINES)
    peers = list(filter(None, [_peer(args, name, folder) for name in names]))
    if not peers:
        raise ConfigError("--engines: none of them is installed here")
    return peers


def _peer(args: Arguments, name: str, folder: Path) -> Peer | None:
    match name:
        case "vllm":
            return _vllm_from(args)
        case "vllm-w8a8":
            return _vllm_w8a8_from(args, folder / "w8a8")
        case "int8":
            return Peer.ours(args.model, "auto", args.dtype, weights="int8")
    return Peer.ours(args.model, name, args.dtype)


def _vllm_w8a8_from(args: Arguments, target: Path) -> Peer | None:
    plain = _vllm_from(args)
    if plain is None:
        return None
    return Peer.vllm_w8a8(plain.command[0], Path(args.vllm_model), target, args.dtype)


def _vllm_from(args: Arguments) -> Peer | None:
    program, folder = shutil.which(args.vllm or "vllm"), args.vllm_model
    if program is None:
        say("vLLM is not installed here and is left out; --vllm FILE names its program")
        return None
    if not Path(folder, "config.json").is_file():
        raise ConfigError(
            "--vllm-model must name a Hugging Face folder of the same model, for vLLM"
        )
    return Peer.vllm(program, folder, args.dtype)


def _deliver(args: Arguments, report: JsonObject) -> None:
    table = markdown(report)
    if args.markdown:
        write_text("--markdown", args.markdown, table)
    if args.write_report(report):
        print(visible("\n".join([table, *_remarks(report)])))


def _remarks(report: JsonObject) -> Iterator[str]:
    for name, engine in report["engines"].items():
        if engine["failed"]:
            yield f"{name} failed: {engine['failed']}"
        shares = [figures["client_cpu_share"]["median"] for figures in engine["medians"].values()]
        if shares:
            used = f"{min(shares):.0%} to {max(shares):.0%} of a core"
            yield f"{name}: the client used {used}; {engine['settings']}"
    ratios = report["auto_over_reference"]
    if ratios:
        each = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
        below = [name for name, ratio in ratios.items() if ratio < 1]
        verdict = (
            f"BELOW the reference: {', '.join(below)}" if below else "none below the reference"
        )
        yield f"auto over reference kernels: {each}; {verdict}"
