"""Fields that clients of other engines send: what each of them means here."""

from __future__ import annotations

import pytest
from api_fakes import BOS, ByteTokenizer, FakeClient, Script, call, make_app, run

PROMPT = {"model": "m", "prompt": "ab"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "ab"}]}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ROUTES = {COMPLETIONS: PROMPT, CHATS: CHAT}


def ask(path, body, client=None, **kw):
    return run(call(make_app(client or FakeClient()), path, body, **kw))


@pytest.mark.parametrize("path", ROUTES)
def test_the_model_need_not_be_named(path):
    body = ROUTES[path] | {"model": None}
    assert ask(path, body).json()["model"] == "m"
    del body["model"]
    assert ask(path, body).json()["model"] == "m"


def test_the_model_goes_by_every_name_it_is_served_under():
    app = make_app(served_model_name=("gpt", "other"))
    for name in ("gpt", "other"):
        assert run(call(app, COMPLETIONS, PROMPT | {"model": name})).json()["model"] == "gpt"
        card = run(call(app, f"/v1/models/{name}", method="GET")).json()
        assert (card["id"], card["root"], card["max_model_len"]) == (name, "gpt", 256)
    assert run(call(app, COMPLETIONS, PROMPT)).error["code"] == "model_not_found"
    listed = run(call(app, "/v1/models", method="GET")).json()["data"]
    assert [card["id"] for card in listed] == ["gpt", "other"]


@pytest.mark.parametrize("path", ROUTES)
def test_many_stop_strings(path):
    client = FakeClient()
    stops = [f"no {number}" for number in range(63)]
    body = ask(path, ROUTES[path] | {"stop": [*stops, "wö"]}, client).json()
    choice = body["choices"][0]
    assert (choice.get("text") or choice["message"]["content"]) == "Hello, "
    assert len(client.requests[0].sampling.stop) == 64


def test_special_tokens_can_be_shown():
    fields = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    shown = ask(COMPLETIONS, PROMPT | fields, FakeClient(Script("A"))).json()
    assert shown["choices"][0]["text"] == "A<eos>"
    hidden = ask(COMPLETIONS, PROMPT, FakeClient(Script("A"))).json()
    assert hidden["choices"][0]["text"] == "A"


def test_prompt_logprobs_of_completions():
    client = FakeClient(Script("Z"))
    body = ask(COMPLETIONS, {"prompt": ["ab", "c"], "prompt_logprobs": 1}, client).json()
    assert [request.sampling.prompt_logprobs for request in client.requests] == [1, 1]
    first, second = [choice["prompt_logprobs"] for choice in body["choices"]]
    assert first == [
        None,
        {
            "98": {"logprob": -0.098, "rank": None, "decoded_token": "b"},
            "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
        },
    ]
    assert second == [None]
    assert body["choices"][0]["logprobs"] is None and body["choices"][0]["text"] == "Z"


def test_a_prompt_token_among_the_likeliest_has_its_rank():
    body = ask(COMPLETIONS, {"prompt": "aB", "prompt_logprobs": 3}).json()
    entries = body["choices"][0]["prompt_logprobs"][1]
    assert list(entries) == ["66", "65", "67"]
    assert [entry["rank"] for entry in entries.values()] == [2, 1, 3]


def test_prompt_logprobs_of_chats_stand_beside_the_choices():
    client = FakeClient()
    body = ask(CHATS, CHAT | {"prompt_logprobs": 0, "n": 2}, client).json()
    entries = body["prompt_logprobs"]
    assert len(entries) == len(client.requests[0].prompt) and entries[0] is None
    token = str(client.requests[0].prompt[1])
    assert list(entries[1]) == [token]
    assert "prompt_logprobs" not in ask(CHATS, CHAT).json()


def test_prompt_logprobs_come_with_each_sequence_and_stand_once():
    fields = {"prompt_logprobs": 1, "echo": True, "logprobs": 1, "n": 2, "max_tokens": 1}
    body = ask(COMPLETIONS, PROMPT | fields, FakeClient(Script("Z", delay_s=0.01))).json()
    for choice in body["choices"]:
        assert len(choice["prompt_logprobs"]) == 2
        assert choice["logprobs"]["tokens"] == ["a", "b", "Z"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.098, -0.09]


def test_prompt_logprobs_beside_echo():
    client = FakeClient(Script("Z"))
    fields = {"prompt_logprobs": 2, "echo": True, "logprobs": 1}
    choice = ask(COMPLETIONS, PROMPT | fields, client).json()["choices"][0]
    assert client.requests[0].sampling.prompt_logprobs == 2
    assert choice["logprobs"]["top_logprobs"][1] == {"A": -0.5, "b": -0.098}
    assert list(choice["prompt_logprobs"][1]) == ["98", "65", "66"]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "user: a\nassistant: b\nassistant: "),
        ({"add_generation_prompt": False}, "user: a\nassistant: b\n"),
        ({"add_generation_prompt": True}, "user: a\nassistant: b\nassistant: "),
        ({"continue_final_message": True}, "user: a\nassistant: b"),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            "user: a\nassistant: b",
        ),
        ({"continue_final_message": False}, "user: a\nassistant: b\nassistant: "),
    ],
)
def test_where_the_answer_of_a_chat_begins(fields, prompt):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    client = FakeClient()
    assert ask(CHATS, {"messages": messages} | fields, client).status == 200
    assert bytes(client.requests[0].prompt).decode() == prompt


