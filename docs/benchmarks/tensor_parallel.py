"""Runs every family over 1, 2, 4 and 8 devices through the command line: checks for the same tokens
in float32, and counts what a greedy step of two layers sends. Mixtures also run with whole experts
on each of several groups of devices.

python docs/benchmarks/tensor_parallel.py [--families NAME ...]. Devices are parts of this CPU. A
process for each family; some minutes on two cores. Exit status 1 if any tokens differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from jitney.engine.core.weights.checkpoints.families import FAMILIES, tiny_config

SUPPORT = Path(__file__).parents[2] / "tests" / "support"
COUNTS = (1, 8, 2, 4)
#: (devices, groups of devices) for mixtures of experts.
GROUPED = ((2, 2), (4, 2), (8, 4))
MIXTURES = tuple(
    family.name for family in FAMILIES.values() if tiny_config(family.name).experts is not None
)
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


def results_of(family: str) -> dict[str, np.ndarray]:
    """Results of `sharding_program` for a family, by name."""
    jobs: list[tuple[str, str, list[object]]] = [
        (f"tokens {count}", "generated", [family, count]) for count in COUNTS
    ]
    if family in MIXTURES:
        jobs += [
            (f"tokens {count} in {groups}", "generated", [family, count, groups])
            for count, groups in GROUPED
        ]
    jobs.append(("program", "program", [2, True, [4, 4], family]))
    with tempfile.TemporaryDirectory() as folder:
        jobs_file, out = Path(folder, "jobs.json"), Path(folder, "out.npz")
        jobs_file.write_text(json.dumps(jobs))
        environ = os.environ | {
            "XLA_FLAGS": FLAGS,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, str(SUPPORT / "sharding_program.py"), str(jobs_file), str(out)]
        subprocess.run(command, env=environ, check=True, stderr=subprocess.DEVNULL)
        return dict(np.load(out))


def row_of(family: str, results: dict[str, np.ndarray]) -> tuple[str, bool]:
    """(a row of the table, whether all tokens equal those of one device)."""
    one = results["tokens 1"]
    equal = {count: np.array_equal(one, results[f"tokens {count}"]) for count in COUNTS}
    reduces, gathers, widest, *_ = results["program"].tolist()
    counts = " | ".join(said(equal[count]) for count in (2, 4, 8))
    grouped, in_groups = True, "-"
    if family in MIXTURES:
        names = [f"tokens {count} in {groups}" for count, groups in GROUPED]
        grouped = all(np.array_equal(one, results[name]) for name in names)
        in_groups = said(grouped)
    return (
        f"| {family} | {len(one)} | {counts} | {in_groups} | {reduces} | {gathers} | {widest} |",
        all(equal.values()) and grouped,
    )


def said(same: bool) -> str:
    """The word for the table."""
    return "same" if same else "**other**"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    families = [
        family.name for family in FAMILIES.values() if tiny_config(family.name).encoder is None
    ]
    parser.add_argument("--families", nargs="+", default=families)
    args = parser.parse_args()
    print("| family | characters | 2 | 4 | 8 | groups | all-reduces | all-gathers | widest |")
    print("|---|---|---|---|---|---|---|---|---|")
    right = True
    for family in args.families:
        row, same = row_of(family, results_of(family))
        print(row, flush=True)
        right = right and same
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
