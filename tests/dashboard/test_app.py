"""The page's routes at protocol level: headers, files, who may look, the stream and its end."""

from __future__ import annotations

import gzip
import json
import re
import time

import pytest
from api_fakes import call, run
from page_fakes import browser, get, page, viewers_of

from jitney.dashboard import Dashboard, page_files, sse
from jitney.dashboard.page_files import _PLOTLY, _STATIC
from jitney.dashboard.routes import _POLICY
from jitney.dashboard.sse import _FEED_VERSION
from jitney.dashboard.viewers import Viewer
from jitney.engine.common.key_file import digest_key
from jitney.engine.server.http.access import _MOST_ALIKE
from jitney.engine.server.http.sessions import _COOKIE
from jitney.engine.server.http.settings import ServerSettings

KEY = "a secret key"
#: The id of one of the requests that sit in the engine of these tests.
MARKUP = "<img src=x onerror=alert(1)>"
#: Scripts that the page of one engine does not need.
FLEET_SCRIPTS = {
    "fleet.js",
    "fleetrequests.js",
    "replicas.js",
    "rollouts.js",
    "seatmap.js",
    "sign-in.js",
}
PATHS = (
    "/",
    "/slots",
    "/frames",
    "/assets/page.js",
    "/assets/style.css",
    "/assets/icon.svg",
    "/nowhere",
)


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_carries_the_policy(client, path):
    answer = get(page(client), path)
    assert answer.headers["content-security-policy"] == _POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.status_code == (404 if path == "/nowhere" else 200)


def test_the_policy_forbids_what_is_not_ours():
    rules = {
        name: sources
        for name, _, sources in (rule.strip().partition(" ") for rule in _POLICY.split(";"))
    }
    assert rules["default-src"] == "'none'" and rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["connect-src"] == "'self'"


def test_all_that_the_page_asks_for_is_there_and_ours(client):
    """Follows every reference in the HTML, the scripts and the styles."""
    app, todo, seen = page(client), ["index.html", "sign-in.html"], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        text = get(app, "/assets/" + name).raise_for_status().text
        if name == _PLOTLY:
            continue
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), (
            f"{name} points elsewhere"
        )
        todo += re.findall(r"assets/([\w.-]+)", text) + re.findall(r'from "\./([\w.-]+)"', text)
    assert {"page.js", "style.css", _PLOTLY, "timeline.js", "sign-in.js"} <= seen


def test_the_page_reads_the_version_of_the_feed_that_is_sent(client):
    script = get(page(client), "/assets/watcher.js").text
    assert f"const FEED_VERSION = {_FEED_VERSION};" in script


def test_no_inline_script(client):
    for name in ("index.html", "sign-in.html"):
        text = get(page(client), "/assets/" + name).text
        assert re.findall(r"<script[^>]*>([^<]*)</script>", text) == [""] and not re.search(
            r"\son\w+=", text
        )


def test_the_page_has_its_styles_and_the_first_figures_in_it(client):
    """The browser shows figures of now without asking for anything but the script."""
    client.step(started=time.monotonic() - 1.0)
    client.counters.waiting = 7
    app = page(client)
    text = get(app, "/").text
    assert "<style>" in text and "stylesheet" not in text
    assert MARKUP not in text  # its request is told of, but is no markup
    (data,) = re.findall(r'<script id="first" type="application/json">([^<]*)</script>', text)
    first = json.loads(data)
    events = [sse.decode(event.encode()) for event in first["events"]]
    assert [name for name, _ in events] == ["hello", "key_frame"]
    frame = events[-1][1]
    assert frame["metrics"]["waiting"] == 7 and MARKUP in frame["seats"]["request"]
    assert first["past"]["to"] == frame["t"] and sum(first["past"]["bins"]["steps"]) == 1
    assert first["engines"] == get(app, "/engines").json()
    assert viewers_of(app.state.feed) == 0


def test_the_page_comes_without_figures_where_all_viewers_places_are_taken(client):
    app = page(client)
    feed = app.state.feed
    feed._max_viewers = 0
    text = get(app, "/").text
    assert '"events":[],"past":null' in text and text.endswith("</body>\n</html>\n")


