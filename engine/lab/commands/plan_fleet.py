"""`jitney plan --fleet`: finds kind, number and price of replicas for a traffic and targets."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict
from jitney.engine.config import Command, Flag, FlagGroup
from jitney.engine.lab.commands.bench_flags import JSON
from jitney.engine.lab.commands.fleet_flags import FleetArguments
from jitney.engine.lab.commands.plan import EFFICIENCIES, KV, MODEL, assumptions_of
from jitney.engine.lab.figures import rows_table
from jitney.engine.lab.simulation.devices import DEVICES, Accelerator
from jitney.engine.lab.simulation.fleet_planner import (
    FleetAssumptions,
    FleetSizing,
    ReplicaKind,
    Targets,
)
from jitney.engine.lab.simulation.fleet_traffic import Day, Recorded

_HOUR_S = 3600.0


def plan_fleet(arguments: Sequence[str]) -> int:
    """Size a fleet of each kind and compare them; exit status 0, or 1 if none keeps the targets."""
    args = _COMMAND.parse_as(FleetArguments, arguments)
    _check(args)
    kinds = _kinds_of(args)
    traffic, targets, how = (
        args.traffic(),
        Targets(args.slo_ttft_ms / 1e3, args.stream_tok_s, args.refused / 100),
        _assumptions_of(args),
    )
    began = time.perf_counter()
    sizings = [FleetSizing.of(kind, traffic, targets, how) for kind in kinds]
    report = _report_of(args, traffic, sizings, how)
    report["planned_in_s"] = round(time.perf_counter() - began, 1)
    if args.write_report(report):
        _show(args, traffic, sizings, report)
    return int(all(sizing.problem for sizing in sizings))


_WHAT = (
    MODEL,
    Flag.of(
        "--devices",
        "replicas to compare: chips of one by tensor parallelism, device and number format of the "
        f"weights, such as h100,4xv5e,l4:int8; devices: {', '.join(DEVICES)}",
        metavar="LIST",
    ),
    Flag.of("--prices", "of one chip an hour, such as h100=2.5,v5e=1.2", "", metavar="LIST"),
    KV,
)
_TARGETS = (
    Flag.number(
        "--slo-ttft-ms",
        "most milliseconds to the first token, for 99 in 100 requests",
        1000.0,
        metavar="MS",
        least=1e-3,
    ),
    Flag.number(
        "--stream-tok-s", "least tokens a second of 99 in 100 streams; 0: any", 0.0, least=0
    ),
    Flag.number("--refused", "most of 100 requests that may be refused", 0.1, least=0),
)
_DEFAULT = FleetAssumptions()
_HOW = (
    *FleetArguments.RUNNING,
    Flag.whole("--most-seats", "most seats of a replica", _DEFAULT.most_seats, least=1),
    Flag.whole("--token-budget", "most rows of a step", _DEFAULT.token_budget, least=2),
    Flag.whole(
        "--requests", "requests of one simulation, at most", _DEFAULT.most_requests, least=1000
    ),
    JSON,
)
_COMMAND = Command(
    "plan --fleet",
    "Sizes a fleet: how many replicas of what, at which price, for a traffic and its targets.",
    (
        FlagGroup(_WHAT),
        FlagGroup(FleetArguments.TRAFFIC, "traffic"),
        FlagGroup(_TARGETS, "targets"),
        FlagGroup(_HOW, "how it is run"),
        FlagGroup(EFFICIENCIES, "assumptions"),
    ),
    usage="jitney plan --fleet MODEL --devices LIST --rates LIST [FLAG ...]",
)


def _check(args: FleetArguments) -> None:
    """Raise ConfigError for invalid flags before the simulation."""
    if not args.model or not args.devices:
        raise ConfigError("say what to size: jitney plan --fleet MODEL --devices LIST --rates LIST")
    args.check_running()


def _kinds_of(args: FleetArguments) -> list[ReplicaKind]:
    prices = _prices_of(args)
    kinds = [args.kind_of(word, prices) for word in args.words_of("devices")]
    if not kinds:
        raise ConfigError("--devices: names no device")
    unused = prices.keys() - {kind.roofline.device.name for kind in kinds}
    if unused:
        raise ConfigError(f"--prices: {', '.join(sorted(unused))} is not among --devices")
    return kinds


def _prices_of(args: FleetArguments) -> dict[str, float]:
    """Device -> price per chip-hour."""
    prices: dict[str, float] = {}
    words = args.words_of("prices")
    for word in words:
        name, _, price = word.partition("=")
        with suppress(ValueError):
            prices[Accelerator.named(name.strip()).name] = float(price)
    if len(prices) != len(words) or not all(0 < p < math.inf for p in prices.values()):
        raise ConfigError(f"--prices: {args.prices!r} is none; write such as h100=2.5,v5e=1.2")
    return prices


def _assumptions_of(args: FleetArguments) -> FleetAssumptions:
    return FleetAssumptions(
        router=args.router,
        failures=args.failures(),
        start_s=args.start_s,
        token_budget=args.token_budget,
        most_seats=args.most_seats,
        most_requests=args.requests,
        seed=args.seed,
    )


def _report_of(
    args: FleetArguments, traffic: Day | Recorded, sizings: list[FleetSizing], how: FleetAssumptions
) -> JsonDict:
    cheapest = _cheapest(sizings)
    return {
        "model": args.model,
        "rates": list(traffic.rates),
        "hour_s": traffic.hour_s,
        "targets": {
            "ttft_p99_s": args.slo_ttft_ms / 1e3,
            "stream_tok_s": args.stream_tok_s,
            "refused_share": args.refused / 100,
        },
        "fleets": [_fleet_json(sizing) for sizing in sizings],
        "cheapest": cheapest.kind.name if cheapest else None,
        "assumed": list(_assumptions(sizings, how)),
    }


def _fleet_json(sizing: FleetSizing) -> JsonDict:
    """The fleet of one kind as JSON; unknown values are None."""
    kind = sizing.kind
    return {
        "device": kind.name,
        "problem": sizing.problem or None,
        "seats": sizing.seats,
        "pages": sizing.pages,
        "load_req_s": sizing.load_req_s,
        "replicas": sizing.replicas,
        "spare": sizing.spare,
        "chips": sizing.replicas * kind.roofline.count,
        "by_hour": list(sizing.by_hour),
        "price_per_hour": sizing.price_per_hour,
        "fixed": {
            "replica_hours": sizing.fixed_replica_hours,
            "cost_per_million": sizing.cost_per_million(sizing.fixed_replica_hours),
        },
        "scaled": {
            "replica_hours": sizing.scaled_replica_hours,
            "cost_per_million": sizing.cost_per_million(sizing.scaled_replica_hours),
        },
        "output_tokens": sizing.output_tokens,
        "simulated_replicas": sizing.simulated,
        "busiest": sizing.figures or None,
    }


def _cheapest(sizings: Sequence[FleetSizing]) -> FleetSizing | None:
    """The fleet with the least scaled cost; None unless every possible fleet has a price."""
    able = [sizing for sizing in sizings if not sizing.problem]
    if not able or any(sizing.price_per_hour is None for sizing in able):
        return None
    return min(able, key=_scaled_cost)


def _scaled_cost(sizing: FleetSizing) -> float:
    return sizing.cost_per_million(sizing.scaled_replica_hours) or math.inf


def _show(
    args: FleetArguments,
    traffic: Day | Recorded,
    sizings: list[FleetSizing],
    report: JsonDict,
) -> None:
    from jitney.engine.common.reports.page import print_lines

    hour = "hour" if traffic.hour_s == _HOUR_S else f"{traffic.hour_s:g} s"
    rows = [
        _row(sizing, fleet, fleet["device"] == report["cheapest"])
        for sizing, fleet in zip(sizings, report["fleets"], strict=True)
    ]
    rows_table(rows, _HEADS).print(
        f"{args.model}: {max(traffic.rates):,.6g} requests/s in the busiest {hour}"
    )
    print_lines(f"{each.kind.name}: {each.problem}" for each in sizings if each.problem)
    print(f"planned in {report['planned_in_s']:g} s; assumed:")
    print_lines(f"  {line}" for line in report["assumed"])


#: Head of a column -> figure of `_row`.
_HEADS = {
    "replica": "device",
    "seats": "seats",
    "req/s each": "load_req_s",
    "replicas": "replicas",
    "spare": "spare",
    "chips": "chips",
    "TTFT p99": "ttft_p99_s",
    "tok/s p1": "stream_tok_p1_s",
    "refused": "refused_share",
    "price/h": "price_per_hour",
    "cost/M fixed": "fixed_cost",
    "cost/M scaled": "scaled_cost",
    "": "verdict",
}


def _row(sizing: FleetSizing, fleet: JsonDict, is_cheapest: bool) -> JsonDict:
    """A row of the table. fleet: the result of `_fleet_json`."""
    if sizing.problem:
        return {"device": sizing.kind.name, "verdict": "no"}
    return {
        **sizing.figures,
        **fleet,
        "fixed_cost": fleet["fixed"]["cost_per_million"],
        "scaled_cost": fleet["scaled"]["cost_per_million"],
        "verdict": "cheapest" if is_cheapest else "",
    }


def _assumptions(sizings: Sequence[FleetSizing], how: FleetAssumptions) -> Iterator[str]:
    lines = [line for sizing in sizings for line in assumptions_of(sizing.kind.roofline)]
    yield from dict.fromkeys(lines)
    yield (
        "step times are estimates from published peaks, not measurements; the replicas run the "
        "engine's own scheduler on them"
    )
    failures = how.failures
    yield (
        f"a core dies every {failures.core_mtbf_s / _HOUR_S:g} h and is back in "
        f"{failures.core_recovery_s:g} s, a chip is lost every "
        f"{failures.machine_mtbf_s / _HOUR_S:g} h, a replica starts in {how.start_s:g} s; spare: "
        "that fewer are up than needed has a chance of 1 in 1,000"
    )
    yield (
        f"router {how.router}; the ingress sees loads every 0.25 s and predicted waits every "
        "second, and takes no time itself; no prefix is found in a cache"
    )
    yield (
        "a load is looked for with 4 replicas, at most 95 % of what their seats can serve; the "
        "busiest time is simulated with at most 32, with their share of the traffic and at most "
        f"{how.most_requests:,} requests"
    )
    yield "scaled: as many as each hour needs, started so long before it; fixed: as the busiest"
