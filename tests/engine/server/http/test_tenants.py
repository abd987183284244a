"""The header by which a fleet names the tenant of a request: who may send it, and its effect."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest
from api_fakes import FakeClient, Reply, call, make_app, run

from jitney.engine.common.key_file import digest_key

ALPHA, BETA = digest_key("alpha"), digest_key("beta")
KEYS: dict[str, Any] = {
    "api_keys": (ALPHA, BETA),
    "admin_keys": (digest_key("fleet"), digest_key("boss")),
}
PROMPT = {"prompt": "a", "max_tokens": 3}


def named(statement: str, key: str = "fleet") -> str:
    """The header's value as the docs describe it."""
    signature = hmac.new(key.encode(), statement.encode(), hashlib.sha256).hexdigest()
    return f"{statement}.{signature}"


def ask(
    app: Any, *tenants: str, key: str = "", path: str = "/v1/completions", **headers: str
) -> Reply:
    """tenants: values of the header, each time that it is given."""
    given = [("host", "localhost"), ("content-type", "application/json"), *headers.items()]
    given += [("x-jitney-tenant", value) for value in tenants]
    if key:
        given.append(("authorization", f"Bearer {key}"))
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in given]
    if path == "/v1/completions":
        return run(call(app, path, PROMPT, raw_headers=raw))
    return run(call(app, path, method="GET", raw_headers=raw))


def test_an_administrators_key_may_name_the_tenant():
    client = FakeClient()
    app = make_app(client, **KEYS)
    for tenant in (ALPHA, BETA):
        assert ask(app, named(f"user.{tenant}"), key="fleet").status == 200
    assert ask(app, key="fleet").status == 200
    assert [request.tenant for request in client.requests] == [ALPHA, BETA, digest_key("fleet")]


def test_the_request_has_the_rights_of_the_role_that_is_named():
    app = make_app(**KEYS)
    refused = ask(app, named(f"user.{ALPHA}"), key="fleet", path="/metrics")
    assert (refused.status, refused.error["code"]) == (403, "admin_key_needed")
    assert ask(app, named(f"admin.{ALPHA}"), key="fleet", path="/metrics").status == 200


def test_a_users_request_may_be_a_line_of_a_batch():
    client = FakeClient()
    app = make_app(client, **KEYS)
    value = named(f"user.{ALPHA}")
    assert ask(app, value, key="fleet", x_jitney_background="1").status == 200
    assert [(each.tenant, each.background) for each in client.requests] == [(ALPHA, True)]
    assert ask(app, f"user.{ALPHA}", key="alpha", x_jitney_background="1").status == 403


@pytest.mark.parametrize(
    "value", [f"user.{ALPHA}", named(f"user.{ALPHA}", "beta"), f"admin.{ALPHA}", "alpha", ""]
)
def test_a_user_may_not_name_another_client(value: str):
    client = FakeClient()
    reply = ask(make_app(client, **KEYS), value, key="beta")
    assert (reply.status, reply.error["code"]) == (403, "admin_key_needed")
    assert "x-jitney-tenant" in reply.error["message"] and not client.requests


@pytest.mark.parametrize(
    "value",
    [
        f"user.{ALPHA}",
        named(f"user.{ALPHA}", "boss"),
        named(f"user.{ALPHA}", ""),
        named(f"user.{BETA}").replace(BETA, ALPHA),
        named(f"user.{ALPHA}").replace("user", "admin"),
    ],
)
def test_the_signature_is_that_of_the_key_which_is_shown(value: str):
    """A gateway that adds the key to all requests does not lend it to their headers."""
    client = FakeClient()
    assert ask(make_app(client, **KEYS), value, key="fleet").status == 403
    assert not client.requests


@pytest.mark.parametrize(
    "values",
    [
        ("",),
        ("user",),
        (named("user.x"),),
        (named(f"anybody.{ALPHA}"),),
        (named(f"user.{ALPHA}") + "0",),
        (named(f"user.{ALPHA}"), named(f"user.{ALPHA}")),
        ("x" * 5000,),
    ],
)
def test_another_form_is_refused(values: tuple[str, ...]):
    client = FakeClient()
    reply = ask(make_app(client, **KEYS), *values, key="fleet")
    assert (reply.status, len(reply.body) < 500) == (400, True) and not client.requests


def test_a_client_may_name_itself_and_gets_no_more_rights():
    """As a fleet without a key of its own does for it, passing the client's on."""
    client = FakeClient()
    app = make_app(client, **KEYS)
    assert ask(app, f"user.{ALPHA}", key="alpha").status == 200
    assert ask(app, f"admin.{digest_key('boss')}", key="boss").status == 200
    assert [each.tenant for each in client.requests] == [ALPHA, digest_key("boss")]
    assert ask(app, f"admin.{ALPHA}", key="alpha", path="/metrics").status == 403


def test_without_keys_the_word_of_everybody_is_taken():
    client = FakeClient()
    app = make_app(client)
    for value in (f"user.{ALPHA}", named(f"user.{BETA}")):
        assert ask(app, value).status == 200
    assert [each.tenant for each in client.requests] == [ALPHA, BETA]


def test_the_header_is_no_key():
    app = make_app(**KEYS)
    value = named(f"user.{ALPHA}")
    assert (ask(app, value).status, ask(app, value, key="wrong").status) == (401, 401)
