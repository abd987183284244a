"""`jitney cascade tune`: finds a cascade's threshold, from requests that both models answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from jitney.engine.common.errors import ConfigError, JitneyError
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.terminal import progress_reporter
from jitney.engine.config import Arguments, Command, Flag, FlagGroup
from jitney.engine.fleet.compositions.cascade import Measure
from jitney.engine.fleet.compositions.cascade_tuning import (
    Cost,
    ModelComparison,
    Pair,
    Threshold,
    Thresholds,
    TokenPrices,
    read_requests,
)
from jitney.engine.fleet.compositions.engines import EngineAddress
from jitney.engine.fleet.request import ProxiedRequest

if TYPE_CHECKING:
    from jitney.engine.common.reports.page import Table

_SMALL, _LARGE = "small", "large"
#: Environment variables for API keys; other users of the machine could see flags.
_KEYS = {_SMALL: "JITNEY_SMALL_KEY", _LARGE: "JITNEY_LARGE_KEY"}
_ANY_KEY = "OPENAI_API_KEY"
#: Most thresholds in a table.
_SHOWN = 12
#: Measures to try: over the whole answer, and over windows of tokens.
_MEASURES = (Measure("mean"), *(Measure("least", window) for window in (1, 2, 4, 8, 16, 32)))
_UNITS: dict[Cost, str] = {"price": "the prices given", "seconds": "seconds", "tokens": "tokens"}

_MODELS = (
    Flag("file", {"metavar": "FILE", "help": "requests, one a line (JSON Lines)"}),
    Flag.of(
        "--small",
        "the small model: http://HOST:PORT/MODEL",
        metavar="URL/MODEL",
        required=True,
    ),
    Flag.of("--large", "the large model, likewise", metavar="URL/MODEL", required=True),
    Flag.whole(
        "--at-once", "requests open at a time; with more than 1, seconds say little", 1, least=1
    ),
    Flag.number("--timeout-s", "seconds an answer may take", 600.0, least=0.001),
)
_ASKED = (
    Flag.number("--agreement", "wanted agreement with the large model, 0 to 1", 0.95),
    Flag.of(
        "--agree",
        "what agreement is: equal (the same text but for case, spaces and punctuation at the "
        "ends) or words (F1 of the words shared)",
        "equal",
        choices=("equal", "words"),
    ),
    Flag.of(
        "--measure",
        "mean, or least:WINDOW; all are tried where none is named, and the cheapest is taken",
        metavar="NAME",
    ),
    Flag.of(
        "--cost",
        "what is to be little: price (needs both prices), seconds or tokens [price if both are "
        "given, else seconds]",
        choices=tuple(_UNITS),
    ),
    Flag.number("--small-price", "of a million tokens of the small model", least=0),
    Flag.number("--large-price", "of a million tokens of the large model", least=0),
    Flag.output("--json", "write all figures to a file; - is standard output"),
)
_DEFAULTS = (
    Flag.whole("--max-tokens", "of requests that do not say", least=1),
    Flag.number("--temperature", "of requests that do not say", 0.0, least=0),
)
_COMMAND = Command(
    "cascade tune",
    "Ask both models every request of a file, and say what each threshold of a cascade would "
    "have cost and how often it would have agreed with the large model.",
    (
        FlagGroup(_MODELS),
        FlagGroup(_ASKED, "what is wanted"),
        FlagGroup(_DEFAULTS, "fields of requests"),
    ),
    usage="jitney cascade tune FILE --small URL/MODEL --large URL/MODEL [FLAG ...]",
)


def cascade_tune(arguments: Sequence[str]) -> int:
    """Find and print the threshold; exit status 1 if none reaches the requested agreement."""
    args = _COMMAND.parse(arguments)
    _check(args)
    by = _cost_of(args)
    measures = [_measure_from(args.measure)] if args.measure else list(_MEASURES)
    requests = read_requests(Path(args.file), _fields_from(args))
    pairs, refusals = asyncio.run(_compare(args, requests))
    if not pairs:
        raise JitneyError(f"no request was answered by both models: {refusals[0]}")
    tried = [Thresholds.of(pairs, measure, by) for measure in measures]
    # Of equal ones, the first.
    best = min(tried, key=lambda each: each.cost_share(args.agreement))
    chosen = best.cheapest(args.agreement)
    tuned = _Tuned(by, args.agreement, pairs, refusals, tried, best, chosen)
    if args.write_report(_report_of(tuned)):
        _show(tuned)
    return int(chosen is None)


@dataclass(frozen=True, slots=True)
class _Tuned:
    by: Cost
    wanted: float
    pairs: list[Pair]
    refusals: list[str]
    #: Thresholds of each measure.
    tried: list[Thresholds]
    best: Thresholds
    #: The chosen threshold; None if none reaches the requested agreement.
    chosen: Threshold | None


def _check(args: Arguments) -> None:
    """Raises ConfigError."""
    if not 0 < args.agreement <= 1:
        raise ConfigError(f"--agreement must be over 0 and at most 1, not {args.agreement:g}")


def _cost_of(args: Arguments) -> Cost:
    """Raises ConfigError."""
    prices = TokenPrices(args.small_price, args.large_price)
    if args.cost == "price" and not prices.known:
        raise ConfigError("--cost price needs --small-price and --large-price")
    if args.cost:
        return args.cost
    return "price" if prices.known else "seconds"


def _measure_from(text: str) -> Measure:
    """Raises ConfigError."""
    name, _, window = text.partition(":")
    if text == "mean":
        return Measure("mean")
    if name == "least" and window.isdecimal() and 1 <= int(window) <= 4096:
        return Measure("least", int(window))
    raise ConfigError(f"--measure must be mean or least:WINDOW such as least:8, not {text!r}")


def _fields_from(args: Arguments) -> JsonDict:
    fields: JsonDict = {"temperature": args.temperature}
    return fields if args.max_tokens is None else fields | {"max_tokens": args.max_tokens}


def _address_from(flag: str, text: str) -> EngineAddress:
    """Parse http://HOST:PORT/MODEL, with or without /v1. Raises ConfigError."""

    parts = urlsplit(text)
    model = parts.path.removeprefix("/v1/").strip("/")
    if parts.scheme not in ("http", "https") or not parts.netloc or not model or model == "v1":
        raise ConfigError(f"--{flag} {text}: give http://HOST:PORT/MODEL")
    key = os.environ.get(_KEYS[flag]) or os.environ.get(_ANY_KEY, "")
    return EngineAddress(f"{parts.scheme}://{parts.netloc}", model, key)


