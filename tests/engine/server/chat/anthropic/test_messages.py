"""/v1/messages against the anthropic client's own types: answers, streams, blocks, errors."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from api_fakes import FakeClient, Script, call, make_app, opening, run, served
from client_models import parsed, typed_events
from families import FamilyTokenizer, family_app

from jitney.engine.common.errors import ErrorInfo
from jitney.engine.common.key_file import digest_key

# The client takes seconds to import: that is for the process that runs these tests.
if TYPE_CHECKING:
    import anthropic
    from anthropic.types import Message

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER = {"role": "user", "content": "ab"}
BODY = {"model": "m", "max_tokens": 200, "messages": [USER]}
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "get_weather", "description": "Now", "input_schema": PLACE}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris é"}}\n</tool_call>'
THOUGHTS = "<think>\nHm.\n</think>\n\n"


def family(text: str, name: str = "qwen3", **script: Any) -> tuple[Any, FakeClient]:
    """A model that thinks and calls as Qwen 3 does, and says this."""
    return family_app(name, text, **script)


def ask(app: Any, body: dict[str, Any] = BODY, **kw: Any) -> dict[str, Any]:
    from anthropic.types import Message

    reply = run(call(app, PATH, body, **kw))
    assert reply.status == 200, reply.body
    parsed(Message, reply.json())
    return reply.json()


def stream(app: Any, body: dict[str, Any] = BODY) -> list[dict[str, Any]]:
    from anthropic.types import RawMessageStreamEvent

    reply = run(call(app, PATH, body | {"stream": True}))
    assert reply.status == 200 and reply.complete
    events = typed_events(reply.body)
    for event in events:
        if event["type"] != "ping":
            parsed(RawMessageStreamEvent, event)
    return events


def prompt(client: FakeClient) -> str:
    return bytes(client.requests[-1].prompt).decode()


def family_prompt(client: FakeClient) -> str:
    ids = client.requests[-1].prompt
    return FamilyTokenizer("qwen3").decode(ids, skip_special_tokens=False)


def test_a_plain_message():
    client = FakeClient(Script(cached_tokens=7))
    system = [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]
    body = ask(make_app(client), BODY | {"system": system, "metadata": {"user_id": "u"}})
    assert body["id"].startswith("msg_")
    assert body["content"] == [{"type": "text", "text": "Hello, wörld!"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert prompt(client) == "system: be\nuser: ab\nassistant: "
    assert client.requests[0].user == "u"
    assert body["usage"] == {
        "input_tokens": 31 - 7,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 7,
        "output_tokens": 15,
        "output_tokens_details": {"thinking_tokens": 0},
    }


def test_a_streamed_text_event_by_event():
    events = stream(make_app(FakeClient(Script("hé"))))
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    assert message["usage"]["input_tokens"] == 20
    assert events[3]["delta"] == {"type": "text_delta", "text": "h"}
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 4


def test_a_streamed_turn_of_thoughts_text_and_a_call():
    app, _ = family(THOUGHTS + "ok" + CALL)
    events = stream(app, BODY | {"tools": [TOOL]})
    begun = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == ["thinking", "text", "tool_use"]
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2]
    assert [event["type"] for event in events].count("ping") == 1
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    said = {
        kind: "".join(delta[field] for delta in deltas if delta["type"] == kind)
        for kind, field in (
            ("thinking_delta", "thinking"),
            ("text_delta", "text"),
            ("input_json_delta", "partial_json"),
        )
    }
    assert (said["thinking_delta"], said["text_delta"]) == ("Hm.", "ok")
    assert json.loads(said["input_json_delta"]) == {"city": "Paris é"}
    last_of_thoughts = [d["type"] for d in deltas].index("text_delta") - 1
    assert deltas[last_of_thoughts]["type"] == "signature_delta"
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("text", "extra"),
    [
        ("Hello", {}),
        ("", {}),
        (THOUGHTS + "ok", {}),
        (THOUGHTS + "ok", {"thinking": {"type": "adaptive", "display": "omitted"}}),
        (THOUGHTS + "ok" + CALL + CALL, {"tools": [TOOL]}),
        ("x" * 50, {"max_tokens": 5}),
        ("one two three", {"stop_sequences": ["three", "two"]}),
        (CALL[:-30], {"tools": [TOOL]}),
    ],
)
def test_the_clients_stream_helper_comes_to_the_plain_answer(text: str, extra: dict[str, Any]):
    app, _ = family(text)
    asked: dict[str, Any] = BODY | extra
    with served(app) as (url, _), client_of(url) as client:
        plain = client.messages.create(**asked)
        with client.messages.stream(**asked) as events:
            last = events.get_final_message()
    assert _nameless(last) == _nameless(plain)
    assert plain.stop_reason is not None


def client_of(url: str) -> anthropic.Anthropic:
    import anthropic

    http = anthropic.DefaultHttpxClient(trust_env=False)
    return anthropic.Anthropic(base_url=url, api_key="k", http_client=http, max_retries=0)


def _nameless(message: Message) -> dict[str, Any]:
    """Without what differs between two answers that say the same."""
    shown = message.model_dump(exclude={"id"}, exclude_none=True)
    for block in shown["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return shown


@pytest.mark.parametrize(
    ("script", "extra", "reason", "sequence"),
    [
        ("one two", {}, "end_turn", None),
        ("one two", {"max_tokens": 3}, "max_tokens", None),
        ("one two", {"stop_sequences": ["tw"]}, "stop_sequence", "tw"),
        ("x" * 9000, {"max_tokens": 32_000}, "model_context_window_exceeded", None),
        (CALL, {"tools": [TOOL]}, "tool_use", None),
        (CALL, {"tools": [TOOL], "max_tokens": 60}, "max_tokens", None),
    ],
)
def test_why_it_stopped(script: str, extra: dict[str, Any], reason: str, sequence: str | None):
    app, _ = family(script)
    plain = ask(app, BODY | extra)
    assert (plain["stop_reason"], plain["stop_sequence"]) == (reason, sequence)
    ended = stream(app, BODY | extra)[-2]["delta"]
    assert (ended["stop_reason"], ended["stop_sequence"]) == (reason, sequence)


def test_blocks_become_the_messages_that_they_are():
    app, client = family("ok")
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "1"}]},
        {"type": "tool_result", "tool_use_id": "c2", "content": "no", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c3"},
        {"type": "text", "text": "go"},
    ]
    thought = {"type": "thinking", "thinking": "t", "signature": "s"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "system", "content": "mind"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "c"}, use]},
        {"role": "user", "content": results},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    ask(app, BODY | {"messages": messages, "system": "be"})
    assert family_prompt(client) == (
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>system\nmind<|im_end|>\n"
        '<|im_start|>assistant\nc<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>tool\nError: no<|im_end|>\n"
        "<|im_start|>tool\n<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n"
        "<|im_start|>assistant\nd<|im_end|>\n<|im_start|>user\ne<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_last_message_of_the_assistant_is_gone_on_with():
    client = FakeClient(Script("xyz"))
    messages = [USER, {"role": "assistant", "content": "I say"}]
    body = ask(make_app(client), BODY | {"messages": messages})
    assert prompt(client) == "user: ab\nassistant: I say"
    assert body["content"] == [{"type": "text", "text": "xyz"}]


def test_statistics_of_a_client_are_no_instruction():
    client = FakeClient()
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=12345;"}
    ask(make_app(client), BODY | {"system": [line, {"type": "text", "text": "be"}]})
    assert prompt(client).startswith("system: be\n")
    ask(make_app(client), BODY | {"system": [line]})
    assert prompt(client).startswith("user: ")


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ({"type": "auto"}, ["clock", "get_weather"]),
        ({"type": "tool", "name": "clock"}, ["clock"]),
        ({"type": "none"}, []),
    ],
)
def test_tools_that_may_be_called_are_told(choice: dict[str, Any], tools: list[str]):
    app, client = family("ok")
    clock = {"name": "clock", "input_schema": {"type": "object"}}
    run(call(app, PATH, BODY | {"tools": [TOOL, clock], "tool_choice": choice}))
    names = [name for name in ("clock", "get_weather") if name in family_prompt(client)]
    assert names == tools


def test_thinking_may_be_turned_off():
    app, client = family("ok")
    ask(app, BODY | {"thinking": {"type": "disabled"}})
    assert family_prompt(client).endswith("<think>\n\n</think>\n\n")
    ask(app, BODY | {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}})
    assert not family_prompt(client).endswith("</think>\n\n")


def test_one_call_where_one_is_allowed():
    app, _ = family(CALL + CALL)
    many = BODY | {"tools": [TOOL], "tool_choice": {"type": "auto"}}
    assert len(ask(app, many)["content"]) == 2
    one = many | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert len(ask(app, one)["content"]) == 1


def test_tokens_are_counted_as_they_would_be_read():
    from anthropic.types import MessageTokensCount

    app, client = family("ok")
    body = {"model": "m", "messages": [USER], "tools": [TOOL], "system": "be"}
    reply = run(call(app, COUNT, body))
    counted = parsed(MessageTokensCount, reply.json()).input_tokens
    usage = ask(app, BODY | body)["usage"]
    assert counted == usage["input_tokens"] == len(client.requests[0].prompt)


def test_what_claude_code_sends_is_taken():
    """The fields and headers of its version 2.1."""
    app, client = family("ok")
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "x-api-key": "k",
    }
    body = {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>"}]},
            {"role": "system", "content": "Available agents"},
        ],
        "system": [{"type": "text", "text": "You", "cache_control": {"type": "ephemeral"}}],
        "tools": [TOOL],
        "metadata": {"user_id": '{"device_id":"x"}'},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    reply = run(call(app, PATH, body, headers=headers, query="beta=true"))
    assert reply.status == 200 and "x-ignored-params" not in reply.headers
    assert typed_events(reply.body)[-1]["type"] == "message_stop"
    assert client.requests


ERRORS: list[tuple[dict[str, Any], dict[str, Any], int, str]] = [
    ({}, {"authorization": ""}, 401, "authentication_error"),
    ({}, {"x-api-key": "nope"}, 401, "authentication_error"),
    ({"model": "nope"}, {}, 404, "not_found_error"),
    ({"max_tokens": 0}, {}, 400, "invalid_request_error"),
    ({"system": "x" * 4000}, {}, 413, "request_too_large"),
    ({}, {"content-type": "text/plain"}, 415, "invalid_request_error"),
]


@pytest.mark.parametrize(("extra", "headers", "status", "kind"), ERRORS)
def test_errors_have_anthropics_form(
    extra: dict[str, Any], headers: dict[str, str], status: int, kind: str
):
    from anthropic.types.shared import ErrorResponse

    app = make_app(api_keys=(digest_key("k"),), body_limit=3000)
    given = {"x-api-key": "k"} | headers
    if headers.get("authorization") == "":
        given.pop("x-api-key")
    reply = run(call(app, PATH, BODY | extra, headers=given))
    assert reply.status == status
    body = reply.json()
    assert body["error"]["type"] == kind and body["request_id"] == reply.headers["request-id"]
    if kind != "request_too_large":  # which the documentation has, and the client's types have not
        parsed(ErrorResponse, body)


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("queue_full", 429, "RateLimitError"),
        ("draining", 503, "InternalServerError"),
        ("deadline_exceeded", 504, "InternalServerError"),
        ("nan_logits", 500, "InternalServerError"),
    ],
)
def test_the_client_knows_the_errors_of_the_engine(code: str, status: int, kind: str):
    import anthropic

    app = make_app(FakeClient(Script(error=ErrorInfo(code, "no", retry_after=1.0))))
    with (
        served(app) as (url, _),
        client_of(url) as client,
        pytest.raises(getattr(anthropic, kind)) as raised,
    ):
        client.messages.create(**BODY)  # type: ignore[arg-type]
    assert raised.value.status_code == status


def test_an_error_in_a_stream_reaches_the_client():
    import anthropic

    app = make_app(FakeClient(Script("abcdef", fail_after=2)))
    events = typed_events(run(call(app, PATH, BODY | {"stream": True})).body)
    assert events[-1]["error"] == {"type": "overloaded_error", "message": "the engine stopped"}
    with (
        served(app) as (url, _),
        client_of(url) as client,
        pytest.raises(anthropic.APIStatusError, match="the engine stopped"),
        client.messages.stream(**BODY) as events,  # type: ignore[arg-type]
    ):
        events.get_final_message()


def test_a_silent_stream_says_ping():
    gate = threading.Event()
    app = make_app(FakeClient(Script("a", gate=gate)), header_wait_s=0.05, comment_s=0.05)
    events = run(_streamed(opening(gate, app, lambda piece: b"ping" in piece))).body
    kinds = [event["type"] for event in typed_events(events)]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-1] == "message_stop"


def _streamed(app: Any) -> Any:
    return call(app, PATH, BODY | {"stream": True})


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_a_thread_is_answered_so_that_the_clients_go_on_without(path: str):
    from anthropic.types import ThreadUnsupportedRequestErrorDetails

    reply = run(call(make_app(), path, BODY | {"thread": {"type": "new"}}))
    assert reply.status == 400 and reply.json()["error"]["type"] == "invalid_request_error"
    details = reply.json()["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    ThreadUnsupportedRequestErrorDetails.construct(**details)


def test_the_clients_tool_runner_comes_to_its_end():
    """It sends a thread once, and every tool of it is called and answered."""
    from anthropic import beta_tool

    given: list[str] = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Now."""
        given.append(city)
        return "20"

    app, client = family(CALL)
    client.scripts = [client.script]
    client.script = Script(tokens=FamilyTokenizer("qwen3").encode("It is 20."))
    asked: Any = BODY | {"tools": [get_weather]}
    with served(app) as (url, _), client_of(url) as anthropic_client:
        last = anthropic_client.beta.messages.tool_runner(**asked).until_done()
    assert given == ["Paris é"] and last.content[0].text == "It is 20."  # type: ignore[union-attr]
    assert "tool\n20<|im_end|>" in family_prompt(client)


