"""Sends a server thousands of valid and invalid requests generated from its own OpenAPI document,
and checks the answers.

    python docs/benchmarks/fuzz.py http://127.0.0.1:8000 [--cases 5000] [--seed 0]

Every answer must have a status, a type and a body that the document promises; none may be a 500,
and none may take longer than `--slowest` seconds. After every hundred cases an ordinary request
must still be answered, which shows that the server is not wedged. An engine that a case sends to
sleep is woken after it. Later cases read, cancel and delete the files, batches and responses that
earlier ones create, so use a server that stores nothing else. Needs schemathesis (extra `test`).
"""

from __future__ import annotations

import argparse
import json
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
#: Statuses from 500 on that are no faults.
_MEANT = {503, 504}
_ALIVE_EVERY = 100
#: Share of the cases that go to routes with a body.
_WITH_BODY = 0.85
_CHAT = [{"role": "user", "content": "a"}]
#: A valid body of each route except for the model, and the field that limits the answer's length.
_SOUND: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({"prompt": "a"}, "max_tokens"),
    "/v1/chat/completions": ({"messages": _CHAT}, "max_tokens"),
    "/v1/responses": ({"input": "a"}, "max_output_tokens"),
    "/v1/messages": ({"messages": _CHAT}, "max_tokens"),
    "/v1/messages/count_tokens": ({"messages": _CHAT}, ""),
    "/v1/embeddings": ({"input": "a"}, ""),
    "/v1/rerank": ({"query": "a", "documents": ["b"]}, ""),
    "/v2/rerank": ({"query": "a", "documents": ["b"]}, ""),
    "/rerank": ({"query": "a", "documents": ["b"]}, ""),
    "/v1/score": ({"text_1": "a", "text_2": "b"}, ""),
    "/score": ({"text_1": "a", "text_2": "b"}, ""),
    "/infill": ({"input_prefix": "a", "input_suffix": "b"}, "n_predict"),
    "/tokenize": ({"prompt": "a"}, ""),
    "/detokenize": ({"tokens": [1, 2]}, ""),
    "/apply-template": ({"messages": _CHAT}, ""),
    "/api/chat": ({"messages": _CHAT, "options": {"num_predict": 8}}, ""),
    "/api/generate": ({"prompt": "a", "options": {"num_predict": 8}}, ""),
    "/api/embed": ({"input": "a"}, ""),
    "/api/embeddings": ({"prompt": "a"}, ""),
    "/api/show": ({}, ""),
}
#: Routes that jobs and batches call.
_LATER = ("/v1/completions", "/v1/embeddings")
_BOUNDS = {"max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"}
#: Most tokens of an answer.
_MOST_TOKENS = 8
#: The route that creates the object named by a path parameter.
_MAKERS = {
    "response_id": "/v1/responses",
    "file_id": "/v1/files",
    "batch_id": "/v1/batches",
    "job_id": "/v1/jobs",
    "model": "/v1/models",
}
#: Ids of each kind that are remembered.
_REMEMBERED = 30


def _nothing_made() -> dict[str, list[str]]:
    return {route: [] for route in _MAKERS.values()}


