"""Hostile and mistaken requests, over the generation routes: the status, the field to blame, and no
harm done.
"""

from __future__ import annotations

import json
import logging
from functools import cache
from typing import Any

import pytest
from api_fakes import FakeClient, Script, call, make_app, run
from starlette.applications import Starlette

from jitney.engine.common.key_file import digest_key
from jitney.engine.server.chat.openai.embeddings import EmbeddingsBody

PROMPT = {"model": "m", "prompt": "ab"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "ab"}]}
RESPONSE = {"model": "m", "input": "ab"}
MESSAGE = CHAT | {"max_tokens": 50}
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
ROUTES = {"/v1/completions": PROMPT, "/v1/chat/completions": CHAT}
EMBEDDINGS = "/v1/embeddings"
#: Those that write text, and those that do not.
WRITING = ROUTES | {RESPONSES: RESPONSE, MESSAGES: MESSAGE, COUNT: CHAT}
ALL_ROUTES = WRITING | {EMBEDDINGS: {"model": "m", "input": "ab"}}
#: One route for each form of errors, where all routes run the same code.
EACH_FORM = ("/v1/completions", MESSAGES)
MIB = 1 << 20


def check(reply, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The common oracle: the error body, a request id, nothing of ours or (much) of theirs in
    it.
    """
    assert reply.status == status, reply.body[:300]
    assert reply.headers["x-request-id"] and reply.headers["content-type"] == "application/json"
    if "request-id" in reply.headers:
        return check_message_error(reply, status, param)
    assert list(reply.json()) == ["error"]
    error = reply.error
    assert set(error) == {"message", "type", "param", "code"} and len(reply.body) < 2000
    assert error["message"]
    assert not any(word in reply.body for word in (b"Traceback", b".py", b"0x", b"/work", b"/home"))
    assert error["param"] == param or (error["param"] or "").startswith(
        (f"{param}[", f"{param}.")
    ), error
    if code is not None:
        assert error["code"] == code
    return error


def check_message_error(reply, status: int, param: str | None) -> dict[str, Any]:
    """The same of Anthropic's form, whose messages name the field."""
    body = reply.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    error = body["error"]
    assert error.pop("code", None) in (None, "context_length_exceeded")
    assert set(error) == {"type", "message"} and error["message"] and len(reply.body) < 2000
    kinds = {
        401: "authentication_error",
        404: "not_found_error",
        413: "request_too_large",
    }
    assert error["type"] == kinds.get(status, "invalid_request_error")
    assert not any(word in reply.body for word in (b"Traceback", b".py", b"0x", b"/work", b"/home"))
    is_named = error["message"].startswith("prompt is too long: ")
    assert param is None or param in error["message"] or is_named
    return error


@cache
def refusing() -> tuple[FakeClient, Starlette]:
    """One application for all that is refused, which leaves no trace."""
    client = FakeClient()
    return client, make_app(client)


def refuse(
    path: str, body: Any, status: int = 400, param: str | None = None, code: str | None = None, **kw
) -> None:
    client, app = refusing()
    reply = run(call(app, path, body, **kw))
    check(reply, status, param, code)
    assert not client.requests, "a refused request must not reach the engine"


BOTH: list[tuple[str, Any]] = [  # field, value: 400 that blames the field
    ("model", ""),
    ("model", 5),
    ("model", ["m"]),
    *(("max_tokens", value) for value in (-1, 2**31, 2**63, 1.5, "10", True, [])),
    *(("n", value) for value in (0, -1, 129, 10**6, 2**63, "2", True, 1.5)),
    *(("temperature", value) for value in (-1, 2.0001, "hot", True, [])),
    *(("top_p", value) for value in (0, -1, 1.1, "x")),
    ("min_p", 2),
    ("min_p", -0.1),
    ("typical_p", 0.5),
    *(("top_k", value) for value in (-2, 1.5, 2**40, "5")),
    *(
        (name, value)
        for name in ("frequency_penalty", "presence_penalty")
        for value in (3, -2.1, "x")
    ),
    *(("repetition_penalty", value) for value in (0, -1, 11, 1e-300, 1e-38)),
    *(("seed", value) for value in (2**63, -(2**63) - 1, 2**64, 1.5, "x", True)),
    *(
        ("stop", value)
        for value in (
            "",
            [""],
            ["a"] * 65,
            ["a"] * 10**5,
            "x" * 257,
            [None],
            5,
            {"a": 1},
            "x" * 900_000,
        )
    ),
    *(
        ("stop_token_ids", value)
        for value in ([260], [-1], list(range(200)) * 500, [True], [1.5], ["1"], 5, [2**63])
    ),
    *(
        ("logit_bias", value)
        for value in (
            [1],
            {"x": 1},
            {"-1": 1},
            {"260": 1},
            {"5": 101},
            {"5": "1"},
            {"5": None},
            {"5": True},
            {str(2**64): 1},
            {str(id): 1 for id in range(1000)},
        )
    ),
    *(("stream", value) for value in ("yes", 1, [])),
    *(("stream_options", value) for value in ({"include_usage": True}, [], "x", 5)),
    ("min_tokens", -1),
    ("min_tokens", 17_000),
    ("ignore_eos", "yes"),
    ("skip_special_tokens", 0),
    *(("priority", value) for value in (1, 2**63, "high", 1.5)),
    *(("cache_salt", value) for value in ("", "x" * MIB, "a/b@c\0", 5, "a\n")),
    *(("timeout_ms", value) for value in (0, -1, 10**18, 1.5, "5")),
    *((name, value) for name in ("user", "safety_identifier") for value in ("x" * 513, 5)),
    ("metadata", {"k": "x" * 513}),
    ("metadata", {"k" * 65: "x"}),
    ("metadata", {str(i): "x" for i in range(17)}),
    *(("request_id", value) for value in ("", "a b", "x" * 129, "a\r\nb", 5)),
    *(("truncate_prompt_tokens", value) for value in (0, -2, 2**31, "1", True, 1.5)),
    *(
        ("allowed_token_ids", value)
        for value in ([], [260], [-1], [2**63], [True], ["1"], [1.5], 5, "a", list(range(300)))
    ),
    *(
        ("bad_words", value)
        for value in ([""], [5], "a", 5, ["a" * 65], ["a"] * 257, [None], [["a"]])
    ),
    *(("prompt_logprobs", value) for value in (-1, 2**63, 10**9, True, "1", 1.5)),
    ("tool_choice", "required"),
    ("tool_choice", "nope"),
    ("tool_choice", {"type": "function"}),
    ("tool_choice", 5),
]


def is_fine(path: str, field: str, value: Any) -> bool:
    """Whether a route has another meaning for a field, in which the value is good, or none."""
    if path == EMBEDDINGS:
        return field not in EmbeddingsBody.model_fields
    if path == COUNT and (field, value) == ("priority", 1):
        return True
    return path in (MESSAGES, COUNT) and field == "metadata"


def test_a_bad_field_is_named():
    for field, value in BOTH:
        check_field("/v1/completions", field, value)


@pytest.mark.parametrize("path", ALL_ROUTES)
def test_a_bad_field_is_named_on_every_route(path):
    """One value of each field: the bodies share the fields."""
    for field, value in dict(BOTH).items():
        if not is_fine(path, field, value):
            check_field(path, field, value)


def check_field(path: str, field: str, value: Any) -> None:
    """A value is refused by the name of its field."""
    body = ALL_ROUTES[path] | {field: value}
    if len(json.dumps(body)) > MIB:
        return refuse(path, body, 413)
    refuse(path, body, 400, field)


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f", "parameters": {}} | fields]}


#: Of /v1/responses: what is sent, the field to blame, and whether it is one that is not supported.
BAD_RESPONSES: list[tuple[dict[str, Any], str, bool]] = [
    ({"input": None}, "input", False),
    ({"input": 5}, "input", False),
    ({"input": [None]}, "input[0]", False),
    ({"input": [{"role": "user", "content": "x"}] * 5000}, "input", False),
    (item(role="root", content="x"), "input[0].role", False),
    (item(role="user"), "input[0].content", False),
    (item(role="user", content=None), "input[0].content", False),
    (item(role="user", content=[{"type": "input_text"}]), "input[0].content", False),
    (item(role="user", content=[{"type": "input_image"}]), "input[0].content", True),
    (item(role="user", content=[{"type": "input_file"}]), "input[0].content", True),
    (item(type="custom_tool_call"), "input[0].call_id", False),
    (item(type="compaction_trigger"), "input[0]", True),
    (item(type=5), "input[0]", True),
    (item(type="function_call", name="f", arguments="{}"), "input[0].call_id", False),
    (item(type="function_call_output", call_id="c"), "input[0].output", False),
    (item(type="function_call_output", call_id="", output=""), "input[0].call_id", False),
    (item(type="item_reference"), "input[0].id", False),
    (item(type="item_reference", id="msg_nope"), "input[0].id", False),
    (item(type="reasoning", content=[{"type": "nope"}]), "input[0].content[0].type", False),
    ({"instructions": 5}, "instructions", False),
    ({"max_output_tokens": 0}, "max_output_tokens", False),
    ({"max_output_tokens": "5"}, "max_output_tokens", False),
    ({"max_output_tokens": 5000}, "input", False),
    ({"max_tool_calls": 0}, "max_tool_calls", False),
    ({"top_logprobs": 21}, "top_logprobs", False),
    ({"store": "yes"}, "store", False),
    ({"include": ["nope"]}, "include", True),
    ({"include": "x"}, "include", False),
    ({"text": {"format": {"type": "nope"}}}, "text.format.type", False),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", False),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort", False),
    (function(name="a b"), "tools[0].name", False),
    (function(parameters=5), "tools[0].parameters", False),
    (function(parameters={"type": "nope"}), "tools[0].parameters", False),
    ({"tools": function()["tools"] * 2}, "tools", False),
    ({"tools": function()["tools"] * 200}, "tools", False),
    ({"tool_choice": "required"}, "tool_choice", False),
    (function() | {"tool_choice": {"type": "function", "name": "g"}}, "tool_choice", False),
    (function() | {"tool_choice": {"type": "file_search"}}, "tool_choice", True),
    ({"tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice", False),
    (function() | {"text": {"format": {"type": "nope"}}}, "text.format.type", False),
]


def test_bad_responses():
    for fields, param, is_unsupported in BAD_RESPONSES:
        code = "unsupported_parameter" if is_unsupported else None
        refuse(RESPONSES, RESPONSE | fields, 400, param, code)


@pytest.mark.parametrize("id", ["resp_nope", "x" * 400, "../../x", "resp_\n"])
def test_a_response_that_is_not_kept(id):
    body = RESPONSE | {"previous_response_id": id}
    refuse(RESPONSES, body, 404, "previous_response_id", "response_not_found")
    if "/" not in id:
        for method in ("GET", "DELETE"):
            refuse(f"{RESPONSES}/{id}", b"", 404, "response_id", method=method)


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"name": "f", "input_schema": {"type": "object"}} | fields]}


