"""Writes what the engine's steps are when compiled for GPUs and TPUs, without one:
compiled_programs.json and .md here.

python docs/benchmarks/compiled_programs.py [--targets h100 v6e ...], after `make test-compile` has
fetched the compilers' plugins; the programs and their account are those of tests/compiled. Programs
of other targets, and those whose plugin is not there, stay as the JSON has them. --kept compiles
nothing: it writes the pages anew from what JITNEY_COMPILED holds, and for the others from the JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE, NAME = Path(__file__).parent, "compiled_programs.json"
sys.path.insert(0, str(HERE.parents[1] / "tests" / "support"))
from compiled_defects import defects  # noqa: E402
from compiled_specs import GPUS, TPUS, Spec, every_spec, facts, kept  # noqa: E402

HEADER = """# The compiled programs

Written by `python docs/benchmarks/compiled_programs.py` (`make test-compile`). Nothing here was
timed: every step was compiled by XLA for a device that was not there, from shapes alone, and its
instructions were counted.

- **touched**: bytes that the instructions of the optimised program read and write, per device:
  operands and results, gathers and scatters by rows, our own kernels by what they are documented to
  touch. **floor**: weights once, keys and values read once and written once. **over**: touched /
  floor.
- **temporaries**, and **graphs**: CUDA graphs that the step is; nothing lies outside of them.
- **sums**: all-reduces between devices; of them, those that run asynchronously; of those, the ones
  that a product runs beside. Told of TPUs over 4 and 8 devices.
- **us**: floor, touched bytes and operations over the data sheet's bandwidth and bf16 rate
  (`engine/lab/simulation/devices.py`).
- The mixed steps carry 63 decoding sequences and a prompt of 449 rows.
- Of a mixture (Qwen3-30B-A3B: 8 of 128 experts for each row) the rows choose by chance. The floor
  has the experts that any row chose: 8, 52, 112 and 128 of a layer at 1, 8, 32 and 512 rows. An
  expert is counted as touched once for each block of its rows: as many blocks, since hardly an
  expert has more rows than a block (16; 64 of 512 rows). Rows that fill blocks are not counted.
- Where a number of layers is named, so many of the model's were compiled: what is counted grows
  with them, but for the head. On a TPU the matrix that XLA brings in ahead for the next step is
  counted twice, up to 7 % of four layers and less than 1 % of a whole model.

What this proves: that these programs compile and fit, what they read and write, that pools are
written where they lie, that narrow weights stay narrow, which sums can overlap with what.

What it does not prove: time, and that a device computes what the compiler was told. Without a
device no product is autotuned on a GPU, so the products that were counted have tiles that no card
would run; their bytes are those of whole operands and results. A kernel of ours is counted by its
documentation: that prompts on TPUs read keys once for each block of rows is not in it. Not here: a
70B model over 4 v5e, which hold it in int4 alone, where XLA copies the head of 32,064 outputs a
device in each step. All rows are of 2026-11-26.
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
    "sums",
)


def rows(spec: Spec, step: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """One line of the table per context."""
    graphs = str(step["command_buffers"]) if spec.target in GPUS else "-"
    sums = "-"
    if spec.target in TPUS and spec.devices > 2 and "sums" in step:
        sums = " / ".join(str(step["sums"][name]) for name in ("all", "asynchronous", "beside"))
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
            sums,
        )


def heading(spec: Spec) -> str:
    """What the steps of one table have in common."""
    kept = "bf16" if spec.weights == "plain" else spec.weights
    pool = "" if spec.kv == "auto" else f", {spec.kv} keys and values"
    devices = f", {spec.devices} devices" if spec.devices > 1 else ""
    layers = f", {spec.layers} layers" if spec.layers else ""
    return f"{spec.target}, {spec.model}, {kept} weights{pool}{devices}{layers}"


def table(found: dict[Spec, dict[str, Any]]) -> str:
    """All steps as Markdown, a table per target, model and number format."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for spec, step in found.items():
        groups.setdefault(heading(spec), []).extend(rows(spec, step))
    lines = [HEADER, defects(found)]
    for name, group in groups.items():
        lines += [
            f"## {name}\n",
            f"| {' | '.join(COLUMNS)} |",
            "|---" * len(COLUMNS) + "|",
            *(f"| {' | '.join(row)} |" for row in group),
            "",
        ]
    return "\n".join(lines)


def compiled_facts(targets: Sequence[str]) -> dict[Spec, dict[str, Any]]:
    """What comes out of every program of these targets whose plugin is there."""
    found = {}
    for spec in every_spec():
        if spec.plugin and spec.target in targets:
            found[spec] = facts(spec)
            over = (
                f"{load['context']}: {load['bytes'] / load['floor']:.3f}"
                for load in found[spec]["loads"]
            )
            print(spec, *over, flush=True)
    return found


def kept_facts() -> dict[Spec, dict[str, Any]]:
    """What is known of every program without compiling one."""
    page = {step.pop("program"): step for step in json.loads((HERE / NAME).read_text())}
    known = ((spec, kept(spec) or page.get(str(spec))) for spec in every_spec())
    return {spec: step for spec, step in known if step is not None}


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
    parser.add_argument("--kept", action="store_true", help="compile nothing")
    options = parser.parse_args()
    new = {} if options.kept else compiled_facts(options.targets)
    if not new and not options.kept:
        sys.exit(
            "no compiler plugin: set JITNEY_CUDA_PLUGIN or JITNEY_TPU_PLUGIN, or run make "
            "test-compile"
        )
    found = kept_facts() | new
    programs = [{"program": str(spec), **step} for spec, step in found.items()]
    (HERE / NAME).write_text(json.dumps(programs, indent=1) + "\n")
    (HERE / "compiled_programs.md").write_text(table(found))


if __name__ == "__main__":
    main()
