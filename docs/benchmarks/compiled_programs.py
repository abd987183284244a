"""Counts the bytes that the engine's compiled steps read and write on GPUs and TPUs, without a
device; writes compiled_programs.json and .md here.

python docs/benchmarks/compiled_programs.py [--targets h100 v6e ...] [--before DATE], after `make
build/cuda build/tpu` has fetched the compilers' plugins (JITNEY_CUDA_PLUGIN, JITNEY_TPU_PLUGIN);
the programs and the counting are those of tests/compiled. Entries of the JSON stay as they are for
other targets, for programs counted on DATE or later, and for targets without a plugin; both files
are written after each program. --kept compiles nothing: it writes the files from the facts in the
folder JITNEY_COMPILED, and otherwise from the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE, NAME = Path(__file__).parent, "compiled_programs.json"
sys.path.insert(0, str(HERE.parents[1] / "tests" / "support"))
from compiled_specs import GPUS, PLUGINS, TPUS, Spec, every_spec, facts, families, kept  # noqa: E402

HEADER = """# The compiled programs

Written by `python docs/benchmarks/compiled_programs.py` (`make test-compile`); every program's own
figures are in `compiled_programs.json` beside it. Nothing here was timed: each step was compiled by
XLA for a device that was not there, and its instructions were counted.

- **decode**, **mixed**: bytes that the instructions of the program read and write on a device, over
  the least possible: weights once, keys and values read once and written once. From the best to the
  worst of the steps: decode of 1 to 128 rows at contexts of 1,024 and 4,096 tokens, mixed steps of
  63 decoding sequences and a prompt of 449 rows at 256 and 1,024.
- **temporaries**: the most of any step. On GPUs each step is one CUDA graph.
- **sums**: all-reduces of a decode and of a mixed step over 4 or 8 TPU chips; of them, those that
  run asynchronously; of those, the ones that a product runs beside.
- Rows of a mixture choose experts by chance; the least has the experts that any row chose.
- Where a number of layers is named, so many of the model's were compiled; of those whose layers are
  of several kinds, some of each kind, and bytes are counted without the output head, which would
  outweigh so few layers. Qwen3-8B is in the JSON.

Programs compile and fit, pools are written in place, narrow weights stay narrow. Time is not shown:
without a device XLA does not tune its products, and a kernel of ours is counted by what its
documentation says it touches. `date` is that of the oldest of a row's steps.
"""
COLUMNS = ("program", "decode", "mixed", "temporaries MiB", "sums", "date")
#: Device kind of steps whose facts name none.
UNDATED = "2026-11-26"


def heading(spec: Spec) -> str:
    """Target, model, number formats and devices of a group of steps."""
    weights = "bf16" if spec.weights == "plain" else spec.weights
    pool = "" if spec.kv == "auto" else f", {spec.kv} KV"
    devices = f", {spec.devices} devices" if spec.devices > 1 else ""
    layers = f", {spec.layers} layers" if spec.layers else ""
    return f"{spec.target}, {spec.model}, {weights}{pool}{devices}{layers}"


def table(found: dict[Spec, dict[str, Any]]) -> str:
    """The page's table: a line per target, model, formats and devices; one of two 8B models."""
    groups: dict[str, dict[Spec, dict[str, Any]]] = {}
    for spec, step in found.items():
        if spec.model != "qwen3-8b":
            groups.setdefault(heading(spec), {})[spec] = step
    lines = [HEADER, f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join((name, *_cells(group)))} |" for name, group in groups.items()]
    return "\n".join(lines) + "\n"


def _cells(group: dict[Spec, dict[str, Any]]) -> Iterator[str]:
    """The table cells after the heading."""
    decode = [step for spec, step in group.items() if spec.decodes]
    mixed = [step for spec, step in group.items() if not spec.decodes]
    yield _over(decode)
    yield _over(mixed)
    yield f"{max(step['temporaries'] for step in group.values()) / 2**20:.0f}"
    yield "; ".join(
        dict.fromkeys(
            " / ".join(str(step["sums"][name]) for name in ("all", "asynchronous", "beside"))
            for spec, step in group.items()
            if spec.target in TPUS and spec.devices > 2 and "sums" in step
        )
    )
    yield min(step.get("date", UNDATED) for step in group.values())


def _over(steps: Sequence[dict[str, Any]]) -> str:
    """Range of the bytes touched divided by the fewest possible, over some steps."""
    overs = [
        (load["bytes"] - step.get("head", 0)) / (load["floor"] - step.get("head", 0))
        for step in steps
        for load in step["loads"]
    ]
    if not overs:
        return ""
    least, most = f"{min(overs):.2f}", f"{max(overs):.2f}"
    return least if least == most else f"{least} - {most}"


def compile_all(targets: Sequence[str], before: str) -> None:
    """Compile every program of these targets whose plugin is installed and whose figures are older
    than `before` (an ISO date; "": all programs). Both files are written after each.
    """
    stored = kept_facts()
    for spec in (*every_spec(), *families()):
        figures = stored.get(spec)
        recent = figures is not None and "" < before <= figures.get("date", UNDATED)
        if recent or not spec.plugin or spec.target not in targets:
            continue
        stored[spec] = counted = facts(spec)
        write(stored)
        over = (
            f"{load['context']}: {load['bytes'] / load['floor']:.3f}" for load in counted["loads"]
        )
        print(spec, *over, flush=True)


def kept_facts() -> dict[Spec, dict[str, Any]]:
    """Stored facts of every program, without compiling any."""
    page = {step.pop("program"): step for step in json.loads((HERE / NAME).read_text())}
    steps = ((spec, kept(spec) or page.get(str(spec))) for spec in (*every_spec(), *families()))
    return {spec: step for spec, step in steps if step is not None}


def write(found: dict[Spec, dict[str, Any]]) -> None:
    """Write both files, with programs in the order of `every_spec`."""
    order = {spec: place for place, spec in enumerate((*every_spec(), *families()))}
    found = dict(sorted(found.items(), key=lambda item: order[item[0]]))
    programs = [{"program": str(spec), **step} for spec, step in found.items()]
    (HERE / NAME).write_text(json.dumps(programs, indent=1) + "\n")
    (HERE / "compiled_programs.md").write_text(table(found))


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
    parser.add_argument("--before", default="", metavar="DATE", help="only figures older than that")
    options = parser.parse_args()
    if options.kept:
        write(kept_facts())
    elif any(os.environ.get(PLUGINS[target]) for target in options.targets):
        compile_all(options.targets, options.before)
    else:
        sys.exit(
            "no compiler plugin: set JITNEY_CUDA_PLUGIN or JITNEY_TPU_PLUGIN, or run make "
            "test-compile"
        )


if __name__ == "__main__":
    main()
