"""`jitney bench sizes`: times steps of growing sizes, and prints the sizes for `jitney serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import date
from typing import TYPE_CHECKING

import msgspec

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.platforms import check_platform, runs_on_device
from jitney.engine.common.requests import JsonObject
from jitney.engine.config import SIZES, Command, Flag, FlagGroup, ResolvedConfig
from jitney.engine.lab.commands.bench_flags import JSON
from jitney.engine.lab.server_sizes import ServerSizes
from jitney.engine.lab.tuned_sizes import TunedSizes

if TYPE_CHECKING:
    from jitney.engine.lab.bench.sizes import SizeTimes

_FLAGS = (
    Flag.switch("--keep", "have jitney serve take these sizes from now on, with these settings"),
    JSON,
)
_COMMAND = Command(
    "bench sizes",
    "Time steps of growing sizes on this CPU, and say which sizes jitney serve chooses by them.",
    [FlagGroup(_FLAGS)],
    sections=("model", "engine"),
    leave_out=(*sorted(SIZES), *Command.ONLY_SERVED),
)


def bench_sizes(arguments: Sequence[str]) -> int:
    """Measure, print, and store the chosen sizes if requested; exit status 0."""
    from jitney.engine.lab.bench.sizes import sizes_here

    args = _COMMAND.parse(arguments)
    resolved = args.load_layers()
    _check(resolved)
    config = resolved.config
    measured = asyncio.run(sizes_here(config))
    sizes = ServerSizes(resolved)
    chosen = TunedSizes(measured.values, date.today().isoformat())
    if args.keep:
        reason = chosen.keep(config, sizes.machine)
        if reason:
            raise ConfigError(f"the sizes cannot be kept: {reason}")
    report = {"machine": sizes.machine, "model": config.model.id, **msgspec.to_builtins(measured)}
    if args.write_report(report):
        _show(report, measured.times, chosen)
    return 0


def _check(resolved: ResolvedConfig) -> None:
    """Raise ConfigError if no size can be chosen."""
    engine = resolved.config.engine
    check_platform(engine.platform)
    if runs_on_device(engine.platform):
        raise ConfigError("sizes are measured on a CPU: give --platform cpu")
    if engine.tensor_parallel > 1 or engine.n_hosts > 1:
        raise ConfigError("sizes are measured of an engine that is one process")
    for name in sorted(SIZES & set(resolved.origins)):
        where = resolved.origins[name]
        raise ConfigError(f"{where}: one given size decides on all; leave it out")


def _show(report: JsonObject, timed: Sequence[SizeTimes], chosen: TunedSizes) -> None:
    from jitney.engine.common.reports.page import Table, print_lines

    rows = [row for times in timed for row in _rows(times)]
    table = Table(["threads", "step", "rows", "ms", "rows/s"], rows)
    table.print("{model} on {machine}".format_map(report))
    print_lines([f"jitney serve: {chosen.flags}"])


def _rows(times: SizeTimes) -> Iterator[list[str]]:
    for name, timed in (("decode", times.decode), ("prompt", times.prompts)):
        for step in timed:
            figures = f"{1e3 * step.seconds:.2f}", f"{step.rate:,.0f}"
            yield [str(times.threads), name, str(step.size), *figures]
