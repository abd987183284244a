"""What small conversations show of a template's abilities."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conversations import SandboxedTemplate
from small_templates import SMALL_TEMPLATES

from jitney.engine.server.chat.conversation.template_abilities import (
    ChatAbilities,
    TemplateAbilities,
)
from jitney.engine.server.chat.conversation.tools import Tool, ToolUse


def abilities(text: str, tools_template: str = "") -> ChatAbilities:
    return asyncio.run(SandboxedTemplate.of(text, tools_template).abilities())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemma 2", {"system": False, "user_twice": False, "arguments": None}),
        ("mixtral", {"system": False, "assistant_first": False}),
        ("nemo", {"system": False, "short_ids": True, "text_beside_calls": "before_empty_turn"}),
        ("nemo", {"user_after_result": "after_empty_turn", "unanswered_calls": False}),
        ("mistral small", {"system": True, "empty_assistant": False}),
        ("mistral small", {"user_after_result": "in_result"}),
        ("llama 3", {"parallel_calls": False, "text_beside_calls": "before"}),
        ("qwen coder", {"arguments": "object", "parallel_calls": True}),
        ("hermes", {"text_beside_calls": "before"}),
        ("r1 distill", {"systems": False, "arguments": "text", "null_beside_calls": True}),
        ("deepseek", {"systems": True, "system_later": False, "null_beside_calls": True}),
        ("gpt-oss", {"systems": False, "parallel_calls": False, "text_beside_calls": "before"}),
        ("phi", {"system_later": True, "arguments": None, "results": False}),
        ("later qwen", {"system_later": False, "text_beside_calls": "beside"}),
        ("names only", {"arguments": "object", "shows_arguments": False}),
    ],
)
def test_the_habits_of_known_templates(name: str, expected: dict[str, Any]):
    can = abilities(SMALL_TEMPLATES[name]).plain
    assert {ability: getattr(can, ability) for ability in expected} == expected


def test_which_templates_show_tools():
    shown = {name: abilities(text).with_tools is not None for name, text in SMALL_TEMPLATES.items()}
    without = ("gemma 2", "mixtral", "r1 distill", "deepseek", "phi")
    assert [name for name, shows in shown.items() if not shows] == list(without)


def test_what_templates_need_of_tools():
    bare = ToolUse((Tool("f", parameters={"properties": {"a": {"type": ["string", "null"]}}}),))
    [shown] = abilities(SMALL_TEMPLATES["llama 3"]).variables(bare)["tools"]
    assert shown == bare.tools[0].shown() and "description" not in shown["function"]
    [written_out] = abilities(SMALL_TEMPLATES["hermes"]).variables(bare)["tools"]
    assert written_out["function"]["description"] == ""
    [field] = written_out["function"]["parameters"]["properties"].values()
    assert field == {"description": "", "anyOf": [{"type": "string"}, {"type": "null"}]}
    assert abilities(SMALL_TEMPLATES["hermes"]).variables(None) == {"tools": []}
    assert abilities(SMALL_TEMPLATES["llama 3"]).variables(None) == {}
    assert abilities(SMALL_TEMPLATES["phi"]).variables(bare) == {}


def test_the_template_for_tools_is_used_with_tools_alone():
    can = abilities(SMALL_TEMPLATES["gemma 2"], SMALL_TEMPLATES["hermes"])
    assert can.with_tools is not None
    assert (can.plain.system, can.with_tools.system) == (False, True)
    assert can.beside(None) is can.plain
    assert can.beside(ToolUse((Tool("f"),))) is can.with_tools


@pytest.mark.parametrize("text", ["{{ raise_exception('not today') }}", "{{ nothing.here.not }}"])
def test_a_template_that_renders_nothing_has_the_least_abilities_and_a_reason(text: str):
    can = abilities(text)
    assert can.plain == TemplateAbilities() and can.with_tools is None
    assert can.refusal
