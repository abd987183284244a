"""`jitney plan buckets`: finds the padded sizes to compile for, from step records or simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from jitney.engine.common.errors import ConfigError
from jitney.engine.config import Command, Config, Flag, FlagGroup
from jitney.engine.core import Bucket, Buckets, EngineShape
from jitney.engine.lab.commands.bench_flags import JSON
from jitney.engine.lab.commands.simulate_flags import SimulateArguments
from jitney.engine.lab.simulation.bucket_tuner import (
    DECODE_EXECUTABLES,
    Proposal,
    SeenSteps,
    check_budget,
)

if TYPE_CHECKING:
    import numpy as np

    from jitney.engine.core import StepTimes

_FLAGS = (
    Flag.whole(
        "--budget", "executables to compile; 0: as many as the present buckets take", 0, least=0
    ),
    JSON,
)
_SEEN = (
    Flag.of(
        "--records",
        "step records of a real run (.npz or .npy); else traffic is simulated",
        metavar="FILE",
    ),
    Flag.of(
        "--table",
        "step times measured by jitney bench step --json FILE",
        metavar="FILE",
    ),
    Flag.of(
        "--device",
        "step times of a device's roofline; else, with --records, those of the records",
        dest="chip",
        metavar="NAME",
    ),
)
_COMMAND = Command(
    "plan buckets",
    "Propose the seat and token buckets whose steps take the least time under a compile budget.",
    (
        FlagGroup(_FLAGS),
        FlagGroup(_SEEN, "what was seen"),
        SimulateArguments.traffic_flags(requests=1000, arrivals="poisson"),
        SimulateArguments.PACE,
    ),
    sections=("model", "engine"),
    leave_out=SimulateArguments.NOT_SIMULATED,
    constants={"count": 1, "weight_format": "bf16", "kv": "bf16", "seats": None, "measured": None},
)


def plan_buckets(arguments: Sequence[str]) -> int:
    """Print the sizes as the flags that set them, and the padding they save; exit status 0."""
    args = _COMMAND.parse_as(SimulateArguments, arguments)
    config = args.load_config()
    present = EngineShape.buckets_of(config.engine, bool(args.chip))
    budget = args.budget or DECODE_EXECUTABLES * len(present.decode) + len(present.mixed)
    check_budget(budget)  # before a simulation that takes seconds
    records, times = _seen_steps(args, config, present)
    proposal = SeenSteps.of(records).propose(present, budget, times)
    shares = {"share": proposal.share, "share_now": proposal.share_now}
    report = msgspec.to_builtins(proposal) | {"steps": len(records), **shares}
    if args.write_report(report):
        _show(proposal, len(records), budget)
    return 0


def _seen_steps(
    args: SimulateArguments, config: Config, present: Buckets
) -> tuple[np.ndarray, StepTimes]:
    """(step records from the file or from simulated traffic, step times)."""
    if not args.records:
        times = args.step_times(config)
        return _simulated_steps(args, config, present, times), times
    if args.trace:
        raise ConfigError("--records says what was seen: give no --trace with it")
    records = args.read_records()
    _check_fit(records, present)
    if args.table or args.chip:
        args.records = ""  # the times are others'
    return records, args.step_times(config)


def _check_fit(records: np.ndarray, present: Buckets) -> None:
    most = [int(records[name].max()) for name in ("bucket_seats", "bucket_tokens")]
    if most[0] > present.seats or most[1] > present.token_budget:
        raise ConfigError(
            "the records are of an engine with more seats or a larger token budget: give its "
            "--max-seats and --token-budget"
        )


def _simulated_steps(
    args: SimulateArguments, config: Config, present: Buckets, table: StepTimes
) -> np.ndarray:
    """Records of simulated steps, with a bucket for every size, so that no step is padded."""
    arrivals, policy = args.coming(), config.engine.policy
    shape = replace(args.shape_for(config, arrivals, table), buckets=_every_size(present))
    return args.simulate(policy, arrivals, shape, table, args.concurrency).records


def _every_size(present: Buckets) -> Buckets:
    seats, budget = present.seats, present.token_budget
    decode = [Bucket(rows, rows) for rows in range(1, seats + 1)]
    mixed = [Bucket.mixed(rows, seats) for rows in range(Bucket.fewest_rows, budget + 1)]
    return Buckets(tuple(decode), tuple(mixed))


def _show(proposal: Proposal, steps: int, budget: int) -> None:
    print(f"from {steps:,} steps, {proposal.executables} of {budget} executables:")
    for kind in ("seat", "token"):
        sizes = getattr(proposal, f"{kind}_buckets")
        print(f"  --{kind}-buckets {','.join(map(str, sizes))}")
    print(
        f"padding: {proposal.share_now:.1%} of all rows with the present buckets, "
        f"{proposal.share:.1%} with these ({proposal.rows_saved:,} rows saved)"
    )
    print(
        f"time: {proposal.seconds_now:,.3f} s of all steps with the present buckets, "
        f"{proposal.seconds:,.3f} s with these"
    )