#: Of /v1/messages: what is sent, and the field that the message names.
BAD_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [None]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "x"}] * 5000}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (said(5), "messages[0].content[0]"),
    (said({"text": "x"}), "messages[0].content[0]"),
    (said({"type": "text"}), "messages[0].content[0].text"),
    (said({"type": "image", "source": {"type": "url"}}), "messages[0].content"),
    (said({"type": "document"}), "messages[0].content[0]"),
    (said({"type": "tool_use", "id": "a", "name": "f", "input": {}}), "messages[0].content"),
    (said({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    (
        said({"type": "tool_use", "id": "a", "name": "f", "input": "x"}, role="assistant"),
        "messages[0].content[0].input",
    ),
    (said({"type": "made_up"}), "messages[0].content[0]"),
    (
        said({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "made_up"}]}),
        "messages[0].content[0].content",
    ),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system"),
    (tool(name="a b"), "tools[0].name"),
    (tool(input_schema=5), "tools[0].input_schema"),
    (tool(input_schema={"type": "string"}), "tools[0].input_schema"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": tool()["tools"] * 2}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    (tool() | {"tool_choice": {"type": "tool"}}, "tool_choice"),
    (tool() | {"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    (tool() | {"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice"),
    ({"output_config": {"effort": "extreme"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
]


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_bad_conversations_in_blocks(path):
    for fields, param in BAD_MESSAGES:
        refuse(path, ALL_ROUTES[path] | fields, 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x" * 257]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"metadata": {"user_id": "x" * 513}}, "metadata.user_id"),
        ({"metadata": "x"}, "metadata"),
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "thinking.budget_tokens"),
    ],
)
def test_bad_messages_of_blocks(fields, param):
    refuse(MESSAGES, MESSAGE | fields, 400, param)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [""],
        [[]],
        ["a", ""],
        ["a", 1],
        [1, "a"],
        [[1], "a"],
        5,
        {},
        [-1],
        [260],
        [2**31],
        [2**63],
        [2**64],
        [1.5],
        [True],
        ["5", 5],
        [[1], [True]],
        ["a"] * 129,
        [[1]] * 129,
    ],
    ids=lambda value: str(value)[:24],
)
def test_bad_prompts(prompt):
    refuse("/v1/completions", {"model": "m", "prompt": prompt}, 400, "prompt")
    refuse("/v1/completions", {"model": "m"}, 400, "prompt")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 10**6}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 10**9}, "logprobs"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
    ],
)
def test_completion_combinations(body, param):
    refuse("/v1/completions", PROMPT | body, 400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"continue_final_message": "yes"}, "continue_final_message"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        *(({"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in (21, -1, 2**63)),
        ({"logprobs": 1}, "logprobs"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
    ],
)
def test_chat_combinations(body, param):
    refuse("/v1/chat/completions", CHAT | body, 400, param)


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        (None, "messages", None),
        ([], "messages", None),
        ("hi", "messages", None),
        ([None], "messages[0]", None),
        ([{"role": "user", "content": "x"}] * 5000, "messages", None),
        ([{"content": "x"}], "messages[0].role", None),
        ([{"role": "root", "content": "x"}], "messages[0].role", None),
        (user(None), "messages[0].content", None),
        (user(5), "messages[0].content", None),
        (user({}), "messages[0].content", None),
        (user([]), "messages[0].content", None),
        (user([None]), "messages[0].content", None),
        (user([{"type": "nope"}]), "messages[0].content", None),
        (user([{"type": []}]), "messages[0].content", None),
        (user([{"type": "text"}]), "messages[0].content", None),
        (user([{"type": "text", "text": 5}]), "messages[0].content", None),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id", None),
        (
            [{"role": "tool", "content": "x", "tool_call_id": ""}],
            "messages[0].tool_call_id",
            None,
        ),
        ([{"role": "system", "content": None}], "messages[0].content", None),
        ([*user("x"), {"role": "user"}], "messages[1].content", None),
        (
            [{"role": "assistant", "tool_calls": [{"id": "x"}]}],
            "messages[0].tool_calls[0].function",
            None,
        ),
        (
            [{"role": "assistant", "content": "x", "function_call": {}}],
            "messages[0]",
            "unsupported_parameter",
        ),
        *(
            (
                user([{"type": kind, kind: {"url": url}}]),
                "messages[0].content",
                "unsupported_parameter",
            )
            for kind, url in (
                ("image_url", "http://169.254.169.254/"),
                ("image_url", "file:///etc/passwd"),
                ("input_audio", "x"),
                ("video_url", "x"),
            )
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_messages(messages, param, code):
    refuse("/v1/chat/completions", {"model": "m", "messages": messages}, 400, param, code)


@pytest.mark.parametrize("path", ALL_ROUTES)
def test_an_unknown_model_is_404_and_hardly_repeated(path):
    for name in ("nope", "x" * 500_000, "../../x", "m\n", "<img src=x onerror=alert(1)>"):
        refuse(path, ALL_ROUTES[path] | {"model": name}, 404, "model", "model_not_found")


@pytest.mark.parametrize("path", EACH_FORM)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"42",
        b'{"model": "m"',
        b'{"model": "m"} x',
        b"{} {}",
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"a":' * 1000 + b"1" + b"}" * 1000,
        b'{"a":' * 64 + b"[1]" + b"}" * 64,
        b'{"a":' * 800 + b"NaN" + b"}" * 800,
        b'{"model": "\\ud800"}',
        b"{'model': 1}",
        b'"' * 1000,
        b'{"a": "\\u00',
    ],
    ids=lambda body: str(body[:16]),
)
def test_bodies_that_are_no_json_object(path, body):
    refuse(path, body, 400, None, "invalid_json")


@pytest.mark.parametrize("path", EACH_FORM)
@pytest.mark.parametrize("field", ["temperature", "max_tokens", "priority"])
def test_numbers_that_are_not_finite_name_their_field(path, field):
    good = json.dumps(ALL_ROUTES[path])[:-1].encode()
    for number in (b"NaN", b"Infinity", b"-Infinity", b"1e400"):
        refuse(path, good + b', "%s": %s}' % (field.encode(), number), 400, field)


def test_a_token_id_that_is_not_finite():
    refuse("/v1/completions", b'{"model": "m", "prompt": [1, 1e400]}', 400, "prompt")


@pytest.mark.parametrize("path", ALL_ROUTES)
def test_of_equal_keys_the_last_counts(path):
    body = json.dumps(ALL_ROUTES[path])[:-1].encode()
    field = b"dimensions" if path == EMBEDDINGS else b"temperature"
    bad = b', "%s": 2, "%s": 9999}' % (field, field)
    refuse(path, body + bad, 400, field.decode())
    good = body + b', "%s": 9999, "%s": 2}' % (field, field)
    assert run(call(make_app(), path, good)).status == 200


@pytest.mark.parametrize("path", WRITING)
def test_many_errors_make_one_short_answer(path):
    body = ALL_ROUTES[path] | {
        "n": "x",
        "seed": "x",
        "top_k": "x",
        "top_p": "x",
        "stop_token_ids": ["x" * 1000] * 500,
    }
    client = FakeClient()
    reply = run(call(make_app(client), path, body))
    assert reply.status == 400 and reply.error["message"].count(";") <= 9 and len(reply.body) < 1500


@pytest.mark.parametrize(
    ("prompt", "extra", "status"),
    [
        (255, {"max_tokens": 1}, 200),
        (255, {"max_tokens": 2}, 400),
        (256, {}, 400),
        (257, {}, 400),
        (2560, {}, 400),
        (250, {"max_tokens": 6}, 200),
        (255, {}, 200),
        (2560, {"truncate_prompt_tokens": 10}, 200),
        (2560, {"truncate_prompt_tokens": -1}, 200),
    ],
)
def test_the_context_is_a_limit(prompt, extra, status):
    client = FakeClient()
    body = {"model": "m", "prompt": "a" * prompt} | extra
    reply = run(call(make_app(client), "/v1/completions", body))
    if status == 200:
        assert reply.status == 200
    else:
        check(reply, 400, "prompt", "context_length_exceeded")


#: Route -> the field that its prompt comes in.
PROMPTS = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    RESPONSES: "input",
    MESSAGES: "messages",
    COUNT: "messages",
    EMBEDDINGS: "input",
}


