"""Clients of a fleet are kept apart at its endpoint and at its engines: whatever the engines are
asked with, no key reads, continues, cancels or deletes what belongs to another, or shares with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_fakes import FakeClient, Script
from batch_files import CHATS
from fleet_engines import CHAT, FakeEngine, Served, engines, fleet_of, toml
from two_keys import MARK, Things, check_apart

from jitney.engine.common.key_file import digest_key
from jitney.engine.core.scheduler.page_keys import root_of
from jitney.engine.fleet.prompt_prefixes import prompt_prefixes
from jitney.engine.fleet.request import ProxiedRequest
from jitney.engine.server.http.tenants import signed

ALPHA, BETA, BOSS, OWN = map(digest_key, ("alpha", "beta", "boss", "own"))
KEYS: dict[str, Any] = {"api_keys": (ALPHA, BETA), "admin_keys": (BOSS,)}


@dataclass(frozen=True)
class Setting:
    """key: `engine_key_file`. keys: those that the engines accept."""

    key: str
    keys: dict[str, Any] = field(default_factory=dict)


SETTINGS = {
    "a key of its own": Setting("own", {"admin_keys": (OWN,)}),
    "an administrator's key": Setting("boss", KEYS),
    "the client's key": Setting("", KEYS),
    "engines without keys": Setting(""),
    "a key that engines do not need": Setting("own"),
}


@contextmanager
def serving(
    folder: Path, setting: Setting, *fakes: FakeEngine, model: str = "", **settings: Any
) -> Iterator[Served]:
    """A fleet over these engines. model: more lines of its file."""
    for fake in fakes:
        fake.set(**setting.keys)
    with engines(*fakes):
        text = toml([fake.url for fake in fakes], model)
        given = KEYS | {"data_dir": folder / "data"} | settings
        with fleet_of(folder, text, setting.key, **given) as served:
            served.wait_ready(*(fake.name for fake in fakes))
            yield served


def keyed(served: Served, key: str, **headers: str) -> httpx.Client:
    return served.http(headers={"authorization": f"Bearer {key}"} | headers)


EACH_SETTING = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


@EACH_SETTING
def test_no_route_gives_one_key_what_belongs_to_another(tmp_path: Path, setting: Setting):
    fakes = [FakeEngine(FakeClient(Script(f"answer {MARK}"))) for _ in range(2)]
    with (
        serving(tmp_path, setting, *fakes) as served,
        keyed(served, "alpha") as alpha,
        keyed(served, "beta") as beta,
    ):
        things = Things(alpha)
        things.make()
        assert things.texts().count(MARK) >= 5
        for fake in fakes:
            fake.client.script = Script("for beta")
        assert check_apart(things, beta) > 40


@EACH_SETTING
def test_engines_tell_keys_apart_and_no_client_can_name_another(tmp_path: Path, setting: Setting):
    """In the prefix cache, in the fair order and in limits: all go by the request's tenant."""
    fake = FakeEngine()
    statement = f"user.{ALPHA}".encode()
    with serving(tmp_path, setting, fake) as served:
        for key in ("alpha", "beta", "alpha"):
            with keyed(served, key) as http:
                assert http.post(CHATS, json=CHAT).status_code == 200
        for forged in (statement, signed(statement, b"beta"), b"admin." + ALPHA.encode(), b"x"):
            with keyed(served, "beta", **{"x-jitney-tenant": forged.decode()}) as http:
                assert http.post(CHATS, json=CHAT).status_code == 403
    requests = fake.client.requests
    assert [request.tenant for request in requests] == [ALPHA, BETA, ALPHA]
    roots = [root_of(request, retain=True) for request in requests]
    accounts = [request.account for request in requests]
    for first, second, third in (roots, accounts):
        assert first == third != second


@pytest.mark.parametrize("name", ["a key of its own", "engines without keys"])
def test_lines_and_jobs_run_for_their_owner(tmp_path: Path, name: str):
    fake = FakeEngine()
    with serving(tmp_path, SETTINGS[name], fake) as served:
        for key in ("alpha", "beta", "boss"):
            with keyed(served, key) as http:
                Things(http).make()
    tenants = [request.tenant for request in fake.client.requests]
    assert tenants == [digest_key(key) for key in ("alpha", "beta", "boss") for _ in range(3)]
    assert sum(request.background for request in fake.client.requests) == 3


