"""The text of a custom tool, read out of JSON arguments that come in pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitney.engine.server.chat.conversation.custom_inputs import CustomInputs
from jitney.engine.server.chat.conversation.events import (
    AssistantEvent,
    AssistantMessage,
    ContentDelta,
    ToolCallArguments,
    ToolCallStart,
)
from jitney.engine.server.chat.conversation.tools import custom_arguments


def read(pieces: list[str], name: str = "patch") -> str:
    """The text of a call whose arguments come in these pieces."""
    events: list[AssistantEvent] = [ToolCallStart(0, "c", name)]
    events += [ToolCallArguments(0, piece) for piece in pieces]
    inputs = CustomInputs(frozenset({"patch"}))
    made = [each for event in events for each in inputs.texts([event], is_end=False)]
    made += inputs.texts([], is_end=True)
    [call] = AssistantMessage.of(made).tool_calls
    assert call.is_custom == (name == "patch")
    return call.arguments


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.integers(0, 500)),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_the_text_is_what_json_says_however_it_is_cut(
    text: str, places: list[int], ascii: bool, indent: int | None
):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii, indent=indent)
    assert read(cut(arguments, places)) == text


@given(st.text(st.sampled_from('{}"\\u0dD8aceinptu: \n,'), max_size=40), st.lists(st.integers(0)))
def test_it_does_not_matter_where_arguments_of_any_form_are_cut(text: str, places: list[int]):
    for arguments in (text, '{"input": "' + text):
        assert read(cut(arguments, places)) == read([arguments])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a", "other": "b"}', "a"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "\\ud83d\\ude00', "😀"),
        ('{"input": "\\ud83d!"}', "\ufffd!"),
        ('{"input": "\\ud83d', ""),
        ('{"input": "\\q"}', "\\q"),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"inp', '{"inp'),
        ("", ""),
    ],
)
def test_arguments_that_are_cut_off_or_of_another_form(arguments: str, text: str):
    assert read([arguments]) == read(list(arguments)) == text


def test_the_arguments_of_functions_stay_as_they_are():
    assert read(['{"input": "', 'a\\n"}'], name="shell") == '{"input": "a\\n"}'


def test_calls_and_content_stay_in_order():
    inputs = CustomInputs(frozenset({"a"}))
    given_events: list[AssistantEvent] = [
        ContentDelta("x"),
        ToolCallStart(0, "c0", "a"),
        ToolCallArguments(0, custom_arguments("1\n")),
        ToolCallStart(1, "c1", "f"),
        ToolCallArguments(1, "{}"),
        ToolCallStart(2, "c2", "a"),
        ToolCallArguments(2, custom_arguments("2")),
    ]
    message = AssistantMessage.of(inputs.texts(given_events, is_end=True))
    assert message.content == "x"
    assert [(call.name, call.arguments) for call in message.tool_calls] == [
        ("a", "1\n"),
        ("f", "{}"),
        ("a", "2"),
    ]
