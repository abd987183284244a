"""The limit of a body that none is set for follows the model's context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from api_fakes import ByteTokenizer, FakeClient, call, make_app, run
from fleet_engines import FakeEngine, engines, fleet_of, toml

from jitney.engine.common.errors import ConfigError
from jitney.engine.config.layers import ResolvedConfig

MIB = 1 << 20
PATH = "/v1/completions"


def body_of(size: int) -> bytes:
    """A completion of so many bytes, most of them in a field that nobody knows."""
    frame = json.dumps({"prompt": "a", "max_tokens": 1, "padding": ""}).encode()
    return frame.replace(b'"padding": "', b'"padding": "' + b"x" * (size - len(frame)))


@pytest.mark.parametrize(
    ("context", "limit"), [(256, MIB), (20_000, MIB), (65_536, 3 * MIB), (262_144, 12 * MIB)]
)
def test_it_is_48_bytes_a_token_and_at_least_a_mebibyte(context: int, limit: int):
    app = make_app(FakeClient(context_length=context))
    assert run(call(app, PATH, body_of(limit))).status == 200
    reply = run(call(app, PATH, body_of(limit + 1)))
    assert reply.status == 413 and str(limit) in reply.error["message"]


def test_a_limit_that_is_set_counts():
    app = make_app(FakeClient(context_length=262_144), body_limit=2000)
    assert [run(call(app, PATH, body_of(size))).status for size in (2000, 2001)] == [200, 413]


def test_a_prompt_of_escaped_characters_fits():
    """Python's json writes a Chinese character in six bytes; a token holds one or two of them."""

    class Wide(ByteTokenizer):
        longest_token = None

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [1] * (len(text) // 2)

    app = make_app(FakeClient(context_length=131_072, pages=8192), tokenizer=Wide())
    data = json.dumps({"prompt": "\u4e2d" * 260_000, "max_tokens": 1}).encode()
    assert len(data) > MIB and run(call(app, PATH, data)).status == 200


def test_until_the_context_is_known_a_larger_body_is_refused_for_now():
    client = FakeClient(context_length=65_536)
    info, client.info, client.state = client.info, None, "loading"
    app = make_app(client)
    for size in (MIB, MIB + 1):
        reply = run(call(app, PATH, body_of(size)))
        assert (reply.status, reply.error["code"]) == (503, "loading")
    client.info, client.state = info, "ready"
    assert run(call(app, PATH, body_of(MIB + 1))).status == 200


def test_a_limit_that_is_set_counts_before_the_engine_is_ready():
    client = FakeClient()
    client.info, client.state = None, "loading"
    assert run(call(make_app(client, body_limit=2000), PATH, body_of(2001))).status == 413


@pytest.mark.parametrize("limit", ["1", "1023", "-1", "2000000000"])
def test_a_limit_that_holds_no_body_is_refused_at_start(limit: str):
    with pytest.raises(ConfigError, match="body-limit"):
        ResolvedConfig.load(None, {}, {"body_limit": limit})


def test_a_fleets_limit_follows_its_longest_context(tmp_path: Path):
    long = FakeEngine(FakeClient(context_length=65_536))
    with engines(FakeEngine(), long) as fakes:
        with fleet_of(tmp_path, toml([fake.url for fake in fakes])) as served:
            served.wait_ready(*(fake.name for fake in fakes))
            assert served.fleet.body_limit == 3 * MIB
        with fleet_of(tmp_path, toml([long.url])) as served:
            served.wait_ready(long.name)
            with served.http() as http:
                assert [sent(http, size) for size in (3 * MIB, 3 * MIB + 1)] == [200, 413]


def sent(http: Any, size: int) -> int:
    headers = {"content-type": "application/json"}
    return http.post(PATH, content=body_of(size), headers=headers).status_code
