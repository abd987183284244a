"""Every field, item, block and tool that the official clients can send has a decision here. A new
version of a client that has a new one makes these tests fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from api_fakes import FakeClient, call, make_app, run
from openai.types import EmbeddingCreateParams, completion_create_params
from openai.types.chat import completion_create_params as chat_create
from openai.types.responses import (
    InputTokenCountParams,
    ResponseIncludable,
    ResponseInputItemParam,
    ToolParam,
    response_create_params,
)

from jitney.engine.common.errors import RequestError
from jitney.engine.server.chat.anthropic.schema import CountTokensBody, MessagesBody, _block
from jitney.engine.server.chat.content import is_content
from jitney.engine.server.chat.fields import FIELDS
from jitney.engine.server.chat.openai.embeddings import EmbeddingsBody
from jitney.engine.server.chat.openai.schema import ChatBody, CompletionBody
from jitney.engine.server.chat.responses.items import HostedItem, item_of
from jitney.engine.server.chat.responses.schema import InputTokensBody, ResponsesBody, includable
from jitney.engine.server.chat.responses.tools import tool_of
from jitney.engine.server.chat.schema import ModelBody, OtherTool

MESSAGES = {"messages": [{"role": "user", "content": "x"}]}
BODIES: dict[type[ModelBody], dict[str, Any]] = {
    CompletionBody: {"prompt": "x"},
    ChatBody: MESSAGES,
    ResponsesBody: {"input": "x"},
    InputTokensBody: {"input": "x"},
    EmbeddingsBody: {"input": "x"},
    MessagesBody: MESSAGES | {"max_tokens": 5},
    CountTokensBody: MESSAGES,
}


def requests() -> list[tuple[Any, type[ModelBody]]]:
    """Requests of the clients, and the bodies that read them. Anthropic's takes seconds to import:
    that is for the process that runs these tests.
    """
    from anthropic.types import MessageCountTokensParams, message_create_params
    from anthropic.types.beta import message_count_tokens_params as beta_count
    from anthropic.types.beta import message_create_params as beta_create

    return [
        (completion_create_params.CompletionCreateParamsStreaming, CompletionBody),
        (chat_create.CompletionCreateParamsStreaming, ChatBody),
        (response_create_params.ResponseCreateParamsStreaming, ResponsesBody),
        (InputTokenCountParams, InputTokensBody),
        (EmbeddingCreateParams, EmbeddingsBody),
        (message_create_params.MessageCreateParamsStreaming, MessagesBody),
        (beta_create.MessageCreateParamsStreaming, MessagesBody),
        (MessageCountTokensParams, CountTokensBody),
        (beta_count.MessageCountTokensParams, CountTokensBody),
    ]


def test_every_field_of_the_clients_has_a_decision():
    for sent, body in requests():
        names = set(sent.__required_keys__ | sent.__optional_keys__)
        assert len(names) > 4 and names <= {*body.model_fields, *body.rules()}, body


def test_a_field_has_one_rule_on_all_routes():
    """A body either does a field, or the one table says what becomes of it; its own rules are only
    for fields that it would otherwise do.
    """
    for body in BODIES:
        for name, rule in body.rules().items():
            assert rule == FIELDS.get(name) or name in body.refused
        assert body.refused.keys() <= body.model_fields.keys() | FIELDS.keys()


@pytest.mark.parametrize(
    ("body", "raw"), BODIES.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_hints_are_accepted_and_told_and_the_rest_is_refused(
    body: type[ModelBody], raw: dict[str, Any]
):
    for name, rule in body.rules().items():
        for neutral in (None, *rule.neutral):
            if name not in body.model_fields:
                assert body.parse(raw | {name: neutral})[1] == []
        if name == "thread" and issubclass(body, CountTokensBody):
            continue  # which has an answer of its own
        if rule.is_hint:
            if name not in body.model_fields:
                assert body.parse(raw | {name: ["made up"]})[1] == [name]
            continue
        with pytest.raises(RequestError) as refusal:
            body.parse(raw | {name: ["made up"]})
        assert refusal.value.info.param == name
        assert refusal.value.info.code == "unsupported_parameter"


def types_in(*unions: Any) -> set[str]:
    """The values of `type` of all members of unions of typed dictionaries and models."""
    return {kind for union in unions for kind in _types_in(union)}


def _types_in(hint: Any) -> Iterator[str]:
    if hasattr(hint, "model_fields"):
        yield from _texts(hint.model_fields["type"].annotation)
    elif isinstance(hint, type):
        yield from _texts(get_type_hints(hint).get("type"))
    else:
        for part in get_args(hint):
            yield from _types_in(part)


def _texts(hint: Any) -> Iterator[str]:
    """Texts among the literals of a type."""
    for part in get_args(hint):
        if isinstance(part, str):
            yield part
        else:
            yield from _texts(part)


def reads(read: Any, kind: str) -> Any:
    """What is read of an object that only has its type. None where its fields are missed, which
    shows that the type is known.
    """
    try:
        return read({"type": kind})
    except ValueError as error:
        assert "not supported here" not in str(error), kind
        return None


#: Items that ask for something now, which is not done here.
_ASKS = {"compaction_trigger"}


def test_every_item_of_the_client_is_read_or_left_out():
    kinds = types_in(ResponseInputItemParam)
    assert len(kinds) > 25 and kinds >= _ASKS
    left_out = set()
    for kind in kinds - _ASKS:
        item = reads(item_of, kind)
        if isinstance(item, HostedItem):
            assert item.replaced == (kind,)  # without the fields of a call
            left_out.add(kind)
    assert left_out >= {"web_search_call", "compaction", "mcp_call", "shell_call"}
    assert not left_out & {"message", "function_call", "custom_tool_call", "reasoning"}


def test_every_block_of_the_client_is_read_or_left_out():
    from anthropic.types import ContentBlockParam
    from anthropic.types.beta import BetaContentBlockParam
    from anthropic.types.beta.beta_tool_result_block_param import Content

    kinds = types_in(ContentBlockParam, BetaContentBlockParam)
    assert len(kinds) > 20
    for kind in kinds:
        reads(_block, kind)
    parts = types_in(Content)
    assert len(parts) > 4 and all(map(is_content, parts))


def test_every_tool_of_the_clients_is_called_by_the_client_or_left_out():
    from anthropic.types.beta import BetaToolUnionParam

    told = {"custom", "function", "namespace"}
    kinds = types_in(ToolParam, BetaToolUnionParam)
    assert len(kinds) > 30 and told < kinds
    for kind in kinds:
        tool = reads(tool_of, kind)
        assert (tool is None) if kind in told else isinstance(tool, OtherTool)


def test_everything_that_can_be_included_is_known():
    includable(list(get_args(ResponseIncludable)))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_hints_stand_in_the_header(path: str):
    body = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}
    hints = {"service_tier": "flex", "web_search_options": {}, "verbosity": "low"}
    client = FakeClient()
    reply = run(call(make_app(client), path, body.get(path, MESSAGES) | hints))
    assert reply.status == 200 and client.requests
    assert reply.headers["x-ignored-params"] == ", ".join(hints)