def noted(app: Any, body: dict[str, Any], header: str) -> list[str]:
    """The notes of a header of an answer that is well."""
    reply = run(call(app, PATH, BODY | body))
    assert reply.status == 200, reply.body
    return [note for note in reply.headers.get(header, "").split(", ") if note]


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "source": {"type": "text", "data": "hé"}}, "hé"),
        (
            {
                "type": "document",
                "title": "T",
                "context": "C",
                "source": {"type": "base64", "media_type": "text/plain", "data": "aMOp"},
            },
            "T\nC\nhé",
        ),
        (
            {
                "type": "document",
                "source": {"type": "content", "content": [{"type": "text", "text": "hé"}]},
            },
            "hé",
        ),
        (
            {
                "type": "search_result",
                "source": "s",
                "title": "T",
                "content": [{"type": "text", "text": "hé"}],
            },
            "T\ns\nhé",
        ),
        ({"type": "text", "text": "hé", "citations": [{}], "cache_control": {"x": 1}}, "hé"),
        ({"type": "compaction", "content": "hé"}, "hé"),
    ],
)
def test_blocks_that_are_text_are_read(block: dict[str, Any], text: str):
    app, client = family("ok")
    messages = [{"role": "user", "content": [block]}]
    assert noted(app, {"messages": messages}, "x-jitney-warnings") == []
    assert f"<|im_start|>user\n{text}<|im_end|>" in family_prompt(client)
    if block["type"] == "compaction":
        return
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [block]}
    assert noted(app, _after_a_call(result), "x-jitney-warnings") == []
    assert f"<|im_start|>tool\n{text}<|im_end|>" in family_prompt(client)


