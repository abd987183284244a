"""Limits per API key: open requests and tokens per minute, alone and over HTTP."""

from __future__ import annotations

import asyncio

import pytest
from api_fakes import FakeClient, Script, call, make_app, run
from fakes import FakeClock

from jitney.engine.api.quotas import Quotas
from jitney.engine.api.settings import digest_key
from jitney.engine.errors import RequestError

PATH = "/v1/completions"
BODY = {"model": "m", "prompt": "ab", "max_tokens": 4, "ignore_eos": True}


def refusal(quotas: Quotas, key: str, tokens: int) -> RequestError:
    with pytest.raises(RequestError) as caught:
        quotas.enter(key, tokens)
    return caught.value


def test_a_minute_of_tokens_fills_up_again():
    clock = FakeClock()
    quotas = Quotas(0, 600, clock)  # ten a second
    quotas.enter("a", 500)
    error = refusal(quotas, "a", 300)
    assert (error.info.code, error.info.retry_after) == ("rate_limit", pytest.approx(20.0))
    assert "600 tokens a minute" in str(error)
    quotas.enter("b", 600)  # another key has its own
    clock.now = 20.0
    quotas.enter("a", 300)
    assert refusal(quotas, "a", 1).info.retry_after == pytest.approx(0.1)


def test_output_tokens_are_charged_and_may_leave_a_debt():
    clock = FakeClock()
    quotas = Quotas(0, 60, clock)
    quotas.enter("a", 10)
    quotas.spend("a", 80)
    assert refusal(quotas, "a", 1).info.retry_after == pytest.approx(31.0)
    clock.now = 1000.0
    quotas.enter("a", 60)
    assert refusal(quotas, "a", 60).info.retry_after == pytest.approx(60.0), (
        "no more than a minute's worth is saved"
    )


def test_a_prompt_larger_than_the_bucket_enters_when_it_is_full():
    clock = FakeClock()
    quotas = Quotas(0, 60, clock)
    quotas.enter("a", 150)
    assert refusal(quotas, "a", 1).info.retry_after == pytest.approx(91.0)


def test_open_requests_are_counted_until_they_end_however_they_do():
    quotas = Quotas(2, 0)
    with quotas.open("a"), quotas.open("b"), quotas.open("a"):
        with pytest.raises(RequestError, match="at most 2 requests") as caught, quotas.open("a"):
            pass
        assert caught.value.info.code == "rate_limit" and caught.value.info.retry_after
    with pytest.raises(KeyError), quotas.open("a"):
        raise KeyError
    with quotas.open("a"), quotas.open("a"):
        pass


def test_no_limit_is_no_limit():
    quotas = Quotas(0, 0)
    for _ in range(100):
        quotas.enter("a", 10**9)
        quotas.spend("a", 10**9)
        quotas.open("a").__enter__()


def test_over_http_a_key_has_so_many_requests_open():
    """One stream runs; the second of the same key is refused, another key's is not, and later all
    is well again.
    """

    async def scenario() -> None:
        client = FakeClient(Script(text="abcdefgh", delay_s=0.02))
        app = make_app(
            client, api_keys=(digest_key("one"), digest_key("two")), key_max_concurrent=1
        )
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        first = asyncio.create_task(call(app, PATH, BODY, headers=one))
        while not client.requests:
            await asyncio.sleep(0.001)
        refused, other = (
            await call(app, PATH, BODY, headers=one),
            await call(app, PATH, BODY, headers=two),
        )
        assert (refused.status, refused.error["code"], refused.error["type"]) == (
            429,
            "rate_limit",
            "rate_limit_error",
        )
        assert int(refused.headers["retry-after"]) >= 1 and other.status == 200
        assert (await first).status == 200
        assert (await call(app, PATH, BODY, headers=one)).status == 200

    run(scenario())


def test_over_http_prompt_and_output_tokens_are_counted():
    """60 a minute: 2 + 4 tokens are paid for; then a prompt of 57 finds 54."""

    async def scenario() -> None:
        app = make_app(FakeClient(Script(text="abcdefgh")), key_tokens_per_minute=60)
        assert (await call(app, PATH, BODY)).status == 200
        refused = await call(app, PATH, BODY | {"prompt": "x" * 57})
        assert refused.status == 429 and 2 <= int(refused.headers["retry-after"]) <= 3
        assert (await call(app, PATH, BODY | {"prompt": "x" * 53})).status == 200

    run(scenario())


def test_without_keys_everybody_is_one():
    async def scenario() -> None:
        app = make_app(FakeClient(Script(text="abcdefgh")), key_tokens_per_minute=10)
        statuses = [(await call(app, PATH, BODY | {"user": user})).status for user in "abc"]
        assert statuses == [200, 200, 429]

    run(scenario())


def test_the_user_goes_to_the_engine_for_the_fair_order():
    client = FakeClient()
    assert run(call(make_app(client), PATH, BODY | {"user": "ann"})).status == 200
    assert [(request.tenant, request.user, request.account) for request in client.requests] == [
        ("", "ann", "user ann")
    ]
