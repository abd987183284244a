"""What the two generation routes answer when all is well: shapes, streams to the byte, fields that
matter.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from api_fakes import EOS, FakeClient, Script, call, http_client, make_app, run, score, served

from jitney.engine.common.requests import SamplingParams
from jitney.engine.server.chat.openai.schema import ChatBody, CompletionBody

PROMPT = {"model": "m", "prompt": "ab"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "ab"}]}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def ask(path, body, client=None, **kw):
    client = client or FakeClient()
    return run(call(make_app(client), path, body, **kw))


def events(reply) -> list:
    frames = reply.body.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [
        json.loads(frame.removeprefix("data: "))
        for frame in frames[:-2]
        if not frame.startswith(":")
    ]


def test_a_plain_completion():
    reply = ask(COMPLETIONS, PROMPT)
    body = reply.json()
    assert reply.status == 200 and reply.headers["content-type"] == "application/json"
    assert body["id"].startswith("cmpl-") and isinstance(body["created"], int)
    assert {**body, "id": "", "created": 0} == {
        "id": "",
        "object": "text_completion",
        "created": 0,
        "model": "m",
        "choices": [
            {"index": 0, "text": "Hello, wörld!", "finish_reason": "stop", "logprobs": None}
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 15,
            "total_tokens": 17,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_plain_chat():
    client = FakeClient(Script(cached_tokens=7))
    body = ask(CHATS, CHAT, client).json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": "Hello, wörld!", "refusal": None}
    assert body["choices"] == [
        {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    ]
    assert bytes(client.requests[0].prompt) == b"user: ab\nassistant: "
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}


def test_default_lengths_are_16_for_completions_and_the_context_for_chat():
    client = FakeClient(Script("x" * 500))
    assert ask(COMPLETIONS, PROMPT, client).json()["usage"]["completion_tokens"] == 16
    body = ask(CHATS, CHAT, client).json()
    assert body["usage"]["total_tokens"] == 256 and body["choices"][0]["finish_reason"] == "length"
    ask(COMPLETIONS, {"model": "m", "prompt": "a" * 250}, client)
    assert client.requests[-1].sampling.max_tokens == 6


def test_max_completion_tokens_wins():
    client = FakeClient()
    ask(CHATS, CHAT | {"max_tokens": 9, "max_completion_tokens": 3}, client)
    assert client.requests[0].sampling.max_tokens == 3


def frame(body: str) -> bytes:
    return b"data: " + body.encode() + b"\n\n"


def test_a_streamed_chat_to_the_byte():
    reply = ask(
        CHATS,
        CHAT | {"stream": True, "request_id": "r", "stream_options": {"include_usage": True}},
        FakeClient(Script("hé", chunk=2)),
    )
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (reply.headers["cache-control"], reply.headers["x-accel-buffering"]) == (
        "no-store",
        "no",
    )
    created = json.loads(reply.body.split(b"\n\n")[0][6:])["created"]

    def chunk(choices, usage="null"):
        return frame(
            f'{{"id":"chatcmpl-r","object":"chat.completion.chunk","created":{created},"model":"m",'
            f'"choices":[{choices}],"usage":{usage}}}'
        )

    def delta(text, finish="null"):
        return chunk(f'{{"index":0,"delta":{text},"finish_reason":{finish},"logprobs":null}}')

    assert reply.body == (
        delta('{"role":"assistant","content":""}')
        + delta('{"content":"h"}')
        + delta('{"content":"é"}')
        + delta("{}", '"stop"')
        + chunk(
            "",
            '{"prompt_tokens":20,"completion_tokens":4,"total_tokens":24,'
            '"prompt_tokens_details":{"cached_tokens":0},'
            '"completion_tokens_details":{"reasoning_tokens":0}}',
        )
        + b"data: [DONE]\n\n"
    )


def test_a_streamed_completion_to_the_byte():
    reply = ask(
        COMPLETIONS,
        PROMPT | {"stream": True, "request_id": "r", "max_tokens": 3},
        FakeClient(Script("abcdef", chunk=2)),
    )
    created = json.loads(reply.body.split(b"\n\n")[0][6:])["created"]

    def chunk(text, finish):
        return frame(
            f'{{"id":"cmpl-r","object":"text_completion","created":{created},"model":"m",'
            f'"choices":[{{"index":0,"text":"{text}","finish_reason":{finish},"logprobs":null}}]}}'
        )

    assert reply.body == chunk("ab", "null") + chunk("c", '"length"') + b"data: [DONE]\n\n"


def test_continuous_usage_counts_up():
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(
        ask(
            COMPLETIONS,
            PROMPT | {"stream": True, "stream_options": options},
            FakeClient(Script("abc")),
        )
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 2, 3, 4, 4] and chunks[-1]["choices"] == []


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHATS, CHAT)])
@pytest.mark.parametrize("stop", ["wör", ["zzz", "wö"], ["rld", "wö"]])
def test_a_stream_says_what_the_plain_answer_says(path, body, stop):
    plain = ask(path, body | {"stop": stop}).json()["choices"][0]
    chunks = events(ask(path, body | {"stop": stop, "stream": True}))
    entries = [entry for chunk in chunks for entry in chunk["choices"]]
    text = "".join(
        entry.get("text") or entry.get("delta", {}).get("content") or "" for entry in entries
    )
    assert text == (plain.get("text") or plain["message"]["content"]) == "Hello, "
    assert entries[-1]["finish_reason"] == plain["finish_reason"] == "stop"


def test_a_stop_string_ends_the_sequence_in_the_engine():
    client = FakeClient(Script("abcdef" * 20))
    body = ask(COMPLETIONS, PROMPT | {"stop": "cd", "max_tokens": 100}, client).json()
    assert body["choices"][0]["text"] == "ab" and body["usage"]["completion_tokens"] == 4
    assert client.aborts == [(client.requests[0].id, 0, "stop")]
    assert not client.open


def test_include_stop_str_in_output():
    body = ask(COMPLETIONS, PROMPT | {"stop": "lo", "include_stop_str_in_output": True}).json()
    assert body["choices"][0]["text"] == "Hello"


def test_n_choices_interleave_by_index():
    client = FakeClient(Script("abc", numbered=True))
    plain = ask(CHATS, CHAT | {"n": 3}, client).json()
    assert [choice["message"]["content"] for choice in plain["choices"]] == ["abc0", "abc1", "abc2"]
    chunks = events(ask(CHATS, CHAT | {"n": 3, "stream": True}, client))
    texts = ["", "", ""]
    order = []
    for chunk in chunks:
        [entry] = chunk["choices"]
        order.append(entry["index"])
        texts[entry["index"]] += entry["delta"].get("content", "")
    assert texts == ["abc0", "abc1", "abc2"]
    assert sum(a != b for a, b in pairwise(order)) > 3


def test_several_prompts_are_several_requests_with_choices_prompt_by_prompt():
    client = FakeClient(Script("x", numbered=True))
    body = ask(COMPLETIONS, {"model": "m", "prompt": ["a", "bc"], "n": 2}, client).json()
    assert [choice["text"] for choice in body["choices"]] == ["x0", "x1"] * 2
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [bytes(request.prompt) for request in client.requests] == [b"a", b"bc"]
    assert len({request.id for request in client.requests}) == 2
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98], [[97, 98]]])
def test_all_forms_of_prompt_mean_the_same(prompt):
    client = FakeClient()
    assert ask(COMPLETIONS, {"model": "m", "prompt": prompt}, client).status == 200
    assert client.requests[0].prompt == [97, 98]


def test_best_of_returns_those_of_highest_mean_log_probability():
    client = FakeClient(
        Script("", numbered=True)
    )  # says "0", "1", "2": later digits are less likely in `score`
    body = ask(COMPLETIONS, PROMPT | {"n": 2, "best_of": 3, "ignore_eos": True}, client).json()
    assert [choice["text"] for choice in body["choices"]] == ["0", "1"]
    assert body["usage"]["completion_tokens"] == 3 and body["choices"][0]["logprobs"] is None
    assert client.requests[0].sampling.n == 3


def test_completion_logprobs():
    body = ask(COMPLETIONS, PROMPT | {"logprobs": 2}, FakeClient(Script("Aé"))).json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["A", "bytes:\\xc3", "bytes:\\xa9", "<eos>"],
        "token_logprobs": [-0.065, -0.195, -0.169, -0.256],
        "top_logprobs": [
            {"A": -0.065, "B": -1.5},
            {"A": -0.5, "B": -1.5, "bytes:\\xc3": -0.195},
            {"A": -0.5, "B": -1.5, "bytes:\\xa9": -0.169},
            {"A": -0.5, "B": -1.5, "<eos>": -0.256},
        ],
        "text_offset": [0, 1, 1, 2],
    }


def test_chat_logprobs():
    body = ask(CHATS, CHAT | {"logprobs": True, "top_logprobs": 1}, FakeClient(Script("A"))).json()
    top = [{"token": "A", "logprob": -0.5, "bytes": [65]}]
    assert body["choices"][0]["logprobs"] == {
        "refusal": None,
        "content": [
            {"token": "A", "logprob": -0.065, "bytes": [65], "top_logprobs": top},
            {"token": "<eos>", "logprob": -0.256, "bytes": list(b"<eos>"), "top_logprobs": top},
        ],
    }
    bare = ask(CHATS, CHAT | {"logprobs": True}, FakeClient(Script("A"))).json()
    assert [entry["top_logprobs"] for entry in bare["choices"][0]["logprobs"]["content"]] == [
        [],
        [],
    ]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_streamed_logprobs_are_the_plain_ones_one_per_counted_token(path):
    body = (
        (PROMPT | {"logprobs": 1})
        if path == COMPLETIONS
        else (CHAT | {"logprobs": True, "top_logprobs": 1})
    )
    body |= {"stop": "rld"}
    plain = ask(path, body).json()
    chunks = events(ask(path, body | {"stream": True}))
    pieces = [
        entry["logprobs"] for chunk in chunks for entry in chunk["choices"] if entry["logprobs"]
    ]
    want = plain["choices"][0]["logprobs"]
    for key in (
        ("content",)
        if path == CHATS
        else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    ):
        assert [each for piece in pieces for each in piece[key]] == want[key]
    assert len(want.get("content") or want["tokens"]) == plain["usage"]["completion_tokens"]


def test_echo_with_prompt_logprobs_as_evaluation_harnesses_ask_for_it():
    client = FakeClient(Script("Z"))
    body = ask(
        COMPLETIONS,
        {
            "model": "m",
            "prompt": [97, 98, 99],
            "echo": True,
            "max_tokens": 1,
            "logprobs": 1,
            "temperature": 0,
        },
        client,
    ).json()
    assert body["choices"][0]["text"] == "abcZ"
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "Z"] and logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["token_logprobs"] == [None, -0.098, -0.099, -0.09]
    assert logprobs["top_logprobs"] == [
        None,
        {"A": -0.5, "b": -0.098},
        {"A": -0.5, "c": -0.099},
        {"A": -0.5, "Z": -0.09},
    ]
    assert client.requests[0].sampling.prompt_logprobs == 1


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_the_prompt_alone(stream):
    body = PROMPT | {"echo": True, "max_tokens": 0, "logprobs": 0, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    reply = ask(COMPLETIONS, body)
    parts = events(reply) if stream else [reply.json()]
    choice, usage = parts[0]["choices"][0], parts[-1]["usage"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, score(98, 0).logprob]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, 2)


def test_streamed_echo_begins_with_the_prompt_once_per_choice():
    chunks = events(
        ask(COMPLETIONS, PROMPT | {"echo": True, "stream": True, "n": 2}, FakeClient(Script("xyz")))
    )
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["abxyz", "abxyz"]


def test_return_token_ids():
    body = ask(COMPLETIONS, PROMPT | {"return_token_ids": True}, FakeClient(Script("A"))).json()
    assert body["choices"][0]["prompt_token_ids"] == [97, 98] and body["choices"][0][
        "token_ids"
    ] == [65, EOS]
    chat = ask(CHATS, CHAT | {"return_token_ids": True, "stream": True}, FakeClient(Script("é")))
    ids = [
        id
        for chunk in events(chat)
        for entry in chunk["choices"]
        for id in entry.get("token_ids", [])
    ]
    assert ids == [*"é".encode(), EOS]


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_every_sampling_parameter_can_be_asked_for(kind):
    """A new one needs a field of its name in the body; then it reaches the engine."""
    made_of_others = {"grammar", "banned_sequences"}
    assert set(SamplingParams.__struct_fields__) - made_of_others <= set(kind.model_fields)


def test_every_sampling_field_reaches_the_engine():
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": -3,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 5,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    client = FakeClient(order="priority")
    extra = {
        "logit_bias": {"5": -100, "6": 1.5},
        "stop_token_ids": [7, 8, 7],
        "stop": ["x", "yy"],
        "priority": -2,
        "cache_salt": "s-1",
        "timeout_ms": 60_000,
    }
    for path, body in ((COMPLETIONS, PROMPT), (CHATS, CHAT)):
        assert ask(path, body | fields | extra, client).status == 200
        request = client.requests[-1]
        assert {name: getattr(request.sampling, name) for name in fields} == fields
        assert request.sampling.logit_bias == {5: -100.0, 6: 1.5}
        assert request.sampling.stop_token_ids == (7, 8) and request.sampling.stop == ("x", "yy")
        assert (request.priority, request.cache_salt) == (-2, "s-1")
        assert request.deadline is not None and request.deadline == pytest.approx(
            request.arrival + 60
        )


def test_null_means_not_given():
    fields = (
        "n",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "logit_bias",
        "stop_token_ids",
        "user",
        "tools",
        "tool_choice",
        "response_format",
        "priority",
        "timeout_ms",
    )
    for path, body in ((COMPLETIONS, PROMPT), (CHATS, CHAT)):
        client = FakeClient()
        assert ask(path, body | dict.fromkeys(fields), client).status == 200
        assert client.requests[0].sampling.temperature == 1.0


def test_a_field_that_is_not_given_has_the_models_default():
    defaults = {"temperature": 0.2, "top_p": 0.9, "top_k": 30}
    for path, body in ((COMPLETIONS, PROMPT), (CHATS, CHAT)):
        client = FakeClient(sampling_defaults=defaults)
        for fields, wanted in (
            ({}, (0.2, 0.9, 30)),
            ({"temperature": None, "top_k": 0}, (0.2, 0.9, 0)),
            ({"temperature": 0, "top_p": 1}, (0.0, 1.0, 30)),
        ):
            assert ask(path, body | fields, client).status == 200
            sampling = client.requests[-1].sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == wanted


@pytest.mark.parametrize(
    ("fields", "temperature", "penalty"),
    [
        ({}, 0.2, 1.05),
        ({"temperature": 0}, 0.0, 1.0),
        ({"temperature": 1e-6}, 1e-6, 1.0),
        ({"temperature": 0, "repetition_penalty": 1.05}, 0.0, 1.05),
        ({"temperature": 0, "repetition_penalty": None}, 0.0, 1.0),
        ({"temperature": 0, "repeat_penalty": 1.3}, 0.0, 1.3),
        ({"temperature": 0.1}, 0.1, 1.05),
    ],
)
def test_greedy_is_the_models_own_likeliest_token(
    fields: dict[str, Any], temperature: float, penalty: float
):
    """A default penalty would make it another."""
    client = FakeClient(sampling_defaults={"temperature": 0.2, "repetition_penalty": 1.05})
    for path, body in ((COMPLETIONS, PROMPT), (CHATS, CHAT)):
        assert ask(path, body | fields, client).status == 200
        sampling = client.requests[-1].sampling
        assert (sampling.temperature, sampling.repetition_penalty) == (temperature, penalty)
        assert sampling.greedy_only == (temperature < 0.1 and penalty == 1.0)


def test_truncation_keeps_the_end_of_the_prompt():
    client = FakeClient()
    fields = {"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True}
    body = ask(COMPLETIONS, PROMPT | fields, client).json()
    assert bytes(client.requests[0].prompt) == b"ef" and body["choices"][0]["text"].startswith(
        "efHello"
    )


def test_a_field_without_a_name_does_not_break_the_answer():
    """No HTTP header may end with a blank; a server that sends one only closes the connection."""
    with served(make_app()) as (url, _), http_client(url) as client:
        answer = client.post(COMPLETIONS, json=PROMPT | {"x": 1, "": 2})
    assert (answer.status_code, answer.headers["x-ignored-params"]) == (200, "x, ?")


def test_text_parts_roles_and_earlier_tool_calls():
    client = FakeClient()
    call_ = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "system", "content": [{"type": "text", "text": "brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call_], "refusal": None},
        {"role": "tool", "content": "", "tool_call_id": "c"},
        {"role": "assistant", "content": "ok"},
    ]
    assert ask(CHATS, {"model": "m", "messages": messages}, client).status == 200
    assert bytes(client.requests[0].prompt).decode() == (
        "system: be\nsystem: brief\nuser: a\nb\n"
        'assistant: <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        "user: <tool_response>\n\n</tool_response>\nassistant: ok\nassistant: "
    )


def test_request_ids_are_the_clients_only_when_harmless():
    def got(given):
        return ask(COMPLETIONS, PROMPT, headers={"x-request-id": given}).headers["x-request-id"]

    assert got("abc-1.X_") == "abc-1.X_"
    for bad in ("", "a b", "<script>", "x" * 129, "é"):
        assert got(bad) != bad and len(got(bad)) == 32
    client = FakeClient()
    for _ in range(2):
        ask(COMPLETIONS, PROMPT, client, headers={"x-request-id": "same"})
    first, second = client.requests
    assert first.id != second.id and "same" not in first.id