def _after_a_call(*blocks: dict[str, Any]) -> dict[str, Any]:
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {}, "caller": {"type": "direct"}}
    return {
        "messages": [
            USER,
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": list(blocks)},
        ]
    }


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PDF = {"type": "document", "title": "P", "source": {"type": "url", "url": "http://x/y.pdf"}}


@pytest.mark.parametrize("block", [IMAGE, PDF])
def test_what_no_text_model_can_read_is_a_note_and_a_warning(block: dict[str, Any]):
    app, client = family("ok")
    kind = block["type"]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [block]}
    for body, place in (
        ({"messages": [{"role": "user", "content": [block]}, USER]}, 0),
        ({"messages": [{"role": "user", "content": [block, {"type": "text", "text": "?"}]}]}, 0),
        (_after_a_call(result), 2),
    ):
        assert noted(app, body, "x-jitney-warnings") == [f"messages[{place}]: {kind} left out"]
        assert f"[{kind}" in family_prompt(client) and "AAAA" not in family_prompt(client)
    reference = {"type": "tool_reference", "tool_name": "late"}
    noted(app, _after_a_call(result | {"content": [reference]}), "x-jitney-warnings")
    assert "tool\nlate<|im_end|>" in family_prompt(client)


def test_blocks_of_other_servers_are_left_out():
    app, client = family("ok")
    turn = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "t"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "so", "citations": [{"type": "x"}]},
    ]
    messages = [USER, {"role": "assistant", "content": turn}, USER]
    assert noted(app, {"messages": messages}, "x-jitney-warnings") == [
        f"messages[1]: {kind} left out"
        for kind in ("redacted_thinking", "server_tool_use", "web_search_tool_result")
    ]
    assert "<|im_start|>assistant\nso<|im_end|>" in family_prompt(client)


