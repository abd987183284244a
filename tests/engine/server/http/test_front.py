"""The ways in for whoever knows the address alone, and SageMaker's names of routes."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from api_fakes import ByteTokenizer, FakeClient, Script, call, make_app, run
from server_settings import server_settings

from jitney.dashboard import Dashboard
from jitney.engine.common.key_file import digest_key
from jitney.engine.server.app import create_app
from jitney.engine.server.http.routes import ROUTES

KEYS: dict[str, Any] = {"api_keys": (digest_key("k"),)}
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def with_page(**settings: Any) -> Any:
    client = FakeClient()
    limits = server_settings(**settings).with_page("/dashboard")
    routes = Dashboard(client, limits).mounted("/dashboard")
    return create_app(client, ByteTokenizer(), limits, "m", routes)  # type: ignore[arg-type]


def get(app: Any, path: str, **kw: Any) -> Any:
    return run(call(app, path, method="GET", **kw))


def test_a_browser_at_the_root_goes_on_to_the_page():
    reply = get(with_page(**KEYS), "/", headers=BROWSER)
    assert (reply.status, reply.headers["location"]) == (307, "dashboard/")
    bare = get(make_app(), "/", headers=BROWSER)
    assert (bare.status, bare.headers["location"]) == (307, "docs")


@pytest.mark.parametrize("accept", ["application/json", "*/*"])
def test_a_program_at_the_root_is_told_where_what_is(accept: str):
    app = with_page(**KEYS)
    told = get(app, "/", headers={"accept": accept}).json()
    assert told["page"] == "dashboard/" and get(make_app(), "/").json()["page"] is None
    key = {"authorization": "Bearer k"}
    for place in (told["docs"], told["openapi"]):
        assert get(app, f"/{place}", headers=key).status == 200


class _Page(HTMLParser):
    """What a page loads, and which anchors it has and leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.links: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert name not in ("src", "style", "onclick")
            if name == "id" and value:
                self.ids.append(value)
            if name == "href" and value:
                self.links.add(value)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_routes_as_a_page_without_anything_from_elsewhere():
    reply = get(make_app(**KEYS), "/docs")
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/html")
    page = _Page()
    page.feed(reply.body.decode())
    assert not {"script", "link", "img", "iframe"} & page.tags
    anchors = {link for link in page.links if link.startswith("#")}
    assert page.links - anchors == {"openapi.json"}
    assert {link.removeprefix("#") for link in anchors} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    for route in ROUTES:
        assert re.sub(r":\w+}", "}", route.path) in page.text and route.summary in page.text
    assert "max_completion_tokens" in page.text and "ChatAnswer" in page.text


def test_the_page_of_routes_has_a_policy_that_its_style_fits():
    reply = get(make_app(), "/docs")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    [style] = re.findall(rb"<style>(.*?)</style>", reply.body, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy


def test_ping_says_whether_requests_are_taken():
    client = FakeClient()
    app = make_app(client, **KEYS)
    assert get(app, "/ping").status == 200
    client.state = "sleeping"
    assert get(app, "/ping").status == 503


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "chat.completion"),
        ({"prompt": "a"}, "text_completion"),
        ({"prompt": "a", "messages": None}, "text_completion"),
    ],
)
def test_an_invocation_is_what_its_fields_say(body: dict[str, Any], kind: str):
    app = make_app(FakeClient(Script("hi")))
    reply = run(call(app, "/invocations", {"model": "m", "extra": 1} | body))
    assert reply.json()["object"] == kind
    assert reply.headers["x-ignored-params"] == "extra"
    streamed = run(call(app, "/invocations", body | {"stream": True}))
    assert streamed.body.endswith(b"data: [DONE]\n\n")
    first = json.loads(streamed.body.split(b"\n")[0].removeprefix(b"data: "))
    assert first["object"].startswith(kind)


@pytest.mark.parametrize(("body", "param"), [({}, "prompt"), ({"input": "a"}, "input")])
def test_an_invocation_of_neither_says_what_is_wrong(body: dict[str, Any], param: str):
    reply = run(call(make_app(), "/invocations", body))
    assert (reply.status, reply.error["param"]) == (400, param)


def test_an_invocation_needs_a_key_and_counts_against_it():
    assert run(call(make_app(**KEYS), "/invocations", {"prompt": "a"})).status == 401
    app = make_app(key_max_concurrent=1)
    assert run(call(app, "/invocations", {"prompt": "a", "n": 2})).status == 400
