"""The program guidellm (a load generator) against a Jitney server.

python guidellm_program.py URL MODEL --tokenizer FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import Checks, expect

checks = Checks(__doc__)
_REQUESTS = 12
_OUTPUT_TOKENS = 16


def _run(route: str, profile: str) -> dict[str, Any]:
    """The report of one benchmark over a route."""
    program = str(Path(sys.executable).parent / "guidellm")
    backend = {
        "kind": "openai_http",
        "target": checks.url,
        "model": checks.model,
        "api_key": checks.key,
        "request_format": route,
    }
    data = f"kind=synthetic_text,prompt_tokens=32,output_tokens={_OUTPUT_TOKENS}"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [
            *(program, "run", "--disable-console", "--backend", json.dumps(backend)),
            *("--tokenizer", f"kind=hf_auto,model={checks.tokenizer}", "--data", data),
            *("--profile", profile, "--constraint", f"kind=max_requests,count={_REQUESTS}"),
            *("--output", f"kind=json,path={report}"),
        ]
        process = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
        expect(report.is_file(), (process.stdout + process.stderr)[-300:])
        [benchmark] = json.loads(report.read_text())["benchmarks"]
    return benchmark


def _said(benchmark: dict[str, Any]) -> str:
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    expect(totals["successful"] == _REQUESTS and not totals["errored"], totals)
    first = metrics["time_to_first_token_ms"]["successful"]["median"]
    speed = metrics["output_tokens_per_second"]["successful"]["mean"]
    return f"{_REQUESTS} requests, {speed:.0f} tok/s, first token p50 {first:.0f} ms"


@checks.add
def completions() -> str:
    return _said(_run("/v1/completions", "kind=concurrent,streams=4"))


@checks.add
def chat() -> str:
    return _said(_run("/v1/chat/completions", "kind=concurrent,streams=4"))


@checks.add
def synchronous() -> str:
    return _said(_run("/v1/chat/completions", "kind=synchronous"))


@checks.add
def responses() -> str:
    return _said(_run("/v1/responses", "kind=concurrent,streams=4"))


checks.run()