def test_turns_that_say_nothing_are_taken():
    app, client = family("ok")
    nothing = {"type": "tool_result", "tool_use_id": "c1", "is_error": True, "content": []}
    noted(app, _after_a_call(nothing), "x-jitney-warnings")
    assert "<|im_start|>tool\nError: <|im_end|>" in family_prompt(client)
    for content in ("", [], [{"type": "text", "text": ""}]):
        empty = {"role": "assistant", "content": content}
        noted(app, {"messages": [USER, empty, USER]}, "x-jitney-warnings")
        noted(app, {"messages": [USER, empty]}, "x-jitney-warnings")
        assert family_prompt(client) == (
            "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
        ), "there is nothing to go on with"
        noted(app, {"messages": [{"role": "user", "content": content}]}, "x-jitney-warnings")


def test_tools_that_the_client_does_not_run_are_left_out():
    app, client = family("ok")
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        TOOL | {"input_examples": [{"city": "x"}], "eager_input_streaming": False, "made_up": 1},
        {"type": "bash_20250124", "name": "bash"},
        TOOL | {"name": "late", "defer_loading": True},
        TOOL | {"name": "program", "allowed_callers": ["code_execution_20260120"]},
    ]
    names = ["tools[0]", "tools[2]", "tools[4]", "tools[3].defer_loading"]
    assert noted(app, {"tools": tools}, "x-ignored-params") == names
    assert '"late"' in family_prompt(client) and '"bash"' not in family_prompt(client)
    auto = {"tool_choice": {"type": "auto"}}
    assert noted(app, {"tools": tools[:1]} | auto, "x-ignored-params") == ["tools[0]"]
    for choice in ({"type": "tool", "name": "bash"}, {"type": "tool", "name": "program"}):
        reply = run(call(app, PATH, BODY | {"tools": tools, "tool_choice": choice}))
        assert reply.status == 400 and "tool_choice" in reply.json()["error"]["message"]
    reply = run(call(app, PATH, BODY | {"tools": tools[:1], "tool_choice": {"type": "any"}}))
    assert reply.status == 400


