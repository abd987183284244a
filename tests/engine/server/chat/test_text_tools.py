"""Texts, tokens and templates by themselves: vLLM's and llama.cpp's forms."""

from __future__ import annotations

import pytest
from api_fakes import EOS, FakeClient, call, make_app, run

from jitney.engine.common.key_file import digest_key
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.core.weights.checkpoints.sources import ModelSource

CHAT = {"messages": [{"role": "user", "content": "ab"}]}
RENDERED = "user: ab\nassistant: "
ROUTES = {
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [97]},
    "/apply-template": CHAT,
}


def ask(path, body, **kw):
    client = FakeClient()
    reply = run(call(make_app(client), path, body, **kw))
    assert not client.requests, "the engine has nothing to do with it"
    return reply


def test_a_text_in_vllms_form():
    assert ask("/tokenize", {"prompt": "hé"}).json() == {
        "count": 3,
        "max_model_len": 256,
        "tokens": [104, 195, 169],
        "token_strs": None,
    }
    spelled = ask("/tokenize", {"model": "m", "prompt": "ab", "return_token_strs": True}).json()
    assert spelled["token_strs"] == ["a", "b"]


def test_a_text_in_llama_cpps_form():
    assert ask("/tokenize", {"content": "ab", "add_special": True}).json() == {"tokens": [97, 98]}
    pieces = ask("/tokenize", {"content": "hé", "with_pieces": True}).json()
    assert pieces == {
        "tokens": [
            {"id": 104, "piece": "h"},
            {"id": 195, "piece": [195]},
            {"id": 169, "piece": [169]},
        ]
    }


def test_a_chat_is_tokenised_as_it_would_be_answered():
    body = ask("/tokenize", CHAT | {"model": "m"}).json()
    assert bytes(body["tokens"]).decode() == RENDERED and body["count"] == len(RENDERED)
    bare = ask("/tokenize", CHAT | {"add_generation_prompt": False}).json()
    assert bytes(bare["tokens"]).decode() == "user: ab\n"


def test_an_empty_text_has_no_tokens():
    assert ask("/tokenize", {"content": ""}).json() == {"tokens": []}
    assert ask("/tokenize", {"prompt": ""}).json()["count"] == 0
    assert ask("/detokenize", {"tokens": []}).json()["prompt"] == ""


def test_tokens_become_text_under_both_names():
    body = ask("/detokenize", {"tokens": [104, 195, 169, EOS]}).json()
    assert body == {"prompt": "hé<eos>", "content": "hé<eos>"}


def test_what_a_client_needs_to_leave_tokenising_to_the_server():
    client = FakeClient()
    body = run(call(make_app(client), "/tokenizer_info", method="GET")).json()
    assert body == {
        "bos_token": None,
        "eos_token": "<eos>",
        "pad_token": None,
        "unk_token": None,
        "chat_template": "",
        "vocab_size": 260,
        "model_max_length": 256,
    }


def test_the_special_tokens_of_a_model_have_names():
    tokens = Tokenizer.load(ModelSource.resolve("tiny-random")).special_tokens
    assert (tokens["bos_token"], tokens["eos_token"]) == ("<|bos|>", "<|im_end|>")


def test_what_the_template_makes_of_a_chat():
    assert ask("/apply-template", CHAT).json() == {"prompt": RENDERED}
    extra = {"continue_final_message": True}
    assert ask("/apply-template", CHAT | extra).json() == {"prompt": "user: ab"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": None}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "a"}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"content": 5}, 400, "content"),
        ("/tokenize", {"content": "a", "parse_special": False}, 400, "parse_special"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "a" * 3000}, 400, "prompt"),
        ("/tokenize", {"content": "a" * 3000}, 400, "content"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "x", "content": "a"}]}, 400, "messages[0].role"),
        ("/tokenize", CHAT | {"return_token_strs": 1}, 400, "return_token_strs"),
        ("/tokenize", CHAT | {"chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [260]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens"),
        ("/apply-template", {}, 400, "messages"),
        ("/apply-template", CHAT | {"functions": [{}]}, 400, "functions"),
        *((path, b"[]", 400, None) for path in ROUTES),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes_are_named(path, body, status, param):
    reply = ask(path, body)
    assert (reply.status, reply.error["param"]) == (status, param)
    assert len(reply.body) < 1500


@pytest.mark.parametrize("path", ROUTES)
def test_they_are_behind_the_key_and_wait_for_the_model(path):
    app = make_app(api_keys=(digest_key("k"),))
    assert run(call(app, path, ROUTES[path])).status == 401
    app = make_app()
    app.state.service.tokenizer = None
    assert run(call(app, path, ROUTES[path])).status == 503
