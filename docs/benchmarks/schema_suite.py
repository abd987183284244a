"""Tests the grammars made from schemas with the official JSON-Schema-Test-Suite: each valid
instance must be accepted, and no invalid one.

    python docs/benchmarks/schema_suite.py [FOLDER] [--wrong] [--drafts draft7,draft2020-12]

FOLDER has the suite's `tests`. Without it the source archive of the `jsonschema` package, which has
a copy of the suite, is downloaded into build/. --wrong: print each instance with a wrong result.

Each instance is walked token by token with the default model's tokenizer, under the masks of a
step: compact, with blanks, indented. A valid instance has to pass in all these forms, with its keys
in the schema's order if needed. An invalid one must not pass in any order of its keys, nor with its
characters escaped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from jitney.engine.common.errors import RequestError
from jitney.engine.core.grammar.grammar import schema_grammar
from jitney.engine.core.grammar.manager import _token_trie
from jitney.engine.core.grammar.matchers import GrammarMatcher, Matchers
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.core.weights.checkpoints.sources import ModelSource

BUILD = Path(__file__).resolve().parents[2] / "build"
DRAFTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
#: Most orders of keys tried for an instance, and most characters of one.
MOST_ORDERS = 300
MOST_CHARS = 4000
#: Columns of each draft, with the count in brackets: refused schemas, valid instances wrongly
#: rejected, invalid ones wrongly accepted.
COLUMNS = ("schemas (refused)", "valid (rejected)", "invalid (accepted)")
type Write = Callable[[Any], str]
type NewMatcher = Callable[[], GrammarMatcher]


def escaped(instance: Any) -> str:
    """Compact JSON with every character of a text escaped, where that is longer."""
    if isinstance(instance, str):
        units = instance.encode("utf-16-be", "surrogatepass").hex()
        return '"' + "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)) + '"'
    if isinstance(instance, list):
        return "[" + ",".join(escaped(item) for item in instance) + "]"
    if isinstance(instance, dict):
        pairs = [f"{escaped(key)}:{escaped(value)}" for key, value in instance.items()]
        return "{" + ",".join(pairs) + "}"
    return json.dumps(instance)


FORMS: tuple[Write, ...] = (
    lambda instance: json.dumps(instance, separators=(",", ":"), ensure_ascii=False),
    lambda instance: json.dumps(instance, ensure_ascii=False),
    lambda instance: json.dumps(instance, indent=4, ensure_ascii=False),
)
#: A valid instance need not pass in these forms, but an invalid one must fail in them too.
FURTHER_FORMS: tuple[Write, ...] = (json.dumps, escaped)


def orders(instance: Any) -> Iterator[Any]:
    """An instance with its keys in every order, its own first."""
    if isinstance(instance, list):
        for items in itertools.product(*[list(orders(item)) for item in instance]):
            yield list(items)
    elif isinstance(instance, dict):
        for keys in itertools.permutations(instance):
            for values in itertools.product(*[list(orders(instance[key])) for key in keys]):
                yield dict(zip(keys, values, strict=True))
    else:
        yield instance


def without_points(instance: Any) -> Any:
    """An instance with 1 for 1.0, which are the same value."""
    if isinstance(instance, float) and instance.is_integer():
        return int(instance)
    if isinstance(instance, list):
        return [without_points(item) for item in instance]
    if isinstance(instance, dict):
        return {key: without_points(value) for key, value in instance.items()}
    return instance


@dataclass
class Row:
    """Counts of one file of the suite."""

    cases: int = 0
    refused: int = 0
    valid: int = 0
    wrongly_rejected: int = 0
    invalid: int = 0
    wrongly_accepted: int = 0

    def add(self, other: Row) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Suite:
    """Runs the suite. `wrong` and `refusals`: lines about wrong instances and refused schemas."""

    tokenizer: Any
    matchers: Matchers
    ends: Sequence[int]
    wrong: list[str] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=dict)

    def case(self, name: str, draft: str, case: dict[str, Any]) -> Row:
        row = Row(cases=1)
        schema = case["schema"]
        if isinstance(schema, dict) and "$schema" not in schema:
            schema = {"$schema": DRAFTS[draft]} | schema
        try:
            # Parsed as a request is.
            new_matcher = self.compiled(orjson.loads(json.dumps(schema)))
        except RequestError as error:
            row.refused = 1
            self.note_refusal(f"{name} / {case['description']}: {error}  {json.dumps(schema)}")
            return row
        for test in case["tests"]:
            self.instance(row, new_matcher, test, f"{name} / {case['description']}", schema)
        return row

    def compiled(self, schema: Any) -> NewMatcher:
        """A factory of the schema's matchers. Raises RequestError."""
        grammar = schema_grammar(schema)
        self.matchers.begin(grammar)
        while (new_matcher := self.matchers.maker(grammar)) is None:
            time.sleep(0.001)
        return new_matcher

    def note_refusal(self, line: str) -> None:
        self.refusals[line] = self.refusals.get(line, 0) + 1

    def instance(
        self, row: Row, new_matcher: NewMatcher, test: dict[str, Any], where: str, schema: Any
    ) -> None:
        data = json.dumps(test["data"])
        what = f"{where} / {test['description']}: {data[:200]}  {json.dumps(schema)[:600]}"
        if test["valid"]:
            row.valid += 1
            if not self.may_write(new_matcher, test["data"]):
                row.wrongly_rejected += 1
                self.wrong.append(f"REJECTED {what}")
        else:
            row.invalid += 1
            accepted = self.way_to_write(new_matcher, test["data"])
            if accepted is not None:
                row.wrongly_accepted += 1
                self.wrong.append(f"ACCEPTED {what} as {accepted[:200]}")

    def may_write(self, new_matcher: NewMatcher, instance: Any) -> bool:
        """Whether all forms pass, with the keys in one of their orders, and whole numbers with or
        without a point.
        """
        for spelling in (instance, without_points(instance)):
            for order in itertools.islice(orders(spelling), MOST_ORDERS):
                if all(self.passes(new_matcher, write(order)) for write in FORMS):
                    return True
        return False

    def way_to_write(self, new_matcher: NewMatcher, instance: Any) -> str | None:
        """The first text of the instance that passes; None: none does."""
        for order in itertools.islice(orders(instance), MOST_ORDERS):
            for write in FORMS + FURTHER_FORMS:
                if self.passes(new_matcher, text := write(order)):
                    return text
        return None

    def passes(self, new_matcher: NewMatcher, text: str) -> bool:
        """Whether the grammar accepts the text, and may end there."""
        assert len(text) <= MOST_CHARS
        try:
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
        except UnicodeEncodeError:  # half of a surrogate pair is no valid text
            return False
        place = new_matcher()
        for number, token in enumerate(tokens):
            place.take(tokens[:number], 0)
            mask = self.matchers.masks(1)
            may_go_on = self.matchers.fill(place, mask, 0, may_end=True)
            if not may_go_on or not is_in(mask[0], token):
                return False
        place.take(tokens, 0)
        mask = self.matchers.masks(1)
        if not self.matchers.fill(place, mask, 0, may_end=True):
            return True
        return any(is_in(mask[0], end) for end in self.ends)


