"""Takes into model_families.json what the tests of model families measured.

    JITNEY_TEST_COMPILE=1 python -m pytest -n 0 tests/engine/core/models/test_numerics.py \\
      tests/engine/core/models/test_families.py -k transformers --junitxml build/families.xml
    python docs/benchmarks/model_families.py build/families.xml
    python docs/benchmarks/tables.py

Cases that the file of results lacks stay as they are; one that failed is taken out. The table of
docs/models.md has a row for every architecture that is served, with the names of the JSON's
`names` where it has some, so a new family is in it as soon as `tables.py` runs.
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

from jitney.dashboard import Table
from jitney.engine.core.weights.checkpoints.families import FAMILIES, WRAPPERS
from jitney.engine.lab.simulation.roofline import SHAPES

HERE = Path(__file__).parent
FILE = HERE / "model_families.json"
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
    """The cases as `proved` has them, with those of a file of pytest's results. The kernels of a
    case are those of its greedy tokens by the default set.
    """
    cases = {name: dict(case) for name, case in proved.items()}
    for suite in results.iter("testsuite"):
        for test in suite.iter("testcase"):
            facts = {one.attrib["name"]: one.attrib["value"] for one in test.iter("property")}
            if "case" not in facts or facts.get("kernels") == "reference":
                continue
            case = cases.setdefault(facts.pop("case"), {})
            case["date"] = suite.attrib["timestamp"][:10]
            case["jax"] = version("jax")
            for name, value in facts.items():
                case[name] = value if name == "kernels" else _number(value)
    return dict(sorted(cases.items()))


def _number(text: str) -> int | float:
    """A count, or a difference with two digits."""
    return int(text) if text.isdecimal() else float(f"{float(text):.2g}")


def table(content: Mapping[str, Any]) -> Iterator[str]:
    """A row for every architecture that decodes. content: of model_families.json."""
    proved, compiled, ran = _proved(content["proved"]), _compiled(), _ran_on()
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
    yield f"Compared on {', '.join(f'{date} (jax {release})' for date, release in runs)}."


def _wrappers_of(architecture: str) -> Iterator[str]:
    """Architectures of models that also see, of which this is the text model."""
    for wrapper, texts in WRAPPERS.items():
        if architecture in texts.values():
            yield wrapper


def _proved(proved: Mapping[str, Any]) -> defaultdict[str, list[Any]]:
    """Facts of the cases of each architecture; {} of a case that was not run."""
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for name, case in json.loads(REFERENCE.read_text())["cases"].items():
        found[case["config"]["architectures"][0]].append(proved.get(name, {}))
    return found


def _figures(cases: list[Any]) -> tuple[str, str]:
    """Logits and greedy tokens of an architecture's cases."""
    logits = [case["logits"] for case in cases if "logits" in case]
    tokens = [case["greedy"] for case in cases if "greedy" in case]
    apart = [case["logprobs"] for case in cases if "logprobs" in case]
    return (
        f"{max(logits):.0e} ({len(logits)})" if logits else "-",
        f"{sum(tokens)}, {max(apart):.0e}" if tokens else "-",
    )


def _kernels(cases: list[Any]) -> Iterator[str]:
    """Kernel sets with which an architecture was compared on a CPU: logits with the reference's,
    greedy tokens with the engine's own.
    """
    sets = [case["kernels"] for case in cases if "kernels" in case]
    if not sets and any("logits" in case for case in cases):
        sets = ["reference"]
    yield from (f"CPU: {name}" for name in dict.fromkeys(sets))


def _compiled() -> defaultdict[str, dict[str, None]]:
    """Devices for which steps of a model of each architecture are compiled."""
    found: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for step in json.loads((HERE / "compiled_programs.json").read_text()):
        target, model, *_ = step["program"].split()
        found[SHAPES[model].architecture][target] = None
    return found


def _ran_on() -> defaultdict[str, list[str]]:
    """Devices on which a model of each architecture has run."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for file in sorted(HERE.glob("device_*.json")):
        report = json.loads(file.read_text())
        found[SHAPES[report["shape"]].architecture].append(report["about"]["device"])
    return found


def main() -> None:
    content = json.loads(FILE.read_text())
    content["proved"] = taken_up(content["proved"], ElementTree.parse(sys.argv[1]).getroot())
    FILE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