def with_prompt(path: str, text: str) -> dict[str, Any]:
    """A body whose prompt is, or has in it, this text."""
    field = PROMPTS[path]
    return ALL_ROUTES[path] | {field: user(text) if field == "messages" else text}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        *((path, "a") for path in ALL_ROUTES),
        *(
            ("/v1/completions", text)
            for text in ("\N{PILE OF POO}", " ", "\0", "e\u0301", "\u202e\u200b")
        ),
    ],
    ids=ascii,
)
def test_huge_texts_are_refused_before_they_are_tokenised(path, text):
    huge = text * (700_000 // len(json.dumps(text, ensure_ascii=False).encode()))
    data = json.dumps(with_prompt(path, huge), ensure_ascii=False).encode()
    if len(data) > MIB:
        refuse(path, data, 413)
    else:
        refuse(path, data, 400, PROMPTS[path])


@pytest.mark.parametrize("path", EACH_FORM)
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_cap(path, declared):
    limit = 2000
    body = json.dumps(ALL_ROUTES[path]).encode()
    chunks = [body + b" " * (limit - len(body)), b" "]
    headers = {"content-length": str(limit + 1)} if declared else {}
    messages = [
        {"type": "http.request", "body": chunk, "more_body": chunk != chunks[-1]}
        for chunk in chunks
    ]
    client = FakeClient()
    app = make_app(client, body_limit=limit)
    reply = run(call(app, path, headers=headers, messages=messages))
    check(reply, 413)
    assert reply.headers["connection"] == "close" and not client.requests
    fits = [{"type": "http.request", "body": chunks[0], "more_body": False}]
    assert run(call(app, path, messages=fits)).status == 200


@pytest.mark.parametrize("path", EACH_FORM)
@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": ""},
        {"content-type": "application/json; charset=utf-16"},
        {"content-type": "multipart/form-data"},
        {"content-encoding": "gzip"},
        {"content-encoding": "identity, gzip"},
    ],
)
def test_media_types(path, headers):
    refuse(path, ALL_ROUTES[path], 415, headers=headers)