def test_another_keys_response_looks_like_none(tmp_path: Path):
    """Whether an id is taken is no news: not in the words, not in a header."""
    with (
        serving(tmp_path, SETTINGS["a key of its own"], FakeEngine()) as served,
        keyed(served, "alpha") as alpha,
        keyed(served, "beta") as beta,
    ):
        id = alpha.post("/v1/responses", json={"model": "m", "input": "x"}).json()["id"]
        none = "resp_" + "0" * (len(id) - len("resp_"))
        theirs, nobodys = (beta.get(f"/v1/responses/{each}") for each in (id, none))
        assert theirs.text.replace(id, none) == nobodys.text
        assert theirs.headers.keys() == nobodys.headers.keys()
        assert alpha.get(f"/v1/responses/{id}").status_code == 200


def test_a_user_key_at_the_engines_is_refused_with_the_reason(tmp_path: Path):
    fake = FakeEngine()
    with (
        serving(tmp_path, Setting("alpha", KEYS), fake) as served,
        keyed(served, "beta") as http,
    ):
        refused = http.post(CHATS, json=CHAT)
    assert refused.status_code == 403
    assert "engine_key_file" in refused.json()["error"]["message"]
    assert not fake.client.requests


def test_limits_of_an_engine_hold_for_each_client(tmp_path: Path):
    fake = FakeEngine(settings={"key_max_concurrent": 1})
    fake.client.scripts = [Script(gate=threading.Event(), free=1)]
    body = CHAT | {"stream": True}
    with (
        serving(tmp_path, SETTINGS["a key of its own"], fake) as served,
        keyed(served, "alpha") as alpha,
        keyed(served, "beta") as beta,
        alpha.stream("POST", CHATS, json=body) as hanging,
    ):
        assert hanging.status_code == 200
        assert beta.post(CHATS, json=CHAT).status_code == 200
        refused = alpha.post(CHATS, json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit")


def test_models_made_of_models_ask_for_their_client(tmp_path: Path):
    composed = '[models.panel]\nkind = "ensemble"\nmodels = ["m"]\nrepeats = 2'
    fake = FakeEngine()
    setting = SETTINGS["a key of its own"]
    with (
        serving(tmp_path, setting, fake, model=composed) as served,
        keyed(served, "alpha") as http,
    ):
        assert http.post(CHATS, json=CHAT | {"model": "panel"}).status_code == 200
    assert {request.tenant for request in fake.client.requests} == {ALPHA}


def test_a_fleet_behind_a_fleet_tells_keys_apart(tmp_path: Path):
    fake = FakeEngine()
    inner_keys: dict[str, Any] = {"admin_keys": (digest_key("outer"),)}
    (tmp_path / "outer").mkdir()
    with (
        serving(tmp_path, SETTINGS["a key of its own"], fake, **inner_keys) as inner,
        fleet_of(tmp_path / "outer", toml([inner.url]), "outer", **KEYS) as outer,
    ):
        outer.wait_ready(inner.url.removeprefix("http://"))
        for key in ("alpha", "beta"):
            with keyed(outer, key) as http:
                assert http.post(CHATS, json=CHAT).status_code == 200
    assert [request.tenant for request in fake.client.requests] == [ALPHA, BETA]


def test_routing_by_prefix_does_not_show_what_others_asked():
    """Two keys with one prompt, or one name for it, need not go to one engine."""
    for fields in (CHAT, CHAT | {"prompt_cache_key": "k"}, {"prompt": "x" * 5000}):
        asked = [
            ProxiedRequest("POST", CHATS, [(b"x-jitney-tenant", tenant)], fields=fields)
            for tenant in (b"user." + ALPHA.encode(), b"admin." + ALPHA.encode(), b"user.b")
        ]
        own, as_admin, others = (set(prompt_prefixes(each, 1024)) for each in asked)
        assert own == as_admin and not own & others


def test_a_replica_is_asked_with_its_own_key_in_place_of_the_clients():
    statement = b"user." + ALPHA.encode()
    for header in ((b"authorization", b"Bearer mine"), (b"x-api-key", b"mine")):
        kept = (b"content-type", b"application/json")
        theirs = ProxiedRequest("POST", CHATS, [header, (b"x-jitney-tenant", statement), kept])
        assert theirs.headers_for("") == theirs.headers
        assert sorted(theirs.headers_for("own")) == [
            (b"authorization", b"Bearer own"),
            kept,
            (b"x-jitney-tenant", signed(statement, b"own")),
        ]
    nobodys = ProxiedRequest("POST", CHATS, [kept])
    assert sorted(nobodys.headers_for("own")) == [(b"authorization", b"Bearer own"), kept]
