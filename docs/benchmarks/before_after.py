"""Compares two checkouts of this project on one machine: the cost of the host's work, as ratios.

    python docs/benchmarks/before_after.py --before TREE --after TREE [--only NAME ...] [--quick]
        [--rounds 2] [--requests 1000000] [--json FILE]

TREE: a checkout (`git worktree add --detach TREE COMMIT`). Both run in this Python, each with its
own sources and benchmarks, in turn: before, after, before, after. Measured are simulated requests
(CPU time), the scheduler alone, the closed loop, the page's feed, and starts of `jitney serve` (one
with an empty cache folder, one after it), until /readyz answers and until the server has ended. A
measurement that one tree lacks or cannot run is skipped with a line that says so. A ratio is
after / before, of means over the rounds; the last column, how far the runs of one tree lie apart,
is the noise. --quick: small sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from jitney.engine.common.cache_folder import cache_dir
from jitney.engine.common.machine import cpu_name
from jitney.engine.common.ports import free_port

_BENCHMARKS = Path("docs/benchmarks")
#: Python code that runs `jitney ARGUMENTS`, whatever a tree's entry point is called.
_CLI = "import sys; from jitney.engine.cli import main; sys.exit(main(sys.argv[1:]))"
#: Step times are a roofline's, so that only the host's work takes time; at this rate three of four
#: seats are taken.
_SIMULATE = (
    *("simulate", "--policies", "continuous", "--device", "h100"),
    *("--seats", "32", "--rate", "300"),
)
#: Seconds between two checks of a server that starts.
_LOOK_S = 0.05
#: A line of feed_cost.py.
_COST = re.compile(r"^(.+?):\s+([\d.]+) (us a step|ms of CPU a second)")

type _Figures = dict[str, float]


class _Skipped(Exception):
    """Raised where a tree cannot run a measurement."""


@dataclass(frozen=True)
class _Tree:
    """A checkout that can be imported as `jitney`."""

    label: str
    folder: Path
    #: Folder on the PYTHONPATH of the processes of this tree.
    importable: Path

    def run(self, *command: str) -> tuple[str, float]:
        """Run the command; returns its output and CPU seconds. Raises _Skipped."""
        environment = os.environ | {"PYTHONPATH": str(self.importable), "COLUMNS": "200"}
        before = _children_cpu_s()
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no reason given"]
            raise _Skipped(f"status {done.returncode}: {lines[-1]}")
        return done.stdout, _children_cpu_s() - before

    def serve(self, model: str, cache: str) -> float:
        """Start a server and stop it; returns the time at which it was ready. Raises _Skipped."""
        port = free_port()
        environment = {"PYTHONPATH": str(self.importable), "JITNEY_CACHE": cache}
        server = subprocess.Popen(
            [sys.executable, "-c", _CLI, "serve", model, "--port", str(port)],
            cwd=self.folder,
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while server.poll() is None:
                with suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1).close()
                    return time.perf_counter()
                time.sleep(_LOOK_S)
            raise _Skipped(f"the server ended with status {server.returncode}")
        finally:
            server.terminate()
            server.wait()

    def script(self, name: str, *arguments: str) -> str:
        """Run one of the tree's own benchmarks; returns its output. Raises _Skipped."""
        file = self.folder / _BENCHMARKS / name
        if not file.exists():
            raise _Skipped(f"it has no {_BENCHMARKS / name}")
        printed, _ = self.run(str(file), *arguments)
        return printed

    def report(self, name: str, *arguments: str) -> dict[str, Any]:
        """Run one of the tree's own benchmarks; returns its JSON. Raises _Skipped."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "report.json"
            self.script(name, *arguments, "--json", str(file))
            return json.loads(file.read_text())


def _children_cpu_s() -> float:
    """CPU seconds of all child processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _simulated(tree: _Tree, args: argparse.Namespace) -> _Figures:
    """CPU time of a simulation, including its start."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        n_requests = 2000 if args.quick else args.requests
        _, cpu_s = tree.run(
            "-c", _CLI, *_SIMULATE, "--requests", str(n_requests), "--json", str(file)
        )
        [figures] = json.loads(file.read_text())["policies"].values()
    return {
        "a request, us": 1e6 * cpu_s / n_requests,
        "a step, us": 1e6 * cpu_s / figures["steps"],
    }


def _scheduler(tree: _Tree, args: argparse.Namespace) -> _Figures:
    sizes, steps = ("64", "20") if args.quick else ("64,256", "200")
    report = tree.report("scheduler.py", "--seats", sizes, "--steps", steps)
    return {
        f"{policy}, {seats} seats, {part}, ms": value
        for policy, row in report.items()
        for seats, parts in row.items()
        for part, value in zip(("plan", "commit"), parts, strict=True)
    }


def _closed_loop(tree: _Tree, args: argparse.Namespace) -> _Figures:
    streams = ["32"] if args.quick else ["32", "8", "1"]
    report = tree.report("closed_loop.py", "--streams", *streams)
    figures: _Figures = {}
    for name in [f"streams_{count}" for count in streams]:
        figures[f"{name}, output tok/s"] = report[name]["output_tok_s"]
        figures[f"{name}, host ms"] = report[name]["host_ms_median"]
    figures["prompts_512, prompt tok/s"] = report["prompts_512"]["prompt_tok_s"]
    return figures


def _feed_cost(tree: _Tree, args: argparse.Namespace) -> _Figures:
    """Figures in the order of the output lines, since their labels differ between trees."""
    quick = ("--seats", "64", "--seconds", "2")
    printed = tree.script("feed_cost.py", *(quick if args.quick else ()))
    costs = [match for line in printed.splitlines() if (match := _COST.match(line))]
    names = ("host half of a step", "events", "page states", "history alone", "with viewers")
    return {
        f"{name}, {match[3]}": float(match[2]) for name, match in zip(names, costs, strict=True)
    }


def _starts(tree: _Tree, args: argparse.Namespace) -> _Figures:
    """Wall time until a server is ready, and CPU time of all its processes."""
    figures: _Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "models").symlink_to(cache_dir() / "models")
        for kind in ("cold", "warm"):
            before, started = _children_cpu_s(), time.perf_counter()
            ready_s = tree.serve("tiny-random" if args.quick else "smollm2-135m", folder) - started
            figures[f"{kind}, ready after, s"] = ready_s
            figures[f"{kind}, CPU, s"] = _children_cpu_s() - before
    return figures


_MEASUREMENTS: dict[str, Callable[[_Tree, argparse.Namespace], _Figures]] = {
    "simulate": _simulated,
    "scheduler": _scheduler,
    "closed_loop": _closed_loop,
    "feed_cost": _feed_cost,
    "starts": _starts,
}


def _tree(label: str, folder: Path, links: Path) -> _Tree:
    """The tree in a folder. Raises SystemExit if the folder is not a checkout."""
    folder = folder.resolve()
    if not (folder / "engine" / "__init__.py").exists():
        sys.exit(f"--{label}: {folder} is no checkout of this project")
    package = links / label / "jitney"
    package.mkdir(parents=True)
    for part in ("engine", "kernels", "dashboard"):
        (package / part).symlink_to(folder / part)
    return _Tree(label, folder, package.parent)


def _in_turn(
    name: str, trees: tuple[_Tree, _Tree], args: argparse.Namespace
) -> dict[str, list[_Figures]] | None:
    """The figures of each round, by tree; None where a tree cannot run the measurement."""
    runs: dict[str, list[_Figures]] = {tree.label: [] for tree in trees}
    for turn in range(args.rounds):
        for tree in trees:
            print(f"{name}: {tree.label}, {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
            try:
                runs[tree.label].append(_MEASUREMENTS[name](tree, args))
            except _Skipped as reason:
                print(f"{name} is skipped: {tree.label}: {reason}", flush=True)
                return None
    return runs


def _spread(values: list[float]) -> float:
    """Range of one tree's runs, divided by their mean."""
    return (max(values) - min(values)) / mean(values) if mean(values) else 0.0


