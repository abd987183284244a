"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from jitney.engine.api.errors import echo
from jitney.engine.api.grammar_fields import WantedGrammar
from jitney.engine.api.schema import (
    LIMITS,
    FunctionName,
    GenerationBody,
    Label,
    Part,
    at_field,
    kind_of,
    object_schema,
    ranged,
    text_content,
    unsupported,
)
from jitney.engine.conversation.tools import Tool
from jitney.engine.types import JsonDict, JsonValue


class _CacheControl(Part):
    """Where a cached prefix may end. Every page of a prompt may be one here, marked or not."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Label | None = None


class TextBlock(Part):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: _CacheControl | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Part):
    """What the model thought in an earlier turn. The signature is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Part):
    """The model called a tool."""

    type: Literal["tool_use"]
    id: Annotated[Label, Field(min_length=1)]
    name: Annotated[Label, Field(min_length=1)]
    input: JsonDict
    cache_control: _CacheControl | None = None
    toolset_name: None = None


def _result(value: JsonValue) -> str:
    """What a tool gave; it may have given nothing."""
    return text_content(value) or "" if value != [] else ""


class ToolResultBlock(Part):
    """What a tool gave. is_error: its text is an error, which the model is told with a word before
    it.
    """

    type: Literal["tool_result"]
    tool_use_id: Annotated[Label, Field(min_length=1)]
    content: Annotated[
        str, PlainValidator(_result, json_schema_input_type=str | list[TextBlock] | None)
    ] = ""
    is_error: bool | None = None
    cache_control: _CacheControl | None = None
    toolset_name: None = None

    @property
    def text(self) -> str:
        return f"Error: {self.content}" if self.is_error else self.content


_Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
_BLOCKS: dict[str, type[Part]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}
#: What each role may say.
_SAYS: dict[str, tuple[type[Part], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


def _block(value: JsonValue) -> Part:
    kind = kind_of(value)
    if kind is None:
        raise ValueError("must be an object with a type")
    if kind not in _BLOCKS:
        raise unsupported(f"blocks of type {echo(kind)} are not supported here")
    return _BLOCKS[kind].model_validate(value)


def _as_blocks(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return value


class MessageParam(Part):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Annotated[_Block, PlainValidator(_block, json_schema_input_type=_Block)]],
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[_Block]),
    ]

    @model_validator(mode="after")
    def _own_blocks(self) -> Self:
        if not self.content and self.role != "assistant":
            raise at_field("content", "must hold a block")
        for block in self.content:
            if not isinstance(block, _SAYS[self.role]):
                raise at_field("content", f"the role {self.role} has no blocks {block.type!r}")
        return self


def _system(value: JsonValue) -> str | None:
    """The system prompt without the line that one client writes for its own statistics: it is no
    instruction, and a number in it that changes with each request would keep the prompt out of the
    prefix cache.
    """
    if isinstance(value, list):
        value = [part for part in value if not _is_statistics(part)]
    return None if value == [] else text_content(value)


def _is_statistics(part: JsonValue) -> bool:
    text = part.get("text") if isinstance(part, dict) else None
    return isinstance(text, str) and text.startswith("x-anthropic-billing-header:")


class ToolParam(Part):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: Annotated[JsonDict, AfterValidator(object_schema)]
    strict: bool | None = None
    cache_control: _CacheControl | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    #: Arguments are streamed as they are written, in any case.
    eager_input_streaming: Literal[True] | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None

    def as_tool(self) -> Tool:
        """As every conversation has it."""
        return Tool(self.name, self.description, self.input_schema, bool(self.strict))


def _tool(value: JsonValue) -> ToolParam:
    kind = kind_of(value)
    if kind not in (None, "custom"):
        raise unsupported(f"tools of type {echo(kind)} are not supported here")
    return ToolParam.model_validate(value)


class ToolChoice(Part):
    """Whether the model may, must or must not call, or which tool it must."""

    type: Literal["auto", "any", "tool", "none"]
    name: Label | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.type == "tool":
            if self.name is None:
                raise at_field("name", "must name the tool")
        elif self.name is not None:
            raise at_field("name", "goes with the type tool")
        return self


class _Thinking(Part):
    """adaptive: as the model does by itself."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _budget(self) -> Self:
        if self.type != "enabled" and self.budget_tokens is not None:
            raise at_field("budget_tokens", "goes with the type enabled")
        return self


class _Format(Part):
    type: Literal["json_schema"]
    schema_: Annotated[JsonDict, Field(alias="schema")]


class _OutputConfig(Part):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class _ClearThinking(Part):
    """Keeping all thoughts is what is done."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class _ContextManagement(Part):
    edits: list[_ClearThinking] = Field(default_factory=list)


class _UserMetadata(Part):
    user_id: Label | None = None


#: Fields of OpenAI's routes, and of Anthropic's that ask for what is not here.
_NOT_HERE: dict[str, tuple[JsonValue, ...]] = {
    "best_of": (1,),
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "diagnostics": (),
    "echo": (False,),
    "fallback_credit_token": (),
    "fallbacks": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (),
    "inference_geo": (),
    "input": (),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "mcp_servers": ([],),
    "n": (1,),
    "parallel_tool_calls": (),
    "prompt": (),
    "prompt_logprobs": (),
    "request_id": (),
    "response_format": (),
    "return_token_ids": (False,),
    "safety_identifier": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "stop": ([],),
    "stream_options": (),
    "structured_outputs": (),
    "thread": (),
    "top_logprobs": (),
    "user": (),
    "user_profile_id": (),
    "workspace_id": (),
}


class CountTokensBody(GenerationBody):
    """POST /v1/messages/count_tokens: what a conversation is made of."""

    refused: ClassVar = _NOT_HERE | {"max_tokens": (), "stream": (False,)}

    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: Annotated[
        str | None, PlainValidator(_system, json_schema_input_type=str | list[TextBlock] | None)
    ] = None
    tools: (
        Annotated[
            list[Annotated[ToolParam, PlainValidator(_tool, json_schema_input_type=ToolParam)]],
            Field(max_length=LIMITS.tools),
        ]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    cache_control: _CacheControl | None = None
    context_management: _ContextManagement | None = None

    @property
    def shows_thoughts(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    @model_validator(mode="after")
    def _tools_fit(self) -> Self:
        names = [tool.name for tool in self.tools or ()]
        choice = self.tool_choice
        needs_tools = choice is not None and choice.type != "none"
        self.check_tools(names, needs_tools=needs_tools, what="tools")
        return self

    @property
    def chosen_names(self) -> list[str] | None:
        """The tool that tool_choice names; None if it names none."""
        choice = self.tool_choice
        return [choice.name] if choice is not None and choice.name is not None else None

    @property
    def wanted_grammar(self) -> WantedGrammar | None:
        if self.output_config is None or self.output_config.format is None:
            return None
        schema = self.output_config.format.schema_
        return WantedGrammar.of_schema("output_config.format", schema, is_strict=True)


class MessagesBody(CountTokensBody):
    """POST /v1/messages. A max_tokens that is more than the context has room for asks for as much
    as there is.
    """

    refused: ClassVar = _NOT_HERE

    max_tokens: Annotated[int, ranged("max_tokens")]  # pyright: ignore[reportGeneralTypeIssues]
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=256)]],
            Field(max_length=LIMITS.stops),
        ]
        | None
    ) = None
    metadata: _UserMetadata | None = None

    @model_validator(mode="after")
    def _budget_fits(self) -> Self:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise at_field("thinking.budget_tokens", "must be less than max_tokens")
        return self
