"""Engines behind a name: they come and go with its addresses."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import httpx
import pytest

from jitney.engine.fleet import build
from jitney.engine.fleet.build import _addresses, open_fleet
from jitney.engine.fleet.config import FleetConfig

FLEET = """
[fleet]
poll_s = 0.01
[models.m]
urls = ["http://10.0.0.9:8000", "dns+http://pods:8000"]
"""


def _ready(request: httpx.Request) -> httpx.Response:
    """Every engine that is asked."""
    if request.url.path == "/v1/models":
        return httpx.Response(200, json={"data": [{"id": "m"}]})
    return httpx.Response(200, text="")


async def test_every_address_of_a_name_is_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """As long as it is one; the one that is named by itself stays."""
    now: list[str] | None = ["10.0.0.1:8000", "10.0.0.2:8000"]

    async def looked_up(name: str, port: int) -> list[str]:
        assert (name, port) == ("pods", 8000)
        if now is None:
            raise socket.gaierror(-2, "Name or service not known")
        return now

    monkeypatch.setattr(build, "_addresses", looked_up)
    monkeypatch.setattr(build, "_LOOK_S", 0.01)
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET)

    async with open_fleet(FleetConfig.read(file), "", httpx.MockTransport(_ready)) as (
        fleet,
        _,
    ):

        async def until_ready(names: set[str]) -> None:
            async with asyncio.timeout(120):
                while {
                    replica.name
                    for replica in fleet.models["m"].replicas
                    if replica.state == "ready"
                } != names:
                    await asyncio.sleep(0.01)

        given = "10.0.0.9:8000"
        await until_ready({given, "10.0.0.1:8000", "10.0.0.2:8000"})
        stays = next(each for each in fleet.models["m"].replicas if "0.2" in each.url)
        now = ["10.0.0.2:8000", "[fd00::3]:8000"]
        await until_ready({given, "10.0.0.2:8000", "[fd00::3]:8000"})
        assert stays in fleet.models["m"].replicas, "what is known of it is kept"
        now = None
        async with asyncio.timeout(120):
            while "its engines are not found" not in caplog.text:
                await asyncio.sleep(0.01)
        await until_ready({given, "10.0.0.2:8000", "[fd00::3]:8000"})


def test_a_name_has_each_address_once():
    assert "127.0.0.1:8000" in asyncio.run(_addresses("localhost", 8000))
    assert asyncio.run(_addresses("::1", 80)) == ["[::1]:80"]
    with pytest.raises(OSError):
        asyncio.run(_addresses("nobody.invalid", 80))
