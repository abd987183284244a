"""Limits of a key over all engines of a fleet: open sequences, and tokens a minute that are guessed
before an answer and put right after it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_fakes import FakeClient, Script, until
from fakes import FakeClock
from fleet_engines import CHAT, FakeEngine, engines, fleet_of, toml

from jitney.engine.common.errors import ConfigError, RequestError
from jitney.engine.common.key_file import digest_key
from jitney.engine.fleet.config import FleetConfig
from jitney.engine.fleet.forwarding import ProxiedAnswer
from jitney.engine.fleet.quotas import FleetQuotas, _Account, _prompt_size, _sequences_of
from jitney.engine.fleet.request import ProxiedRequest

#: 10 tokens by the first guess of 4 characters each.
PROMPT = "x" * 40


def asked(route: str = "/v1/completions", **fields: Any) -> ProxiedRequest:
    return ProxiedRequest("POST", route, [], fields={"prompt": PROMPT} | fields)


def answered(account: _Account, *parts: bytes, status: int = 200, whole: bool = True) -> None:
    """An answer of these parts goes to the client; not whole: the client leaves after them."""

    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    async def read() -> None:
        reading = aiter(account.watched(ProxiedAnswer(status, [], body())).body)
        for _ in parts:
            await anext(reading)
        if whole:
            assert await anext(reading, None) is None

    asyncio.run(read())


def usage(prompt: int, output: int) -> bytes:
    told = {"prompt_tokens": prompt, "completion_tokens": output}
    return json.dumps({"choices": [], "usage": told}).encode()


def left(quotas: FleetQuotas, key: str = "k") -> float:
    """Tokens of this minute that the key may still use."""
    return quotas._quotas._of(key).tokens


def test_what_an_answer_used_is_charged_and_no_more():
    quotas = FleetQuotas(0, 1000, FakeClock())
    with quotas.holding("k", asked(max_tokens=100)) as account:
        assert left(quotas) < 990, "the prompt and what is expected are charged at once"
        answered(account, usage(20, 7))
    assert left(quotas) == 1000 - 20 - 7
    assert left(quotas, "another") == 1000


def test_tokens_are_as_long_as_answers_said():
    """After one prompt of 2 characters a token, the next one is charged by that."""
    quotas = FleetQuotas(0, 10_000, FakeClock())
    with quotas.holding("k", asked()) as account:
        answered(account, usage(20, 1))
    before = left(quotas)
    with quotas.holding("k", asked("/v1/embeddings", prompt=None, input=PROMPT)):
        assert left(quotas) == before - 20
    with quotas.holding(
        "k", replace(asked("/v1/embeddings", prompt=None, input=PROMPT), model="other")
    ):
        assert left(quotas) == before - 10, "another model has tokens of its own"


def test_a_stream_whose_client_leaves_costs_what_came():
    quotas = FleetQuotas(0, 1000, FakeClock())
    with quotas.holding("k", asked(max_tokens=100)) as account:
        answered(account, *([b'data: {"choices":[{"text":"a"}]}\n\n'] * 3), whole=False)
    assert left(quotas) == 1000 - 10 - 3


def test_what_is_refused_costs_nothing():
    quotas = FleetQuotas(0, 1000, FakeClock())
    with quotas.holding("k", asked()) as account:
        answered(account, b'{"error": {"code": "invalid_value"}}', status=400)
    assert left(quotas) == 1000
    with pytest.raises(ValueError), quotas.holding("k", asked()):
        raise ValueError
    assert left(quotas) == 1000


def test_a_key_that_used_its_minute_is_told_when_to_come():
    quotas = FleetQuotas(0, 60, FakeClock())
    with quotas.holding("k", asked(max_tokens=1)) as account:
        answered(account, usage(30, 40))
    with pytest.raises(RequestError) as caught, quotas.holding("k", asked(max_tokens=1)):
        pass
    assert caught.value.info.code == "rate_limit"
    assert caught.value.info.retry_after is not None and caught.value.info.retry_after > 10
    for route in ("/tokenize", "/v1/messages/count_tokens"):
        with quotas.holding("k", asked(route)):
            pass


def test_sequences_are_counted_over_prompts_and_choices():
    assert _sequences_of(asked(n=3)) == 3
    assert _sequences_of(asked(n=2, best_of=4, prompt=["a", "b"])) == 8
    assert _sequences_of(asked(prompt=[1, 2, 3])) == 1
    assert _sequences_of(asked(prompt=[[1], [2]], n="many")) == 2
    assert _sequences_of(asked("/v1/embeddings", n=9)) == 1
    quotas = FleetQuotas(4)
    with quotas.holding("k", asked(n=3)):
        with pytest.raises(RequestError) as caught, quotas.holding("k", asked(n=2)):
            pass
        assert caught.value.info.code == "rate_limit"
        with quotas.holding("k", asked()), quotas.holding("other", asked(n=4)):
            pass
    with pytest.raises(RequestError) as caught, quotas.holding("k", asked(n=5)):
        pass
    assert caught.value.info.code == "invalid_value" and caught.value.info.param == "n"


def test_the_size_of_a_prompt_leaves_out_what_is_no_text():
    image = {"type": "image_url", "image_url": {"url": "data:" + "A" * 100_000}}
    parts = [{"type": "text", "text": "abc"}, image]
    ids, chars = _prompt_size({"messages": [{"role": "user", "content": parts}]})
    assert ids == 0 and 3 <= chars < 40
    assert _prompt_size({"prompt": [[1, 2], [3]]}) == (3, 0)
    assert _prompt_size({"prompt": {"odd": [None, True, 1.5]}}) == (0, 0)


def test_open_sequences_are_counted_over_all_engines(tmp_path: Path):
    """Two engines; the second request of a key is refused though the other engine is free."""
    slow = Script("Hello, wörld! " * 20, gate=threading.Event(), free=1)
    fakes = [FakeEngine(FakeClient(slow)) for _ in range(2)]
    keys = digest_key("one"), digest_key("two")
    limits = "key_max_concurrent = 1"
    with engines(*fakes):
        text = toml([fake.url for fake in fakes], 'router = "round-robin"', limits)
        with fleet_of(tmp_path, text, api_keys=keys) as served, served.http() as http:
            served.wait_ready(*(fake.name for fake in fakes))
            one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
            body = CHAT | {"stream": True, "max_tokens": 100}
            with http.stream("POST", "/v1/chat/completions", json=body, headers=one) as answer:
                assert answer.status_code == 200
                refused = http.post("/v1/chat/completions", json=CHAT, headers=one)
                other = http.post("/v1/chat/completions", json=CHAT | {"n": 2}, headers=two)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "rate_limit"
            assert other.json()["error"]["param"] == "n"
            until(lambda: _status(http, one) == 200)


def _status(http: httpx.Client, headers: dict[str, str]) -> int:
    body = CHAT | {"max_tokens": 1}
    return http.post("/v1/chat/completions", json=body, headers=headers).status_code


def test_tokens_are_counted_over_all_engines(tmp_path: Path):
    with engines(FakeEngine(), FakeEngine()) as fakes:
        limits = "key_tokens_per_minute = 100"
        text = toml([fake.url for fake in fakes], 'router = "round-robin"', limits)
        with fleet_of(tmp_path, text) as served, served.http() as http:
            served.wait_ready(*(fake.name for fake in fakes))
            statuses = [
                http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 20}).status_code
                for _ in range(8)
            ]
        assert statuses[0] == 200 and statuses[-1] == 429
        given = [len(fake.client.requests) for fake in fakes]
        assert sum(given) == statuses.count(200) and min(given) >= 1


@pytest.mark.parametrize("limit", ["key_max_concurrent", "key_tokens_per_minute"])
def test_limits_of_each_engine_alone_are_refused_by_name(tmp_path: Path, limit: str):
    file = tmp_path / "fleet.toml"
    file.write_text(f"[models.m]\nreplicas = 2\nsettings = {{ {limit} = 5 }}\n")
    with pytest.raises(ConfigError, match=rf"models.m\] settings: {limit} would hold .* \[fleet\]"):
        FleetConfig.read(file)
