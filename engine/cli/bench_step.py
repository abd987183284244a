"""`jitney bench step`: how long a step takes by rows, seats and context, and how far that is from
the floor.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence

from jitney.engine.cli.bench_flags import check_numbers, check_writable, write_report
from jitney.engine.cli.display import load_llm
from jitney.engine.cli.flags import Flag, Parser, add_flags, add_settings, config_from
from jitney.engine.config.schema import Config
from jitney.engine.types import JsonDict, JsonObject

_FLAGS = (
    Flag.whole("--repeats", "times each step is run", 7),
    Flag.number("--seconds", "begin no new round after this", 60.0),
    Flag.of("--json", "write the report with the table; - is standard output", metavar="FILE"),
)


def run(arguments: Sequence[str]) -> int:
    """Measure, print, and write the table; exit status 0."""
    args = _make_parser().parse(arguments)
    check_numbers(args, repeats=1, seconds=0)
    check_writable(args, "json")
    report = _measured(args, config_from(args))
    if write_report(args, report):
        show(report)
    return 0


def _measured(args: Namespace, config: Config) -> JsonDict:
    from jitney.engine.bench.step import measure
    from jitney.engine.checkpoints.sources import resolve

    llm = load_llm(config)
    shape = resolve(config.model.id, revision=config.model.revision or None).config
    report = measure(llm, shape, repeats=args.repeats, seconds=args.seconds)
    llm.close()
    return report


def _make_parser() -> Parser:
    parser = Parser(
        "bench step",
        "Time single steps of the engine: the table that jitney simulate --table reads.",
    )
    add_flags(parser, _FLAGS)
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
    median = case["median_s"]
    floor = max(case["bytes_floor_s"], case["flops_floor_s"])
    return [
        case["bucket"],
        f"{case['decode']} + {case['prompt']}",
        str(case["keys"]),
        str(case["longest"]),
        *(f"{1e3 * seconds:.2f}" for seconds in (median, case["fitted_s"], floor)),
        f"{median / floor:.1f}",
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
    table = report["table"]
    yield _host_note(table["host"])
    for kind, error in table["errors"].items():
        yield (
            f"fit of {kind} steps: median error {error['median']:.1%}, of "
            f"the sum {error['total']:+.1%}"
        )


def _host_note(host: Mapping[str, float]) -> str:
    return (
        f"host: {1e3 * host['before']:.2f} ms a step + {1e6 * host['before_per_row']:.1f} us a "
        f"sequence before the launch, {1e3 * host['after']:.2f} ms + "
        f"{1e6 * host['after_per_row']:.1f} us after"
    )
