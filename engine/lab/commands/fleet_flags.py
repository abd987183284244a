"""Flags of the commands that plan or simulate a fleet: traffic, replicas, and failures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar, get_args

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.trace import Arrival
from jitney.engine.config import Arguments, Flag
from jitney.engine.fleet import RouterName
from jitney.engine.lab.simulation.fleet import Failures
from jitney.engine.lab.simulation.fleet_planner import FleetAssumptions, ReplicaKind
from jitney.engine.lab.simulation.fleet_traffic import Day, Recorded
from jitney.engine.lab.simulation.roofline import WEIGHT_FORMATS, Assumptions, Roofline
from jitney.engine.lab.simulation.workload import parse_lengths

_HOUR_S = 3600.0
_START_S = FleetAssumptions().start_s
#: Form of a word of --devices: "h100", "4xv5e", "l4:int8".
_DEVICE = re.compile(r"(?:(?P<count>[1-9]\d{0,3})x)?(?P<name>[a-z0-9-]+)(?::(?P<weights>\w+))?")
_PROMPT = "lognormal:mean=512,sigma=0.8,min=16,max=8000"
_OUTPUT = "lognormal:mean=256,sigma=0.8,min=8,max=2000"


class FleetArguments(Arguments):
    """The parsed flags of a command with `TRAFFIC` and `RUNNING`, and with a kind of replica."""

    #: Flags for the traffic.
    TRAFFIC: ClassVar = (
        Flag.of(
            "--rates",
            "requests a second, hour by hour: one number, or such as 10,8,30 for three hours",
            metavar="LIST",
        ),
        Flag.of(
            "--trace",
            "times and lengths from a file of JSON lines instead (`jitney serve --record`)",
            metavar="FILE",
        ),
        Flag.of("--prompt", f"prompt tokens, as `jitney simulate` takes them [{_PROMPT}]"),
        Flag.of("--output", f"output tokens, likewise [{_OUTPUT}]"),
        Flag.whole("--seed", "of times, lengths and failures", 0, least=0),
    )
    #: Flags for the router and for failures.
    RUNNING: ClassVar = (
        Flag.of(
            "--router",
            "how requests find a replica",
            "least-wait",
            choices=get_args(RouterName.__value__),
        ),
        Flag.number(
            "--core-mtbf-h", "hours between two deaths of a replica's core", 168.0, least=1e-3
        ),
        Flag.number("--core-recovery-s", "seconds until the next core is there", 10.0, least=0),
        Flag.number("--machine-mtbf-h", "hours between two losses of a chip", 50_000.0, least=1e-3),
        Flag.number("--start-s", "seconds until a new replica is ready", _START_S, least=0),
    )

    def check_running(self) -> None:
        """Raise ConfigError for flags of `TRAFFIC` and `RUNNING` that contradict each other."""
        if bool(self.rates) == bool(self.trace):
            raise ConfigError("say what comes: exactly one of --rates and --trace")
        if self.trace and (self.prompt or self.output):
            raise ConfigError("--prompt and --output are for --rates: a trace has its own lengths")

    def kind_of(self, word: str, prices: Mapping[str, float]) -> ReplicaKind:
        """The kind of replica of a word of --devices. prices: per chip-hour. Raises ConfigError."""
        match = _DEVICE.fullmatch(word.lower())
        weights = (match and match["weights"]) or "bf16"
        if match is None or weights not in WEIGHT_FORMATS:
            raise ConfigError(
                f"--devices: {word!r} is none; write h100, 4xv5e or l4:int8, with one of "
                f"{', '.join(WEIGHT_FORMATS)} as the format of the weights"
            )
        reached = self.bandwidth_efficiency, self.flops_efficiency
        assumed = Assumptions(*reached, self.overhead_ms / 1e3)
        roofline = Roofline.named(
            self.model,
            match["name"],
            weights=weights,
            kv=self.kv,
            count=int(match["count"] or 1),
            assumed=assumed,
        )
        return ReplicaKind(word, roofline, prices.get(roofline.device.name))

    def traffic(self) -> Day | Recorded:
        if self.trace:
            return Recorded(Arrival.read_all(self.trace))
        prompt = parse_lengths(self.prompt or _PROMPT, "--prompt")
        output = parse_lengths(self.output or _OUTPUT, "--output")
        return Day(_rates_of(self.rates), prompt, output)

    def failures(self) -> Failures:
        """The failures for the flags of `RUNNING`; those of machines are for one chip."""
        return Failures(
            core_mtbf_s=self.core_mtbf_h * _HOUR_S,
            core_recovery_s=self.core_recovery_s,
            machine_mtbf_s=self.machine_mtbf_h * _HOUR_S,
        )


def _rates_of(text: str) -> tuple[float, ...]:
    """Parse the requests a second of each hour; numbers may repeat."""
    with suppress(ValueError):
        rates = tuple(map(float, text.split(",")))
        if all(0 <= rate < math.inf for rate in rates) and max(rates) > 0:
            return rates
    raise ConfigError(f"--rates: {text!r} is none; write numbers such as 10,8,30, one above 0")
