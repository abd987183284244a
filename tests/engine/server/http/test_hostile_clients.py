"""Bad inputs that need more than one request and its answer: keys in wrong places, crowds of slow
sockets, ranges without end, names that are code, a stop in the middle of it all.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_fakes import ByteTokenizer, FakeClient, Reply, Script, call, make_app, run, served, until
from server_settings import server_settings

from jitney.dashboard import Dashboard
from jitney.engine.cli import main
from jitney.engine.common.errors import ErrorInfo
from jitney.engine.server.app import create_app
from jitney.engine.server.http.connections import Connections
from jitney.engine.server.http.settings import digest_key

PROMPT = {"model": "m", "prompt": "ab", "max_tokens": 3}
WRITES = {
    "/v1/completions": PROMPT,
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"model": "m", "input": "a"},
    "/v1/messages": {
        "model": "m",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "a"}],
    },
}
GENERATES = WRITES | {"/v1/embeddings": {"model": "m", "input": "a"}}
MIB = 1 << 20


def with_page(client: FakeClient, **settings: Any) -> Any:
    """The endpoint and the page behind one port, as `jitney serve` has them."""
    limits = server_settings(**settings)
    routes = Dashboard(client, limits).mounted("/dashboard")
    return create_app(client, ByteTokenizer(), limits, "m", routes)  # type: ignore[arg-type]


def ask(app: Any, path: str, body: Any = b"", **kw: Any) -> Reply:
    return run(call(app, path, body, **kw))


@pytest.mark.parametrize("path", GENERATES)
@pytest.mark.parametrize("query", ["key", "api_key", "access_token", "authorization"])
def test_a_key_in_the_query_is_none(path: str, query: str):
    app = make_app(api_keys=(digest_key("sekrit"),))

    async def session() -> int:
        scope_path = f"{path}?{query}=sekrit"
        with served(app) as (url, _):
            async with httpx.AsyncClient(trust_env=False) as web:
                return (await web.post(url + scope_path, json=GENERATES[path])).status_code

    assert run(session()) == 401


@pytest.mark.parametrize("path", GENERATES)
def test_a_key_of_a_megabyte_is_too_large(path: str):
    app = make_app(api_keys=(digest_key("sekrit"),))
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"authorization", b"Bearer " + b"x" * MIB),
    ]
    assert ask(app, path, GENERATES[path], raw_headers=headers).status == 431


@pytest.mark.parametrize("path", GENERATES)
def test_unknown_fields_are_listed_and_change_nothing(path: str):
    body = GENERATES[path]
    reply = ask(make_app(), path, body | {"__proto__": {"n": 9}, "constructor": 1, "foo": 2})
    assert reply.status == 200
    assert set(reply.headers["x-ignored-params"].split(", ")) == {
        "__proto__",
        "constructor",
        "foo",
    }
    many = ask(make_app(), path, body | {f"field{number}": 1 for number in range(50_000)})
    assert many.status == 200 and len(many.headers["x-ignored-params"].split(", ")) == 20
    long = ask(make_app(), path, body | {"x" * (MIB // 2): 1})
    assert long.status == 200 and len(long.headers["x-ignored-params"]) <= 160


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"previous_response_id": "resp_unknown"}, 404, None),
        ({"previous_response_id": "../../x"}, None, None),
        ({"previous_response_id": 5}, 400, "previous_response_id"),
        ({"background": True, "store": False}, 400, None),
        ({"input": [None]}, 400, None),
        ({"input": 5}, 400, "input"),
        ({"input": [{"type": "item_reference", "id": "resp_unknown"}]}, None, None),
    ],
)
def test_responses_that_refer_to_nothing(body: dict[str, Any], status: int | None, param: Any):
    """None: 400 or 404."""
    client = FakeClient()
    reply = ask(make_app(client), "/v1/responses", GENERATES["/v1/responses"] | body)
    assert reply.status in ((400, 404) if status is None else (status,)), reply.body
    if param is not None:
        assert (reply.error["param"] or "").startswith(param)
    assert not client.requests


def test_a_response_of_another_key_is_nobody_s():
    app = make_app(api_keys=(digest_key("one"), digest_key("two")))
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    body = GENERATES["/v1/responses"]
    made = ask(app, "/v1/responses", body, headers=one).json()["id"]
    path = f"/v1/responses/{made}"
    assert ask(app, path, method="GET", headers=one).status == 200
    for method in ("GET", "DELETE"):
        assert ask(app, path, method=method, headers=two).status == 404
    stolen = body | {"previous_response_id": made}
    assert ask(app, "/v1/responses", stolen, headers=two).status == 404


def upload(content: bytes, **fields: str) -> tuple[bytes, dict[str, str]]:
    """A multipart body with a file and fields, and its header."""
    request = httpx.Request("POST", "http://x", files={"file": ("a.jsonl", content)}, data=fields)
    return request.read(), {"content-type": request.headers["content-type"]}


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        (b"", {"purpose": "batch"}),
        (b"{}\n", {}),
        (b"{}\n", {"purpose": "fine-tune"}),
        (b"x" * MIB, {"purpose": "batch"}),
    ],
    ids=["empty", "no purpose", "wrong purpose", "too large"],
)
def test_files_that_are_refused_leave_nothing(
    content: bytes, fields: dict[str, str], tmp_path: Path
):
    app = make_app(data_dir=tmp_path / "data", file_limit=10_000)
    body, headers = upload(content, **fields)
    reply = ask(app, "/v1/files", body, headers=headers)
    assert reply.status in (400, 413), reply.body
    kept = [path for path in (tmp_path / "data").rglob("*") if b"x" * 100 in read(path)]
    assert not kept
    assert ask(app, "/v1/files", method="GET").json()["data"] == []


def read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


@pytest.mark.parametrize(
    "path",
    [
        "/slots",
        "/metrics",
        "/dashboard/feed",
        "/dashboard/frames",
        "/dashboard/requests",
        "/dashboard/trace",
        "/dashboard/report",
    ],
)
def test_the_page_and_the_figures_need_the_key(path: str):
    app = with_page(FakeClient(), api_keys=(digest_key("k"),), admin_keys=(digest_key("a"),))
    assert ask(app, path, method="GET").status == 401


@pytest.mark.parametrize(
    "query",
    [
        "from=-1e308&step=0",
        "from=nan&to=nan",
        "after=-9999999999999999999999",
        "after=x",
        "from=5&to=1",
        "limit=1e9",
        "last=inf",
        "%00=%ff&&&==",
    ],
)
@pytest.mark.parametrize("path", ["frames", "requests", "timeline", "trace", "stays"])
def test_queries_of_the_page_are_read_or_refused(path: str, query: str):
    """Whatever they say: a bounded answer within a second, and no 500."""
    app = with_page(FakeClient())

    async def session() -> httpx.Response:
        with served(app) as (url, _):
            async with httpx.AsyncClient(trust_env=False, timeout=30) as web:
                return await web.get(f"{url}/dashboard/{path}?{query}")

    reply = run(session())
    assert reply.status_code in (200, 400, 404), reply.text
    assert len(reply.content) < MIB


def test_ten_thousand_ranges_of_a_file_cost_nothing():
    app = with_page(FakeClient())
    ranges = "bytes=" + ",".join(["0-"] * 10_000)
    assert len(ranges) > 20_000
    started = time.monotonic()
    for path in ("/dashboard/", "/dashboard/style.css", "/dashboard/page.js"):
        reply = ask(app, path, method="GET", headers={"range": ranges})
        assert reply.status in (200, 404, 416) and len(reply.body) < MIB
    assert time.monotonic() - started < 20


def test_a_crowd_of_slow_sockets_leaves_room_for_others():
    """Each sends a byte of its head now and then, or none."""
    settings = server_settings(read_timeout_s=1.0)
    connections = Connections(settings)
    app = make_app(read_timeout_s=1.0)
    with served(app, settings, connections) as (url, port):
        socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        for number, sock in enumerate(socks):
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"[: number % 30])
        with httpx.Client(trust_env=False, timeout=30) as web:
            assert web.post(url + "/v1/completions", json=PROMPT).status_code == 200
        until(lambda: connections.n_open <= 1, 30)
        for sock in socks:
            sock.close()


@pytest.mark.parametrize("path", GENERATES)
def test_the_same_request_hundreds_of_times_and_most_leave(path: str):
    """Everybody is answered or left, and nothing stays open."""
    client = FakeClient(Script("ab" * 20, delay_s=0.005))
    app = make_app(client)
    body = GENERATES[path] | {"stream": True}

    async def session() -> list[Reply]:
        leaving = [call(app, path, body, leave_after=0.1) for _ in range(250)]
        staying = [call(app, path, body) for _ in range(50)]
        replies = await asyncio.gather(*leaving, *staying)
        return replies[-50:]

    for reply in run(session()):
        assert reply.status == 200 and reply.complete
    assert not client.open


@pytest.mark.parametrize("path", GENERATES)
@pytest.mark.parametrize("name", ["m<img src=x onerror=alert(1)>", "</script><script>", "a\"b'c"])
def test_names_that_are_code_stay_text(path: str, name: str):
    app = make_app(model=name)
    reply = ask(app, "/v1/models", method="GET")
    assert reply.json()["data"][0]["id"] == name
    assert reply.headers["content-type"].startswith("application/json")
    body = GENERATES[path] | {"model": name}
    plain = ask(app, path, body)
    assert plain.json()["model"] == name
    assert plain.headers["content-type"].startswith("application/json")
    if path not in WRITES:
        return
    stream = ask(app, path, body | {"stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in stream.body.split(b"\n") if line.startswith(b"data: {")]
    first = json.loads(lines[0].removeprefix(b"data: "))
    holder = first.get("message") or first.get("response") or first
    assert holder["model"] == name


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile", "/profile", "/debug/pprof"])
def test_nobody_profiles_from_outside(path: str):
    for method in ("GET", "POST"):
        assert ask(with_page(FakeClient()), path, b"{}", method=method).status == 404


def test_a_tokenizer_of_a_gigabyte_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A hole in a file costs no disk; the reader looks at its size."""
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "vocab_size": 8}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "model.safetensors").write_bytes((1 << 63).to_bytes(8, "little") + b"{}")
    assert main(["serve", "--model", str(tmp_path), "--port", "0"]) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert "Traceback" not in "".join(error)


