"""The bodies of POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from jitney.engine.common.requests import Grammar, JsonDict, JsonValue
from jitney.engine.server.chat.content import refuse_lost
from jitney.engine.server.chat.conversation.tools import ToolMode
from jitney.engine.server.chat.fields import OPENAI_ONLY
from jitney.engine.server.chat.grammar_fields import WantedGrammar
from jitney.engine.server.chat.responses.items import AnyItem, MessageItem, item_of
from jitney.engine.server.chat.responses.tools import (
    AllowedTools,
    AnyTool,
    CallForm,
    CustomTool,
    NamedTool,
    PlacedTool,
    ToolChoice,
    choice_of,
    placed,
    tool_of,
)
from jitney.engine.server.chat.schema import (
    LIMITS,
    GenerationBody,
    Label,
    Part,
    ReasoningEffort,
    at_field,
    ranged,
    unsupported,
)
from jitney.engine.server.http.errors import echo

#: Values of `include`. Only log-probabilities can be given; the others have no effect.
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
    """Check the values of `include`."""
    for name in names:
        if name not in _INCLUDABLE:
            raise unsupported(f"{echo(name)} cannot be included")
    return names


def _items(value: JsonValue) -> JsonValue:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class _TextFormat(Part):
    """The required form of the answer's text."""

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
    """verbosity: a hint."""

    format: _TextFormat | None = None
    verbosity: str | None = None


class _Reasoning(Part):
    """All fields but the effort are hints. Summaries are never made; "auto" accepts that."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


#: Hints inside objects -> values that ask for the default behaviour.
_INNER_HINTS: dict[str, tuple[str | None, ...]] = {
    "reasoning.context": (None, "auto", "all_turns"),
    "reasoning.generate_summary": (None, "auto"),
    "reasoning.mode": (None, "standard"),
    "reasoning.summary": (None, "auto", "none"),
    "text.verbosity": (None, "medium"),
}


#: Fields of the other routes that have no place in a response.
_NOT_HERE = {**OPENAI_ONLY, "max_tokens": (), "request_id": ()}


class InputTokensBody(GenerationBody):
    """POST /v1/responses/input_tokens: what a conversation is made of."""

    refused: ClassVar = _NOT_HERE | {"stream": (False,)}

    #: Empty: the model answers the instructions, or continues a response.
    input: Annotated[
        list[Annotated[AnyItem, PlainValidator(item_of, json_schema_input_type=AnyItem)]],
        BeforeValidator(_items, json_schema_input_type=str | list[AnyItem]),
    ]
    instructions: str | None = None
    previous_response_id: Label | None = None
    #: None: true.
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    tool_choice: Annotated[
        ToolChoice | None, PlainValidator(choice_of, json_schema_input_type=ToolChoice | None)
    ] = None
    tools: (
        Annotated[
            list[Annotated[AnyTool, PlainValidator(tool_of, json_schema_input_type=AnyTool)]],
            Field(max_length=LIMITS.tools),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        place = len(self.input) - 1
        newest = self.input[place] if self.input else None
        if isinstance(newest, MessageItem):
            refuse_lost(newest.content, f"input[{place}].content")
        return self

    @model_validator(mode="after")
    def _tools_fit(self) -> Self:
        names = [each.form.flat_name for each in self.client_tools]
        if len(names) > LIMITS.tools:
            raise at_field("tools", f"must hold at most {LIMITS.tools}, with those of namespaces")
        needs_tools = self.tool_choice not in (None, "none", "auto")
        self.check_tools(names, needs_tools=needs_tools)
        return self

    @property
    def client_tools(self) -> list[PlacedTool]:
        """The tools that the model gets."""
        return [each for each in placed(self.tools or ()) if isinstance(each, PlacedTool)]

    @property
    def call_forms(self) -> dict[str, CallForm]:
        """The client's names of the tools, by the model's names."""
        return {each.form.flat_name: each.form for each in self.client_tools}

    def unfollowed(self) -> list[str]:
        names = super().unfollowed()
        for each in placed(self.tools or ()):
            if isinstance(each, str):
                names.append(each)
            elif each.tool.defer_loading:
                names.append(f"{each.path}.defer_loading")
        fields = {"reasoning": self.reasoning, "text": self.text}
        for path, neutral in _INNER_HINTS.items():
            part, name = path.split(".")
            if getattr(fields[part], name, None) not in neutral:
                names.append(path)
        return names

    def unenforced(self) -> list[str]:
        required = self.tool_mode == "required"
        return [
            f"{each.path}.format"
            for each in self.client_tools
            if isinstance(each.tool, CustomTool) and not each.tool.is_enforced(required=required)
        ]

    @property
    def tool_mode(self) -> ToolMode:
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return "required"
        return choice.mode if isinstance(choice, AllowedTools) else choice or "auto"

    @property
    def chosen_names(self) -> list[str] | None:
        """The model's names of the tools that tool_choice names; None if it names none."""
        choice = self.tool_choice
        return choice.names if isinstance(choice, NamedTool | AllowedTools) else None

    @property
    def effort(self) -> ReasoningEffort | None:
        """The reasoning effort; None: the model's default."""
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def wanted_grammar(self) -> WantedGrammar | None:
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return WantedGrammar("text.format", Grammar("json_object"))
        is_strict = form.strict is True
        return WantedGrammar.of_schema("text.format", form.schema_ or {}, is_strict=is_strict)


class ResponsesBody(InputTokensBody):
    """POST /v1/responses. The sampling parameters of the other routes are accepted too."""

    refused: ClassVar = _NOT_HERE

    include: Annotated[list[str], AfterValidator(includable)] | None = None
    max_output_tokens: Annotated[int | None, ranged("max_tokens")] = None
    #: Limit of calls of tools that the server runs; it runs none.
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    store: bool | None = None
    top_logprobs: Annotated[int | None, ranged("logprobs")] = None

    @property
    def shows_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())
