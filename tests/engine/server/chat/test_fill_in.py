"""Filling in the middle: `suffix` of completions, and /infill in llama.cpp's form."""

from __future__ import annotations

import json

import pytest
from api_fakes import EOS, ByteTokenizer, FakeClient, Script, call, make_app, run
from tokenizers import AddedToken

from jitney.engine.core.text.fast_tokenizers import _tiny_fast
from jitney.engine.core.text.fill_in import FillIn
from jitney.engine.core.text.tokenizer import Tokenizer

PREFIX, SUFFIX, MIDDLE, END = 250, 251, 252, 253
INFILL = {"input_prefix": "ab", "input_suffix": "yz"}


class FillingTokenizer(ByteTokenizer):
    fill_in = FillIn(PREFIX, SUFFIX, MIDDLE, (END,), None)


def ask(path, body, client=None, tokenizer: type[ByteTokenizer] = FillingTokenizer):
    app = make_app(client or FakeClient())
    app.state.service.tokenizer = tokenizer()
    return run(call(app, path, body))


def wrapped(before: bytes, after: bytes) -> list[int]:
    return [PREFIX, *before, SUFFIX, *after, MIDDLE]


def tokenizer_with(*names: str) -> Tokenizer:
    fast = _tiny_fast()
    tokens = [AddedToken(name, special=True, normalized=False) for name in names]
    fast.rust.add_special_tokens(tokens)
    return Tokenizer(fast)


@pytest.mark.parametrize(
    "names",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ],
)
def test_a_vocabulary_says_how_its_model_is_asked(names):
    tokenizer = tokenizer_with(*names, "<|endoftext|>")
    fill_in = tokenizer.fill_in
    assert fill_in is not None
    ids = fill_in.prompt(tokenizer, "def f(", "):")
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        f"{names[0]}def f({names[1]}):{names[2]}"
    )
    assert fill_in.ends == (tokenizer.token_to_id("<|endoftext|>"),)


def test_other_files_stand_before_it_marked_where_the_model_knows_marks():
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    others = [("a.py", "x = 1"), ("b.py", "y = 2")]
    plain = tokenizer_with(*names)
    assert plain.fill_in is not None
    text = plain.decode(plain.fill_in.prompt(plain, "p", "s", others), skip_special_tokens=False)
    assert text == "x = 1\n\ny = 2\n\n<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>"
    marked = tokenizer_with(*names, "<|repo_name|>", "<|file_sep|>")
    assert marked.fill_in is not None
    ids = marked.fill_in.prompt(marked, "p", "s", others)
    assert marked.decode(ids, skip_special_tokens=False) == (
        "<|repo_name|>repository\n<|file_sep|>a.py\nx = 1\n<|file_sep|>b.py\ny = 2\n"
        "<|file_sep|>file\n<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>"
    )


def test_a_vocabulary_with_some_of_the_tokens_was_not_taught():
    assert FillIn.of(tokenizer_with("<fim_prefix>", "<fim_suffix>")) is None
    assert tokenizer_with().fill_in is None


def test_a_completion_with_a_suffix():
    client = FakeClient(Script("mid"))
    body = ask("/v1/completions", {"prompt": ["ab", "c"], "suffix": "yz"}, client).json()
    assert [request.prompt for request in client.requests] == [
        wrapped(b"ab", b"yz"),
        wrapped(b"c", b"yz"),
    ]
    assert client.requests[0].sampling.stop_token_ids == (END,)
    assert [choice["text"] for choice in body["choices"]] == ["mid", "mid"]
    for nothing in (None, ""):
        ask("/v1/completions", {"prompt": "ab", "suffix": nothing}, client)
        assert client.requests[-1].prompt == [97, 98]


def test_infill_in_llama_cpps_form():
    client = FakeClient(Script("mid", cached_tokens=2))
    fields = {"prompt": "c", "n_predict": 9, "stop_token_ids": [7], "return_token_ids": True}
    body = ask("/infill", INFILL | fields, client).json()
    [request] = client.requests
    assert request.prompt == wrapped(b"abc", b"yz")
    assert request.sampling.max_tokens == 9 and request.sampling.stop_token_ids == (7, END)
    assert body == {
        "index": 0,
        "content": "mid",
        "tokens": [*b"mid", EOS],
        "stop": True,
        "model": "m",
        "tokens_predicted": 4,
        "tokens_evaluated": 8,
        "tokens_cached": 2,
        "truncated": False,
        "stop_type": "eos",
    }


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [({"n_predict": 2}, "limit", "mi"), ({"stop": "d"}, "word", "mi"), ({}, "eos", "mid")],
)
def test_why_it_ended(fields, kind, text):
    body = ask("/infill", INFILL | fields, FakeClient(Script("mid"))).json()
    assert (body["stop_type"], body["content"]) == (kind, text)


def test_without_a_length_it_goes_to_the_end_of_the_context():
    client = FakeClient(Script("mid"))
    for fields in ({}, {"n_predict": -1}, {"n_predict": 10_000}):
        ask("/infill", INFILL | fields, client)
        assert client.requests[-1].sampling.max_tokens == 256 - len(wrapped(b"ab", b"yz"))


def test_a_streamed_infill():
    reply = ask("/infill", INFILL | {"stream": True}, FakeClient(Script("mid")))
    frames = reply.body.decode().removesuffix("\n\n").split("\n\n")
    events = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert "".join(event["content"] for event in events) == "mid"
    assert [event["stop"] for event in events] == [False, False, False, True]
    assert events[-1]["stop_type"] == "eos"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [1], "suffix": "x"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": 5}, "suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "x", "echo": True}, "suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "x", "truncate_prompt_tokens": 2}, "suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "x" * 3000}, "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": "x" * 255}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "suffix": "x"},
            "suffix",
        ),
        ("/infill", {}, "input_prefix"),
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
        ("/infill", INFILL | {"input_prefix": 5}, "input_prefix"),
        ("/infill", INFILL | {"prompt": ["a"]}, "prompt"),
        ("/infill", INFILL | {"input_extra": "a"}, "input_extra"),
        ("/infill", INFILL | {"input_extra": [{}]}, "input_extra[0].text"),
        ("/infill", INFILL | {"input_extra": [{"text": "a"}] * 65}, "input_extra"),
        ("/infill", INFILL | {"input_extra": [{"text": "a" * 3000}]}, "input_prefix"),
        ("/infill", INFILL | {"input_prefix": "a" * 300}, "input_prefix"),
        ("/infill", INFILL | {"n": 2}, "n"),
        ("/infill", INFILL | {"prompt_logprobs": 2}, "prompt_logprobs"),
        ("/infill", INFILL | {"n_predict": -2}, "n_predict"),
        ("/infill", INFILL | {"n_predict": 0}, "max_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes_are_named(path, body, param):
    client = FakeClient()
    reply = ask(path, body, client)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    assert not client.requests


def test_a_model_that_was_not_taught_says_so():
    for path, body, param in (
        ("/v1/completions", {"prompt": "a", "suffix": "x"}, "suffix"),
        ("/infill", INFILL, "input_suffix"),
    ):
        reply = ask(path, body, tokenizer=ByteTokenizer)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert reply.error["code"] == "unsupported_parameter"
        assert "not taught" in reply.error["message"]
