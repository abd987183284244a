"""Requests that are longer than the context: what clients read of them on every route, and which
texts are refused before they are tokenised.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from api_fakes import (
    ByteTokenizer,
    FakeClient,
    Script,
    call,
    make_app,
    opening,
    run,
    served,
)
from client_models import parsed
from fleet_engines import FakeEngine, engines, fleet_of, toml

from jitney.engine.common.errors import ErrorInfo, RequestError
from jitney.engine.common.requests import RequestLimits
from jitney.engine.server.http.errors import ErrorReply

CONTEXT = 256
#: What the test's template puts around one message of the user.
AROUND = len("user: \nassistant: ")
#: As clients look for it, with what each of them takes from it.
OPENAI = re.compile(
    r"This model's maximum context length is (\d+) tokens\. However, you requested (\d+) tokens "
    r"\((\d+) in the (\w+), (\d+) in the completion\)( or more)?\. Please reduce the length of "
    r"the (\w+) or completion\."
)
ANTHROPIC = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


#: Route -> the field with the prompt, and a body with this text in it.
ROUTES: dict[str, tuple[str, Any]] = {
    "/v1/completions": ("prompt", lambda text: {"prompt": text}),
    "/v1/chat/completions": ("messages", lambda text: {"messages": user(text)}),
    "/v1/responses": ("input", lambda text: {"input": text}),
    "/v1/embeddings": ("input", lambda text: {"input": text}),
    "/invocations": ("messages", lambda text: {"messages": user(text)}),
}


def counting() -> Any:
    """An endpoint that tokenises prompts that are a little too long, and so knows their length."""
    tokenizer = ByteTokenizer()
    tokenizer.longest_token = 4
    return make_app(tokenizer=tokenizer)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_openais_words_on_openais_routes(path: str, stream: bool):
    field, body_of = ROUTES[path]
    extra = {"stream": True} if stream and path != "/v1/embeddings" else {}
    reply = run(call(counting(), path, body_of("a" * CONTEXT) | extra))
    error = reply.error
    assert (reply.status, error["type"]) == (400, "invalid_request_error")
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    match = OPENAI.fullmatch(error["message"])
    assert match, error["message"]
    prompt_tokens = CONTEXT if field == "prompt" or "embed" in path else CONTEXT + AROUND
    assert match.groups() == (
        str(CONTEXT),
        str(prompt_tokens + 1),
        str(prompt_tokens),
        field,
        "1",
        None,
        field,
    )


def test_the_tokens_of_the_answer_are_named():
    body = {"messages": user("a" * 100), "max_tokens": 200}
    match = OPENAI.fullmatch(run(call(make_app(), "/v1/chat/completions", body)).error["message"])
    assert match and match[2] == str(100 + AROUND + 200) and match[5] == "200"


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_words_on_anthropics_routes(stream: bool):
    from anthropic.types import ErrorResponse

    body = {"max_tokens": 5, "messages": user("a" * 300), "stream": stream}
    reply = run(call(counting(), "/v1/messages", body))
    error = reply.json()["error"]
    assert (reply.status, error["type"]) == (400, "invalid_request_error")
    assert error["message"] == f"prompt is too long: {300 + AROUND} tokens > {CONTEXT} maximum"
    assert error.pop("code") == "context_length_exceeded"
    parsed(ErrorResponse, reply.json() | {"error": error})


def test_a_prompt_without_room_for_an_answer_is_too_long_too():
    body = {"max_tokens": 5, "messages": user("a" * (CONTEXT - AROUND))}
    match = ANTHROPIC.fullmatch(run(call(make_app(), "/v1/messages", body)).error["message"])
    assert match and int(match[1]) > int(match[2]) == CONTEXT


def test_clients_know_the_error():
    import anthropic
    import openai

    with served(make_app()) as (url, _):
        with openai.OpenAI(
            base_url=url + "/v1",
            api_key="k",
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client:
            with pytest.raises(openai.BadRequestError, match="maximum context length is") as raised:
                client.chat.completions.create(model="m", messages=user("a" * 999))  # type: ignore[arg-type]
            assert raised.value.code == "context_length_exceeded"
        with anthropic.Anthropic(
            base_url=url,
            api_key="k",
            http_client=anthropic.DefaultHttpxClient(trust_env=False),
        ) as client:
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: ") as refused:
                client.messages.create(model="m", max_tokens=5, messages=user("a" * 999))  # type: ignore[arg-type]
            assert refused.value.body["error"]["code"] == "context_length_exceeded"  # type: ignore[index]


def overflow() -> ErrorInfo:
    limits = RequestLimits(vocab_size=9, context_length=64, pool_tokens=1000)
    return RequestError.too_long(limits.overflow(70, 5), "prompt").info


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": user("a")}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"max_tokens": 5, "messages": user("a")}),
    ],
)
def test_what_the_engine_finds_when_a_stream_has_begun(path: str, body: dict[str, Any]):
    gate = threading.Event()
    app = make_app(FakeClient(Script(error=overflow(), gate=gate)), header_wait_s=0.05)
    reply = run(call(opening(gate, app), path, body | {"stream": True}))
    assert reply.status == 200
    assert b'"code":"context_length_exceeded"' in reply.body
    words = b"maximum context length is 64 tokens"
    if path == "/v1/messages":
        words = b"prompt is too long: 70 tokens > 64 maximum"
    assert words in reply.body
    assert path != "/v1/responses" or b'"type":"response.failed"' in reply.body


def test_a_pool_that_holds_less_than_the_context_is_named():
    limits = RequestLimits(vocab_size=9, context_length=4096, pool_tokens=99)
    message = str(RequestError.too_long(limits.overflow(200, 1), "prompt"))
    assert "maximum context length is 100 tokens" in message and "4096" in message


def test_the_numbers_survive_another_field_and_another_process():
    moved = RequestError.from_info(overflow()).blaming("input")
    assert "70 in the input" in str(moved) and moved.info.overflow == overflow().overflow
    assert "70 tokens > 64" in ErrorReply.of(moved, "id").anthropic().error.message


class _LongTokens(ByteTokenizer):
    """A run of 64 of one character is one token, as in vocabularies with long entries."""

    longest_token = 64

    def __init__(self, bound: int | None = 64):
        self.longest_token = bound
        self.tokenised: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.tokenised.append(len(text))
        runs = re.findall(r"(.)(\1{63})?", text, re.DOTALL)
        return [ord(character) % 256 for character, _ in runs]


@pytest.mark.parametrize("bound", [64, None])
@pytest.mark.parametrize("path", ROUTES)
def test_what_fits_is_taken_however_many_characters_it_has(path: str, bound: int | None):
    body = ROUTES[path][1]("-" * 64 * 200)
    reply = run(call(make_app(tokenizer=_LongTokens(bound)), path, body))
    assert reply.status == 200, reply.body


@pytest.mark.parametrize("path", ROUTES)
def test_what_cannot_fit_is_refused_untokenised_with_a_lower_bound(path: str):
    tokenizer = _LongTokens()
    field, body_of = ROUTES[path]
    reply = run(call(make_app(tokenizer=tokenizer), path, body_of("-" * 64 * 400)))
    match = OPENAI.fullmatch(reply.error["message"])
    assert match and match[6] == " or more" and match[4] == field
    assert CONTEXT < int(match[3]) <= 400 + AROUND and int(match[2]) == int(match[3]) + 1
    assert not tokenizer.tokenised


@pytest.mark.parametrize(
    ("path", "most"), [*((path, 10) for path in ROUTES), ("/v1/completions", -1)]
)
def test_what_is_truncated_may_be_of_any_length(path: str, most: int):
    client = FakeClient()
    body = ROUTES[path][1]("-" * 64 * 400) | {"truncate_prompt_tokens": most}
    reply = run(call(make_app(client, tokenizer=_LongTokens()), path, body))
    assert reply.status == 200, reply.body
    [request] = client.requests
    assert len(request.prompt) == (10 if most > 0 else len(request.prompt)) < CONTEXT


def test_a_template_may_drop_what_does_not_fit():
    class Trimming(_LongTokens):
        def apply_chat_template(self, messages, **variables) -> str:
            return "".join((message["content"] or "").strip() for message in messages)

    body = {"messages": user("hi" + " " * 64 * 400)}
    assert run(call(make_app(tokenizer=Trimming()), "/v1/chat/completions", body)).status == 200


def test_a_fleet_passes_the_words_on(tmp_path: Path):
    with engines(FakeEngine()) as fakes, fleet_of(tmp_path, toml([fakes[0].url])) as served_fleet:
        served_fleet.wait_ready(fakes[0].name)
        with served_fleet.http() as http:
            chat = http.post("/v1/chat/completions", json={"messages": user("a" * 300)})
            body = {"max_tokens": 5, "messages": user("a" * 300)}
            message = http.post("/v1/messages", json=body)
            called = http.post("/invocations", json={"messages": user("a" * 300)})
    assert OPENAI.fullmatch(chat.json()["error"]["message"]) and chat.status_code == 400
    assert ANTHROPIC.fullmatch(message.json()["error"]["message"])
    assert called.json()["error"]["message"] == chat.json()["error"]["message"]
