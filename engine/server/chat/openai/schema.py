"""The bodies of POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

import orjson
from pydantic import AliasChoices, BeforeValidator, Field, PlainValidator, model_validator

from jitney.engine.common.requests import JsonDict, JsonValue
from jitney.engine.server.chat.conversation.tools import Tool, custom_arguments
from jitney.engine.server.chat.schema import (
    LIMITS,
    CustomFields,
    FunctionFields,
    FunctionName,
    GenerationBody,
    Label,
    OtherTool,
    Part,
    ReasoningEffort,
    at_field,
    kind_of,
    left_out,
    prompt_list,
    ranged,
    text_content,
    unsupported,
    with_names,
)
from jitney.engine.server.http.errors import echo

#: Variables of a chat template that a request may not set.
_OWN_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "kwargs",
        "load_audio_from_video",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


class _TextPart(Part):
    """A part of a message. A text model reads no others."""

    type: Literal["text"]
    text: str


_Prompt = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=LIMITS.prompts)]
    | Annotated[list[int], Field(min_length=1)]
    | Annotated[list[list[int]], Field(min_length=1, max_length=LIMITS.prompts)]
)


def _prompts(value: JsonValue) -> list[str | list[int]]:
    return prompt_list(value, LIMITS.prompts)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[
        list[str | list[int]], PlainValidator(_prompts, json_schema_input_type=_Prompt)
    ]
    #: The text after the answer, which fills in the middle; "": none.
    suffix: str | None = None
    #: Whether the model's own special tokens are put around the prompt. None: yes.
    add_special_tokens: bool | None = None
    best_of: Annotated[int | None, ranged("n")] = None
    echo: bool | None = None
    logprobs: Annotated[int | None, ranged("logprobs")] = None

    @model_validator(mode="after")
    def _completion_combinations(self) -> Self:
        n = self.n or 1
        best_of = self.best_of or n
        if best_of < n:
            raise at_field("best_of", "must not be less than n")
        if best_of > n and self.stream:
            raise at_field(
                "best_of", "must equal n when streaming: the best are known only at the end"
            )
        if self.max_tokens == 0 and not self.echo:
            raise at_field("max_tokens", "may be 0 only with echo")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise at_field("suffix", "needs prompts that are texts")
        if self.suffix and (self.echo or self.truncate_prompt_tokens is not None):
            raise at_field("suffix", "excludes echo and truncate_prompt_tokens")
        return self


class _ToolFunction(Part):
    name: Annotated[str, Field(min_length=1, max_length=LIMITS.label_chars)]
    arguments: str


class _ToolCall(Part):
    """A call made earlier in the conversation; the chat template shows it to the model."""

    id: Label
    type: Literal["function"] = "function"
    function: _ToolFunction

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, raw: JsonValue) -> JsonValue:
        """A call of a custom tool is one of a function that takes the text."""
        if kind_of(raw) != "custom" or not isinstance(raw, dict):
            return raw
        custom = raw.get("custom")
        text = custom.get("input") if isinstance(custom, dict) else None
        if not isinstance(custom, dict) or not isinstance(text, str):
            raise at_field("custom", "must have a name and an input")
        function = {"name": custom.get("name"), "arguments": custom_arguments(text)}
        return raw | {"type": "function", "function": function}


class _Tool(Part):
    """A function that the model may ask the client to call."""

    type: Literal["function"]
    function: FunctionFields

    @property
    def fields(self) -> FunctionFields | CustomFields:
        return self.function


class _CustomTool(Part):
    """A tool that takes a text, which the model may ask the client to call."""

    type: Literal["custom"]
    custom: CustomFields

    @property
    def fields(self) -> FunctionFields | CustomFields:
        return self.custom


_AnyTool = _Tool | _CustomTool | OtherTool
_TOOLS: dict[str | None, type[_Tool | _CustomTool]] = {
    None: _Tool,
    "function": _Tool,
    "custom": _CustomTool,
}


def _tool(value: JsonValue) -> _AnyTool:
    kind = kind_of(value)
    return _TOOLS[kind].model_validate(value) if kind in _TOOLS else OtherTool.of(value)


class _NamedFunction(Part):
    name: FunctionName


class _NamedTool(Part):
    """One function or custom tool, by its name."""

    type: Literal["function", "custom"]
    function: Annotated[_NamedFunction, Field(validation_alias=AliasChoices("function", "custom"))]

    @property
    def names(self) -> list[str]:
        return [self.function.name]


class _AllowedTools(Part):
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[_NamedTool],
        BeforeValidator(with_names),
        Field(min_length=1, max_length=LIMITS.tools),
    ]


class _Allowed(Part):
    """A subset of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools

    @property
    def names(self) -> list[str]:
        return [tool.function.name for tool in self.allowed_tools.tools]


