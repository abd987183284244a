"""A server with a fake engine in its own process, which a test may kill."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from api_fakes import http_client, until

_SERVER = Path(__file__).parent / "batch_server.py"


@contextmanager
def serving_process(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the server process; yields it once it answers."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, str(_SERVER), str(port), str(folder)], env=environ)
    try:
        with http_client(f"http://127.0.0.1:{port}") as http:
            until(lambda: _answers(http))
        yield process
    finally:
        process.kill()
        process.wait(120)


def _answers(http: httpx.Client) -> bool:
    try:
        return http.get("/v1/models").status_code == 200
    except httpx.TransportError:
        return False
