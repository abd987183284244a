"""A disk that gets full while a server runs is said once, and so is that it has room again."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

import pytest

from jitney.engine.server.http.disk_watch import watch_disks


def test_a_full_disk_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    whole = shutil.disk_usage(tmp_path)
    looks = iter([10**9, 1000, 1000, 10**9, 1000])
    told: list[int] = []
    caplog.set_level(logging.INFO)

    def usage(folder: Path) -> object:
        try:
            return whole._replace(free=next(looks))
        except StopIteration:
            raise asyncio.CancelledError from None

    async def scene() -> None:
        folders = [tmp_path / "not there", tmp_path]
        await watch_disks(folders, lambda: told.append(len(caplog.messages)), pause_s=0)

    monkeypatch.setattr("shutil.disk_usage", usage)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scene())
    assert len(told) == 2
    full, again, once_more = caplog.messages
    assert full == once_more and str(tmp_path) in full and "0.0 MB free" in full
    assert "room again" in again