@pytest.mark.parametrize(
    ("path", "fields", "left"),
    [
        (COMPLETIONS, {"max_tokens": 100}, 156),
        (COMPLETIONS, {}, 240),
        (CHATS, {}, 255),
        (CHATS, {"max_tokens": 6}, 250),
    ],
)
def test_a_prompt_is_cut_to_what_there_is_room_for(path, fields, left):
    client = FakeClient()
    long = {COMPLETIONS: {"prompt": "a" * 1000}}.get(
        path, {"messages": [{"role": "user", "content": "a" * 1000}]}
    )
    fields = fields | {"truncate_prompt_tokens": -1}
    assert ask(path, long | fields, client).status == 200
    assert len(client.requests[0].prompt) == left
    assert ask(path, ROUTES[path] | fields, client).status == 200


@pytest.mark.parametrize("path", ROUTES)
def test_words_that_never_come_are_tokens_with_and_without_a_blank(path):
    client = FakeClient()
    fields = {"bad_words": ["no", "no", "\n"], "allowed_token_ids": [65, 66, 65]}
    assert ask(path, ROUTES[path] | fields, client).status == 200
    sampling = client.requests[0].sampling
    assert sampling.banned_sequences == (tuple(b"no"), tuple(b" no"), (10,))
    assert sampling.allowed_token_ids == (65, 66)
    assert sampling.constrained and not sampling.greedy_only


def test_words_that_leave_no_token_are_refused():
    fields = {"bad_words": ["A", "B"], "allowed_token_ids": [65, 66]}
    reply = ask(COMPLETIONS, PROMPT | fields)
    assert (reply.status, reply.error["param"]) == (400, "bad_words")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"logprobs": 31}, "logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 31}, "prompt_logprobs"),
        (CHATS, {"logprobs": True, "top_logprobs": 31}, "top_logprobs"),
    ],
)
def test_as_many_alternatives_as_the_server_computes(path, fields, param):
    client = FakeClient(max_logprobs=30)
    reply = ask(path, ROUTES[path] | fields, client)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert "--max-logprobs" in reply.error["message"] and not client.requests
    assert ask(path, ROUTES[path] | fields | {param: 30}, client).status == 200


@pytest.mark.parametrize("path", ROUTES)
def test_a_penalty_goes_by_both_its_names(path):
    client = FakeClient()
    assert ask(path, ROUTES[path] | {"repeat_penalty": 1.25}, client).status == 200
    assert client.requests[0].sampling.repetition_penalty == 1.25
    for fields in ({"repeat_penalty": -1}, {"repeat_penalty": 1.2, "repetition_penalty": 1.2}):
        reply = ask(path, ROUTES[path] | fields)
        assert (reply.status, reply.error["param"]) == (400, "repeat_penalty")


def test_log_probabilities_may_name_tokens_by_their_ids():
    fields = {"return_tokens_as_token_ids": True, "logprobs": 1, "max_tokens": 1}
    choice = ask(COMPLETIONS, PROMPT | fields, FakeClient(Script("Z"))).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == ["token_id:90"]
    assert set(choice["logprobs"]["top_logprobs"][0]) == {"token_id:90", "token_id:65"}
    chat = CHAT | fields | {"logprobs": True, "top_logprobs": 1}
    for extra in ({}, {"stream": True}):
        reply = ask(CHATS, chat | extra, FakeClient(Script("Z")))
        assert b'"token":"token_id:90"' in reply.body and b'"token":"token_id:65"' in reply.body
        assert b'"token":"Z"' not in reply.body


def test_special_tokens_around_a_prompt_are_the_clients_choice():
    class Tokenizer(ByteTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            return [BOS] * add_special_tokens + list(text.encode())

    for path, usual in ((COMPLETIONS, True), (CHATS, False)):
        for value, has_special in ((None, usual), (True, True), (False, False)):
            client = FakeClient()
            app = make_app(client, tokenizer=Tokenizer())
            body = ROUTES[path] | {"add_special_tokens": value}
            assert run(call(app, path, body)).status == 200
            assert (client.requests[0].prompt[0] == BOS) == has_special


def test_hints_that_this_model_cannot_follow_are_told():
    for fields in (
        {"reasoning_effort": "max"},
        {"thinking_token_budget": 5},
        {"stream": True, "stream_options": {"include_obfuscation": True}},
    ):
        reply = ask(CHATS, CHAT | fields)
        name = list(fields)[-1].replace("_options", "_options.include_obfuscation")
        assert (reply.status, reply.headers["x-ignored-params"]) == (200, name)
    for fields in (
        {"reasoning_effort": "none"},  # it does not think
        {"top_logprobs": 0, "tool_choice": "auto", "prompt_cache_key": "k", "store": False},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ):
        reply = ask(CHATS, CHAT | fields)
        assert reply.status == 200 and "x-ignored-params" not in reply.headers