def test_a_page_has_one_script_with_all_its_modules(client):
    app = page(client)
    (script,) = re.findall(r'src="(assets/[^"]+)"></script>', get(app, "/").text)
    zipped = run(call(app, f"/{script}", method="GET", headers={"accept-encoding": "gzip"}))
    text = gzip.decompress(zipped.body).decode()
    assert not re.search(r"^(import|export) ", text, re.MULTILINE)
    for module in _STATIC.glob("*.js"):
        lines = module.read_text().splitlines()
        longest_line = max([line for line in lines if not line.startswith("import ")], key=len)
        is_of_page = module.name not in FLEET_SCRIPTS
        assert (longest_line.removeprefix("export ") in text) is is_of_page, module.name
    again = get(app, f"/{script}", **{"if-none-match": zipped.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert get(app, f"/{script}", **{"accept-encoding": "identity"}).text == text


def test_modules_that_import_each_other_are_refused(tmp_path, monkeypatch):
    for name, other in (("one", "two"), ("two", "one")):
        (tmp_path / f"{name}.js").write_text(f'import {{x}} from "./{other}.js";\n')
    monkeypatch.setattr(page_files, "_STATIC", tmp_path)
    with pytest.raises(ValueError, match=r"one.js -> two.js -> one.js"):
        page_files._in_order("one.js")


def test_plotly_travels_zipped_and_once(client):
    app = page(client)
    first = get(app, f"/assets/{_PLOTLY}", **{"accept-encoding": "gzip"})
    assert first.headers["content-encoding"] == "gzip" and b"plotly.js v" in first.content[:200]
    assert int(first.headers["content-length"]) < 2_000_000 < len(first.content)
    again = get(app, f"/assets/{_PLOTLY}", **{"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and not again.content
    plain = get(app, "/assets/page.js", **{"accept-encoding": "identity"})
    zipped = run(call(app, "/assets/page.js", method="GET", headers={"accept-encoding": "gzip"}))
    assert gzip.decompress(zipped.body) == plain.content


@pytest.mark.parametrize("name", ["..%2fapp.py", "%2e%2e/app.py", "app.py", "", "plotly.js"])
def test_only_the_pages_files_are_assets(client, name):
    answer = get(page(client), f"/assets/{name}")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


def test_slots_and_frames(client):
    app = page(client)
    slots = get(app, "/slots").json()
    assert slots["seats"]["request"][0] == "req-a" and slots["pages"]["counts"]["shared"] == 2
    assert get(app, "/frames?from=0").json()["columns"]["step"] == [1, 2]
    assert get(app, "/frames").json()["columns"]["waiting"] == [2, 2, 2]
    for wrong in ("x", "1.5", "--1", "", "²", "9" * 30):
        answer = get(app, f"/frames?from={wrong}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "from", wrong


def test_answers_are_zipped_for_who_can_read_that(client):
    app = page(client)
    plain = run(call(app, "/requests", method="GET"))
    zipped = run(call(app, "/requests", method="GET", headers={"accept-encoding": "gzip"}))
    assert "content-encoding" not in plain.headers and zipped.headers["content-encoding"] == "gzip"
    rows = [json.loads(one)["requests"] for one in (plain.body, gzip.decompress(zipped.body))]
    assert [row["request"] for row in rows[0]] == [row["request"] for row in rows[1]]
    assert len(zipped.body) < len(plain.body)


def test_the_stream_frees_its_place_when_the_client_leaves(client):
    app = page(client)
    reply = run(call(app, "/feed", method="GET", leave_on_chunk=3))
    assert reply.status == 200 and reply.headers["content-type"] == "text/event-stream"
    assert (
        reply.headers["cache-control"] == "no-store" and reply.headers["x-accel-buffering"] == "no"
    )
    assert [chunk.split(b"\n")[0] for chunk in reply.chunks[:3]] == [
        b"event: hello",
        b"event: key_frame",
        b"event: delta",
    ]
    assert json.loads(reply.chunks[1].split(b"data: ")[1])["seats"]["request"][1] == "req-b"
    assert viewers_of(app.state.feed) == 0


def test_a_viewer_too_many_is_told_to_come_back(client):
    app = page(client)
    assert app.state.feed._max_viewers == Viewer.most == 32
    app.state.feed._max_viewers = 0
    reply = run(call(app, "/feed", method="GET"))
    assert (reply.status, reply.error["code"]) == (503, "too_many_viewers")
    assert reply.headers["retry-after"] == "5"


def test_head_of_the_feed_ends(client):
    reply = run(call(page(client), "/feed", method="HEAD"))
    assert reply.status == 200 and reply.complete and not reply.body


@pytest.mark.parametrize("path", ["/feed", "/slots", "/frames"])
@pytest.mark.parametrize(
    "cookie", ["", "jitney_session=", "jitney_session=wrong", f"jitney_session={digest_key(KEY)}"]
)
def test_data_needs_a_session_when_keys_are_set(client, path, cookie):
    reply = run(call(page(client, KEY), path, method="GET", headers={"cookie": cookie}))
    assert reply.status == 401 and reply.error["code"] == "not_signed_in"
    assert client.asked == 0


async def test_signing_in(client):
    async with browser(page(client, "another", KEY)) as web:
        form = await web.get("/")
        assert form.status_code == 401 and "sign-in.js" in form.text
        wrong = await web.post("/sign-in", json={"key": "wrong"})
        assert wrong.status_code == 401 and "set-cookie" not in wrong.headers
        right = await web.post("/sign-in", json={"key": KEY})
        assert right.status_code == 204
        cookie = right.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(
            cookie.split("; ")
        ) and KEY not in cookie
        assert (await web.get("/")).status_code == 200
        assert (await web.get("/slots")).json()["seats"]["request"][0] == "req-a"


@pytest.mark.parametrize(
    "body, status",
    [
        (b"", 400),
        (b"key", 400),
        (b"[]", 400),
        (b'{"key": 1}', 400),
        (b'{"key": "a", "x": 1}', 400),
        (b'{"key": "' + b"a" * 5000 + b'"}', 413),
        (b'{"key": "\\ud800"}', 400),
        ('{"key": "ü"}'.encode(), 401),
    ],
)
def test_bad_sign_ins(client, body, status):
    reply = run(call(page(client, KEY), "/sign-in", body))
    assert reply.status == status and "set-cookie" not in reply.headers


def test_without_keys_nobody_signs_in(client):
    assert run(call(page(client), "/sign-in", {"key": ""})).status == 401
    assert get(page(client), "/slots").status_code == 200


def test_loading_is_an_error_in_the_endpoints_form(client):
    from jitney.engine.common.errors import RequestError

    async def loading():
        raise RequestError("the model is still loading", code="loading")

    client.seat_map = loading
    answer = get(page(client), "/slots")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"


async def test_guessing_keys_is_slow_and_locks_nobody_out(client):
    app = page(client, KEY)
    for _ in range(_MOST_ALIKE):
        assert (await call(app, "/sign-in", {"key": "guess"})).status == 401
    reply = await call(app, "/sign-in", {"key": "guess"})
    assert reply.status == 429 and reply.error["code"] == "too_many_attempts"
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert (await call(app, "/sign-in", {"key": KEY})).status == 204


async def test_signing_out_ends_the_session(client):
    async with browser(page(client, KEY)) as web:
        await web.post("/sign-in", json={"key": KEY})
        stolen = web.cookies[_COOKIE]
        assert (await web.get("/engines")).json()["signed_in"] is True
        left = await web.post("/sign-out")
        assert left.status_code == 204 and "Max-Age=0" in left.headers["set-cookie"]
        assert _COOKIE not in web.cookies
        again = await web.get("/slots", headers={"cookie": f"{_COOKIE}={stolen}"})
        assert again.status_code == 401, "the id itself is worth nothing any more"
    async with browser(page(client)) as web:
        assert (await web.get("/engines")).json()["signed_in"] is False


def test_a_form_of_another_site_cannot_sign_in(client):
    reply = run(
        call(page(client, KEY), "/sign-in", {"key": KEY}, headers={"content-type": "text/plain"})
    )
    assert reply.status == 415 and "set-cookie" not in reply.headers


def test_text_is_shown_only_where_the_server_allows_it(client):
    request = client.history.find("req-a", 0)
    assert get(page(client), "/request/req-a").json()["text"] is None
    app = Dashboard(client, ServerSettings(), decode=lambda ids: "".join(map(chr, ids))).to_mount()
    assert get(app, "/request/req-a").json()["text"] is None, (
        "tokens that were not kept cannot be shown"
    )
    request.tokens = [104, 105, 33, 63, 63, 111, 107]
    assert get(app, "/request/req-a").json()["text"] == {"prompt": "hi!??", "answer": "ok"}
    assert get(page(client), "/request/req-a").json()["text"] is None
    listed = json.dumps(get(app, "/requests").json())
    assert '"tokens"' not in listed and '"text"' not in listed
