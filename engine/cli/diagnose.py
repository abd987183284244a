"""`jitney diagnose`: finds out from live metrics why a server is slow, and what to change."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from jitney.engine.cli.asking import Refused, ask
from jitney.engine.cli.config_command import settings_of
from jitney.engine.cli.diagnosis import COMPLAINTS, Figures, Finding, diagnose
from jitney.engine.common.errors import JitneyError
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.scrape import Scrape
from jitney.engine.common.terminal import visible
from jitney.engine.config import KEY_FLAG, Command, Flag, FlagGroup

_DEFAULT_URL = "http://127.0.0.1:8000"
#: Seconds between two scrapes.
_EVERY_S = 1.0
#: Most engines of a fleet that are watched at once.
_MOST_AT_ONCE = 64
_NO_METRICS = {404: "it has no metrics of Jitney; is this a Jitney server?"}
_NO_FLEET = {404: "it has no /fleet/replicas; is this a Jitney fleet?"}
#: Parts of the headline; those with unknown figures are left out.
_HEADLINE = {
    "seats": "{running:.1f} of {seats:.0f} seats taken",
    "waiting": "{waiting:.1f} waiting",
    "first_token_s": "first token {first_token_s:.2f} s",
    "token_gap_s": "between tokens {token_gap_s:.3f} s",
    "output_tok_s": "{output_tok_s:.0f} tokens/s",
    "page_share": "{page_share:.0%} of the pages in use",
    "bandwidth": "{bandwidth:.0%} of the memory bandwidth",
    "operations": "{operations:.0%} of the arithmetic",
}


def _command() -> Command:
    flags = (
        Flag.of("url", "a server or a fleet", _DEFAULT_URL, nargs="?", metavar="URL"),
        Flag.number("--seconds", "how long to watch it", 10.0, least=_EVERY_S),
        Flag.switch("--json", "print one JSON object"),
        KEY_FLAG,
    )
    return Command(
        "diagnose",
        "Watch a running server's metrics; print why it is slow and the one thing to change.",
        [FlagGroup(flags)],
        usage="jitney diagnose [URL] [FLAG ...]",
    )


def run(arguments: Sequence[str]) -> int:
    """Watch the server and print findings; exit status 0. Raises Refused if it does not answer."""
    args = _command().parse(arguments)
    url = args.url if "://" in args.url else f"http://{args.url}"
    url = url.rstrip("/").removesuffix("/dashboard")
    key = args.engine_key()
    reports = _fleet(url, key, args.seconds) or [_engine(url, key, args.seconds)]
    if args.json:
        print(json.dumps([report.as_json() for report in reports], indent=2))
    else:
        print(visible("\n".join(line for report in reports for line in report.lines())))
    return 0


@dataclass(frozen=True, slots=True)
class _Report:
    #: URL, or model and replica.
    name: str
    #: None: its metrics could not be read.
    figures: Figures | None = None
    #: State in the fleet, and why the metrics could not be read.
    note: str = ""

    def as_json(self) -> JsonDict:
        report: JsonDict = {"engine": self.name, "note": self.note}
        if self.figures is not None:
            values = asdict(self.figures).items()
            report["figures"] = {
                name: None if math.isnan(value) else value for name, value in values
            }
            report["findings"] = {
                complaint: finding and finding._asdict()
                for complaint, finding in diagnose(self.figures).items()
            }
        return report

    def lines(self) -> Iterator[str]:
        yield self.name
        if self.note:
            yield f"  {self.note}"
        if self.figures is None:
            return
        values = asdict(self.figures)
        parts = [
            text.format_map(values)
            for name, text in _HEADLINE.items()
            if not math.isnan(values[name])
        ]
        yield f"  in {self.figures.seconds:.0f} s: {', '.join(parts)}"
        for complaint, finding in diagnose(self.figures).items():
            yield ""
            yield f"  {COMPLAINTS[complaint]}?"
            yield from _answer(finding)


def _answer(finding: Finding | None) -> Iterator[str]:
    if finding is None:
        yield "    no cause found in these figures"
        return
    yield f"    seen:   {finding.seen}"
    yield f"    cause:  {finding.cause}"
    if finding.change:
        yield f"    change: {finding.change}"


def _engine(url: str, key: str, seconds: float) -> _Report:
    """Watch one engine. Raises Refused."""
    started = time.monotonic()
    scrapes = [_scrape(url, key)]
    while (left := started + seconds - time.monotonic()) > 0:
        time.sleep(min(left, _EVERY_S))
        scrapes.append(_scrape(url, key))
    return _Report(url, Figures.of(scrapes, time.monotonic() - started, _policy(url, key)))


def _scrape(url: str, key: str) -> Scrape:
    """The engine's metrics. Raises Refused if they are not Jitney's."""
    scrape = Scrape(ask(url, "/metrics", key, _NO_METRICS).decode("utf-8", "replace"))
    if not scrape.names():
        raise Refused(f"{url}: {_NO_METRICS[404]}")
    return scrape


def _policy(url: str, key: str) -> str:
    try:
        return str(settings_of(url, key).settings["policy"].value)
    except (JitneyError, KeyError):
        return ""


def _fleet(url: str, key: str, seconds: float) -> list[_Report]:
    """Watch all engines of a fleet at once; [] if the URL is no fleet's. Raises Refused."""
    if "fleet_replicas" not in _scrape(url, key).names():
        return []
    models = json.loads(ask(url, "/fleet/replicas", key, _NO_FLEET))["models"]
    replicas = [
        (f"{model}, {replica['name']}", replica)
        for model, replicas in models.items()
        for replica in replicas
    ]
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        reports = [pool.submit(_replica, *replica, key, seconds) for replica in replicas]
        return [report.result() for report in reports]


def _replica(name: str, replica: JsonDict, key: str, seconds: float) -> _Report:
    """The fleet's view of an engine, and its own metrics if it accepts the key."""
    note = f"in the fleet: {replica['state']} ({replica['reason']}), load {replica['load']:.0f}"
    if replica["state"] != "ready":
        return _Report(name, note=note)  # it takes no requests, so it has no predicted wait
    note += f", predicted wait {replica['predicted_wait_s']:.1f} s"
    try:
        figures = _engine(replica["url"], key, seconds).figures
    except Refused as error:
        return _Report(name, note=f"{note}; no metrics of its own: {error}")
    return _Report(name, figures, note)
