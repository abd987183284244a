"""Conversations over HTTP with templates that refuse or leave out what clients send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_fakes import FakeClient, Reply, call, make_app, run
from families import FamilyTokenizer
from small_templates import SMALL_TEMPLATES

from jitney.engine.common.requests import EngineRequest

type Json = dict[str, Any]

CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time"}}
ASKED = {"role": "user", "content": "What time is it?"}


def asked(name: str, path: str, body: Json) -> tuple[Reply, list[EngineRequest]]:
    """The answer of a server whose model has this template, and what the engine was asked."""
    tokenizer = FamilyTokenizer("plain")
    tokenizer.chat_template = SMALL_TEMPLATES[name]
    tokenizer.special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    client = FakeClient(context_length=4096, vocab_size=tokenizer.vocab_size)
    return run(call(make_app(client, tokenizer=tokenizer), path, body)), client.requests


def prompt_of(name: str, body: Json) -> str:
    reply, _ = asked(name, "/apply-template", body)
    assert reply.status == 200, reply.body
    return reply.json()["prompt"]


def history(arguments: str) -> list[Json]:
    function = {"name": "clock", "arguments": arguments}
    made = {"id": "toolu_01AbCdEfGhIj", "type": "function", "function": function}
    return [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "toolu_01AbCdEfGhIj", "content": "noon"},
        {"role": "user", "content": "Again."},
    ]


@pytest.mark.parametrize("name", ["gemma 2", "mixtral", "nemo"])
def test_tools_can_be_forced_where_no_system_message_is_allowed(name: str):
    body = {"model": "m", "messages": [ASKED], "tools": [CLOCK], "tool_choice": "required"}
    reply, requests = asked(name, "/v1/chat/completions", body | {"max_tokens": 5})
    assert reply.status == 200, reply.body
    grammar = requests[0].sampling.grammar
    assert grammar is not None and "clock" in grammar.text
    assert "clock" in bytes(requests[0].prompt).decode()


@pytest.mark.parametrize(("name", "most"), [("llama 3", 1), ("later qwen", 2)])
def test_a_turn_has_no_more_calls_than_the_template_can_show(name: str, most: int):
    text = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    tokenizer = FamilyTokenizer("plain")
    tokenizer.chat_template = SMALL_TEMPLATES[name]
    client = FakeClient(context_length=4096, vocab_size=tokenizer.vocab_size)
    client.script.text = f"{text}\n{text}"
    body = {"model": "m", "messages": [ASKED], "tools": [CLOCK]}
    reply = run(call(make_app(client, tokenizer=tokenizer), "/v1/chat/completions", body))
    [choice] = reply.json()["choices"]
    assert len(choice["message"]["tool_calls"]) == most


def test_bad_arguments_are_noted_in_a_header():
    body = {"model": "m", "messages": history('{"zone": "C'), "tools": [CLOCK], "max_tokens": 2}
    for path in ("/apply-template", "/v1/chat/completions"):
        reply, _ = asked("qwen coder", path, body)
        assert reply.status == 200, reply.body
        assert "the arguments of a call of clock" in reply.headers["x-jitney-warnings"]
    assert '{"zone": "C<function=clock></im>' in prompt_of("qwen coder", body)


def test_shortened_ids_are_noted_in_a_header():
    body = {"model": "m", "messages": history("{}"), "tools": [CLOCK]}
    reply, _ = asked("nemo", "/apply-template", body)
    assert reply.status == 200 and "nine characters" in reply.headers["x-jitney-warnings"]
    assert "x-jitney-warnings" not in asked("llama 3", "/apply-template", body)[0].headers


@pytest.mark.parametrize(
    "message",
    [
        {"content": None},
        {},
        {"content": ""},
        {"content": None, "tool_calls": []},
        {"reasoning_content": "hm"},
        {"content": None, "reasoning": "hm"},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("name", ["gemma 2", "mistral small", "gpt-oss"])
def test_an_assistant_may_say_nothing(name: str, message: Json):
    said = [ASKED, message | {"role": "assistant"}, {"role": "user", "content": "Hello?"}]
    prompt = prompt_of(name, {"messages": said})
    assert prompt.count("What time is it?") == prompt.count("Hello?") == 1
    assert "None" not in prompt


def test_a_result_may_be_empty():
    said = history("{}")
    del said[2]["content"]
    assert "Again." in prompt_of("llama 3", {"messages": said, "tools": [CLOCK]})


def test_what_cannot_be_rendered_is_told_in_the_templates_words():
    body = {"messages": [{"role": "system", "content": "RULE"}]}
    reply, _ = asked("later qwen", "/apply-template", body)
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "nobody asks" in reply.error["message"]