OTHER_SITES = (
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site", "origin": "http://localhost:9999"},
)


@pytest.mark.parametrize("path", GENERATES)
@pytest.mark.parametrize("headers", OTHER_SITES, ids=str)
def test_a_page_of_another_site_cannot_have_it_compute(path: str, headers: dict[str, str]):
    client = FakeClient()
    for method, status in (("POST", 403), ("OPTIONS", 405)):
        reply = ask(make_app(client), path, GENERATES[path], method=method, headers=headers)
        assert reply.status == status, reply.body
        assert not any(name.startswith("access-control") for name in reply.headers)
    assert not client.requests


@pytest.mark.parametrize("path", GENERATES)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT"])
def test_only_a_post_generates(path: str, method: str):
    client = FakeClient()
    reply = ask(make_app(client), path, GENERATES[path], method=method)
    assert (reply.status, reply.headers["allow"]) == (405, "POST") and not client.requests


@pytest.mark.parametrize("path", GENERATES)
def test_a_client_that_sends_half_and_is_silent_is_told(path: str):
    """A body that stops, and a connection that is half closed behind a whole one."""
    settings = server_settings(read_timeout_s=0.3)
    client = FakeClient()
    app = make_app(client, read_timeout_s=0.3)
    body = json.dumps(GENERATES[path]).encode()
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" % path.encode()
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    with served(app, settings) as (_, port):
        with socket.create_connection(("127.0.0.1", port), 30) as sock:
            sock.sendall(head + body[:-1])
            assert sock.recv(100).startswith(b"HTTP/1.1 408 ") and not client.requests
        with socket.create_connection(("127.0.0.1", port), 30) as sock:
            sock.sendall(head + body)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(100).startswith(b"HTTP/1.1 200 ")
        until(lambda: not client.open, 30)


