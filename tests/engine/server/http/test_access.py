"""Wrong keys are counted by address and beginning, and no right key is ever held up."""

from __future__ import annotations

import pytest
from api_fakes import FakeClient, call, make_app
from fakes import FakeClock

from jitney.engine.common.key_file import digest_key
from jitney.engine.server.http.access import (
    _MAX_REMEMBERED,
    _MOST_ALIKE,
    _MOST_OF_ADDRESS,
    NOBODY,
    ApiKeys,
    Identity,
    _WrongKeys,
)
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.http.routing import Role
from jitney.engine.server.http.sessions import _LIFETIME_S, _MAX_SESSIONS, Sessions
from jitney.engine.server.http.settings import ServerSettings

HERE, ELSEWHERE = "192.0.2.1", "192.0.2.2"
PROMPT = {"model": "m", "prompt": "Hi", "max_tokens": 1}


def test_alike_keys_of_one_address_are_counted_together():
    clock = FakeClock()
    guesses = _WrongKeys(clock)
    for number in range(_MOST_ALIKE):
        clock.now = float(number)
        assert guesses.wait(HERE, "sk-wrong-1") == 0
        guesses.failed(HERE, f"sk-wrong-{number}")
    assert guesses.wait(HERE, "sk-wrong-x") == 60 - (_MOST_ALIKE - 1)
    assert guesses.wait(HERE, "another beginning") == 0
    assert guesses.wait(ELSEWHERE, "sk-wrong-x") == 0
    clock.now = 60.0  # the first of them is a minute old
    assert guesses.wait(HERE, "sk-wrong-x") == 0


def test_an_address_has_only_so_many_wrong_keys_however_they_begin():
    guesses = _WrongKeys(FakeClock())
    for number in range(_MOST_OF_ADDRESS):
        assert guesses.wait(HERE, f"{number:08}") == 0
        guesses.failed(HERE, f"{number:08}")
    assert guesses.wait(HERE, "anything else") == 60
    assert guesses.wait(ELSEWHERE, "anything else") == 0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("", "unix", False),
    ],
)
def test_an_ipv6_network_is_one_client(one: str, other: str, same: bool):
    guesses = _WrongKeys(FakeClock())
    for _ in range(_MOST_ALIKE):
        guesses.failed(one, "guess")
    assert (guesses.wait(other, "guess") > 0) is same


def test_what_is_remembered_is_bounded():
    guesses = _WrongKeys(FakeClock())
    for _ in range(_MOST_ALIKE):
        guesses.failed(HERE, "guess")
    for number in range(_MAX_REMEMBERED // 2):
        guesses.failed(f"address {number}", "guess")
    assert guesses.wait(HERE, "guess") == 0, "of too many the quietest is forgotten"
    assert len(guesses._times) == _MAX_REMEMBERED


def test_a_right_key_is_let_in_among_any_number_of_wrong_ones():
    keys = ApiKeys(
        ServerSettings(api_keys=(digest_key("right"),), admin_keys=(digest_key("root"),)),
        FakeClock(),
    )
    statuses = []
    for number in range(200):
        with pytest.raises(HttpError) as error:
            keys.identify(f"{number:08}", HERE)
        statuses.append(error.value.status)
    assert statuses == [401] * _MOST_OF_ADDRESS + [429] * (200 - _MOST_OF_ADDRESS)
    assert keys.identify("right", HERE) == Identity(Role.USER, digest_key("right"))
    assert keys.identify("root", HERE).is_admin


async def test_guesses_on_the_endpoint_are_counted_too():
    app = make_app(FakeClient(), api_keys=(digest_key("right"),))

    async def ask(key: str):
        headers = {"authorization": f"Bearer {key}"}
        return await call(app, "/v1/completions", PROMPT, headers=headers)

    statuses = [(await ask("wrong")).status for _ in range(_MOST_ALIKE + 5)]
    assert statuses == [401] * _MOST_ALIKE + [429] * 5
    refused = await ask("wrong")
    assert refused.error["code"] == "too_many_attempts"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert (await ask("right")).status == 200
    bare = [(await call(app, "/v1/completions", PROMPT)).status for _ in range(20)]
    assert set(bare) == {401}, "who shows no key does not guess"


def test_sessions_end_and_are_bounded():
    now = [0.0]
    keys = ApiKeys(ServerSettings(api_keys=("digest",)))
    sessions = Sessions(keys, clock=lambda: now[0])
    somebody = Identity(Role.USER, "digest", key="digest")
    first = sessions.open(somebody)
    assert sessions.identify(first) == somebody
    assert sessions.identify(None) == NOBODY == sessions.identify("made up")
    now[0] = _LIFETIME_S
    assert sessions.identify(first) == NOBODY
    opened = [sessions.open(somebody) for _ in range(_MAX_SESSIONS + 1)]
    assert len(set(opened)) == _MAX_SESSIONS + 1
    assert [sessions.identify(one) for one in (opened[0], opened[1], opened[-1])] == [
        NOBODY,
        somebody,
        somebody,
    ]
    sessions.close(opened[1])
    assert sessions.identify(opened[1]) == NOBODY and sessions.identify(opened[2]) == somebody
