"""`jitney plan`: size a deployment from a device's published peaks, propose buckets from what was
seen, or compare fleets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.summary import Slo
from jitney.engine.config import Arguments, Command, Flag, FlagGroup
from jitney.engine.lab.simulation.devices import DEVICES, Accelerator
from jitney.engine.lab.simulation.planner import Demand, Operating, Sizing
from jitney.engine.lab.simulation.roofline import SHAPES, Assumptions, ModelCost, Roofline

if TYPE_CHECKING:
    from jitney.dashboard import Table

_WEIGHTS = ("bf16", "fp8", "int8", "int4")
#: Fields of `Demand` that flags of the same name give.
_OF_DEMAND = ("prompt", "output", "rate", "price_per_hour", "token_budget", "page_size")


def plan(arguments: Sequence[str]) -> int:
    """Size, or with the word `buckets` tune, or with --fleet size a fleet; exit status 0, 1 if no
    batch size or no fleet keeps the limits.
    """
    if arguments[:1] == ["buckets"]:
        from jitney.engine.lab.commands.plan_buckets import plan_buckets

        return plan_buckets(arguments[1:])
    if "--fleet" in arguments:
        from jitney.engine.lab.commands.plan_fleet import plan_fleet

        return plan_fleet([word for word in arguments if word != "--fleet"])
    return _run_plan(_COMMAND.parse(arguments))


def _run_plan(args: Arguments) -> int:
    args.check_numbers(count=1, rate=0)
    args.check_writable("json")
    if not args.model or not args.device:
        raise ConfigError("say what to size: jitney plan MODEL --device NAME")
    roofline, demand = _roofline_of(args), _demand_of(args)
    sizing = Sizing.of(roofline, demand)
    if args.write_report(_report_of(roofline, demand, sizing)):
        _show(args.model, roofline, demand, sizing)
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
    )


def _demand_of(args: Arguments) -> Demand:
    slo = args.slo() or Slo()
    same = {name: getattr(args, name) for name in _OF_DEMAND}
    return Demand(itl_s=slo.itl_s, ttft_s=slo.ttft_s, **same)


_DEFAULT = Assumptions()


class _RooflineFlags(NamedTuple):
    """Flags of all commands that size by a roofline."""

    model: Flag
    #: Number format of keys and values.
    kv: Flag
    json: Flag
    #: How far a device comes.
    efficiencies: tuple[Flag, ...]


ROOFLINE = _RooflineFlags(
    model=Flag(
        "model",
        {
            "help": f"{', '.join(SHAPES)}, a config.json, or what --model takes",
            "nargs": "?",
            "metavar": "MODEL",
        },
    ),
    kv=Flag.of("--kv", "number format of keys and values", "bf16", choices=("bf16", "fp8", "int8")),
    json=Flag.of("--json", "write everything to a file; - is standard output", metavar="FILE"),
    efficiencies=(
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
        Flag.number(
            "--overhead-ms", "fixed time of a step", 1e3 * _DEFAULT.overhead_s, metavar="MS"
        ),
    ),
)
_FLAGS = (
    ROOFLINE.model,
    Flag.of("--device", f"one of: {', '.join(DEVICES)}", metavar="NAME"),
    Flag.whole("--count", "chips of a replica, by tensor parallelism", 1),
    Flag.of("--weights", "number format of the layers", "bf16", choices=_WEIGHTS),
    ROOFLINE.kv,
    Flag.whole("--prompt", "mean prompt tokens", 512),
    Flag.whole("--output", "mean output tokens", 256),
    Flag.number("--slo-itl-ms", "most milliseconds between two tokens", metavar="MS"),
    Flag.number(
        "--slo-ttft-ms",
        "most milliseconds to the first token, for 99 in 100 requests",
        metavar="MS",
    ),
    Flag.number("--price-per-hour", "of one chip"),
    Flag.number("--rate", "requests a second to serve: how many replicas", 0.0),
    Flag.whole("--token-budget", "most rows of a step", 2048),
    Flag.whole("--page-size", "KV positions per page", 16),
    ROOFLINE.json,
)
_ASSUMPTIONS = (
    *ROOFLINE.efficiencies,
    Flag.number("--memory-share", "share of the memory that may be used", _DEFAULT.memory),
)
_COMMAND = Command(
    "plan",
    "Size a deployment: what fits, tokens/s by batch size, the knee, cost and replicas. "
    "`jitney plan buckets --help`: propose buckets instead; `jitney plan --fleet --help`: compare "
    "fleets.",
    (FlagGroup(_FLAGS), FlagGroup(_ASSUMPTIONS, "assumptions")),
)


def _report_of(roofline: Roofline, demand: Demand, sizing: Sizing) -> JsonDict:
    cost = roofline.cost
    return {
        "device": roofline.device.name,
        "count": roofline.count,
        "weights": cost.weights,
        "kv": cost.kv,
        "parameters": cost.parameters,
        "demand": msgspec.to_builtins(demand),
        **msgspec.to_builtins(sizing),
        "assumed": list(_assumptions(roofline, demand)),
    }


def _show(model: str, roofline: Roofline, demand: Demand, sizing: Sizing) -> None:
    from jitney.dashboard import print_lines

    title = f"{model} on {roofline.count} x {roofline.device.name}"
    tokens = f"{demand.prompt} prompt and {demand.output} output tokens"
    _curve_table(sizing).print(f"{title}: {tokens}")
    print_lines(_answers(roofline, demand, sizing))
    print("assumed:")
    print_lines(f"  {line}" for line in _assumptions(roofline, demand))


def _curve_table(sizing: Sizing) -> Table:
    from jitney.dashboard import Table

    heads = ["seats", "step ms", "tok/s", "req/s", "TTFT ms", "bound", "cost/M", ""]
    return Table(heads, [_cells(point, sizing) for point in sizing.curve])


def _cells(point: Operating, sizing: Sizing) -> list[str]:
    cost = point.cost_per_million
    return [
        str(point.seats),
        f"{1e3 * point.step_s:.2f}",
        f"{point.output_tok_s:,.0f}",
        f"{point.req_s:.2f}",
        f"{1e3 * point.ttft_s:.0f}",
        point.bound,
        "" if cost is None else f"{cost:.3f}",
        _mark(point, sizing),
    ]


def _mark(point: Operating, sizing: Sizing) -> str:
    """What is special about a point of the curve."""
    marks = {"knee": sizing.knee, "within limits": sizing.within_slo}
    return ", ".join(name for name, marked in marks.items() if marked == point)


def _answers(roofline: Roofline, demand: Demand, sizing: Sizing) -> Iterator[str]:
    """The answers, a line each."""
    yield _memory_line(sizing)
    if sizing.chosen is None:
        yield _no_choice(sizing.curve[0])
        return
    yield from _choice(sizing.chosen, sizing)
    if sizing.replicas is not None:
        yield _replicas_line(roofline, demand, sizing.replicas)


def _no_choice(first: Operating) -> str:
    step, ttft = 1e3 * first.step_s, 1e3 * first.ttft_s
    return (
        f"no batch size keeps the limits: with one seat a step takes {step:.1f} "
        f"ms and the first token {ttft:.0f} ms"
    )


def _replicas_line(roofline: Roofline, demand: Demand, replicas: int) -> str:
    chips = replicas * roofline.count
    return f"replicas: {replicas} for {demand.rate:g} requests/s ({chips} chips)"


def _memory_line(sizing: Sizing) -> str:
    memory = sizing.memory
    return (
        f"memory: {memory.weight_bytes / 1e9:.1f} GB of weights, {memory.kv_room_bytes / 1e9:.1f} "
        f"GB for KV = {memory.positions:,} tokens in {memory.pages:,} pages: {memory.seats_mean} "
        f"seats at the mean context, {memory.seats_full} at the whole length"
    )


def _choice(chosen: Operating, sizing: Sizing) -> Iterator[str]:
    speed = f"{chosen.output_tok_s:,.0f} output tokens/s, {1e3 * chosen.step_s:.1f} ms"
    yield f"chosen: {chosen.seats} seats, {speed} between tokens"
    yield f"load at {Sizing.UTILISATION:.0%}: {sizing.load_req_s:.2f} requests/s a replica"
    full, loaded = chosen.cost_per_million, sizing.cost_per_million_loaded
    if loaded is not None:
        price = f"{full:.3f} a million output tokens when full, {loaded:.3f}"
        yield f"cost: {price} at {Sizing.UTILISATION:.0%}"


def _assumptions(roofline: Roofline, demand: Demand) -> Iterator[str]:
    """Everything that was taken for granted, a line each."""
    yield from assumptions_of(roofline)
    yield _steady_state(demand)
    yield _TTFT


def assumptions_of(roofline: Roofline) -> Iterator[str]:
    """What a roofline takes for granted, a line each."""
    yield _peaks(roofline.device)
    yield _reached(roofline.assumed)
    yield _counted(roofline.cost)
    yield from _narrow(roofline)
    if roofline.count > 1:
        yield _exchange(roofline)


_TTFT = (
    f"TTFT: p{100 * Sizing.TTFT_QUANTILE:g} at {Sizing.UTILISATION:.0%} load, seats as servers of "
    "a Markov queue (Erlang C), then the prompt's own steps"
)


def _counted(cost: ModelCost) -> str:
    return (
        f"{cost.parameters / 1e9:.2f} G parameters; embedding (and a head tied to it) stay 16 bit; "
        "attention over the whole context, in every layer"
    )


def _narrow(roofline: Roofline) -> Iterator[str]:
    """How numbers of 8 and 4 bits are multiplied."""
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
        yield _WHY_WIDENED


_WHY_WIDENED = "the experts of a mixture are widened, whatever multiplies its other matrices"


def _peaks(device: Accelerator) -> str:
    rates = ", ".join(f"{name} {rate / 1e12:g}" for name, rate in device.flops.items())
    memory = f"{device.memory / 1e9:g} GB, {device.bandwidth / 1e9:,.0f} GB/s"
    return f"{device.name}: {memory}, TFLOP/s {rates} (published peaks, dense)"


def _reached(assumed: Assumptions) -> str:
    return (
        f"reached: {assumed.bandwidth:.0%} of the bandwidth, {assumed.flops:.0%} of the "
        f"operations, {1e3 * assumed.overhead_s:g} ms fixed a step, {assumed.memory:.0%} of the "
        "memory usable"
    )


def _steady_state(demand: Demand) -> str:
    return (
        f"steady state: every step carries {demand.prompt_rows:g} prompt rows beside each decode "
        f"row, at most {demand.token_budget} rows; mean context {demand.mean_context:g}; nothing "
        "shared between prompts"
    )


def _exchange(roofline: Roofline) -> str:
    norms = ""
    if roofline.hops > 2:
        norms = "; a third one of two numbers a row for the norms of queries and keys"
    return (
        f"tensor parallel: two ring all-reduces a layer over {roofline.device.link / 1e9:g} GB/s "
        f"one way, {1e6 * roofline.assumed.hop_s:g} us each, not overlapped{norms}; KV divided "
        f"over {roofline.kv_split}"
    )
