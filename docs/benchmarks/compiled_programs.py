"""Writes what the engine's steps are when compiled for GPUs and TPUs, without one:
compiled_programs.json and .md here.

python docs/benchmarks/compiled_programs.py [--targets h100 v6e ...], after `make test-compile` has
fetched the compilers' plugins; the programs and their account are those of tests/compiled. Programs
whose plugin is not there are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "support"))
from compiled_specs import GPUS, TPUS, Spec, every_spec, facts  # noqa: E402

HEADER = """# The compiled programs

Written by `python docs/benchmarks/compiled_programs.py` (`make test-compile`). Nothing here was
timed: every step was compiled by XLA for a device that was not there, from shapes alone, and its
instructions were counted.

- **touched**: bytes that the instructions of the optimised program read and write, per device:
  operands and results, gathers and scatters by rows, our own kernels by what they are documented to
  touch. **floor**: weights once, keys and values read once and written once. **over**: touched /
  floor.
- **temporaries**, and **graphs**: CUDA graphs that the step is; nothing lies outside of them.
- **us**: floor, touched bytes and operations over the data sheet's bandwidth and bf16 rate
  (`engine/simulation/devices.py`).
- The mixed steps carry 63 decoding sequences and a prompt of 449 rows.
- What this does not prove: time. Without a device no product is autotuned, so the products
  that were counted have tiles that no card would run; their
  bytes are those of whole operands and results.
"""
COLUMNS = (
    "step",
    "context",
    "floor GiB",
    "touched GiB",
    "over",
    "GFLOP",
    "us: floor",
    "touched",
    "operations",
    "temporaries MiB",
    "graphs",
)


def rows(spec: Spec, step: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """One line of the table per context."""
    graphs = str(step["command_buffers"]) if spec.target in GPUS else "-"
    for load in step["loads"]:
        yield (
            spec.step,
            str(load["context"]),
            f"{load['floor'] / 2**30:.2f}",
            f"{load['bytes'] / 2**30:.2f}",
            f"{load['bytes'] / load['floor']:.3f}",
            f"{load['operations'] / 1e9:.0f}",
            f"{load['floor_us']:.0f}",
            f"{load['bytes_us']:.0f}",
            f"{load['operations_us']:.0f}",
            f"{step['temporaries'] / 2**20:.0f}",
            graphs,
        )


def heading(spec: Spec) -> str:
    """What the steps of one table have in common."""
    kept = "bf16" if spec.weights == "plain" else spec.weights
    pool = "" if spec.kv == "auto" else f", {spec.kv} keys and values"
    return f"{spec.target}, {spec.model}, {kept} weights{pool}" + (
        ", 2 devices" if spec.devices > 1 else ""
    )


def table(found: dict[Spec, dict[str, Any]]) -> str:
    """All steps as Markdown, a table per target, model and number format."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for spec, step in found.items():
        groups.setdefault(heading(spec), []).extend(rows(spec, step))
    lines = [HEADER]
    for name, group in groups.items():
        lines += [
            f"## {name}\n",
            f"| {' | '.join(COLUMNS)} |",
            "|---" * len(COLUMNS) + "|",
            *(f"| {' | '.join(row)} |" for row in group),
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--targets",
        nargs="+",
        default=(*GPUS, *TPUS),
        choices=(*GPUS, *TPUS),
        help="all by default",
    )
    options = parser.parse_args()
    found = {}
    for spec in every_spec():
        if spec.plugin and spec.target in options.targets:
            found[spec] = facts(spec)
            print(
                spec,
                *(
                    f"{load['context']}: {load['bytes'] / load['floor']:.3f}"
                    for load in found[spec]["loads"]
                ),
                flush=True,
            )
    if not found:
        sys.exit(
            "no compiler plugin: set JITNEY_CUDA_PLUGIN or JITNEY_TPU_PLUGIN, or run make "
            "test-compile"
        )
    kept = [{"program": str(spec), **step} for spec, step in found.items()]
    (HERE / "compiled_programs.json").write_text(json.dumps(kept, indent=1) + "\n")
    (HERE / "compiled_programs.md").write_text(table(found))


if __name__ == "__main__":
    main()