THINKS = {"type": "enabled", "budget_tokens": 100}


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("plain", {"thinking": THINKS}, ["thinking", "thinking.budget_tokens"]),
        (
            "plain",
            {"thinking": {"type": "adaptive", "budget_tokens": 5}},
            ["thinking.budget_tokens"],
        ),
        ("plain", {"thinking": {"type": "adaptive"}}, []),
        ("plain", {"output_config": {"effort": "max"}}, ["output_config.effort"]),
        ("qwen3", {"thinking": THINKS, "output_config": {"effort": "low"}}, []),
        ("deepseek_v3", {"thinking": THINKS}, []),
        ("deepseek_v3", {"thinking": {"type": "disabled"}}, ["thinking"]),
        ("qwen3", {"output_config": {"task_budget": {}}}, ["output_config.task_budget"]),
        ("qwen3", {"mcp_servers": [{}], "betas": []}, ["mcp_servers"]),
        ("qwen3", {"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, None),
        ("qwen3", {"cache_control": {"type": "ephemeral", "ttl": "1h", "made_up": 1}}, []),
    ],
)
def test_hints_are_told_where_they_are_not_followed(
    name: str, fields: dict[str, Any], told: list[str] | None
):
    app, _ = family("ok", name)
    assert noted(app, fields, "x-ignored-params") == (list(fields) if told is None else told)


