"""What the scripts of this folder share: named checks against a running server, one line for each.

    python openai_python.py URL MODEL [--tokenizer FOLDER] [--only NAME ...]

A script runs in its client's own environment, so nothing but the standard library is used here. A
key, if the server asks for one, is in the environment as JITNEY_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

#: A prompt that has the obedient model call the tool `add`, and say what it gave.
TASK = 'Do this:\nCALL add {"a": 4000, "b": 711}\nSAY the sum is RESULT'
#: Most characters of a reason.
_REASON_CHARS = 300
#: Seconds that a program between client and server gets to end.
_STOP_S = 20


class Skipped(Exception):
    """The check cannot be made here; its text says why."""


class Checks:
    """The checks of one client, in the order in which they are added."""

    def __init__(self, about: str):
        parser = argparse.ArgumentParser(description=about)
        parser.add_argument("url", help="of the server, such as http://127.0.0.1:8000")
        parser.add_argument("model", help="a name that /v1/models lists")
        parser.add_argument("--tokenizer", default="", help="the model's tokenizer, as a folder")
        parser.add_argument("--program", default="", help="of the client, if it is elsewhere")
        parser.add_argument("--only", nargs="+", help="names of checks")
        args = parser.parse_args()
        #: Without a slash at its end.
        self.url: str = args.url.rstrip("/")
        #: Where OpenAI's clients begin.
        self.base_url = f"{self.url}/v1"
        self.model: str = args.model
        self.key = os.environ.get("JITNEY_API_KEY", "none")
        self.tokenizer: str = args.tokenizer
        self.program: str = args.program
        self._only: list[str] | None = args.only
        self._checks: dict[str, Callable[[], Any]] = {}

    def add(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Add a check (a decorator), plain or async. Its name is the function's; it may return a
        note.
        """
        self._checks[function.__name__.replace("_", "-")] = function
        return function

    def run(self) -> None:
        """Make the checks, print `NAME: ok`, `NAME: skipped (why)` or `NAME: FAILED (why)`, and
        leave with status 1 if one failed.
        """
        failed = 0
        for name, function in self._checks.items():
            if self._only is None or name in self._only:
                failed += not _passed(name, function)
        sys.exit(int(bool(failed)))


def expect(condition: object, complaint: object) -> None:
    """Fail the check unless the condition holds."""
    if not condition:
        raise AssertionError(str(complaint))


def _passed(name: str, function: Callable[[], Any]) -> bool:
    """Make one check; False if it failed."""
    try:
        note = function()
        if inspect.iscoroutine(note):
            note = asyncio.run(note)
    except Skipped as reason:
        _say(name, "skipped", str(reason))
        return True
    except Exception as error:
        traceback.print_exc()
        _say(name, "FAILED", f"{type(error).__name__}: {error}")
        return False
    _say(name, "ok", note or "")
    return True


def _say(name: str, result: str, note: str) -> None:
    sys.stderr.flush()
    short = " ".join(note.split())[:_REASON_CHARS]
    print(f"{name}: {result} ({short})" if short else f"{name}: {result}", flush=True)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a program that stood between client and server."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
