"""Estimates decode with pipeline stages over a slow link, beside all-reduces over the same link: by
the simulator's roofline, not measured, since Jitney has no stages.

    python docs/benchmarks/pipeline_stages.py [--context 1024]

Each host has one chip. Tensor parallelism computes every layer on all hosts and has two all-reduces
a layer over the link. With stages each host has a part of the layers (the last one the output head
too, so it is the slowest). A batch is cut into M microbatches, of which each stage computes one at
a time, and a sequence's next token begins when the last stage is done with the previous one. A
cycle, in which every sequence gets a token, takes max(M, S) turns of a stage; with M < S stages
idle 1 - M / S of the time.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from jitney.engine.core.scheduler.buckets import Bucket
from jitney.engine.core.scheduler.plan import StepWork
from jitney.engine.lab.simulation.devices import Accelerator
from jitney.engine.lab.simulation.roofline import SHAPES, Assumptions, ModelCost, Roofline

#: Model, weights, chip of each host, number of hosts.
CASES = (
    ("llama-3.1-8b", "bf16", "l4", 2),
    ("llama-3.1-70b", "int8", "h100", 2),
    ("llama-3.1-70b", "int8", "a100-40", 4),
)
#: Links (Gbit/s, seconds of one message): a cloud network with TCP, and one with RDMA.
LINKS = ((25, 5e-5), (100, 1e-5))
SEATS = (8, 32, 128)
_BF16 = 2


@dataclass(frozen=True)
class Split:
    """A model over hosts of one chip each, with `context` tokens in each seat."""

    cost: ModelCost
    device: Accelerator
    hosts: int
    assumed: Assumptions
    context: int

    def tensor_parallel_s(self, rows: int) -> float:
        """Seconds of a step with tensor parallelism."""
        return self._seconds(self.cost, self.hosts, rows)

    def sums_s(self, rows: int) -> float:
        """Seconds of all-reduces in such a step."""
        return Roofline(self.cost, self.device, self.hosts, self.assumed).link_seconds(rows)

    def cycle_s(self, rows: int, microbatches: int) -> float:
        """Seconds until every sequence has one more token, with stages."""
        config = self.cost.config
        layers = config.n_layers // self.hosts
        part = replace(config, n_layers=layers, windows=config.windows[:layers])
        part_rows = rows // microbatches
        turn_s = self._seconds(replace(self.cost, config=part), 1, part_rows)
        hop_s = self.assumed.hop_s + self.hop_bytes(part_rows) / self.device.link
        return max(microbatches, self.hosts) * (turn_s + hop_s)

    def hop_bytes(self, rows: int) -> float:
        """Bytes of hidden states that a stage sends to the next one."""
        return rows * self.cost.config.hidden_size * _BF16

    def sum_bytes(self, rows: int) -> float:
        """Bytes that each host sends in the all-reduces of a step."""
        share = 2 * (self.hosts - 1) / self.hosts
        return 2 * self.cost.config.n_layers * share * self.hop_bytes(rows)

    def _seconds(self, cost: ModelCost, count: int, rows: int) -> float:
        work = StepWork(keys=rows * self.context)
        roofline = Roofline(cost, self.device, count, self.assumed)
        return roofline.seconds(Bucket(rows, rows), work)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence")
    args = parser.parse_args()
    print("| model, hosts | Gbit/s | seats | sums send | a hop sends | all-reduces: step | of it "
          "sums | stages, M = 1 | stages, M = S |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for model, weights, chip, hosts in CASES:
        for gigabits, hop_s in LINKS:
            device = replace(Accelerator.named(chip), link=gigabits / 8 * 1e9)
            cost = ModelCost(SHAPES[model], weights=weights)
            split = Split(cost, device, hosts, Assumptions(hop_s=hop_s), args.context)
            for seats in SEATS:
                print(_row(f"{model} {weights}, {hosts} x {chip}", gigabits, split, seats))


def _row(what: str, gigabits: int, split: Split, seats: int) -> str:
    step_s, sums = split.tensor_parallel_s(seats), split.sums_s(seats)
    alone, filled = split.cycle_s(seats, 1), split.cycle_s(seats, split.hosts)
    cells = (
        what,
        f"{gigabits}",
        f"{seats}",
        f"{split.sum_bytes(seats) / 1e6:.1f} MB",
        f"{split.hop_bytes(seats) / 1e3:.0f} KB",
        f"{step_s * 1e3:.1f} ms",
        f"{sums * 1e3:.1f} ms",
        f"{alone * 1e3:.1f} ms",
        f"{filled * 1e3:.1f} ms",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
