"""What is said of wrong fields: their names and what is accepted, and nothing of our models."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jitney.engine.common.errors import RequestError
from jitney.engine.server.chat.anthropic.schema import MessagesBody
from jitney.engine.server.chat.openai.embeddings import EmbeddingsBody
from jitney.engine.server.chat.openai.schema import ChatBody, CompletionBody
from jitney.engine.server.chat.responses.schema import ResponsesBody
from jitney.engine.server.chat.schema import ModelBody

USER = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "f"}}
BODIES: dict[type[ModelBody], dict[str, Any]] = {
    ChatBody: {"messages": USER, "tools": [TOOL]},
    CompletionBody: {"prompt": "a"},
    ResponsesBody: {"input": "a", "tools": [{"type": "function", "name": "f"}]},
    MessagesBody: {"max_tokens": 5, "messages": USER, "tools": [{"name": "f", "input_schema": {}}]},
    EmbeddingsBody: {"input": "a"},
}
WRONG = (
    "any",
    5,
    True,
    {},
    [],
    [5],
    {"type": "x"},
    {"type": "function"},
    {"type": "function", "function": "f"},
    {"type": "allowed_tools"},
    [{"type": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "bad"}]}],
)
#: Names of our classes, of pydantic's types, and of branches of a union.
INTERNAL = re.compile(
    r"instance of|Input should|literal\[|function-|constrained|dictionary|union|\b_[A-Za-z]|"
    r"\.[A-Z]|\b(NamedTool|Allowed|Part|Body)\b|after validation"
)


def refusal(kind: type[ModelBody], fields: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as raised:
        kind.parse(BODIES[kind] | fields)
    return raised.value


@pytest.mark.parametrize("kind", BODIES)
def test_no_message_tells_of_our_models(kind: type[ModelBody]):
    n_refused = 0
    for name in kind.model_fields:
        for value in WRONG:
            try:
                kind.parse(BODIES[kind] | {name: value})
            except RequestError as error:
                n_refused += 1
                assert not INTERNAL.search(str(error)), (name, value, str(error))
                path = error.info.param or ""
                assert re.fullmatch(rf"{name}([.\[].*)?", path), (name, value, path)
    assert n_refused > 3 * len(kind.model_fields)


@pytest.mark.parametrize(
    ("choice", "param", "says"),
    [
        ("any", "tool_choice", "must be 'auto', 'none' or 'required', or an object"),
        (5, "tool_choice", "must be 'auto', 'none' or 'required', or an object"),
        ({}, "tool_choice.type", "is missing"),
        (
            {"type": "tool"},
            "tool_choice.type",
            "must be 'function' or 'custom', or 'allowed_tools'",
        ),
        ({"type": "function"}, "tool_choice.function", "is missing"),
        ({"type": "function", "function": {}}, "tool_choice.function.name", "is missing"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [5]}},
            "tool_choice.allowed_tools.tools[0]",
            "must be an object",
        ),
    ],
)
def test_of_a_choice_the_branch_that_was_meant_is_told(choice: Any, param: str, says: str):
    error = refusal(ChatBody, {"tool_choice": choice})
    assert (error.info.param, str(error)) == (param, f"{param}: {says}")


def test_names_that_clients_chose_stand_as_they_are():
    error = refusal(ChatBody, {"metadata": {"Key One": 5}})
    assert error.info.param == "metadata.Key One" and str(error).endswith("must be a string")


def test_several_faults_are_told_at_once_and_no_value_is_repeated():
    error = refusal(CompletionBody, {"n": "secret", "top_p": "secret", "stream": "secret"})
    assert str(error).count(";") == 2 and "secret" not in str(error)