@pytest.mark.parametrize(
    "kind",
    ["application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"'],
)
def test_good_media_types(kind):
    headers = {"content-type": kind, "content-encoding": "identity"}
    assert run(call(make_app(), "/v1/completions", PROMPT, headers=headers)).status == 200


def test_missing_or_repeated_content_type():
    for types in ([], [b"application/json", b"text/plain"]):
        raw = [(b"host", b"x"), *((b"content-type", kind) for kind in types)]
        refuse("/v1/completions", PROMPT, 415, raw_headers=raw)


def test_two_framings_are_refused():
    refuse(
        "/v1/completions",
        PROMPT,
        400,
        headers={"content-length": "5", "transfer-encoding": "chunked"},
    )


@pytest.mark.parametrize(
    "hosts",
    [[], [b"a", b"a"], [b"x/health?y="], [b"a#b"], [b""], [b"a b"], [b"a:123456"], [b"a\n"]],
)
def test_bad_hosts(hosts):
    raw = [*((b"host", host) for host in hosts), (b"content-type", b"application/json")]
    for path in ("/v1/completions", "/livez", "/health"):
        refuse(path, PROMPT, 400, raw_headers=raw)


def test_headers_that_are_too_large():
    for raw in ([(b"x", b"y" * 100_000)], [(b"x%d" % number, b"") for number in range(10_000)]):
        refuse("/v1/completions", PROMPT, 431, raw_headers=[(b"host", b"x"), *raw])


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v1/completions", 405, "POST"),
        ("OPTIONS", "/v1/chat/completions", 405, "POST"),
        ("DELETE", "/v1/models/m", 405, "GET, HEAD"),
        ("TRACE", "/v1/models", 405, "GET, HEAD"),
        ("POST", "/livez", 405, "GET, HEAD"),
        ("CONNECT", "/metrics", 405, "GET, HEAD"),
        ("GET", "/nope", 404, None),
        ("POST", "/", 405, "GET, HEAD"),
        ("POST", "/v1/nope", 404, None),
        ("GET", "/v1/models/", 404, None),
        ("GET", "/static/../../etc/passwd", 404, None),
        ("GET", "/\0", 404, None),
        ("GET", "/v1/completions/", 404, None),
        ("GET", "/start_profile", 404, None),
        ("GET", "/v1/models/nope", 404, None),
    ],
)
def test_routes_and_methods(method, path, status, allow):
    reply = run(call(make_app(), path, PROMPT, method=method))
    check(
        reply, status, param="model" if path.startswith("/v1/models/") and status == 404 else None
    )
    assert reply.headers.get("allow") == allow
    hostile = {"origin": "http://evil", "sec-fetch-site": "cross-site"}
    refused = run(call(make_app(), path, PROMPT, method=method, headers=hostile))
    changes = method not in ("GET", "OPTIONS", "TRACE")
    assert refused.status == (403 if changes else status)
    for answer in (reply, refused):
        assert not any(name.startswith("access-control") for name in answer.headers)