@pytest.mark.parametrize("path", GENERATES)
@pytest.mark.parametrize("given", ["a\r\nSet-Cookie: a=b", "<script>", "x" * 50_000, "a b", ""])
def test_a_request_s_id_is_harmless(path: str, given: str):
    reply = ask(make_app(), path, GENERATES[path], headers={"x-request-id": given})
    assert reply.status == 200 and len(reply.headers["x-request-id"]) == 32
    assert "set-cookie" not in reply.headers


@pytest.mark.parametrize("path", GENERATES)
def test_two_requests_of_one_id_are_two(path: str):
    """And one whose id begins as another's ends neither."""
    client = FakeClient(Script("abc", delay_s=0.01))
    app = make_app(client)

    async def session() -> list[Reply]:
        ids = ("same", "same", "sam", "same-1")
        return await asyncio.gather(
            *(call(app, path, GENERATES[path], headers={"x-request-id": id}) for id in ids)
        )

    assert [reply.status for reply in run(session())] == [200] * 4
    assert len({request.id for request in client.requests}) == 4 and not client.aborts


def picture(path: str, url: str) -> dict[str, Any]:
    """A body with a picture to be fetched."""
    parts: dict[str, Any] = {
        "/v1/chat/completions": {"type": "image_url", "image_url": {"url": url}},
        "/v1/responses": {"type": "input_image", "image_url": url},
        "/v1/messages": {"type": "image", "source": {"type": "url", "url": url}},
    }
    if path == "/v1/completions":
        return PROMPT | {"prompt_embeds": url}
    if path == "/v1/embeddings":
        return {"model": "m", "input": [parts["/v1/chat/completions"]]}
    field = "input" if path == "/v1/responses" else "messages"
    return GENERATES[path] | {field: [{"role": "user", "content": [parts[path]]}]}


