"""vLLM's load generator, `vllm bench serve`, against a Jitney server.

    python vllm_bench.py URL MODEL --tokenizer FOLDER [--program FILE]

FILE is the vllm program; without it, the one beside this Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import Checks, expect

checks = Checks(__doc__)
_PROMPTS = 16


def _bench(*words: str) -> dict[str, Any]:
    """The figures of one run."""
    program = checks.program or str(Path(sys.executable).parent / "vllm")
    with tempfile.TemporaryDirectory() as folder:
        common = (
            *("bench", "serve", "--base-url", checks.url, "--model", checks.model),
            *("--tokenizer", checks.tokenizer, "--num-prompts", str(_PROMPTS)),
            *("--dataset-name", "random", "--random-input-len", "32", "--seed", "1"),
            *("--random-output-len", "16", "--save-result", "--result-dir", folder),
            *("--result-filename", "result.json", "--disable-tqdm"),
        )
        process = subprocess.run(
            [program, *common, *words],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"OPENAI_API_KEY": checks.key, "VLLM_NO_USAGE_STATS": "1"},
        )
        expect(process.returncode == 0, (process.stdout + process.stderr)[-300:])
        figures = json.loads(Path(folder, "result.json").read_text())
    expect(figures["completed"] == _PROMPTS, f"{figures['completed']} of {_PROMPTS} completed")
    return figures


def _said(figures: dict[str, Any]) -> str:
    speed, first = figures["output_throughput"], figures["median_ttft_ms"]
    return f"{figures['completed']} completed, {speed:.0f} tok/s, first token p50 {first:.0f} ms"


@checks.add
def completions() -> str:
    figures = _bench("--backend", "openai", "--ignore-eos")
    expect(figures["total_output_tokens"] == 16 * _PROMPTS, figures["total_output_tokens"])
    return _said(figures)


@checks.add
def vllm_backend() -> str:
    figures = _bench("--backend", "vllm", "--ignore-eos", "--max-concurrency", "8")
    expect(figures["total_output_tokens"] == 16 * _PROMPTS, figures["total_output_tokens"])
    return _said(figures)


@checks.add
def chat() -> str:
    figures = _bench("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")
    return _said(figures)


@checks.add
def responses() -> str:
    figures = _bench("--backend", "openai-responses", "--endpoint", "/v1/responses")
    return _said(figures)


checks.run()
