"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from jitney.engine.common.requests import JsonDict, JsonObject, JsonValue
from jitney.engine.server.chat.content import Content, content_of, is_content, refuse_lost
from jitney.engine.server.chat.conversation.tools import Tool
from jitney.engine.server.chat.fields import OPENAI_ONLY
from jitney.engine.server.chat.grammar_fields import WantedGrammar
from jitney.engine.server.chat.schema import (
    LIMITS,
    FunctionName,
    GenerationBody,
    Label,
    OtherTool,
    Part,
    at_field,
    is_for_the_model,
    kind_of,
    left_out,
    object_schema,
    ranged,
    text_content,
    unsupported,
)
from jitney.engine.server.http.errors import HttpError, echo


class TextBlock(Part):
    """Text."""

    type: Literal["text"]
    text: str


class WrittenBlock(TextBlock):
    """Text that replaces a block of another type."""

    content: Content

    @property
    def replaced(self) -> tuple[str, ...]:
        """Types of the content that the text omits."""
        return self.content.replaced


class ThinkingBlock(Part):
    """The model's thoughts in an earlier turn. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Part):
    """The model called a tool."""

    type: Literal["tool_use"]
    id: Annotated[Label, Field(min_length=1)]
    name: Annotated[Label, Field(min_length=1)]
    input: JsonDict


def _result(value: JsonValue) -> Content:
    """The content of a tool's result, which may be empty."""
    return content_of([] if value is None else value)


class ToolResultBlock(Part):
    """The result of a tool. is_error: its text is an error, and begins with that word in the
    prompt.
    """

    type: Literal["tool_result"]
    tool_use_id: Annotated[Label, Field(min_length=1)]
    content: Annotated[
        Content, PlainValidator(_result, json_schema_input_type=str | list[JsonDict] | None)
    ] = Content("")
    is_error: bool | None = None

    @property
    def text(self) -> str:
        return f"Error: {self.content.text}" if self.is_error else self.content.text

    @property
    def replaced(self) -> tuple[str, ...]:
        """Types of the parts that the text replaces by a note."""
        return self.content.replaced


class OtherBlock(Part):
    """A block that only its own provider can read; it is left out."""

    type: str

    @property
    def replaced(self) -> tuple[str, ...]:
        return (self.type,)


_Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | OtherBlock
_BLOCKS: dict[str, type[Part]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}
#: Blocks of other providers' servers, beside calls and results of tools that ran there.
_OTHER_BLOCKS = frozenset(
    {
        "container_upload",
        "fallback",
        "mcp_tool_listing",
        "redacted_thinking",
        "tool_addition",
        "tool_removal",
    }
)
#: Block types that each role may send.
_SAYS: dict[str, tuple[type[Part], ...]] = {
    "user": (TextBlock, ToolResultBlock, OtherBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock, OtherBlock),
    "system": (TextBlock, OtherBlock),
}


def _block(value: JsonValue) -> Part:
    kind = kind_of(value)
    if kind is None or not isinstance(value, dict):
        raise ValueError("must be an object with a type")
    if kind in _BLOCKS:
        return _BLOCKS[kind].model_validate(value)
    summary = value.get("content")
    if kind == "compaction" and isinstance(summary, str):
        return TextBlock(type="text", text=summary)
    if kind in (*_OTHER_BLOCKS, "compaction") or kind.endswith(("_tool_use", "_tool_result")):
        return OtherBlock(type=kind)
    if not is_content(kind):
        raise unsupported(f"blocks of type {echo(kind)} are not supported here")
    said = content_of([value])
    return WrittenBlock(type="text", text=said.text, content=said)


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

    @property
    def said(self) -> Content:
        """The replaced types, and whether notes are all that the message says; without its text."""
        written = [block.content for block in self.content if isinstance(block, WrittenBlock)]
        is_lost = len(written) == len(self.content) and all(each.is_lost for each in written)
        return Content("", tuple(self.replaced), bool(written) and is_lost)

    @property
    def replaced(self) -> list[str]:
        """Types of the blocks and parts that the model does not read."""
        kinds: list[str] = []
        for block in self.content:
            if isinstance(block, WrittenBlock | ToolResultBlock | OtherBlock):
                kinds += block.replaced
        return kinds

    @model_validator(mode="after")
    def _own_blocks(self) -> Self:
        for block in self.content:
            if not isinstance(block, _SAYS[self.role]):
                raise at_field("content", f"the role {self.role} has no blocks {block.type!r}")
        return self


