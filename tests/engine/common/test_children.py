"""Children of the server: what they are not given, and that they are gone when they should be."""

from __future__ import annotations

import asyncio

import pytest

from jitney.engine.common.child_process import child_environ, end_child, start_child


@pytest.mark.parametrize("name", ["JITNEY_API_KEYS", "JITNEY_ADMIN_KEYS"])
def test_no_child_gets_the_keys(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("JITNEY_PORT", "8000")
    environ = child_environ()
    assert "secret" not in environ.values() and environ["JITNEY_PORT"] == "8000"


def test_a_child_is_ended_also_when_it_has_ended_before():
    async def session() -> tuple[int | None, int | None]:
        waits = await start_child("jitney.dashboard.drawing")
        await end_child(waits)
        fails = await start_child("jitney.no_such_module")
        await fails.wait()
        await end_child(fails)
        return waits.returncode, fails.returncode

    assert asyncio.run(session()) == (-9, 1)
