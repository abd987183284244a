"""Bad inputs that need more than one request and its answer: keys in wrong places, crowds of slow
sockets, ranges without end, names that are code, a stop in the middle of it all.
"""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from api_fakes import ByteTokenizer, FakeClient, Reply, Script, call, make_app, run
from server_settings import server_settings

from jitney.dashboard import Dashboard
from jitney.engine.cli import main
from jitney.engine.common.key_file import digest_key
from jitney.engine.server.app import create_app

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


def test_a_key_in_the_query_is_none():
    app = make_app(api_keys=(digest_key("sekrit"),))
    for name in ("key", "api_key", "access_token", "authorization"):
        assert ask(app, "/v1/completions", PROMPT, query=f"{name}=sekrit").status == 401


def test_unknown_fields_are_listed_and_change_nothing():
    names = ("__proto__", "constructor", "foo")
    for path, body in GENERATES.items():
        reply = ask(make_app(), path, body | dict.fromkeys(names, 9))
        assert reply.status == 200
        assert set(reply.headers["x-ignored-params"].split(", ")) == set(names)
    path, body = "/v1/completions", PROMPT
    many = ask(make_app(), path, body | {f"field{number}": 1 for number in range(50_000)})
    assert many.status == 200 and len(many.headers["x-ignored-params"].split(", ")) == 20
    long = ask(make_app(), path, body | {"x" * (MIB // 2): 1})
    assert long.status == 200 and len(long.headers["x-ignored-params"]) <= 160
    name = "a b\r\nc" * 100
    assert ask(make_app(), path, body | {name: 1}).headers["x-ignored-params"] == (
        ("a b??c" * 100)[:160].strip()
    )


QUERIES = (
    "from=-1e308&step=0",
    "from=nan&to=nan",
    "after=-9999999999999999999999",
    "after=x",
    "from=5&to=1",
    "limit=1e9",
    "last=inf",
    "%00=%ff&&&==",
)


@pytest.mark.parametrize("path", ["frames", "requests", "timeline", "trace", "stays"])
def test_queries_of_the_page_are_read_or_refused(path: str):
    """Whatever they say: a bounded answer, and no 500."""
    app = with_page(FakeClient())
    for query in QUERIES:
        reply = ask(app, f"/dashboard/{path}", method="GET", query=query)
        assert reply.status in (200, 400, 404), (query, reply.body)
        assert len(reply.body) < MIB


def test_ten_thousand_ranges_of_a_file_cost_nothing():
    app = with_page(FakeClient())
    ranges = "bytes=" + ",".join(["0-"] * 10_000)
    assert len(ranges) > 20_000
    for path in ("/dashboard/", "/dashboard/style.css", "/dashboard/page.js"):
        reply = ask(app, path, method="GET", headers={"range": ranges})
        assert reply.status in (200, 404, 416) and len(reply.body) < MIB


@pytest.mark.parametrize("path", GENERATES)
def test_names_that_are_code_stay_text(path: str):
    name = "m<img src=x onerror=alert(1)></script><script>a\"b'c"
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


@pytest.mark.parametrize("path", GENERATES)
async def test_two_requests_of_one_id_are_two(path: str):
    """And one whose id begins as another's ends neither."""
    client = FakeClient(Script("abc", delay_s=0.01))
    app = make_app(client)
    ids = ("same", "same", "sam", "same-1")
    replies = await asyncio.gather(
        *(call(app, path, GENERATES[path], headers={"x-request-id": id}) for id in ids)
    )
    assert [reply.status for reply in replies] == [200] * 4
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
def test_nothing_is_fetched(path: str, monkeypatch: pytest.MonkeyPatch):
    def connect(*_: Any) -> None:
        raise AssertionError("a socket was opened")

    app, client = make_app(), FakeClient()
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    for url in ("http://169.254.169.254/x", "file:///etc/passwd", "data:,a"):
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


#: Patterns that take for ever, or too much, where they are taken apart by backtracking.
PATTERNS = ("(a+)+b", "(a|a)*$", ".{1,100000}.{1,100000}", "(", r"(a)\1", "(?=a)b", "a" * 70_000)


@pytest.mark.parametrize(
    ("path", "pattern"),
    [*(("/v1/completions", each) for each in PATTERNS), *((path, "(a+)+b") for path in WRITES)],
    ids=lambda value: value[-12:],
)
def test_a_pattern_is_compiled_or_refused(path: str, pattern: str):
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
    reply = ask(make_app(client), path, GENERATES[path] | fields[path])
    assert reply.status in (200, 400) and len(reply.body) < 5000
    if pattern in ("(", r"(a)\1") or len(pattern) > 65_536:
        assert reply.status == 400 and not client.requests