def _system(value: JsonValue) -> str | None:
    """The system prompt without Claude Code's line of statistics, which changes with each request
    and would defeat the prefix cache.
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
    #: A hint: the model gets all tools at once.
    defer_loading: bool | None = None

    def as_tool(self) -> Tool:
        return Tool(self.name, self.description, self.input_schema, bool(self.strict))


def _tool(value: JsonValue) -> ToolParam | OtherTool:
    if kind_of(value) in (None, "custom") and is_for_the_model(value):
        return ToolParam.model_validate(value)
    return OtherTool.of(value)


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
    """Settings of thinking. adaptive, between_tools: the model decides."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class _Format(Part):
    type: Literal["json_schema"]
    schema_: Annotated[JsonDict, Field(alias="schema")]


class _OutputConfig(Part):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None
    #: A hint.
    task_budget: Any = None


class _UserMetadata(Part):
    user_id: Label | None = None


#: Fields of the other routes that have no place in a message.
_NOT_HERE = {**OPENAI_ONLY, "return_tokens_as_token_ids": (False,), "stop": ([],)}


class CountTokensBody(GenerationBody):
    """POST /v1/messages/count_tokens: what a conversation is made of."""

    refused: ClassVar = _NOT_HERE | {"max_tokens": (), "stream": (False,)}

    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: Annotated[
        str | None, PlainValidator(_system, json_schema_input_type=str | list[TextBlock] | None)
    ] = None
    tools: (
        Annotated[
            list[
                Annotated[
                    ToolParam | OtherTool,
                    PlainValidator(_tool, json_schema_input_type=ToolParam | OtherTool),
                ]
            ],
            Field(max_length=LIMITS.tools),
        ]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    #: The older name of output_config.format.
    output_format: _Format | None = None
    #: Where a cached prefix may end. Every page of a prompt may be one here, marked or not.
    cache_control: Any = None

    @classmethod
    def parse(cls, raw: JsonObject) -> tuple[Self, list[str]]:
        """Parse a body. The SDKs' tool runners send `thread` once, and omit it after this error."""
        if raw.get("thread") is not None:
            unsupported = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            raise HttpError(
                400,
                "there are no threads here: send the whole conversation, without thread",
                param="thread",
                details=unsupported,
            )
        return super().parse(raw)

    def client_tools(self) -> Iterator[Tool]:
        """The tools that the model gets."""
        for place, tool in enumerate(self.tools or ()):
            if isinstance(tool, ToolParam):
                yield tool.as_tool().at(f"tools[{place}]")

    def unfollowed(self) -> list[str]:
        names = super().unfollowed() + left_out(self.tools)
        for place, tool in enumerate(self.tools or ()):
            if isinstance(tool, ToolParam) and tool.defer_loading:
                names.append(f"tools[{place}].defer_loading")
        if self.output_config is not None and self.output_config.task_budget is not None:
            names.append("output_config.task_budget")
        return names

    @property
    def shows_thoughts(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        place = len(self.messages) - 1
        refuse_lost(self.messages[place].said, f"messages[{place}].content")
        return self

    @model_validator(mode="after")
    def _tools_fit(self) -> Self:
        names = [tool.name for tool in self.client_tools()]
        choice = self.tool_choice
        needs_tools = choice is not None and choice.type not in ("none", "auto")
        self.check_tools(names, needs_tools=needs_tools, what="tools")
        return self

    @property
    def chosen_names(self) -> list[str] | None:
        choice = self.tool_choice
        return [choice.name] if choice is not None and choice.name is not None else None

    @property
    def wanted_grammar(self) -> WantedGrammar | None:
        if self.output_config is not None and self.output_config.format is not None:
            form, name = self.output_config.format, "output_config.format"
        elif self.output_format is not None:
            form, name = self.output_format, "output_format"
        else:
            return None
        return WantedGrammar.of_schema(name, form.schema_, is_strict=True)


class MessagesBody(CountTokensBody):
    """POST /v1/messages. A max_tokens that exceeds the context is reduced to the room left."""

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
