"""The sandbox of chat templates against transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from families import TEMPLATES
from transformers.utils.chat_template_utils import render_jinja_template

from jitney.engine.core.text.chat_sandbox import render

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "It's <b>wet</b> & cold",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "é"}}}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Rain? "}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "No,  ", "reasoning": "dry"}]
CHATS: dict[str, list[dict[str, Any]]] = {
    "asked": ASKED,
    "answered": ANSWERED,
    "thought": [*ASKED, {"role": "assistant", "content": "No", "reasoning_content": "dry"}],
    "called": [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sun", "tool_call_id": "c1", "name": "weather"},
    ],
    "in blocks": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]}
    ],
    "empty": [],
}
VARIABLES: dict[str, dict[str, Any]] = {
    "none": {},
    "turn": {"add_generation_prompt": True, "bos_token": "<s>"},
    "tools": {"tools": [TOOL], "add_generation_prompt": True, "enable_thinking": False},
    "continued": {"continue_final_message": True},
}
#: What jinja2 does not have, or has otherwise.
PIECES = {
    "json": "{{ tools | tojson }}{{ messages | tojson(indent=2, sort_keys=true) }}",
    "separators": "{{ messages | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "date": "{{ strftime_now('%Y') }}",
    "namespace": "{% set ns = namespace(a=1, self=2) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}",
    "hidden names": "{% set ns = namespace() %}{% set ns._a = 1 %}",
    "hidden keyword": "{% set ns = namespace(__init__=1) %}",
    "dict": "{{ dict(a=1) }}{{ dict([('b', 2)]) }}{{ dict.fromkeys(['c']) }}",
    "dict's class": "{{ dict.__subclasses__() }}",
    "mro": "{{ dict.mro() }}",
    "generation": "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}\n{% endgeneration %}"
    "{{ a }}",
    "loop": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}"
    "{% break %}{% endfor %}",
    "blocks": "a\n  {% if true %}\n  b\n  {% endif %}\nc\n",
    "exception": "{{ raise_exception('roles must alternate') }}",
    "changes": "{% for m in messages %}{{ m.update({'a': 1}) }}{% endfor %}",
    "defined": "{{ tools is defined }}{{ documents is none }}{{ add_generation_prompt }}",
    "reasoning": "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{% endfor %}",
    "trimmed": "{% for m in messages %}{{ m.content | trim }};\n{% endfor %}",
    "whole": "{% for m in messages %}{{ m.role }}: {{ m.content }};\n{% endfor %}",
    "cut": "{% for m in messages %}{{ m.content[:2] }}{% endfor %}",
    "blind": "{{ messages | length }}",
    "parts": "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}|"
    "{% endfor %}",
}


type Made = str | type[Exception]


def made(render_chat: Callable[..., Any], *given: Any, **named: Any) -> Made:
    """The text, or the kind of error."""
    try:
        return render_chat(*given, **named)
    except Exception as error:
        return type(error)


def by_transformers(template: str, chat: list[dict[str, Any]], variables: dict[str, Any]) -> Any:
    texts, _ = render_jinja_template([chat], chat_template=template, **variables)
    return texts[0]


@pytest.mark.parametrize("name", [*PIECES, *TEMPLATES])
def test_every_text_and_refusal_is_that_of_transformers(name: str):
    template = PIECES.get(name) or TEMPLATES[name]
    texts = set()
    for chat in CHATS.values():
        for variables in VARIABLES.values():
            ours = made(render, template, chat, variables)
            assert ours == made(by_transformers, template, chat, variables), (chat, variables)
            texts.add(ours)
    if name in TEMPLATES:
        assert len([text for text in texts if isinstance(text, str)]) > len(CHATS)


def test_messages_are_left_as_they_are():
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}], "reasoning": "r"}]
    for template in ("{{ messages[0].content }}", "{{ messages[0].content[0].text }}"):
        render(template, chat, {"continue_final_message": True})
        assert chat == [
            {"role": "user", "content": [{"type": "text", "text": "a"}], "reasoning": "r"}
        ]
