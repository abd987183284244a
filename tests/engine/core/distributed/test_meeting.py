"""How a core's process that has met other hosts ends: what failed, and whether one of them is
gone.
"""

from __future__ import annotations

import pytest

from jitney.engine.common.errors import ConfigError, EngineDead, ModelError
from jitney.engine.config.layers import ResolvedConfig
from jitney.engine.core.distributed import meeting as hosts
from jitney.engine.core.weights.checkpoints.sources import ModelSource

MODEL = "tiny-random:qwen3"


def test_hosts_that_serve_nothing_need_no_keys():
    """With keys the order is fair on the host that serves; the others do not plan."""
    first = ResolvedConfig.load(environ={"JITNEY_API_KEYS": "a"}, flags={"model": MODEL}).config
    other = ResolvedConfig.load(flags={"model": MODEL}).config
    assert first.engine.order != other.engine.order
    source = ModelSource.resolve(MODEL)
    assert hosts._digest(first, source) == hosts._digest(other, source)
    fewer = ResolvedConfig.load(flags={"model": MODEL, "max_seats": 3}).config
    assert hosts._digest(fewer, source) != hosts._digest(other, source)


class Company:
    """The others."""

    host_id = 1

    def __init__(self) -> None:
        #: What was asked of them, in order.
        self.asked: list[str] = []

    def wait_for_loss(self) -> None:
        self.asked.append("is anybody gone?")

    def leave(self, reason: str, *, failed: bool) -> None:
        self.asked.append(f"{reason} (failed: {failed})")


@pytest.fixture
def company(monkeypatch: pytest.MonkeyPatch) -> Company:
    company = Company()
    monkeypatch.setattr(hosts, "_meet", lambda *_: company)
    return company


def end_by(error: Exception | None) -> None:
    """Meet them, and then end."""
    config = ResolvedConfig.load(flags={"model": MODEL}).config
    with hosts.met(config, ModelSource.resolve(MODEL), lambda _: None, ""):
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [RuntimeError("Gloo failed"), EngineDead("a step failed")])
def test_what_fails_may_be_the_loss_of_a_host(company: Company, error: Exception):
    """A device tells it in its own words, in a start as in a step."""
    with pytest.raises(type(error)):
        end_by(error)
    assert company.asked == [
        "is anybody gone?",
        f"host 1 cannot go on: {error} (failed: True)",
    ]


@pytest.mark.parametrize("error", [ConfigError("no such part"), ModelError("no such tensor")])
def test_what_a_host_finds_by_itself_is_said_at_once(company: Company, error: Exception):
    with pytest.raises(type(error)):
        end_by(error)
    assert company.asked == [f"host 1 cannot go on: {error} (failed: True)"]


def test_an_end_in_order_waits_for_nothing(company: Company):
    end_by(None)
    assert company.asked == ["host 1 was told to end (failed: False)"]
