"""Limits per API key: open requests and tokens per minute, alone and over HTTP."""

from __future__ import annotations

import asyncio
import threading

import pytest
from api_fakes import FakeClient, Script, call, make_app, run
from fakes import FakeClock

from jitney.engine.common.errors import RequestError
from jitney.engine.common.key_file import digest_key
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.server.http.quotas import Quotas

PATH = "/v1/completions"
BODY = {"model": "m", "prompt": "ab", "max_tokens": 4, "ignore_eos": True}


def wanting(prompt: int, answer: int, n: int = 1) -> list[EngineRequest]:
    """A request of so many prompt tokens whose n answers have so many tokens at most."""
    sampling = SamplingParams(max_tokens=answer, n=n)
    return [EngineRequest(id="r", prompt=[1] * prompt, sampling=sampling, arrival=0.0)]


def served(quotas: Quotas, key: str, prompt: int, answer: int, came: int = -1) -> None:
    """A request that ran to its end. came: tokens of its answer, where they are not as many."""
    with quotas.spending(key, wanting(prompt, answer)) as spending:
        spending.spend(answer if came < 0 else came)


def refusal(quotas: Quotas, key: str, prompt: int, answer: int = 1, n: int = 1) -> RequestError:
    with pytest.raises(RequestError) as caught, quotas.spending(key, wanting(prompt, answer, n)):
        pass
    return caught.value


def test_a_minute_of_tokens_fills_up_again():
    clock = FakeClock()
    quotas = Quotas(0, 600, clock)  # ten a second
    served(quotas, "a", 400, 100)
    error = refusal(quotas, "a", 290, 10)
    assert (error.info.code, error.info.retry_after) == ("rate_limit", pytest.approx(20.0))
    assert "600 tokens a minute" in str(error) and "expected to use 300" in str(error)
    served(quotas, "b", 599, 1)  # another key has its own
    clock.now = 20.0
    served(quotas, "a", 290, 10)


def test_those_turned_away_are_told_one_after_the_other():
    quotas = Quotas(0, 600, FakeClock())
    served(quotas, "a", 590, 10)
    told = [refusal(quotas, "a", 290, 10).info.retry_after for _ in range(3)]
    assert told == [pytest.approx(30.0), pytest.approx(60.0), pytest.approx(90.0)]


def test_the_answers_of_all_sequences_are_charged_before_they_come():
    """4 x 100 expected tokens leave 190 of 600 while it runs; 90 came, so 310 are given back."""
    quotas = Quotas(0, 600, FakeClock())
    with quotas.spending("a", wanting(10, 100, n=4)) as spending:
        refusal(quotas, "a", 190, 1)
        spending.spend(90)
        refusal(quotas, "a", 190, 1)
        with quotas.spending("a", wanting(180, 10)):
            pass
    served(quotas, "a", 310, 10)
    refusal(quotas, "a", 1)


def test_answers_longer_than_expected_may_leave_a_debt():
    clock = FakeClock()
    quotas = Quotas(0, 60, clock)
    served(quotas, "a", 10, 10, came=80)
    assert refusal(quotas, "a", 0, 1).info.retry_after == pytest.approx(31.0)
    clock.now = 1000.0
    served(quotas, "a", 59, 1)
    assert refusal(quotas, "a", 59).info.retry_after == pytest.approx(60.0), (
        "no more than a minute's worth is saved"
    )


def test_what_is_expected_follows_the_answers_that_came():
    quotas = Quotas(0, 1000, FakeClock())
    for _ in range(300):
        quotas.observe(wanting(10, 500)[0], "a", 20, by_itself=True)
    with quotas.spending("a", wanting(10, 500)) as spending:
        assert 10 <= spending.reserved <= 30


def test_a_request_larger_than_the_bucket_enters_when_it_is_full():
    clock = FakeClock()
    quotas = Quotas(0, 60, clock)
    served(quotas, "a", 149, 1)
    assert refusal(quotas, "a", 0, 1).info.retry_after == pytest.approx(91.0)


def test_open_sequences_are_counted_until_they_end_however_they_do():
    quotas = Quotas(2, 0)
    with quotas.open("a"), quotas.open("b"), quotas.open("a"):
        with pytest.raises(RequestError, match="at most 2 sequences") as caught, quotas.open("a"):
            pass
        assert caught.value.info.code == "rate_limit" and caught.value.info.retry_after
    with pytest.raises(KeyError), quotas.open("a"):
        raise KeyError
    with quotas.open("a"), quotas.open("a"):
        pass