def bearer(*values: bytes) -> list[tuple[bytes, bytes]]:
    return [
        (b"host", b"x"),
        (b"content-type", b"application/json"),
        *((b"authorization", value) for value in values),
    ]


#: Nothing of these without a key.
CLOSED = (
    *ALL_ROUTES,
    "/metrics",
    "/slots",
    "/version",
    "/v1/models",
    "/nope",
    "/livez/",
    "//livez",
)


def test_good_keys():
    client = FakeClient()
    app = make_app(client, api_keys=(digest_key("other"), digest_key("sekrit")))
    for good in (b"Bearer sekrit", b"bearer sekrit", b"BEARER  sekrit ", b"Bearer other"):
        assert run(call(app, "/v1/completions", PROMPT, raw_headers=bearer(good))).status == 200
    assert client.requests[0].tenant == digest_key("sekrit") != client.requests[-1].tenant
    for path in ("/livez", "/readyz", "/startupz", "/health"):
        assert run(call(app, path, method="GET")).status == 200


@pytest.mark.parametrize("path", CLOSED)
def test_bad_keys(path):
    app = make_app(api_keys=(digest_key("other"), digest_key("sekrit")))
    for bad in (
        (),
        (b"Bearer",),
        (b"Bearer ",),
        (b"Bearer nope",),
        (b"Basic sekrit",),
        (b"sekrit",),
        (b"Bearer sekrit", b"Bearer sekrit"),
        (b"Bearer " + b"x" * 60_000,),
        (b"Bearer sekrit\xff",),
    ):
        reply = run(call(app, path, PROMPT, raw_headers=bearer(*bad)))
        check(reply, 401, None, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.error["type"] == "authentication_error"


@pytest.mark.parametrize("path", [*ROUTES, RESPONSES, MESSAGES])
def test_the_log_has_one_harmless_line(path, caplog):
    nasty = "\n127.0.0.1 - GET /admin 200 \x1b[31m ${jndi:ldap://x}"
    with caplog.at_level(logging.INFO, logger="jitney.access"):
        run(
            call(
                make_app(),
                path,
                ALL_ROUTES[path] | {"metadata": {"user_id": nasty}, nasty: 1},
                headers={"x-request-id": nasty},
            )
        )
        run(call(make_app(), "/v1/" + nasty, ALL_ROUTES[path], method="G\nET"))
    lines = [record.getMessage() for record in caplog.records if record.name == "jitney.access"]
    assert (
        len(lines) == 2
        and lines[0].startswith(f"POST {path} 200 ")
        and lines[1].startswith("other none 404 ")
    )
    assert not any(sign in line for line in lines for sign in ("\n", "\x1b", "jndi", "admin"))
    assert "completion=15" in lines[0]


def test_a_neighbour_notices_nothing():
    """A stream beside a hundred bad requests says the same as one alone."""
    import asyncio

    body = PROMPT | {"stream": True, "request_id": "r"}

    async def crowd(bad: int) -> bytes:
        client = FakeClient(Script("steady as she goes", delay_s=0.001))
        app = make_app(client)
        stream = asyncio.create_task(call(app, "/v1/completions", body))
        await asyncio.gather(
            *(
                call(app, "/v1/completions", PROMPT | dict([BOTH[number % len(BOTH)]]))
                for number in range(bad)
            )
        )
        reply = await stream
        assert not client.open and (await call(app, "/readyz", method="GET")).status == 200
        created = json.loads(reply.body.split(b"\n\n")[0][6:])["created"]
        return reply.body.replace(str(created).encode(), b"0")

    assert run(crowd(100)) == run(crowd(0))