@dataclass
class Findings:
    """Results of a run."""

    cases: int = 0
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    #: Ids of created objects, by the route that created them.
    made: dict[str, list[str]] = field(default_factory=_nothing_made)
    #: Messages of failed checks with the case, by their beginning; equal ones once.
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
        self.found.made["/v1/models"].append(self.model)

    def run(self, cases: int, number: int = 0) -> Findings:
        """Send about `cases` cases; number: the seed of the random choices."""
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
            share = max(1, round((1 - _WITH_BODY) * cases / len(others)))
            self._sample(operation, GenerationMode.POSITIVE, share, number)
            if operation.query:
                self._sample(operation, GenerationMode.NEGATIVE, share, number)
        self._alive()
        return self.found

    def _sample(self, operation: Any, mode: GenerationMode, cases: int, number: int) -> None:
        """Send cases of one route and mode."""

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
        """Send one case. Three of four are made mostly valid, since nearly all others would fail at
        their first invalid field.
        """
        findings = self.found
        findings.cases += 1
        if findings.cases % 4:
            self._mend(case, random.Random(findings.cases))
        if isinstance(case.body, dict):
            _bound(case.path, case.body)
        started = time.monotonic()
        try:
            response = self._answer(case)
        except requests.RequestException as error:
            self._fault(case, f"no answer: {type(error).__name__}: {error}")
            return
        findings.slowest_s = max(findings.slowest_s, time.monotonic() - started)
        findings.statuses[f"{case.method} {case.path}", response.status_code] += 1
        self._remember(case, response)
        if response.status_code >= 500 and response.status_code not in _MEANT:
            self._fault(case, f"status {response.status_code}: {response.text[:300]}")
        self._check(case, lambda: case.validate_response(response, checks=_CHECKS))
        if case.path == "/sleep" and response.status_code == 200:
            self.session.post(f"{self.url}/wake_up", timeout=self.slowest_s)
        if findings.cases % _ALIVE_EVERY == 0:
            self._alive()

    def _mend(self, case: Case, choice: random.Random) -> None:
        """Make the case use existing ids, and keep at most three of its fields."""
        for name in case.path_parameters or ():
            ids = self.found.made.get(_MAKERS.get(name, ""))
            if ids:
                case.path_parameters[name] = choice.choice(ids)
        if case.path == "/v1/files":
            form: dict[str, Any] = {"purpose": "batch", "file": _lines(choice)}
            case.body = form
        elif isinstance(case.body, dict):
            names = [name for name in case.body if name != "model" and name not in _BOUNDS]
            names = choice.sample(names, min(len(names), choice.randint(0, 3)))
            sound = self._sound(case.path, choice)
            if sound:
                case.body = sound | {name: case.body[name] for name in names}

    def _sound(self, path: str, choice: random.Random) -> dict[str, Any]:
        """A valid body for a route; empty for a route without an entry here."""
        if path == "/v1/jobs":
            endpoint = choice.choice(_LATER)
            body = self._sound(endpoint, choice)
            return {"endpoint": endpoint, "body": body, "window": "1h"}
        if path == "/v1/batches":
            files = self.found.made["/v1/files"] or ["file-none"]
            return {
                "input_file_id": choice.choice(files),
                "endpoint": choice.choice(_LATER),
                "completion_window": choice.choice(["24h", "1h"]),
            }
        if path not in _SOUND:
            return {}
        body, bound = _SOUND[path]
        sound = body | {"model": self.model}
        if bound:
            sound[bound] = choice.randint(1, _MOST_TOKENS)
        return sound

    def _remember(self, case: Case, response: Any) -> None:
        """Store the id of an object that a case created, for later cases."""
        ids = self.found.made.get(case.path)
        if ids is None or case.method != "POST" or response.status_code not in (200, 202):
            return
        if response.headers["content-type"][0].startswith("application/json"):
            ids.append(response.json()["id"])
            del ids[:-_REMEMBERED]

    def _answer(self, case: Case) -> Any:
        """Send the case; once more on a new connection if the server closed the old, idle one."""
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
        """Check that an ordinary request is answered."""
        body = {"model": self.model, "prompt": "a", "max_tokens": 2}
        try:
            url = f"{self.url}/v1/completions"
            status = self.session.post(url, json=body, timeout=self.slowest_s).status_code
        except requests.Timeout:
            status = 0
        if status != 200:
            text = f"after {self.found.cases} cases an ordinary request got {status}"
            self.found.faults.setdefault("wedged", text)


def _bound(path: str, body: dict[str, Any]) -> None:
    """Limit the length of the answer; values that are no numbers of tokens stay."""
    for name in _BOUNDS & body.keys():
        if isinstance(body[name], int) and body[name] > _MOST_TOKENS:
            body[name] = _MOST_TOKENS
    _, bound = _SOUND.get(path, ({}, ""))
    if bound and not _BOUNDS & body.keys():
        body[bound] = _MOST_TOKENS


def _lines(choice: random.Random) -> bytes:
    """A batch file of requests, with some invalid lines."""
    lines: list[str] = []
    for number in range(choice.randint(0, 4)):
        body = {"prompt": "a", "input": "a", "max_tokens": choice.choice([1, 4, -1])}
        line = {"custom_id": f"line-{number}", "method": "POST", "url": choice.choice(_LATER)}
        lines.append(choice.choice([json.dumps(line | {"body": body})] * 8 + ["{", ""]))
    return "\n".join(lines).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="of the server")
    parser.add_argument("--cases", type=int, default=5000, help="requests to send")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices")
    parser.add_argument("--slowest", type=float, default=10.0, help="seconds an answer may take")
    args = parser.parse_args()
    findings = Fuzzer(args.url, args.slowest).run(args.cases, args.seed)
    console = Console()
    table = Table("route", "status", "answers", title=f"{findings.cases} cases")
    for (path, status), count in sorted(findings.statuses.items()):
        table.add_row(path, str(status), str(count))
    console.print(table)
    console.print(f"slowest answer: {findings.slowest_s:.2f} s; faults: {len(findings.faults)}")
    for fault in findings.faults.values():
        print(f"\n{fault}")
    sys.exit(bool(findings.faults))


if __name__ == "__main__":
    main()