def test_a_request_has_as_many_sequences_open_as_it_wants():
    quotas = Quotas(4, 0)
    with quotas.open("a"), quotas.open_rest("a", 3):
        with quotas.open("a"), pytest.raises(RequestError), quotas.open_rest("a", 2):
            pass
        with quotas.open("a"), quotas.open_rest("a", 1):
            pass
    with pytest.raises(RequestError, match="at most 4") as caught, quotas.open_rest("a", 5):
        pass
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_value", "n")


def test_who_finds_no_place_of_its_key_is_told_by_how_often_one_comes_free():
    clock = FakeClock()
    quotas = Quotas(1, 0, clock)
    for _ in range(100):
        with quotas.open("a"):
            clock.now += 4.0
    with quotas.open("a"):
        told = []
        for _ in range(3):
            with pytest.raises(RequestError) as caught, quotas.open("a"):
                pass
            told.append(caught.value.info.retry_after)
    assert told == [pytest.approx(each, rel=0.01) for each in (4.0, 8.0, 12.0)]


def test_no_limit_is_no_limit():
    quotas = Quotas(0, 0)
    for _ in range(100):
        served(quotas, "a", 1, 10**9)
        quotas.open("a", 1000).__enter__()


async def test_over_http_a_key_has_so_many_requests_open():
    """One stream runs; the second of the same key is refused, another key's is not, and later all
    is well again.
    """

    gate = threading.Event()
    client = FakeClient()
    client.scripts = [Script(gate=gate)]
    app = make_app(client, api_keys=(digest_key("one"), digest_key("two")), key_max_concurrent=1)
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
    gate.set()
    assert (await first).status == 200
    assert (await call(app, PATH, BODY, headers=one)).status == 200


async def test_over_http_n_counts():
    """One request of a key of four has three sequences; another such finds one place."""

    gate = threading.Event()
    client = FakeClient(Script(gate=gate))
    app = make_app(client, key_max_concurrent=4)
    first = asyncio.create_task(call(app, PATH, BODY | {"n": 3}))
    while not client.requests:
        await asyncio.sleep(0.001)
    refused = await call(app, PATH, BODY | {"n": 3})
    assert (refused.status, refused.error["code"]) == (429, "rate_limit")
    never = await call(app, PATH, BODY | {"prompt": ["a", "b", "c"], "n": 2})
    assert (never.status, never.error["param"]) == (400, "n")
    gate.set()
    assert (await first).status == 200
    assert (await call(app, PATH, BODY | {"n": 4})).status == 200


async def test_over_http_prompt_and_output_tokens_are_counted():
    """60 a minute: 2 + 4 tokens are paid for; then 53 and an answer of 4 find 54."""

    app = make_app(FakeClient(Script(text="abcdefgh")), key_tokens_per_minute=60)
    assert (await call(app, PATH, BODY)).status == 200
    refused = await call(app, PATH, BODY | {"prompt": "x" * 53})
    assert refused.status == 429 and 2 <= int(refused.headers["retry-after"]) <= 3
    assert (await call(app, PATH, BODY | {"prompt": "x" * 50})).status == 200


async def test_without_keys_everybody_is_one():
    app = make_app(FakeClient(Script(text="abcdefgh")), key_tokens_per_minute=12)
    statuses = [(await call(app, PATH, BODY | {"user": user})).status for user in "abc"]
    assert statuses == [200, 200, 429]


def test_the_user_goes_to_the_engine_for_the_fair_order():
    client = FakeClient()
    assert run(call(make_app(client), PATH, BODY | {"user": "ann"})).status == 200
    assert [(request.tenant, request.user, request.account) for request in client.requests] == [
        ("", "ann", "user ann")
    ]


def test_the_prompts_of_one_request_go_to_the_engine_as_one():
    client = FakeClient()
    assert run(call(make_app(client), PATH, BODY | {"prompt": ["a", "bcd"]})).status == 200
    assert run(call(make_app(client), PATH, BODY)).status == 200
    first, second, alone = client.requests
    assert first.group is not None and first.group == second.group and alone.group is None
    assert (first.group.requests, first.group.prompt_tokens) == (2, 4)
