"""`jitney bench step`: how long a step takes by rows, seats and context, and how far that is from
the floor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jitney.engine.cli.bench_flags import check_numbers, check_writable, write_json
from jitney.engine.cli.display import load_llm
from jitney.engine.cli.flags import Flags, Parser, add_settings, config_from
from jitney.engine.types import JsonObject


def run(arguments: Sequence[str]) -> int:
    """Measure, print, and write the table; exit status 0."""
    args = _make_parser().parse(arguments)
    check_numbers(args, repeats=1, seconds=0)
    check_writable(args, "json")
    from jitney.engine.bench.step import measure
    from jitney.engine.checkpoints.sources import resolve

    config = config_from(args)
    llm = load_llm(config)
    shape = resolve(config.model.id, revision=config.model.revision or None).config
    report = measure(llm, shape, repeats=args.repeats, seconds=args.seconds)
    llm.close()
    if args.json:
        write_json(args.json, report)
    if args.json != "-":
        show(report)
    return 0


def _make_parser() -> Parser:
    parser = Parser(
        "bench step",
        "Time single steps of the engine: the table that jitney simulate --table reads.",
    )
    flags = Flags(parser)
    flags.whole("--repeats", "times each step is run", 7)
    flags.number("--seconds", "begin no new round after this", 60.0)
    report = "write the report with the table; - is standard output"
    flags.add("--json", report, metavar="FILE")
    add_settings(parser, ("model", "engine"))
    return parser


def show(report: JsonObject) -> None:
    """One row a case, times in ms; the floor is the larger of bytes over bandwidth and operations
    over rate.
    """
    from jitney.engine.report.page import Table
    from jitney.engine.report.tables import print_lines, print_table

    heads = ["bucket", "rows", "keys", "longest", "ms", "fitted", "floor", "x floor"]
    table = Table(heads, [_cells(case) for case in report["cases"]])
    kernels = f"{report['kernels']} kernels on {report['device']}"
    print_table(table, f"{report['model']} {report['dtype']}, {kernels}")
    print_lines(_notes(report))


def _cells(case: JsonObject) -> list[str]:
    floor = max(case["bytes_floor_s"], case["flops_floor_s"])
    return [
        case["bucket"],
        f"{case['decode']} + {case['prompt']}",
        str(case["keys"]),
        str(case["longest"]),
        f"{1e3 * case['median_s']:.2f}",
        f"{1e3 * case['fitted_s']:.2f}",
        f"{1e3 * floor:.2f}",
        f"{case['median_s'] / floor:.1f}",
    ]


def _notes(report: JsonObject) -> Iterator[str]:
    """How to read the table, what else was measured, and how well the table fits."""
    yield (
        "rows: decode + prompt; keys, longest: of the decode rows; ms: median; fitted: what the "
        "table says; floor: bytes or operations at the measured rates"
    )
    yield (
        f"copying {report['copy_bytes_s'] / 1e9:.1f} GB/s, matrix products "
        f"{report['product_flops_s'] / 1e9:,.0f} GFLOP/s"
    )
    host = report["table"]["host"]
    yield (
        f"host: {1e3 * host['before']:.2f} ms a step + {1e6 * host['before_per_row']:.1f} us a "
        "sequence before the "
        f"launch, {1e3 * host['after']:.2f} ms + {1e6 * host['after_per_row']:.1f} us after"
    )
    for kind, error in report["table"]["errors"].items():
        yield (
            f"fit of {kind} steps: median error {error['median']:.1%}, of "
            f"the sum {error['total']:+.1%}"
        )
