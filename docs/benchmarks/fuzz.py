"""Sends a server thousands of requests made up from its own OpenAPI document, right ones and wrong
ones, and says what it answered.

    python docs/benchmarks/fuzz.py http://127.0.0.1:8000 [--cases 5000] [--seed 0]

Every answer must have a status, a type and a body that the document promises; none may be a 500,
and none may take longer than `--slowest` seconds. After every hundred cases an ordinary request
must still be answered: what is wedged would answer none. Needs schemathesis (the extra `test`).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from rich.console import Console
from rich.table import Table
from schemathesis import Case, GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

_CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
#: Statuses of ours from 500 on that are no faults.
_MEANT = {503, 504}
_ALIVE_EVERY = 100
#: Of the cases, the share of the routes that take a body.
_WITH_BODY = 0.9


@dataclass
class Findings:
    """What came of it."""

    cases: int = 0
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    #: What was wrong, with the case; equal ones once.
    faults: dict[str, str] = field(default_factory=dict[str, str])
    slowest_s: float = 0.0


class Fuzzer:
    """Sends cases to one server. slowest_s: the longest that an answer may take."""

    def __init__(self, url: str, slowest_s: float = 10.0):
        load_all_checks()
        self.url = url
        self.slowest_s = slowest_s
        self.session = requests.Session()
        self.session.trust_env = False
        document = self.session.get(f"{url}/openapi.json", timeout=10).json()
        self.model = self.session.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
        self.schema = schemathesis.openapi.from_dict(document)
        self.schema.config.update(base_url=url)
        self.found = Findings()

    def run(self, cases: int, number: int = 0) -> Findings:
        """Send about so many; number: of the random choices."""
        operations = [
            result.ok() for result in self.schema.get_all_operations() if isinstance(result, Ok)
        ]
        with_body = [op for op in operations if "requestBody" in op.definition.raw]
        others = [op for op in operations if "requestBody" not in op.definition.raw]
        for operation in with_body:
            for mode in GenerationMode:
                share = _WITH_BODY * cases / (2 * len(with_body))
                self._sample(operation, mode, round(share), number)
        for operation in others:
            share = (1 - _WITH_BODY) * cases / len(others)
            self._sample(operation, GenerationMode.POSITIVE, max(1, round(share)), number)
        self._alive()
        return self.found

    def _sample(self, operation: Any, mode: GenerationMode, cases: int, number: int) -> None:
        """Cases of one route and mode."""

        @seed(number)
        @settings(
            max_examples=cases,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        )
        @given(operation.as_strategy(generation_mode=mode))
        def send(case: Case) -> None:
            self._send(case)

        send()

    def _send(self, case: Case) -> None:
        """One case. Three of four bodies are mostly sound: else nearly all would end at their first
        wrong field.
        """
        found = self.found
        found.cases += 1
        if isinstance(case.body, dict) and found.cases % 4:
            case.body = self._mended(case.path, case.body, random.Random(found.cases))
        started = time.monotonic()
        try:
            response = self._answer(case)
        except requests.RequestException as error:
            self._fault(case, f"no answer: {type(error).__name__}: {error}")
            return
        found.slowest_s = max(found.slowest_s, time.monotonic() - started)
        found.statuses[case.path, response.status_code] += 1
        if response.status_code >= 500 and response.status_code not in _MEANT:
            self._fault(case, f"status {response.status_code}: {response.text[:300]}")
        self._check(case, lambda: case.validate_response(response, checks=_CHECKS))
        if found.cases % _ALIVE_EVERY == 0:
            self._alive()

    def _mended(self, path: str, body: dict[str, Any], choice: random.Random) -> dict[str, Any]:
        """A sound body with up to three fields of this one."""
        sound: dict[str, Any] = {"model": self.model, "max_tokens": choice.randint(1, 8)}
        if path.endswith("/chat/completions"):
            sound["messages"] = [{"role": "user", "content": "a"}]
        else:
            sound["prompt"] = "a"
        names = [name for name in body if name not in ("model", "max_completion_tokens")]
        fields = choice.sample(names, min(len(names), choice.randint(0, 3)))
        return sound | {name: body[name] for name in fields}

    def _answer(self, case: Case) -> Any:
        """Once more on a new connection where the old one was closed, as idle ones are."""
        try:
            return case.call(session=self.session, timeout=self.slowest_s)
        except requests.ConnectionError:
            self.session.close()
            return case.call(session=self.session, timeout=self.slowest_s)

    def _check(self, case: Case, check: Callable[[], None]) -> None:
        try:
            check()
        except (AssertionError, BaseExceptionGroup) as error:
            self._fault(case, str(error)[:1500])

    def _fault(self, case: Case, what: str) -> None:
        self.found.faults.setdefault(what[:120], f"{what}\n{case.as_curl_command()[:1000]}")

    def _alive(self) -> None:
        """An ordinary request is answered."""
        body = {"model": self.model, "prompt": "a", "max_tokens": 2}
        try:
            url = f"{self.url}/v1/completions"
            status = self.session.post(url, json=body, timeout=self.slowest_s).status_code
        except requests.Timeout:
            status = 0
        if status != 200:
            text = f"after {self.found.cases} cases an ordinary request got {status}"
            self.found.faults.setdefault("wedged", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="of the server")
    parser.add_argument("--cases", type=int, default=5000, help="requests to send")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices")
    parser.add_argument("--slowest", type=float, default=10.0, help="seconds an answer may take")
    args = parser.parse_args()
    found = Fuzzer(args.url, args.slowest).run(args.cases, args.seed)
    console = Console()
    table = Table("route", "status", "answers", title=f"{found.cases} cases")
    for (path, status), count in sorted(found.statuses.items()):
        table.add_row(path, str(status), str(count))
    console.print(table)
    console.print(f"slowest answer: {found.slowest_s:.2f} s; faults: {len(found.faults)}")
    for fault in found.faults.values():
        print(f"\n{fault}")
    sys.exit(bool(found.faults))


if __name__ == "__main__":
    main()
