"""The body of POST /v1/responses, and the items that it may hold."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from jitney.engine.api.errors import echo
from jitney.engine.api.grammar_fields import WantedGrammar
from jitney.engine.api.schema import (
    LIMITS,
    FunctionFields,
    GenerationBody,
    Label,
    Part,
    ReasoningEffort,
    at_field,
    kind_of,
    ranged,
    text_content,
    unsupported,
)
from jitney.engine.types import Grammar, JsonDict, JsonValue

#: What a response may be asked to show more of. Only the log-probabilities are ours to give: the
#: others are of tools that run elsewhere and never do here, and of reasoning that is not encrypted
#: here but stands in its item.
_INCLUDABLE = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "message.output_text.logprobs",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
_LOGPROBS = "message.output_text.logprobs"


def includable(names: list[str]) -> list[str]:
    """The names, which all must be known."""
    for name in names:
        if name not in _INCLUDABLE:
            raise unsupported(f"{echo(name)} cannot be included")
    return names


_Status = Literal["in_progress", "completed", "incomplete"]
_Texts = str | list[JsonDict]


class _Item(Part):
    """One item of a conversation. id: as an earlier answer gave it; of no meaning here."""

    id: Label | None = None
    status: _Status | None = None

    def shown(self) -> JsonDict:
        """The item as it is kept and listed, without its id."""
        raise NotImplementedError


def _input_text(value: JsonValue) -> str:
    return _said(value, ("input_text", "output_text", "text", "refusal"))


def _said(value: JsonValue, kinds: tuple[str, ...]) -> str:
    if isinstance(value, list):
        value = [_renamed(part) for part in value]
    text = text_content(value, kinds)
    if text is None:
        raise ValueError("must be a string or a list of text parts")
    return text


def _renamed(part: JsonValue) -> JsonValue:
    """A refusal has its text under a name of its own."""
    if isinstance(part, dict) and part.get("type") == "refusal":
        return part | {"text": part.get("refusal")}
    return part


class MessageItem(_Item):
    """Somebody says something."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[str, PlainValidator(_input_text, json_schema_input_type=_Texts)]
    phase: Literal["commentary", "final_answer"] | None = None

    def shown(self) -> JsonDict:
        if self.role == "assistant":
            part = {"type": "output_text", "text": self.content, "annotations": []}
        else:
            part = {"type": "input_text", "text": self.content}
        return {
            "type": "message",
            "role": self.role,
            "status": self.status or "completed",
            "content": [part],
        }


class FunctionCallItem(_Item):
    """The model called a function."""

    type: Literal["function_call"]
    call_id: Annotated[Label, Field(min_length=1)]
    name: Annotated[Label, Field(min_length=1)]
    arguments: str
    namespace: None = None
    caller: None = None

    def shown(self) -> JsonDict:
        return {
            "type": "function_call",
            "status": self.status or "completed",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
        }


class FunctionOutputItem(_Item):
    """What a function gave."""

    type: Literal["function_call_output"]
    call_id: Annotated[Label, Field(min_length=1)]
    output: Annotated[str, PlainValidator(_input_text, json_schema_input_type=_Texts)]
    namespace: None = None
    caller: None = None

    def shown(self) -> JsonDict:
        return {
            "type": "function_call_output",
            "status": self.status or "completed",
            "call_id": self.call_id,
            "output": self.output,
        }


class _Thought(Part):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    """What the model thought. Only `content` is read again."""

    type: Literal["reasoning"]
    content: list[_Thought] | None = None
    summary: list[JsonDict] | None = None

    def shown(self) -> JsonDict:
        content = [thought.model_dump() for thought in self.content or ()]
        return {
            "type": "reasoning",
            "status": self.status or "completed",
            "summary": [],
            "content": content,
        }


class ReferenceItem(Part):
    """An item of an earlier response."""

    type: Literal["item_reference"] | None = None
    id: Label


_AnyItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | ReferenceItem
_ITEMS: dict[str, type[Part]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ReferenceItem,
}


def _item(value: JsonValue) -> Part:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    kind = value.get("type")
    if kind is None and "role" in value:
        return MessageItem.model_validate(value)
    if kind is None:
        return ReferenceItem.model_validate(value)
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise unsupported(f"items of type {echo(kind)} are not supported here")
    return _ITEMS[kind].model_validate(value)


