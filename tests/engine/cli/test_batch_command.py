"""`jitney batch` with an engine of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jitney.engine.cli import main

FLAGS = (
    *("--model", "tiny-random"),
    *("--platform", "cpu"),
    *("--kernels", "reference"),
    *("--max-seats", "2"),
    *("--seat-buckets", "2"),
    *("--token-budget", "32"),
    *("--token-buckets", "32"),
)
COLOURS = ("red", "blue")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": COLOURS}},
    "required": ["a"],
    "additionalProperties": False,
}


def line(name: str, **fields: Any) -> str:
    body = {"prompt": "hi", "max_tokens": 40} | fields
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})


def endless_grammar() -> str:
    """Rules that all begin with the next one: whoever compiles them runs out of stack."""
    n = 3000
    rules = (f'r{i}:r{(i + 1) % n}"a"|"b"' for i in range(n))
    return "start:r0\n" + "\n".join(rules)


@pytest.mark.usefixtures("hurried_processes")
def test_lines_are_held_to_grammars_and_one_that_ends_its_compiler_costs_no_other(tmp_path: Path):
    held = {
        "type": "json_schema",
        "json_schema": {"name": "colour", "schema": SCHEMA, "strict": True},
    }
    lines = (
        line("bad", structured_outputs={"grammar": endless_grammar()}),
        line("held", response_format=held),
        line("free"),
    )
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("\n".join(lines))
    assert main(["batch", str(path), "-o", str(out), *FLAGS]) == 1, "one line has an error"
    answers = {each["custom_id"]: each for each in map(json.loads, out.read_text().splitlines())}
    assert answers["bad"]["response"]["body"]["error"]["code"] == "grammar_too_complex"
    assert answers["free"]["response"]["status_code"] == 200
    [choice] = answers["held"]["response"]["body"]["choices"]
    assert choice["finish_reason"] == "length" or json.loads(choice["text"])["a"] in COLOURS