async def _compare(
    args: Arguments, requests: Sequence[ProxiedRequest]
) -> tuple[list[Pair], list[str]]:
    from jitney.engine.fleet.compositions.engines import engines_at

    addresses = {name: _address_from(name, getattr(args, name)) for name in (_SMALL, _LARGE)}
    prices = TokenPrices(args.small_price, args.large_price)
    async with engines_at(addresses) as engines:
        comparison = ModelComparison(
            engines, _SMALL, _LARGE, args.agree, prices, timeout_s=args.timeout_s
        )
        report, total = progress_reporter("requests"), len(requests)
        return await comparison.run(requests, args.at_once, lambda done: report(done, total))


def _report_of(tuned: _Tuned) -> JsonDict:
    return {
        "requests": len(tuned.pairs),
        "refused": tuned.refusals,
        "cost_by": tuned.by,
        "wanted_agreement": tuned.wanted,
        "small": msgspec.to_builtins(_total(tuned.pairs, _SMALL)),
        "large": msgspec.to_builtins(_total(tuned.pairs, _LARGE)),
        "measure": msgspec.to_builtins(tuned.best.measure),
        "chosen": msgspec.to_builtins(tuned.chosen),
        "measures": msgspec.to_builtins(tuned.tried),
    }


def _total(pairs: Sequence[Pair], name: str) -> JsonDict:
    spent = [getattr(pair, name) for pair in pairs]
    return {field: sum(each.of(field) for each in spent) for field in _UNITS}


def _show(tuned: _Tuned) -> None:
    from jitney.engine.common.reports.page import Table, print_lines

    if len(tuned.tried) > 1:
        rows: list[list[str]] = []
        for each in tuned.tried:
            cheapest = each.cheapest(tuned.wanted)
            rows.append([str(each.measure), *(_cells(cheapest)[:4] if cheapest else [""] * 4)])
        heads = ["measure", "threshold", "small sends", "agreement", "cost"]
        Table(heads, rows).print(f"Each measure's cheapest for {tuned.wanted:.1%}")
    _threshold_table(tuned).print(f"Thresholds by the measure {tuned.best.measure}")
    print_lines(_lines(tuned))


def _threshold_table(tuned: _Tuned) -> Table:
    from jitney.engine.common.reports.page import Table

    heads = ["threshold", "small sends", "agreement", "cost", "95 %", "tokens", "seconds", ""]
    if tuned.by == "price":
        heads.insert(-1, "price")
    rows: list[list[str]] = []
    for each in tuned.best.shown(_SHOWN, tuned.chosen):
        cells = [*_cells(each), f"{each.spent.tokens:,}", f"{each.spent.seconds:.1f}"]
        if tuned.by == "price":
            cells.append(f"{each.spent.price:.4g}")
        rows.append([*cells, "chosen" if each == tuned.chosen else ""])
    return Table(heads, rows)


def _cells(threshold: Threshold) -> list[str]:
    return [
        f"{threshold.threshold:.4f}",
        f"{threshold.kept:.1%}",
        f"{threshold.agreement:.1%}",
        f"{threshold.cost_share:.1%}",
        f"{threshold.low:.1%} to {threshold.high:.1%}",
    ]


def _lines(tuned: _Tuned) -> Iterator[str]:
    n = len(tuned.pairs)
    yield f"{n} requests; cost by {_UNITS[tuned.by]}, beside the large model alone"
    if tuned.refusals:
        yield f"{len(tuned.refusals)} more were refused, the first with: {tuned.refusals[0]}"
    if tuned.chosen is None:
        yield f"no threshold agrees in {tuned.wanted:g} of the requests"
        return
    measure = tuned.best.measure
    yield "in fleet.toml:"
    yield f"  threshold = {tuned.chosen.threshold:.6f}"
    yield f'  measure = "{measure.name}"'
    if measure.name == "least":
        yield f"  window = {measure.window}"
    if tuned.chosen.cost_share >= 1:
        yield "this costs no less than the large model alone, which agrees with itself"
