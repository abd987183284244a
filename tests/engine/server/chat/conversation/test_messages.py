"""Conversations of all providers through chat templates with all habits: every text reaches the
prompt, in order and once, or the client learns why not.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from conversations import (
    TALKS,
    SandboxedTemplate,
    Talk,
    assistant,
    call,
    finished,
    result,
    system,
    user,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_templates import SMALL_TEMPLATES

from jitney.engine.common.errors import RequestError
from jitney.engine.server.chat.conversation.formats import TurnFormat
from jitney.engine.server.chat.conversation.messages import shaped_messages
from jitney.engine.server.chat.conversation.template_abilities import (
    ChatAbilities,
    TemplateAbilities,
)
from jitney.engine.server.chat.conversation.tools import Tool, ToolUse

type Json = dict[str, Any]

NAMES = list(SMALL_TEMPLATES)
TOOL = Tool("get_weather", "Weather", {"type": "object", "properties": {"city": {}}})
TURNS = TurnFormat.of("")
#: The most that a template can do.
ABLE = TemplateAbilities(
    system=True,
    systems=True,
    system_later=True,
    user_twice=True,
    assistant_twice=True,
    assistant_first=True,
    empty_assistant=True,
    arguments="object",
    shows_arguments=True,
    results=True,
    parallel_calls=True,
    unanswered_calls=True,
    text_beside_calls="beside",
    user_after_result="next",
)


@functools.cache
def template(name: str) -> SandboxedTemplate:
    return SandboxedTemplate.of(SMALL_TEMPLATES[name])


@functools.cache
def abilities(name: str) -> ChatAbilities:
    return asyncio.run(template(name).abilities())


def prompt_of(name: str, talk: Talk, warnings: list[str] | None = None) -> str:
    noted = [] if warnings is None else warnings
    return asyncio.run(talk.prompt(template(name), abilities(name), noted))


def shaped(
    messages: list[Json], can: TemplateAbilities = ABLE, warnings: list[str] | None = None
) -> list[Json]:
    noted = [] if warnings is None else warnings
    return finished(shaped_messages(messages, ChatAbilities(can, can), TURNS, None, noted))


#: The conversations that a template of ours refuses, each with a reason.
REFUSED = {("later qwen", "only a system"), ("later qwen", "only an assistant")}


@pytest.mark.parametrize("name", NAMES)
def test_every_text_reaches_the_prompt(name: str):
    faults: dict[str, list[str]] = {}
    for talk in TALKS:
        if (name, talk.name) in REFUSED:
            with pytest.raises(RequestError, match="nobody asks"):
                prompt_of(name, talk)
        else:
            faults[talk.name] = talk.faults(prompt_of(name, talk))
    assert not {talk: found for talk, found in faults.items() if found}


def test_a_conversation_that_every_template_takes_is_left_as_it_is():
    messages = [
        {"role": "system", "content": "a"},
        user("b"),
        assistant("", call("call_1", '{"x": 1}')),
        result("call_1", "c"),
        assistant("d"),
        user("e"),
    ]
    [*_, last] = made = shaped(messages)
    assert made[2]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert made[3].pop("name") == "get_weather"
    made[2] = messages[2]
    assert made == messages and last == user("e")


_ENDINGS = ("", " 'quoted' \"twice\"", "\n- a list\n", " — 雪", "  ")
_ARGUMENTS = (None, '{"city": "%s"}', '{"city": "%s', '["%s"]', "{}", "", "null")
_IDS = ("call_1", "toolu_abcdefghijk", "abcdefghi", "x")


@st.composite
def talks(draw: st.DrawFn) -> Talk:
    """Any order of roles, with calls and results that belong together or do not."""
    messages: list[Json] = []
    roles = st.sampled_from(["system", "user", "assistant", "calls", "tool", "developer"])
    for number, role in enumerate(draw(st.lists(roles, min_size=1, max_size=9))):
        text = f"text{number}q" + draw(st.sampled_from(_ENDINGS))
        text = draw(st.sampled_from([text, text, text, ""]))
        message: Json = {"role": role, "content": text}
        if role == "tool":
            message["tool_call_id"] = draw(st.sampled_from(_IDS))
        if role == "calls":
            ids = draw(st.lists(st.sampled_from(_IDS), min_size=1, max_size=3, unique=True))
            calls = [_any_call(draw, id, f"value{number}x{place}q") for place, id in enumerate(ids)]
            message |= {"role": "assistant", "tool_calls": calls}
        if message["role"] in ("assistant", "tool") and not text:
            message["content"] = draw(st.sampled_from(["", None]))
        messages.append(message)
    tools = draw(st.sampled_from([(), (TOOL,)]))
    return Talk("any", messages, tools)


def _any_call(draw: st.DrawFn, id: str, value: str) -> Json:
    arguments = draw(st.sampled_from(_ARGUMENTS)) or "{}"
    return call(id, arguments % value if "%s" in arguments else arguments)


@pytest.mark.parametrize("name", NAMES)
@given(talks())
@settings(max_examples=50, deadline=None)
@example(Talk("calls at the end", [user("a1q"), assistant("", call("1", '{"c": "v"}'))]))
@example(Talk("begins with a call", [assistant("", call("1", '{"city": "v0q"}'))], (TOOL,)))
def test_any_conversation_is_shown_whole_or_refused(name: str, talk: Talk):
    warnings: list[str] = []
    try:
        prompt = prompt_of(name, talk, warnings)
    except RequestError as error:
        assert error.info.param == "messages" and str(error)
        return
    assert talk.faults(prompt) == []


@pytest.mark.parametrize("name", NAMES)
@given(talks())
@settings(max_examples=25, deadline=None)
def test_a_conversation_that_grows_keeps_its_beginning(name: str, talk: Talk):
    """All messages but the last, which may be joined to what follows."""
    can = abilities(name)

    def made(messages: list[Json]) -> list[Json]:
        use = ToolUse(talk.tools) if talk.tools else None
        given = [each | {"role": each["role"].replace("developer", "system")} for each in messages]
        return finished(shaped_messages(given, can, TURNS, use, []))

    whole = made([*talk.messages, user("more")])
    for place in range(1, len(talk.messages)):
        is_within = talk.messages[place]["role"] == "tool"
        if not is_within:
            part = made([*talk.messages[:place], user("more")])[:-1]
            kept = part[:-1]
            assert whole[: len(kept)] == kept


def texts(messages: list[Json]) -> list[tuple[str, str | None]]:
    return [(message["role"], message["content"]) for message in messages]


def test_instructions_that_a_template_refuses_stand_before_the_users_text():
    said = [system("a"), system("b"), user("c"), assistant("d"), system("e"), user("f")]
    assert texts(shaped(said, replace(ABLE, system=False, systems=False, system_later=False))) == [
        ("user", "a\n\nb\n\nc"),
        ("assistant", "d"),
        ("user", "e\n\nf"),
    ]
    assert texts(shaped(said, replace(ABLE, systems=False, system_later=False))) == [
        ("system", "a\n\nb"),
        *texts(said[2:4]),
        ("user", "e\n\nf"),
    ]
    at_the_end = [user("a"), assistant("b"), system("c")]
    assert texts(shaped(at_the_end, replace(ABLE, system_later=False)))[-1] == ("user", "c")


def test_tools_in_words_stand_with_the_instructions():
    for can, role in ((ABLE, "system"), (replace(ABLE, system=False), "user")):
        told = finished(
            shaped_messages([user("a")], ChatAbilities(can), TURNS, ToolUse((TOOL,)), [])
        )
        assert told[0]["role"] == role and TOOL.name in told[0]["content"]
        assert told[-1]["content"].endswith("a") and len(told) == (2 if role == "system" else 1)


def test_several_calls_become_several_messages_where_one_is_all_a_template_shows():
    calls = [call("a", '{"n": 1}'), call("b", '{"n": 2}'), call("c", '{"n": 3}')]
    results = [result("c", "third"), result("a", "first"), result("b", "second")]
    made = shaped(
        [user("x"), assistant("text", *calls), *results], replace(ABLE, parallel_calls=False)
    )
    assert [message["content"] for message in made[1::2]] == ["text", "", ""]
    assert [len(message["tool_calls"]) for message in made[1::2]] == [1, 1, 1]
    pairs = [(made[at]["tool_calls"][0]["id"], made[at + 1]) for at in (1, 3, 5)]
    assert [(id, answer["tool_call_id"]) for id, answer in pairs] == [(x, x) for x in "abc"]
    assert [answer["content"] for _, answer in pairs] == ["first", "second", "third"]


def test_results_of_other_ids_belong_to_the_calls_in_order():
    calls = [call("a", name="one"), call("b", name="two")]
    made = shaped([user("x"), assistant("", *calls), result("?", "1"), result("!", "2")])
    assert [(each["name"], each["content"]) for each in made[2:]] == [("one", "1"), ("two", "2")]


def test_ids_are_shortened_alike_in_calls_and_results():
    given = ["call_5Yb0kq2TnVw8", "call_5Yb0kq2TnVw9", "1", "abcdefghi", "ä" * 9]
    said = [user("x"), assistant("", *map(call, given)), *[result(id, "r") for id in given]]
    warnings: list[str] = []
    made = shaped(said, replace(ABLE, short_ids=True), warnings)
    ids = [each["id"] for each in made[1]["tool_calls"]]
    assert ids == [message["tool_call_id"] for message in made[2:]]
    assert len(set(ids)) == len(given) and ids[3] == "abcdefghi"
    assert all(re.fullmatch("[A-Za-z0-9]{9}", id) for id in ids)
    assert len(warnings) == 1 and "nine" in warnings[0]
    again = shaped([*said, user("more")], replace(ABLE, short_ids=True))
    assert [each["id"] for each in again[1]["tool_calls"]] == ids
    assert shaped(said, ABLE)[1]["tool_calls"][0]["id"] == given[0]


def test_an_id_that_looks_like_a_short_one_is_not_mistaken_for_it():
    """The client sends what another id of its own is shortened to."""
    [_, made, *_] = shaped(
        [user("x"), assistant("", call("call_1"))], replace(ABLE, short_ids=True)
    )
    short = made["tool_calls"][0]["id"]
    both = [user("x"), assistant("", call("call_1"), call(short))]
    [_, made, *_] = shaped(both, replace(ABLE, short_ids=True))
    assert len({each["id"] for each in made["tool_calls"]}) == 2


@pytest.mark.parametrize("form", ["object", "text"])
@pytest.mark.parametrize(
    ("arguments", "is_lost"),
    [
        ('{"a": "b"}', False),
        ("", False),
        (" \n", False),
        ("null", False),
        ('{"a": "b', True),
        ('["a"]', True),
        ('"a"', True),
        ("a=b", True),
        ('{"a": "\\ud800"}', True),
        (json.dumps({"a": 9**40}), True),
        ("[" * 100_000, True),
    ],
    ids=lambda value: str(value)[:12],
)
def test_arguments_that_are_no_object_are_read_as_none_and_told_beside(
    arguments: str, is_lost: bool, form: Any
):
    warnings: list[str] = []
    said = [user("x"), assistant("look", call("1", arguments)), result("1", "r")]
    made = shaped(said, replace(ABLE, arguments=form), warnings)[1]
    shown = made["tool_calls"][0]["function"]["arguments"]
    value = json.loads(shown) if form == "text" else shown
    assert value == ({"a": "b"} if "b" in arguments and not is_lost else {})
    assert made["content"] == (f"look\n\n{arguments}" if is_lost else "look")
    assert len(warnings) == is_lost


def test_calls_in_words_have_lost_arguments_beside_them_too():
    warnings: list[str] = []
    said = [user("x"), assistant("look", call("1", '{"a": "b')), result("1", "r"), user("y")]
    made = shaped(said, replace(ABLE, arguments=None), warnings)
    assert [message["role"] for message in made] == ["user", "assistant", "user", "user"]
    assert made[1]["content"].startswith("look") and '{"a": "b' in made[1]["content"]
    assert not any("tool_calls" in message for message in made) and warnings


def test_most_calls_follow_what_the_template_can_show():
    use = ToolUse((TOOL,))
    for can, most in (
        (ABLE, None),
        (replace(ABLE, parallel_calls=False), 1),
        (replace(ABLE, parallel_calls=False, arguments=None), None),
    ):
        limited = ChatAbilities(can, can).limited(use)
        assert limited is not None and limited.most_calls == most
    assert ChatAbilities(ABLE, ABLE).limited(None) is None


def test_long_conversations_are_merged_in_time():
    """4096 messages, which is the most that a request may hold."""
    can = TemplateAbilities()
    said = [user("x" * 100)] * 2048 + [system("y" * 100)] * 2048
    [made] = shaped(said, can)
    assert made["content"].count("x") == made["content"].count("y") == 204_800
