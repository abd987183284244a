"""The core's part of sleeping, and forgetting prefixes, on the fake device."""

from __future__ import annotations

import pytest
from fakes import device_of, make_core, make_request, tokens_of

from jitney.engine.common.errors import RequestError

PROMPT = list(range(1, 13))


def nothing() -> None:
    pass


def test_a_core_with_work_does_not_sleep():
    core = make_core()
    core.add(make_request("a", PROMPT))
    with pytest.raises(RequestError, match="there is work"):
        core.sleep(nothing)
    core.run_until_idle()
    assert core.sleep(nothing) > 0
    assert core.sleep(nothing) == 0, "it slept already"


def test_what_was_stored_is_gone_and_is_not_found():
    core = make_core()
    core.add(make_request("a", PROMPT))
    before = tokens_of(core.run_until_idle(), "a")
    assert core.scheduler.pool.n_cached > 0
    core.sleep(nothing)
    assert core.scheduler.pool.n_cached == 0 and not device_of(core).tokens.size
    core.wake(nothing)
    core.wake(nothing)
    core.add(make_request("b", PROMPT))
    outputs = core.run_until_idle()
    assert tokens_of(outputs, "b") == before
    assert not any(output.cached_tokens for output in outputs)
    core.check()


def test_reset_prefixes_are_computed_again_and_running_requests_are_not_changed():
    core = make_core()
    core.add(make_request("a", PROMPT))
    before = tokens_of(core.run_until_idle(), "a")
    core.add(make_request("b", PROMPT))
    outputs = core.step().outputs + core.step().outputs
    core.reset_prefix_cache()
    outputs += core.run_until_idle()
    assert tokens_of(outputs, "b") == before
    core.reset_prefix_cache()
    core.add(make_request("c", PROMPT, prompt_logprobs=0))
    outputs = core.run_until_idle()
    assert tokens_of(outputs, "c") == before
    assert not any(output.cached_tokens for output in outputs)
    core.check()
