"""The routes of /v1/messages, and how its messages, made of blocks, become those that a chat
template knows.
"""

from __future__ import annotations

from functools import partial

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from jitney.engine.api.anthropic_messages.answers import CountAnswer, MessageAnswer
from jitney.engine.api.anthropic_messages.format import MessageFormat
from jitney.engine.api.anthropic_messages.schema import (
    CountTokensBody,
    MessageParam,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from jitney.engine.api.context import Context
from jitney.engine.api.endpoints import GenerationAnswer, read_body
from jitney.engine.api.errors import HttpError, echo
from jitney.engine.api.request import (
    Conversation,
    RequestBuilder,
    RouteKind,
)
from jitney.engine.api.routing import HttpRoute
from jitney.engine.api.schema import ReasoningEffort
from jitney.engine.api.service import Service
from jitney.engine.api.slices import Work
from jitney.engine.conversation.formats import TurnFormat
from jitney.engine.conversation.tools import ToolMode, ToolUse
from jitney.engine.types import JsonDict

_KIND = RouteKind(
    "msg_",
    "messages",
    names={
        "reasoning_effort": "thinking",
        "response_format": "output_config.format",
        "thinking_token_budget": "thinking.budget_tokens",
    },
    clamps=True,
    tool_schema="input_schema",
)
#: Of the API, as a header says them. The second takes no temperature, top_p and top_k; here both
#: do.
_VERSIONS = ("2023-06-01", "2026-10-21")
_KNOWN = " and ".join(_VERSIONS)

#: Messages between two stops of `Slices`.
_GROUP = 64
#: The mode of a choice.
_MODES: dict[str, ToolMode] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


async def _create_message(service: Service, request: Request) -> ASGIApp:
    _check_version(request)
    body = await read_body(service, request, MessagesBody)
    if body.metadata is not None:
        body = body.model_copy(update={"user": body.metadata.user_id})
    builder = RequestBuilder(service, body, Context.of(request))
    own = {
        "max_tokens": body.max_tokens,
        "stop": tuple(body.stop_sequences or ()),
    }
    sampling = builder.sampling(own)
    conversation = await service.slices.result(_conversation_of(body, _KIND, service.turns))
    wanted = await builder.answer(conversation, sampling)
    return GenerationAnswer(service, wanted, partial(MessageFormat, body=body))


async def _count_tokens(service: Service, request: Request) -> ASGIApp:
    _check_version(request)
    body = await read_body(service, request, CountTokensBody)
    service.check_model(body.model)
    builder = RequestBuilder(service, body, Context.of(request))
    builder.sampling({})  # what a message is refused for is refused here too
    conversation = await service.slices.result(_conversation_of(body, _KIND, service.turns))
    prompt = await conversation.prompt(service, Context.of(request).notes)
    counted = orjson.dumps({"input_tokens": len(prompt.ids)})
    return Response(counted, media_type="application/json")


def _check_version(request: Request) -> None:
    """A request need not name the version of the API: answers are the same in all."""
    version = request.headers.get("anthropic-version", _VERSIONS[0])
    if version not in _VERSIONS:
        raise HttpError(400, f"anthropic-version: not {echo(version)}; {_KNOWN} are known here")


def _conversation_of(
    body: CountTokensBody, kind: RouteKind, turns: TurnFormat
) -> Work[Conversation]:
    """What the body makes the template read. An effort is a wish: a model that cannot be told of
    one does what it does. Raises RequestError.
    """
    messages = yield from _template_messages(body.system, body.messages)
    variables: JsonDict = {}
    if messages[-1]["role"] == "assistant":
        variables = {"add_generation_prompt": False, "continue_final_message": True}
    budget = None
    if body.thinking is not None:
        budget = body.thinking.budget_tokens
    return Conversation(
        kind=kind,
        messages=messages,
        variables=variables,
        tools=_tool_use(body),
        effort=_effort(body, turns),
        thinking_budget=budget,
    )


def _effort(body: CountTokensBody, turns: TurnFormat) -> ReasoningEffort | None:
    """How long the model shall think; None: as it likes."""
    thinking = None if body.thinking is None else body.thinking.type
    if thinking == "disabled":
        return "none"
    wish = None if body.output_config is None else body.output_config.effort
    if not turns.takes_effort:
        return None
    if wish is None and thinking == "enabled":
        return "medium"
    return "xhigh" if wish == "max" else wish


def _template_messages(system: str | None, given: list[MessageParam]) -> Work[list[JsonDict]]:
    """Neighbours of one role are one message. What the system says in the middle is said by the
    user: most templates know a system message only at the beginning.
    """
    messages: list[JsonDict] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for place, message in enumerate(given):
        if message.role == "assistant":
            _add_assistant(messages, message)
        else:
            _add_user(messages, message)
        if place % _GROUP == 0:
            yield
    return messages


def _add_user(messages: list[JsonDict], message: MessageParam) -> None:
    """What tools gave first, in messages of their own."""
    texts: list[str] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            messages.append(
                {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}
            )
        elif isinstance(block, TextBlock):
            texts.append(block.text)
    if texts:
        _say(messages, "user", "\n".join(texts))


def _add_assistant(messages: list[JsonDict], message: MessageParam) -> None:
    texts = [block.text for block in message.content if isinstance(block, TextBlock)]
    said = _say(messages, "assistant", "\n".join(texts))
    for block in message.content:
        if isinstance(block, ThinkingBlock):
            said["reasoning_content"] = said.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            said.setdefault("tool_calls", []).append(_call(block))


def _say(messages: list[JsonDict], role: str, text: str) -> JsonDict:
    """The message of this role that says the text: the last one, if it has the role."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": ""})
    last = messages[-1]
    texts = [each for each in (last["content"], text) if each]
    last["content"] = "\n".join(texts)
    return last


def _call(block: ToolUseBlock) -> JsonDict:
    function = {"name": block.name, "arguments": orjson.dumps(block.input).decode()}
    return {"id": block.id, "type": "function", "function": function}


def _tool_use(body: CountTokensBody) -> ToolUse | None:
    tools = [tool.as_tool() for tool in body.tools or ()]
    choice = body.tool_choice
    if choice is None:
        return ToolUse.of(tools, "auto", None, parallel=True)
    parallel = not choice.disable_parallel_tool_use and choice.type != "tool"
    return ToolUse.of(tools, _MODES[choice.type], body.chosen_names, parallel=parallel)


MESSAGE_ROUTES = (
    HttpRoute(
        "/v1/messages",
        ("POST",),
        _create_message,
        "answer a conversation, in Anthropic's form",
        generates=True,
        body=MessagesBody,
        answer=MessageAnswer,
    ),
    HttpRoute(
        "/v1/messages/count_tokens",
        ("POST",),
        _count_tokens,
        "the tokens of such a conversation",
        body=CountTokensBody,
        answer=CountAnswer,
    ),
)