def _items(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if value == []:
        raise ValueError("must be a string or a list of items")
    return value


class _TextFormat(Part):
    """What the answer's text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: Annotated[JsonDict | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "json_schema":
            if self.schema_ is None:
                raise at_field("schema", "must be a JSON schema")
            if self.name is None:
                raise at_field("name", "must name the schema")
        return self


class _Text(Part):
    format: _TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class _Reasoning(Part):
    """summary: no summaries are made; "auto" asks for one if there is."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class FunctionTool(FunctionFields):
    """A function that the client runs."""

    type: Literal["function"]
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    output_schema: None = None
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None

    def shown(self) -> JsonDict:
        """As a response repeats it."""
        shown = {
            "type": "function",
            "name": self.name,
            "parameters": self.parameters,
            "strict": self.strict is not False,
        }
        if self.description is not None:
            shown["description"] = self.description
        return shown


def _tool(value: JsonValue) -> FunctionTool:
    kind = kind_of(value)
    if kind not in (None, "function"):
        raise unsupported(f"tools of type {echo(kind)} are not supported here")
    return FunctionTool.model_validate(value)


class NamedFunction(Part):
    """A choice of tools: this one."""

    type: Literal["function"]
    name: str

    @property
    def names(self) -> list[str]:
        return [self.name]


class AllowedTools(Part):
    """A choice of tools: some of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=LIMITS.tools)]

    @property
    def names(self) -> list[str]:
        return [tool.name for tool in self.tools]


_ToolChoice = Literal["none", "auto", "required"] | NamedFunction | AllowedTools


#: Choices of tools that are objects, by their types.
_CHOICES: dict[str | None, type[Part]] = {
    "function": NamedFunction,
    "allowed_tools": AllowedTools,
}


def _tool_choice(value: JsonValue) -> Part | str | None:
    if value is None or (isinstance(value, str) and value in ("none", "auto", "required")):
        return value
    kind = kind_of(value)
    if kind in _CHOICES:
        return _CHOICES[kind].model_validate(value)
    if kind is not None:
        raise unsupported(f"a choice of type {echo(kind)} is not supported here")
    raise ValueError("must be none, auto, required or a function")


class ResponsesBody(GenerationBody):
    """POST /v1/responses. The sampling parameters of the other routes may be asked for too."""

    refused: ClassVar = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "best_of": (1,),
        "context_management": ([],),
        "conversation": (),
        "echo": (False,),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "image": (),
        "logprobs": (False,),
        "max_completion_tokens": (),
        "max_tokens": (),
        "messages": (),
        "moderation": (),
        "n": (1,),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "prompt_logprobs": (),
        "request_id": (),
        "response_format": ({"type": "text"},),
        "return_token_ids": (False,),
        "structured_outputs": (),
        "truncation": ("disabled",),
    }

    input: Annotated[
        list[Annotated[_AnyItem, PlainValidator(_item, json_schema_input_type=_AnyItem)]],
        BeforeValidator(_items, json_schema_input_type=str | list[_AnyItem]),
    ]
    instructions: str | None = None
    previous_response_id: Label | None = None
    include: Annotated[list[str], AfterValidator(includable)] | None = None
    max_output_tokens: Annotated[int | None, ranged("max_tokens")] = None
    #: Calls of tools that run on the server; there are none, so none are too many.
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    #: Prompts of one key share the prefix cache whatever they are called.
    prompt_cache_key: Label | None = None
    #: None: true.
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    store: bool | None = None
    text: _Text | None = None
    tool_choice: Annotated[
        Any, PlainValidator(_tool_choice, json_schema_input_type=_ToolChoice | None)
    ] = None
    tools: (
        Annotated[
            list[
                Annotated[FunctionTool, PlainValidator(_tool, json_schema_input_type=FunctionTool)]
            ],
            Field(max_length=LIMITS.tools),
        ]
        | None
    ) = None
    top_logprobs: Annotated[int | None, ranged("logprobs")] = None

    @model_validator(mode="after")
    def _tools_fit(self) -> Self:
        names = [tool.name for tool in self.tools or ()]
        needs_tools = self.tool_choice not in (None, "none", "auto")
        self.check_tools(names, needs_tools=needs_tools)
        return self

    @property
    def chosen_names(self) -> list[str] | None:
        """The functions that tool_choice names; None if it names none."""
        choice = self.tool_choice
        return choice.names if isinstance(choice, NamedFunction | AllowedTools) else None

    @property
    def effort(self) -> ReasoningEffort | None:
        """How long the model shall think; None: as it likes."""
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def wanted_grammar(self) -> WantedGrammar | None:
        """What the answer's text must be; None: any text."""
        wanted = None if self.text is None else self.text.format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return WantedGrammar("text.format", Grammar("json_object"))
        is_strict = wanted.strict is True
        return WantedGrammar.of_schema("text.format", wanted.schema_ or {}, is_strict=is_strict)

    @property
    def shows_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())