@pytest.mark.parametrize("path", GENERATES)
@pytest.mark.parametrize("url", ["http://169.254.169.254/x", "file:///etc/passwd", "data:,a"])
def test_nothing_is_fetched(path: str, url: str, monkeypatch: pytest.MonkeyPatch):
    def connect(*_: Any) -> None:
        raise AssertionError("a socket was opened")

    app, client = make_app(), FakeClient()
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    assert ask(app, path, picture(path, url)).status == 400 and not client.requests
    # A text may say what it likes.
    text = f"![picture]({url})"
    field = next(name for name in ("prompt", "input", "messages") if name in GENERATES[path])
    said: Any = [{"role": "user", "content": text}] if field == "messages" else text
    assert ask(app, path, GENERATES[path] | {field: said}).status == 200


@pytest.mark.parametrize("path", WRITES)
def test_an_answer_without_an_end_ends(path: str):
    """ignore_eos, and no length where a route has none of its own."""
    client = FakeClient(Script("x" * 1000))
    body = GENERATES[path] | {"ignore_eos": True}
    if path in ("/v1/completions", "/v1/chat/completions"):
        body |= {"max_tokens": None}
    reply = ask(make_app(client), path, body)
    assert reply.status == 200
    [request] = client.requests
    length = request.sampling.max_tokens
    assert length is not None and 0 < length <= 256 - len(request.prompt)


@pytest.mark.parametrize("path", GENERATES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"), [("queue_full", 429), ("deadline_exceeded", 504), ("nan_logits", 500)]
)
def test_what_the_engine_refuses_is_a_status_everywhere(
    path: str, stream: bool, code: str, status: int
):
    wait_s = 2.25 if status == 429 else None
    client = FakeClient(Script(error=ErrorInfo(code, "sorry", retry_after=wait_s)))
    reply = ask(make_app(client), path, GENERATES[path] | {"stream": stream})
    assert reply.status == status and not client.open
    assert reply.headers.get("retry-after-ms") == ("2250" if status == 429 else None)


#: Patterns that take for ever, or too much, where they are taken apart by backtracking.
PATTERNS = ("(a+)+b", "(a|a)*$", ".{1,100000}.{1,100000}", "(", r"(a)\1", "(?=a)b", "a" * 70_000)


@pytest.mark.parametrize("path", WRITES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern[:12])
def test_a_pattern_is_compiled_or_refused_in_time(path: str, pattern: str):
    """Where it may stand: beside the answer's form, or in its schema."""
    client = FakeClient()
    schema = {"type": "string", "pattern": pattern}
    schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    fields: dict[str, dict[str, Any]] = {
        "/v1/completions": {"structured_outputs": {"regex": pattern}},
        "/v1/chat/completions": {"structured_outputs": {"regex": pattern}},
        "/v1/responses": {"text": {"format": form}},
        "/v1/messages": {"output_config": {"format": form | {"name": None, "strict": None}}},
    }
    started = time.monotonic()
    reply = ask(make_app(client), path, GENERATES[path] | fields[path])
    assert time.monotonic() - started < 20
    assert reply.status in (200, 400) and len(reply.body) < 5000
    if pattern in ("(", r"(a)\1") or len(pattern) > 65_536:
        assert reply.status == 400 and not client.requests