def _rows(runs: Mapping[str, list[_Figures]]) -> dict[str, dict[str, float]]:
    """Before, after, ratio and noise of every figure that both trees have."""
    first, second = runs["before"][0], runs["after"][0]
    rows: dict[str, dict[str, float]] = {}
    for figure in [name for name in second if name in first]:
        before = [run[figure] for run in runs["before"]]
        after = [run[figure] for run in runs["after"]]
        if mean(before):
            rows[figure] = {
                "before": mean(before),
                "after": mean(after),
                "ratio": mean(after) / mean(before),
                "noise": max(_spread(before), _spread(after)),
            }
    return rows


def _print(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    table = Table("measured", "figure", "before", "after", "after / before", "runs apart")
    for name, rows in results.items():
        for figure, row in rows.items():
            table.add_row(
                name,
                figure,
                f"{row['before']:.4g}",
                f"{row['after']:.4g}",
                f"{row['ratio']:.3f}",
                f"{100 * row['noise']:.1f} %",
            )
        table.add_section()
    Console(width=120).print(f"{cpu_name()}, {os.cpu_count()} processors", table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=_MEASUREMENTS, default=list(_MEASUREMENTS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=1_000_000, help="that are simulated")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as links:
        trees = (
            _tree("before", args.before, Path(links)),
            _tree("after", args.after, Path(links)),
        )
        measured = {name: _in_turn(name, trees, args) for name in args.only}
    results = {name: _rows(runs) for name, runs in measured.items() if runs is not None}
    _print(results)
    if args.json:
        document = {"machine": cpu_name(), "results": results}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
