"""The program llm against a Jitney server, told of the model in extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import Checks, expect

checks = Checks(__doc__)
LLM = str(Path(sys.executable).parent / "llm")
_folder = tempfile.TemporaryDirectory()


def _llm(*words: str, text: str | None = None) -> str:
    """What `llm WORDS` prints."""
    process = subprocess.run(
        [LLM, *words],
        input=text,
        stdin=None if text is not None else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"LLM_USER_PATH": _folder.name},
    )
    expect(process.returncode == 0, process.stderr[-300:])
    return process.stdout


def _tell_models() -> None:
    """Two names for the model: chats, and completions."""
    model = {"model_name": checks.model, "api_base": checks.base_url, "api_key_name": "jitney"}
    models = [
        {"model_id": "ours", "supports_schema": True, "supports_tools": True, **model},
        {"model_id": "ours-text", "completion": True, **model},
    ]
    Path(_folder.name, "extra-openai-models.yaml").write_text(json.dumps(models))
    Path(_folder.name, "keys.json").write_text(json.dumps({"jitney": checks.key}))


@checks.add
def models() -> None:
    expect("ours" in _llm("models", "list"), "it does not list the model")


@checks.add
def prompt() -> None:
    expect(_llm("-m", "ours", "Say hello.", "-o", "max_tokens", "16").strip(), "no text")


@checks.add
def without_stream() -> None:
    words = ("-m", "ours", "--no-stream", "-o", "max_tokens", "16", "-s", "You are polite.")
    expect(_llm(*words, text="Say hello.").strip(), "no text")


@checks.add
def conversation() -> None:
    expect(_llm("-c", "Again.", "-o", "max_tokens", "16").strip(), "no text")
    logged = json.loads(_llm("logs", "list", "--json", "-n", "1"))
    expect(logged[0]["output_tokens"], logged)


@checks.add
def completion() -> None:
    expect(_llm("-m", "ours-text", "Once upon a time", "-o", "max_tokens", "8").strip(), "no text")


@checks.add
def schema() -> None:
    schema = {
        "type": "object",
        "properties": {"feeling": {"enum": ["happy", "sad"]}, "sure": {"type": "boolean"}},
        "required": ["feeling", "sure"],
        "additionalProperties": False,
    }
    answer = json.loads(_llm("-m", "ours", "--schema", json.dumps(schema), "I am happy."))
    expect(answer["feeling"] in ("happy", "sad"), answer)


@checks.add
def tools() -> None:
    """Tools are offered; whether one is called is the model's affair."""
    words = ("-m", "ours", "-T", "llm_version", "Which version is this?", "-o", "max_tokens", "64")
    _llm(*words)


_tell_models()
checks.run()
