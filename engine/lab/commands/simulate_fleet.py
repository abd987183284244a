"""`jitney simulate --fleet`: simulates a fleet under a traffic on a virtual clock, with failures
and with replicas that start and stop.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import astuple, replace

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.trace import Arrival
from jitney.engine.config import Command, Flag, FlagGroup
from jitney.engine.lab.commands.bench_flags import JSON
from jitney.engine.lab.commands.fleet_flags import FleetArguments
from jitney.engine.lab.commands.plan import EFFICIENCIES, KV, MODEL
from jitney.engine.lab.figures import columns_table
from jitney.engine.lab.simulation.fleet import Failures, FleetPlan, FleetRun
from jitney.engine.lab.simulation.fleet_planner import FleetAssumptions, ReplicaKind, Targets
from jitney.engine.lab.simulation.fleet_scaling import ScalingRule
from jitney.engine.lab.simulation.fleet_traffic import Day, LengthMeans, Recorded

#: Form of the least and most replicas, such as 2:50.
_SCALE = re.compile(r"([1-9]\d*):([1-9]\d*)")
_RULE = ScalingRule()
_DEFAULT = FleetAssumptions()
#: Default for the most requests of a run, which then takes half a minute.
_MOST = 20_000

_WHAT = (
    MODEL,
    Flag.of(
        "--device",
        "chips of a replica by tensor parallelism, device and number format of the weights, such "
        "as h100, 4xv5e or l4:int8",
        metavar="WORD",
    ),
    Flag.whole("--replicas", "replicas at the beginning, all ready", least=1),
    Flag.whole("--seats", "most seats of a replica", _DEFAULT.most_seats, least=1),
    Flag.whole("--token-budget", "most rows of a step", _DEFAULT.token_budget, least=2),
    KV,
    Flag.number("--price", "of one chip an hour", least=0),
    Flag.switch(
        "--prefix-cache",
        "prompts of one conversation find the pages of those before, where a --trace names "
        "conversations",
    ),
    JSON,
)
_HOW_MUCH = (
    *FleetArguments.TRAFFIC,
    Flag.number("--rate-s", "seconds that each of --rates holds", 3600.0, least=1e-3),
    Flag.whole("--requests", "most requests; of more, the busiest time", _MOST, least=1),
)
_FAILING = (
    *FleetArguments.RUNNING,
    Flag.number("--notice-s", "seconds until the loss of a machine is noticed", 30.0, least=0),
    Flag.number(
        "--outage-at-s", "seconds after which a part of all machines is lost at once", least=0
    ),
    Flag.number("--outage-share", "of the machines that are lost then", 0.1, least=0),
)
_SCALING = (
    Flag.of("--scale", "least and most replicas, such as 2:50", metavar="LEAST:MOST"),
    Flag.number(
        "--target-wait-s",
        "predicted wait of the tenth of the replicas where it is longest, above which some are "
        "started",
        _RULE.target_wait_s,
    ),
    Flag.number(
        "--fill",
        "seats that the traffic needs over those there are, above which replicas are started; 1: "
        "only by the wait",
        _RULE.fill,
    ),
    Flag.number("--calm-s", "seconds of calm before a replica is let go", _RULE.calm_s),
)
_COMMAND = Command(
    "simulate --fleet",
    "Predict what a fleet does with given traffic: replicas, an ingress and failures on a virtual "
    "clock. Step times are those of `jitney plan`.",
    (
        FlagGroup(_WHAT),
        FlagGroup(_HOW_MUCH, "traffic"),
        FlagGroup(_FAILING, "routing and failures"),
        FlagGroup(_SCALING, "replicas that come and go"),
        FlagGroup(EFFICIENCIES, "assumptions"),
    ),
    usage="jitney simulate --fleet MODEL --device WORD --replicas N --rates LIST [FLAG ...]",
)


def simulate_fleet(arguments: Sequence[str]) -> int:
    """Simulate one fleet; exit status 0. Raises ConfigError."""
    args = _COMMAND.parse_as(FleetArguments, arguments)
    _check(args)
    kind = args.kind_of(args.device, {})
    arrivals, asked = _arrivals_of(args)
    plan = _plan_of(args, kind, arrivals)
    began = time.perf_counter()
    run = plan.simulate(arrivals)
    took = time.perf_counter() - began
    hour = None if args.price is None else args.price * kind.roofline.count
    report = _report_of(args, plan, run, asked, hour)
    report["simulated_in_s"] = round(took, 1)
    if args.write_report(report):
        _show(args, report)
    return 0


def _check(args: FleetArguments) -> None:
    """Raise ConfigError for invalid flags before the simulation."""
    if not args.model or not args.device or not args.replicas:
        raise ConfigError(
            "say what to simulate: jitney simulate --fleet MODEL --device WORD --replicas N "
            "--rates LIST"
        )
    args.check_running()
    if args.prefix_cache and not args.trace:
        raise ConfigError("--prefix-cache is for --trace: made-up traffic has no conversations")


def _arrivals_of(args: FleetArguments) -> tuple[list[Arrival], int]:
    """(the simulated requests, number of requests in the whole traffic)."""
    traffic = args.traffic()
    if isinstance(traffic, Recorded):
        return traffic.busiest(1.0, args.requests, args.seed), len(traffic.arrivals)
    day: Day = replace(traffic, hour_s=args.rate_s)
    n_requests = round(sum(day.rates) * day.hour_s)
    if n_requests > args.requests:
        return day.busiest(1.0, args.requests, args.seed), n_requests
    arrivals = day.whole(args.seed)
    return arrivals, len(arrivals)


def _plan_of(args: FleetArguments, kind: ReplicaKind, arrivals: Sequence[Arrival]) -> FleetPlan:
    how = FleetAssumptions(token_budget=args.token_budget, most_seats=args.seats)
    _, engine = kind.engine_for(LengthMeans.of(arrivals), Targets(ttft_s=1.0), how)
    return FleetPlan(
        engine,
        kind.roofline,
        args.replicas,
        args.router,
        prefix_cache=args.prefix_cache,
        failures=_failures_of(args, kind.roofline.count),
        scaling=_scaling_of(args),
        start_s=args.start_s,
        seed=args.seed,
    )


def _failures_of(args: FleetArguments, chips: int) -> Failures:
    failures = replace(args.failures().of_replica(chips), notice_s=args.notice_s)
    if args.outage_at_s is None:
        return failures
    return replace(failures, outage_at=args.outage_at_s, outage_share=args.outage_share)


def _scaling_of(args: FleetArguments) -> ScalingRule | None:
    """The scaling rule; None for a constant number of replicas. Raises ConfigError."""
    if args.scale is None:
        return None
    scale = _SCALE.fullmatch(args.scale)
    if scale is None:
        raise ConfigError(f"--scale: {args.scale!r} is none; write least and most, such as 2:50")
    least, most = map(int, scale.groups())
    return ScalingRule(
        target_wait_s=args.target_wait_s,
        fill=args.fill,
        calm_s=args.calm_s,
        least=least,
        most=most,
    )


def _report_of(
    args: FleetArguments, plan: FleetPlan, run: FleetRun, asked: int, hour: float | None
) -> JsonDict:
    """The report of a run. hour: price of a replica per hour."""
    return {
        "model": args.model,
        "device": args.device,
        "replicas": plan.replicas,
        "router": plan.router,
        "engine": {
            "seats": plan.engine.limits.max_seats,
            "pages": plan.engine.pages,
            "context": plan.engine.limits.context_length,
        },
        "requests_of_traffic": asked,
        "figures": run.figures(),
        "cost_per_million": None if hour is None else run.cost_per_million(hour),
        "moments": [list(astuple(moment)) for moment in run.moments],
    }


#: Figures in the table.
_SHOWN = {
    "requests": "requests",
    "refused": "refused_share",
    "requests/s": "req_s",
    "output tokens/s": "output_tok_s",
    "first token p50": "ttft_p50_s",
    "first token p99": "ttft_p99_s",
    "tokens/s of the slowest 1 %": "stream_tok_p1_s",
    "prompt tokens found": "hit_rate",
    "cores lost": "core_failures",
    "machines lost": "machine_failures",
    "went on in a new core": "continued",
    "begun again elsewhere": "repeated",
    "replicas started": "started",
    "most replicas ready": "most_ready",
    "replica-hours": "replica_hours",
    "cost of a million output tokens": "cost_per_million",
}


def _show(args: FleetArguments, report: JsonDict) -> None:
    from jitney.engine.common.reports.page import print_lines

    figures, engine = report["figures"], report["engine"]
    shown = {"value": figures | {"cost_per_million": report["cost_per_million"]}}
    title = f"{args.replicas:,} x {args.device} ({args.model}), router {args.router}"
    columns_table(shown, _SHOWN).print(title)
    notes = [
        f"a replica has {engine['seats']} seats and {engine['pages']:,} pages",
        f"simulated in {report['simulated_in_s']:g} s; step times are estimates from published "
        "peaks, latencies are those after the first tenth of the time",
    ]
    asked = report["requests_of_traffic"]
    if figures["requests"] < asked:
        notes.insert(0, f"of {asked:,} requests those of the busiest time (--requests)")
    print_lines(notes)