#: One function: the model must call it, once; some: it may or must call these.
_ToolChoice = Literal["auto", "none", "required"] | _NamedTool | _Allowed


def _checked_variables(value: JsonValue) -> JsonDict:
    """Variables for the chat template, none of which is ours. Raises ValueError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    if len(value) > LIMITS.variables or len(orjson.dumps(value)) > LIMITS.variable_chars:
        raise ValueError(
            f"must hold at most {LIMITS.variables} variables and {LIMITS.variable_chars} characters"
        )
    for name in value:
        if name in _OWN_VARIABLES or not name.isidentifier() or name.startswith("_"):
            raise ValueError(f"{echo(name)} cannot be set for a chat template")
        if name.endswith(("_token", "_tokens")) and name.split("_")[0] in _SPECIAL_TOKENS:
            raise ValueError(f"{echo(name)} cannot be set for a chat template")
    return value


#: Prefixes of the names of special tokens.
_SPECIAL_TOKENS = frozenset(
    {"additional", "bos", "cls", "eos", "extra", "mask", "pad", "sep", "unk"}
)


class Message(Part):
    """One message. Content may be missing in those of assistants and tools only; a tool's message
    needs the id of its call.
    """

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Annotated[
        str | None,
        PlainValidator(text_content, json_schema_input_type=str | list[_TextPart] | None),
    ] = None
    name: Label | None = None
    tool_calls: Annotated[list[_ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Label | None = None
    #: The assistant's thoughts, which most templates leave out, under both names.
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, raw: JsonValue) -> JsonValue:
        for name in ("audio", "function_call"):
            if isinstance(raw, dict) and raw.get(name) is not None:
                raise unsupported(f"{name} is not supported here")
        return raw

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise at_field("content", "must be a string or a list of text parts")
        if self.role == "tool" and not self.tool_call_id:
            raise at_field("tool_call_id", "must name the call that a tool message answers")
        return self


class ChatBody(GenerationBody):
    """POST /v1/chat/completions. Of two different token limits max_completion_tokens, the newer
    name, wins.

    Several system messages and a last message of the assistant are allowed; messages that the chat
    template refuses or would not show are shaped for it (`conversation.messages`). A new assistant
    turn begins unless add_generation_prompt is false or continue_final_message is true: then the
    answer goes on where the last message ends. "developer" reads as "system".
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, ranged("max_tokens")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, ranged("logprobs")] = None
    #: None: true, unless continue_final_message is.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: (
        Annotated[
            list[Annotated[_AnyTool, PlainValidator(_tool, json_schema_input_type=_AnyTool)]],
            Field(max_length=LIMITS.tools),
        ]
        | None
    ) = None
    #: None: auto where there are tools.
    tool_choice: _ToolChoice | None = None
    #: None: true.
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    #: Whether special tokens are put around the template's text, which has them. None: no.
    add_special_tokens: bool | None = None
    #: Most tokens of thoughts; then they are ended and the answer begins.
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    #: Whether thoughts are shown; None: true.
    include_reasoning: bool | None = None
    chat_template_kwargs: Annotated[
        JsonDict,
        PlainValidator(_checked_variables, json_schema_input_type=JsonDict | None),
        Field(default_factory=dict),
    ]

    @model_validator(mode="after")
    def _chat_combinations(self) -> Self:
        names = [tool.name for tool in self.client_tools()]
        self.check_tools(names, needs_tools=self.tool_choice not in (None, "none", "auto"))
        if self.continue_final_message and self.add_generation_prompt:
            raise at_field("continue_final_message", "excludes add_generation_prompt")
        if self.top_logprobs and not self.logprobs:
            raise at_field("top_logprobs", "is only allowed when logprobs is true")
        return self

    def client_tools(self) -> Iterator[Tool]:
        """The tools that the model gets."""
        for place, tool in enumerate(self.tools or ()):
            if not isinstance(tool, OtherTool):
                yield tool.fields.as_tool().at(f"tools[{place}]")

    def unfollowed(self) -> list[str]:
        return super().unfollowed() + left_out(self.tools)

    def unenforced(self) -> list[str]:
        required = self.tool_mode == "required"
        return [
            f"tools[{place}].custom.format"
            for place, tool in enumerate(self.tools or ())
            if isinstance(tool, _CustomTool) and not tool.custom.is_enforced(required=required)
        ]

    @property
    def chosen_names(self) -> list[str] | None:
        choice = self.tool_choice
        return choice.names if isinstance(choice, Part) else None

    @property
    def tool_mode(self) -> Literal["auto", "none", "required"]:
        choice = self.tool_choice
        if isinstance(choice, _NamedTool):
            return "required"
        if isinstance(choice, _Allowed):
            return choice.allowed_tools.mode
        return choice or "auto"

    @property
    def names_one_tool(self) -> bool:
        """Whether tool_choice is one function, to be called once."""
        return isinstance(self.tool_choice, _NamedTool)