def is_in(mask: np.ndarray, token: int) -> bool:
    return bool(mask.view(np.uint32)[token // 32] >> np.uint32(token % 32) & 1)


def downloaded() -> Path:
    """The copy in the source archive of the jsonschema package."""
    folder = BUILD / "schema_suite"
    if not list(folder.glob("*.tar.gz")):
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        subprocess.run([*download, "--no-binary", "jsonschema", "jsonschema"], check=True)
    [archive] = folder.glob("*.tar.gz")
    print(archive.name)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz") / "json"


def run(suite: Suite, folder: Path, draft: str) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    base = folder / "tests" / draft
    for file in sorted(base.rglob("*.json"), key=lambda file: (len(file.parts), file)):
        name = str(file.relative_to(base)).removesuffix(".json")
        row = rows[name] = Row()
        for case in json.loads(file.read_text()):
            row.add(suite.case(f"{draft} {name}", draft, case))
    total = Row()
    for row in rows.values():
        total.add(row)
    return rows | {"all": total}


def table(drafts: dict[str, dict[str, Row]]) -> str:
    """A row for each file of the suite, with the counts of each draft."""
    head = ["file", *[f"{draft}: {what}" for draft in drafts for what in COLUMNS]]
    names = {name for rows in drafts.values() for name in rows} - {"all"}
    lines = [head, ["---"] * len(head)]
    for name in [*sorted(names, key=lambda name: (name.count("/"), name)), "all"]:
        cells = [name]
        for rows in drafts.values():
            cells += cells_of(rows.get(name))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def cells_of(row: Row | None) -> list[str]:
    if row is None:
        return [""] * len(COLUMNS)
    return [
        counted(row.cases, row.refused),
        counted(row.valid, row.wrongly_rejected),
        counted(row.invalid, row.wrongly_accepted),
    ]


def counted(all_of_them: int, of_them: int) -> str:
    return f"{all_of_them} ({of_them})" if of_them else str(all_of_them)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--drafts", default=",".join(DRAFTS))
    args = parser.parse_args()
    source = ModelSource.resolve("smollm2-135m")
    tokenizer = Tokenizer.load(source)
    trie = _token_trie(tokenizer.json, source.config.vocab_size, tokenizer.eos_ids)
    suite = Suite(tokenizer, Matchers(trie), trie.eos_tokens)
    folder = args.folder or downloaded()
    print(table({draft: run(suite, folder, draft) for draft in args.drafts.split(",")}))
    if args.wrong:
        print("", *suite.wrong, *[f"REFUSED {line}" for line in suite.refusals], sep="\n")


if __name__ == "__main__":
    main()
