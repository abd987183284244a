"""Adds the logit differences measured by the tests of model families to model_families.json.

    JITNEY_TEST_COMPILE=1 python -m pytest -n 0 tests/engine/core/models/test_numerics.py \\
      -k transformers --junitxml build/families.xml
    python docs/benchmarks/model_families.py build/families.xml
    python docs/benchmarks/tables.py

Greedy answers come from greedy_families.json.

Cases without a result in the XML file stay as they are; failed cases are removed. The table of
docs/models.md has a row for every supported architecture, with the names of the JSON's `names`
where it has some, so a new family is in it as soon as `tables.py` runs.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jitney.engine.common.reports.page import Table
from jitney.engine.core.weights.checkpoints.families import FAMILIES, WRAPPERS
from jitney.engine.lab.simulation.roofline import SHAPES

HERE = Path(__file__).parent
FILE = HERE / "model_families.json"
GREEDY = HERE / "greedy_families.json"
REFERENCE = HERE.parents[1] / "tests" / "data" / "reference_logits.json"
_HEADS = (
    "family",
    "`architectures` in config.json",
    "GGUF",
    "logits",
    "greedy tokens",
    "compiled for",
    "ran on",
)


def taken_up(proved: Mapping[str, Any], results: ElementTree.Element) -> dict[str, Any]:
    """The cases of `proved`, updated with pytest's results (a JUnit XML file)."""
    cases = {name: dict(case) for name, case in proved.items()}
    for suite in results.iter("testsuite"):
        for test in suite.iter("testcase"):
            facts = {one.attrib["name"]: one.attrib["value"] for one in test.iter("property")}
            if "case" not in facts:
                continue
            case = cases.setdefault(facts.pop("case"), {})
            case["date"] = suite.attrib["timestamp"][:10]
            case["jax"] = version("jax")
            case |= {name: float(f"{float(value):.2g}") for name, value in facts.items()}
    return dict(sorted(cases.items()))


def table(content: Mapping[str, Any]) -> Iterator[str]:
    """A row for every architecture that decodes. content: of model_families.json."""
    greedy = json.loads(GREEDY.read_text())
    proved, compiled, ran = _proved(content["proved"], greedy["cases"]), _compiled(), _ran_on()
    rows = []
    for architecture, family in FAMILIES.items():
        if family.tiny.get("encoder") is not None:
            continue
        gguf = f"`{family.gguf_name}`" if family.from_gguf is not None else "-"
        rows.append(
            [
                content["names"].get(architecture, architecture.removesuffix("ForCausalLM")),
                ", ".join(f"`{name}`" for name in (architecture, *_wrappers_of(architecture))),
                content["gguf"].get(architecture, gguf),
                *_figures(proved[architecture]),
                ", ".join(compiled[architecture]) or "-",
                "; ".join((*_kernels(proved[architecture]), *ran[architecture])) or "-",
            ]
        )
    yield from Table(_HEADS, rows).markdown_lines()
    runs = sorted({(case["date"], case["jax"]) for case in content["proved"].values()})
    yield ""
    yield (
        f"Logits compared on {', '.join(f'{date} (jax {release})' for date, release in runs)}, "
        f"greedy answers on {greedy['date']} ({greedy['cpu']})."
    )
    for name, row in greedy.get("published", {}).items():
        yield (
            f"Published weights: {name}, {row['equal']:,} of {row['compared']:,} tokens equal, "
            f"{row['logprobs']:.0e} (CPU: {row['kernels']}, {row['date']})."
        )


def _wrappers_of(architecture: str) -> Iterator[str]:
    """Architectures of vision models with this text model."""
    for wrapper, texts in WRAPPERS.items():
        if architecture in texts.values():
            yield wrapper


def _proved(
    proved: Mapping[str, Any], greedy: Mapping[str, Any]
) -> defaultdict[str, list[dict[str, Any]]]:
    """Facts of the cases of each architecture: logits, and rows of greedy answers by kernel set."""
    facts_of: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, case in json.loads(REFERENCE.read_text())["cases"].items():
        facts = proved.get(name, {}) | {"greedy": greedy.get(name, [])}
        facts_of[case["config"]["architectures"][0]].append(facts)
    return facts_of


def _figures(cases: list[dict[str, Any]]) -> tuple[str, str]:
    """Logits and greedy tokens of an architecture's cases, for the kernel set with fewest equal."""
    logits = [case["logits"] for case in cases if "logits" in case]
    rows = [min(case["greedy"], key=lambda row: row["equal"]) for case in cases if case["greedy"]]
    apart = [row["logprobs"] for case in cases for row in case["greedy"]]
    equal, compared = (sum(row[name] for row in rows) for name in ("equal", "compared"))
    return (
        f"{max(logits):.0e} ({len(logits)})" if logits else "-",
        f"{equal:,} of {compared:,}, {max(apart):.0e}" if rows else "-",
    )


def _kernels(cases: list[dict[str, Any]]) -> Iterator[str]:
    """Kernel sets with which an architecture's greedy answers were compared on a CPU."""
    sets = dict.fromkeys(row["kernels"] for case in cases for row in case["greedy"])
    if sets:
        yield f"CPU: {', '.join(sets)}"


def _compiled() -> defaultdict[str, dict[str, None]]:
    """Devices for which steps of a model of each architecture are compiled."""
    devices: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for step in json.loads((HERE / "compiled_programs.json").read_text()):
        target, model, *_ = step["program"].split()
        devices[SHAPES[model].architecture][target] = None
    return devices


def _ran_on() -> defaultdict[str, list[str]]:
    """Devices on which a model of each architecture has run."""
    devices: defaultdict[str, list[str]] = defaultdict(list)
    for file in sorted(HERE.glob("device_*.json")):
        report = json.loads(file.read_text())
        devices[SHAPES[report["shape"]].architecture].append(report["about"]["device"])
    return devices


def main() -> None:
    content = json.loads(FILE.read_text())
    content["proved"] = taken_up(content["proved"], ElementTree.parse(sys.argv[1]).getroot())
    FILE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