def test_a_thinking_budget_that_cannot_be_kept_is_a_hint():
    tokenizer = FamilyTokenizer("qwen3", specials=("<think>",))
    client = FakeClient(Script("ok"), vocab_size=400, context_length=4096)
    app = make_app(client, tokenizer=tokenizer)
    assert noted(app, {"thinking": THINKS}, "x-ignored-params") == ["thinking.budget_tokens"]


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_a_form_of_the_answer_is_kept_under_both_its_names(name: str):
    app, client = family('{"city": "x"}')
    form = {"type": "json_schema", "schema": PLACE}
    fields = {"output_format": form} if name == "output_format" else {name: {"format": form}}
    thoughtless = {"thinking": {"type": "disabled"}}
    assert noted(app, fields | thoughtless, "x-ignored-params") == []
    assert client.requests[0].sampling.grammar is not None
    bad = {"type": "json_schema", "schema": {"type": "nope"}}
    broken = {"output_format": bad} if name == "output_format" else {name: {"format": bad}}
    reply = run(call(app, PATH, BODY | broken))
    assert reply.status == 400 and name in reply.json()["error"]["message"]


def test_versions_and_betas_that_are_not_known_are_taken():
    headers = {"anthropic-version": "2031-01-01", "anthropic-beta": "made-up-2031-01-01"}
    for path, body in ((PATH, BODY), (COUNT, {"messages": [USER]})):
        assert run(call(make_app(), path, body, headers=headers)).status == 200


VERSION = {"anthropic-version": "2023-06-01"}


def test_models_in_anthropics_form():
    from anthropic.types import ModelInfo

    client = FakeClient(adapters=("fr",))
    app = make_app(client, model="org/m")
    listed = run(call(app, "/v1/models", method="GET", headers=VERSION)).json()
    assert [card["id"] for card in listed["data"]] == ["org/m", "fr"]
    ends = (listed["has_more"], listed["first_id"], listed["last_id"])
    assert ends == (False, "org/m", "fr") and set(listed) == {
        "data",
        "first_id",
        "has_more",
        "last_id",
    }
    for card in listed["data"]:
        one = run(call(app, f"/v1/models/{card['id']}", method="GET", headers=VERSION)).json()
        assert one == card and card["max_model_len"] == card["max_input_tokens"] == 256
        parsed(ModelInfo, {name: card[name] for name in card if name != "max_model_len"})
    unknown = run(call(app, "/v1/models/nope", method="GET", headers=VERSION)).json()
    assert unknown["type"] == "error" and unknown["error"]["type"] == "not_found_error"
    plain = run(call(app, "/v1/models", method="GET")).json()
    assert plain["object"] == "list" and plain["data"][0]["object"] == "model"
