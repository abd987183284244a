"""`jitney plan`: sizes a deployment from a device's peaks, proposes buckets, or compares fleets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.summary import Slo
from jitney.engine.config import Arguments, Command, Flag, FlagGroup
from jitney.engine.lab.commands.bench_flags import JSON
from jitney.engine.lab.commands.simulate_flags import SimulateArguments
from jitney.engine.lab.figures import rows_table
from jitney.engine.lab.simulation.devices import DEVICES
from jitney.engine.lab.simulation.planner import Load, OperatingPoint, Sizing
from jitney.engine.lab.simulation.roofline import WEIGHT_FORMATS, Assumptions, Roofline
from jitney.engine.lab.simulation.shapes import SHAPES

#: Fields of `Load` with a flag of the same name.
_OF_LOAD = (
    "prompt",
    "output",
    "rate",
    "price_per_hour",
    "token_budget",
    "page_size",
    "acceptance",
    "drafts",
)


def plan(arguments: Sequence[str]) -> int:
    """Size a deployment, or tune buckets (word `buckets`), or size a fleet (--fleet); exit status
    0, or 1 if no batch size or no fleet keeps the limits.
    """
    if arguments[:1] == ["buckets"]:
        from jitney.engine.lab.commands.plan_buckets import plan_buckets

        return plan_buckets(arguments[1:])
    if "--fleet" in arguments:
        from jitney.engine.lab.commands.plan_fleet import plan_fleet

        return plan_fleet([word for word in arguments if word != "--fleet"])
    return _run_plan(_COMMAND.parse(arguments))


def _run_plan(args: Arguments) -> int:
    if (args.speculative in ("draft", "eagle3")) != bool(args.draft_model):
        raise ConfigError("--draft-model is for --speculative draft and eagle3, which need it")
    if not args.model or not args.device:
        raise ConfigError("say what to size: jitney plan MODEL --device NAME")
    roofline, load = _roofline_of(args), _load_of(args)
    sizing = Sizing.of(roofline, load)
    if args.write_report(_report_of(roofline, load, sizing)):
        _show(args.model, roofline, load, sizing)
    return int(sizing.chosen is None)


def _roofline_of(args: Arguments) -> Roofline:
    assumed = Assumptions(
        args.bandwidth_efficiency,
        args.flops_efficiency,
        args.overhead_ms / 1e3,
        memory=args.memory_share,
    )
    return Roofline.named(
        args.model,
        args.device,
        weights=args.weights,
        kv=args.kv,
        count=args.count,
        assumed=assumed,
        speculative=args.speculative,
        draft_model=args.draft_model,
    )


def _load_of(args: Arguments) -> Load:
    slo = args.slo() or Slo()
    same = {name: getattr(args, name) for name in _OF_LOAD}
    return Load(itl_s=slo.itl_s, ttft_s=slo.ttft_s, **same)


_DEFAULT = Assumptions()


MODEL = Flag(
    "model",
    {
        "help": f"{', '.join(SHAPES)}, a config.json, or what --model takes",
        "nargs": "?",
        "metavar": "MODEL",
    },
)
KV = Flag.of("--kv", "number format of keys and values", "bf16", choices=("bf16", "fp8", "int8"))
EFFICIENCIES = (
    Flag.number(
        "--bandwidth-efficiency",
        "share of the published memory bandwidth that is reached",
        _DEFAULT.bandwidth,
    ),
    Flag.number(
        "--flops-efficiency",
        "share of the published operations that is reached",
        _DEFAULT.flops,
    ),
    Flag.number("--overhead-ms", "fixed time of a step", 1e3 * _DEFAULT.overhead_s, metavar="MS"),
)
_FLAGS = (
    MODEL,
    Flag.of("--device", f"one of: {', '.join(DEVICES)}", metavar="NAME"),
    Flag.whole("--count", "chips of a replica, by tensor parallelism", 1, least=1),
    Flag.of("--weights", "number format of the layers", "bf16", choices=WEIGHT_FORMATS),
    KV,
    Flag.whole("--prompt", "mean prompt tokens", 512),
    Flag.whole("--output", "mean output tokens", 256),
    Flag.number("--slo-itl-ms", "most milliseconds between two tokens", metavar="MS", least=0),
    Flag.number(
        "--slo-ttft-ms",
        "most milliseconds to the first token, for 99 in 100 requests",
        metavar="MS",
        least=0,
    ),
    Flag.number("--price-per-hour", "of one chip", least=0),
    Flag.number("--rate", "requests a second to serve: how many replicas", 0.0, least=0),
    Flag.whole("--token-budget", "most rows of a step", 2048),
    Flag.whole("--page-size", "KV positions per page", 16),
    *SimulateArguments.DRAFTS,
    Flag.of(
        "--speculative",
        "what drafts, as of jitney serve",
        "off",
        choices=("off", "ngram", "draft", "mtp", "eagle3"),
    ),
    Flag.of("--draft-model", "as of jitney serve", "", metavar="MODEL"),
    JSON,
)
_ASSUMPTIONS = (
    *EFFICIENCIES,
    Flag.number("--memory-share", "share of the memory that may be used", _DEFAULT.memory),
)
_COMMAND = Command(
    "plan",
    "Size a deployment: what fits, tokens/s by batch size, the knee, cost and replicas. "
    "`jitney plan buckets --help`: propose buckets instead; `jitney plan --fleet --help`: compare "
    "fleets.",
    (FlagGroup(_FLAGS), FlagGroup(_ASSUMPTIONS, "assumptions")),
)


def _report_of(roofline: Roofline, load: Load, sizing: Sizing) -> JsonDict:
    cost = roofline.cost
    return {
        "device": roofline.device.name,
        "count": roofline.count,
        "weights": cost.weights,
        "kv": cost.kv,
        "parameters": cost.parameters,
        "demand": msgspec.to_builtins(load),
        **msgspec.to_builtins(sizing),
        "assumed": list(_assumptions(roofline, load)),
    }


def _show(model: str, roofline: Roofline, load: Load, sizing: Sizing) -> None:
    from jitney.engine.common.reports.page import print_lines

    title = f"{model} on {roofline.count} x {roofline.device.name}"
    tokens = f"{load.prompt} prompt and {load.output} output tokens"
    rows = [_row(point, sizing) for point in sizing.curve]
    table = rows_table(rows, _HEADS)
    table.print(f"{title}: {tokens}")
    print_lines(_answers(roofline, load, sizing))
    print("assumed:")
    print_lines(f"  {line}" for line in _assumptions(roofline, load))


#: Head of a column -> figure of `_row`.
_HEADS = {
    "seats": "seats",
    "drafts": "drafts",
    "step": "step_s",
    "tok/s": "output_tok_s",
    "req/s": "req_s",
    "TTFT": "ttft_s",
    "bound": "bound",
    "cost/M": "cost_per_million",
    "": "mark",
}


def _row(point: OperatingPoint, sizing: Sizing) -> JsonDict:
    marks = {"knee": sizing.knee, "within limits": sizing.within_slo}
    mark = ", ".join(name for name, marked in marks.items() if marked == point)
    return msgspec.to_builtins(point) | {"mark": mark}


def _answers(roofline: Roofline, load: Load, sizing: Sizing) -> Iterator[str]:
    memory, chosen = sizing.memory, sizing.chosen
    yield (
        f"memory: {memory.weight_bytes / 1e9:.1f} GB of weights, {memory.kv_room_bytes / 1e9:.1f} "
        f"GB for KV = {memory.positions:,} tokens in {memory.pages:,} pages: {memory.seats_mean} "
        f"seats at the mean context, {memory.seats_full} at the whole length"
    )
    for window, pages in memory.window_pages.items():
        yield f"memory: of it {pages:,} pages of layers with a window of {window:,} tokens"
    if memory.slot_bytes:
        drafts = f" and each of its {load.most_drafts} drafts" if load.most_drafts else ""
        yield (
            f"memory: {memory.slot_bytes / 1e6:,.1f} MB of recurrent state for each seat{drafts}, "
            f"and for {memory.checkpoints:,} checkpoints of the prefix cache"
        )
    if chosen is None:
        step, ttft = 1e3 * sizing.curve[0].step_s, 1e3 * sizing.curve[0].ttft_s
        yield (
            f"no batch size keeps the limits: with one seat a step takes {step:.1f} "
            f"ms and the first token {ttft:.0f} ms"
        )
        return
    speed = f"{chosen.output_tok_s:,.0f} output tokens/s, {1e3 * chosen.itl_s:.1f} ms"
    drafts = f", {chosen.drafts} drafts of each a step" if chosen.drafts else ""
    yield f"chosen: {chosen.seats} seats, {speed} between tokens{drafts}"
    yield f"load at {Sizing.UTILISATION:.0%}: {sizing.load_req_s:.2f} requests/s a replica"
    full, loaded = chosen.cost_per_million, sizing.cost_per_million_loaded
    if loaded is not None:
        price = f"{full:.3f} a million output tokens when full, {loaded:.3f}"
        yield f"cost: {price} at {Sizing.UTILISATION:.0%}"
    if sizing.replicas is not None:
        chips = sizing.replicas * roofline.count
        yield f"replicas: {sizing.replicas} for {load.rate:g} requests/s ({chips} chips)"


def _assumptions(roofline: Roofline, load: Load) -> Iterator[str]:
    yield from assumptions_of(roofline)
    yield (
        f"steady state: every step carries {load.prompt_rows:g} prompt rows beside each decode "
        f"row, at most {load.token_budget} rows; mean context {load.mean_context:g}; nothing "
        "shared between prompts"
    )
    if load.acceptance:
        makes = "making them takes no time"
        if roofline.cost.drafter is not None:
            makes = "what drafts reads every row, and once more for each draft of a sequence"
        yield (
            f"drafts: each is accepted with chance {load.acceptance:g} if those before it were; a "
            "step has as many for each sequence as bring most tokens, at most "
            f"{load.drafts}; {makes}"
        )
    yield (
        f"TTFT: p{100 * Sizing.TTFT_QUANTILE:g} at {Sizing.UTILISATION:.0%} load, seats as servers "
        "of a Markov queue (Erlang C), then the prompt's own steps"
    )


def assumptions_of(roofline: Roofline) -> Iterator[str]:
    """The assumptions of a roofline, one per line."""
    device, cost, assumed = roofline.device, roofline.cost, roofline.assumed
    rates = ", ".join(f"{name} {rate / 1e12:g}" for name, rate in device.flops.items())
    yield (
        f"{device.name}: {device.memory / 1e9:g} GB, {device.bandwidth / 1e9:,.0f} GB/s, TFLOP/s "
        f"{rates} (published peaks, dense)"
    )
    yield (
        f"reached: {assumed.bandwidth:.0%} of the bandwidth, {assumed.flops:.0%} of the "
        f"operations, {1e3 * assumed.overhead_s:g} ms fixed a step, {assumed.memory:.0%} of the "
        "memory usable"
    )
    yield (
        f"{cost.parameters / 1e9:.2f} G parameters; embedding (and a head tied to it) stay 16 bit; "
        "each layer attends to the whole context or its window"
    )
    yield from _narrow(roofline)
    if roofline.count > 1:
        norms = "; a third one of two numbers a row for the norms of queries and keys"
        yield (
            f"tensor parallel: two ring all-reduces a layer over {device.link / 1e9:g} GB/s "
            f"one way, {1e6 * assumed.hop_s:g} us each, not overlapped"
            f"{norms if roofline.hops > 2 else ''}; KV divided over {roofline.kv_split:.3g}"
        )


def _narrow(roofline: Roofline) -> Iterator[str]:
    widened = roofline.cost.narrow
    if roofline.multiplies_fp8:
        widened.remove("fp8 weights")
        yield (
            "fp8 weights are multiplied as fp8, with rows rounded to fp8: fewer bytes, and the "
            "layers' products at the fp8 peak; output head and attention are counted in bfloat16"
        )
    if widened:
        names = " and ".join(widened)
        yield f"{names} are widened to bfloat16 as they are read: fewer bytes, the same arithmetic"
    if "fp8 weights" in widened and roofline.device.rounds_fp8:
        yield "the experts of a mixture are widened, whatever multiplies its other matrices"
