"""`jitney bench step`: times a step by rows, seats and context, and compares it with its floor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.config import Arguments, Command, Config, Flag, FlagGroup
from jitney.engine.core import load_llm
from jitney.engine.lab.commands.bench_flags import JSON

_FLAGS = (
    Flag.whole("--repeats", "times each step is run", 7, least=1),
    Flag.number("--seconds", "begin no new round after this", 60.0, least=0),
    Flag.switch("--parts", "the share of each kernel in a step, too (native kernels)"),
    JSON,
)
#: Name of the kernels' part that reads the pages of decoding rows.
_DECODING = "attention of decoding rows"
_COMMAND = Command(
    "bench step",
    "Time single steps of the engine: the table that jitney simulate --table reads.",
    [FlagGroup(_FLAGS)],
    sections=("model", "engine"),
    leave_out=Command.ONLY_SERVED,
)


def bench_step(arguments: Sequence[str]) -> int:
    """Measure, print, and write the table; exit status 0."""
    args = _COMMAND.parse(arguments)
    report = _measured(args, args.load_config())
    if args.write_report(report):
        _show(report)
    return 0


def _measured(args: Arguments, config: Config) -> JsonDict:
    from jitney.engine.core import ModelSource
    from jitney.engine.lab.bench.step import measure
    from jitney.engine.lab.bench.step_parts import measure_parts

    llm = load_llm(config)
    shape = ModelSource.of(config).config
    report = measure(llm, shape, repeats=args.repeats, seconds=args.seconds)
    if args.parts:
        report["parts"] = measure_parts(llm, shape, args.repeats)
    llm.close()
    return report


def _show(report: JsonObject) -> None:
    from jitney.engine.common.reports.page import Table, print_lines

    heads = ["bucket", "rows", "keys", "longest", "ms", "fitted", "floor", "x floor"]
    table = Table(heads, [_cells(case) for case in report["cases"]])
    table.print("{model} {dtype}, {kernels} kernels on {device}".format_map(report))
    print_lines(_notes(report))
    if "parts" in report:
        _show_parts(report)


def _show_parts(report: JsonObject) -> None:
    """Print one row per step, with its parts as shares; parts without time are left out."""
    from jitney.engine.common.reports.page import Table, print_lines

    if not report["parts"]:
        print_lines([_NO_PARTS.format_map(report)])
        return
    rows = report["parts"]
    parts = [name for name in _PARTS if any(row["parts_s"][name] for row in rows)]
    heads = ["step", "keys", "ms", *(_PARTS[name] for name in parts), "rest", "GB/s"]
    table = Table(heads, [_part_cells(row, parts) for row in rows])
    table.print("parts of a step, % of its time")
    print_lines([_HOW_TO_READ_PARTS])


def _part_cells(row: JsonObject, parts: list[str]) -> list[str]:
    rows = row["decode"] or row["prompt"]
    if row["decode"] and row["prompt"]:
        rows = f"{row['decode']}+{row['prompt']}"
    seconds = [*(row["parts_s"][name] for name in parts), row["rest_s"]]
    reading = row["parts_s"][_DECODING]
    return [
        str(rows),
        str(row["keys"]),
        f"{1e3 * row['step_s']:.1f}",
        *(f"{100 * spent / row['step_s']:.1f}" for spent in seconds),
        f"{row['kv_read_bytes'] / reading / 1e9:.1f}" if row["decode"] else "",
    ]


#: Name of a part in the kernels -> head of its column.
_PARTS = {
    "products": "products",
    "head": "head",
    _DECODING: "decode",
    "attention of prompts": "prompts",
    "norms": "norms",
    "rotation and writes": "rotate",
    "recurrent layers": "recurrent",
}
_HOW_TO_READ_PARTS = (
    "step: rows that decode + rows of a prompt, run alone; decode, prompts: their attention; "
    "head: where it is the embedding, else it is among the products; rotate: rotation of queries "
    "and keys, and the writes into the pool; recurrent: layers without attention; rest: XLA's own "
    "programs, sampling, launch and host; GB/s: keys and values that decoding rows read"
)
_NO_PARTS = (
    "parts: the native kernels on one device have clocks; these are {kernels} kernels on {device}"
)


def _cells(case: JsonObject) -> list[str]:
    floor = max(case["bytes_floor_s"], case["flops_floor_s"])
    times = case["median_s"], case["fitted_s"], floor
    return [
        case["bucket"],
        f"{case['decode']} + {case['prompt']}",
        str(case["keys"]),
        str(case["longest"]),
        *(f"{1e3 * seconds:.2f}" for seconds in times),
        f"{case['median_s'] / floor:.1f}",
    ]


def _notes(report: JsonObject) -> Iterator[str]:
    yield (
        "rows: decode + prompt; keys, longest: of the decode rows; ms: median; fitted: what the "
        "table says; floor: bytes or operations at the measured rates"
    )
    read, multiplied = report["read_bytes_s"] / 1e9, report["product_flops_s"] / 1e9
    yield f"reading {read:.1f} GB/s, matrix products {multiplied:,.0f} GFLOP/s"
    host = report["table"]["host"]
    yield (
        f"host: {1e3 * host['before']:.2f} ms a step + {1e6 * host['before_per_row']:.1f} us a "
        f"sequence before the launch, {1e3 * host['after']:.2f} ms + "
        f"{1e6 * host['after_per_row']:.1f} us after"
    )
    for kind, error in report["table"]["errors"].items():
        off = f"median error {error['median']:.1%}, of the sum {error['total']:+.1%}"
        yield f"fit of {kind} steps: {off}"
