"""Common parts of all APIs' bodies: their fields, tools, and how they are checked. A body declares
the fields that it implements; `chat.fields` has the treatment of all others. null means absent.
`SamplingParams` checks ranges; bodies check types, sizes and combinations. A sampling parameter is
a field of `GenerationBody` with the same name (docs/contributing/sampling_parameter.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict, JsonObject, JsonValue, Range, SamplingParams
from jitney.engine.server.chat import grammar_fields
from jitney.engine.server.chat.conversation.tools import Tool
from jitney.engine.server.chat.fields import Rule, ignored_fields, rules_of
from jitney.engine.server.chat.grammar_fields import WantedGrammar
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.errors import echo
from jitney.engine.server.http.field_errors import readable


class _Limits(NamedTuple):
    """Limits of a body's fields."""

    #: Stop strings.
    stops: int = 64
    #: Entries of stop_token_ids, duplicates included.
    stop_tokens: int = 512
    #: Characters of a field that only labels a request (user, names, ids).
    label_chars: int = 512
    #: Ids of allowed_token_ids.
    allowed_tokens: int = 1 << 20
    #: Banned words, and characters of each.
    bad_words: int = 256
    bad_word_chars: int = 64
    prompts: int = 128
    messages: int = 4096
    tools: int = 128
    #: Variables of a chat template that a request may set, and characters of their JSON.
    variables: int = 32
    variable_chars: int = 1 << 14


LIMITS = _Limits()
_DAY_MS = 86_400_000
_TOKEN_ID = re.compile(r"[0-9]{1,10}\Z")
#: Names of functions; OpenAI takes no dots, and 64 characters.
_FUNCTION_NAME = r"^[A-Za-z0-9_.-]{1,128}$"
#: Field of a body -> the field of SamplingParams with the same range.
_SAMPLED_AS = {
    "best_of": "n",
    "max_completion_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "top_logprobs": "logprobs",
}
#: Kinds of content part that a text model cannot read; no URL is ever fetched.
_MEDIA_PARTS = frozenset(
    {
        "document",
        "image",
        "image_url",
        "input_image",
        "input_audio",
        "audio_url",
        "video_url",
        "file",
        "input_file",
        "image_embeds",
        "image_pil",
    }
)


class Part(BaseModel):
    """A body, or something in one. No coercion: "10" and true are not integers; NaN and infinities
    are not numbers.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class _StreamOptions(Part):
    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    #: Padding that hides the lengths of a stream's pieces; not implemented, so true is a hint.
    include_obfuscation: bool | None = None


#: JSON schemas of fields that a function checks.
_Stop = str | Annotated[list[str], Field(max_length=LIMITS.stops)]


def _described(schema: JsonDict, model: type[GenerationBody]) -> None:
    """Add to a JSON schema what pydantic does not know: ranges, and fields with neutral values."""
    properties = schema["properties"]
    for name, (low, high, open_low) in _ranges_of(model):
        least = "exclusiveMinimum" if open_low else "minimum"
        properties[name] |= {least: low, "maximum": high}
    for name, rule in model.rules().items():
        if rule.is_hint:
            properties[name] = {"description": "accepted, and changes nothing here"}
        else:
            properties[name] = {"enum": [None, *rule.neutral], "description": "not supported here"}


def _ranges_of(model: type[BaseModel]) -> Iterator[tuple[str, Range]]:
    """The fields of a model with a range of SamplingParams: name -> field of SamplingParams."""
    for name in model.model_fields:
        limits = _range_of(_SAMPLED_AS.get(name, name))
        if limits is not None and name not in ("max_tokens", "logprobs"):
            yield name, limits


def _range_of(field: str) -> Range | None:
    """The range of a field of SamplingParams, if it has one."""
    items = SamplingParams.declared().get(field, ())
    return next((item for item in items if isinstance(item, Range)), None)


def ranged(field: str) -> AfterValidator:
    """A validator with the range of a field of SamplingParams; RequestError names the body's
    field.
    """
    limits = _range_of(field)
    assert limits is not None

    def check(value: float | None, info: ValidationInfo) -> float | None:
        if value is not None:
            limits.check(str(info.field_name), value)
        return value

    return AfterValidator(check)


def _stops(value: JsonValue) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or len(value) > LIMITS.stops:
        raise ValueError(f"must be a string or at most {LIMITS.stops} strings")
    texts = [text for text in value if isinstance(text, str)]
    if len(texts) < len(value):
        raise ValueError("must be a string or a list of strings")
    return tuple(dict.fromkeys(texts))


def _truncation(value: JsonValue) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not (value == -1 or 1 <= value < 2**31):
        raise ValueError(
            "must be a number of tokens, at least 1, or -1 for all that there is room for"
        )
    return value


def _logit_bias(value: JsonValue) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    biases: dict[int, float] = {}
    for token, bias in value.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError("must map token ids to numbers")
        if not _TOKEN_ID.match(token):
            raise ValueError("must map token ids to numbers")
        biases[int(token)] = float(bias)
    return biases


def prompt_list(
    value: JsonValue, most: int, what: str = "prompt", *, empty_texts: bool = False
) -> list[str | list[int]]:
    """`prompt` as a list of at most `most`; empty_texts: allowed. Raises ValueError."""
    items = [value] if not isinstance(value, list) or _is_token_list(value) else value
    if not 0 < len(items) <= most:
        raise ValueError(f"must hold 1 to {most} {what}s")
    if not _all_of(str, items) and not all(map(_is_token_list, items)):
        raise ValueError(
            "must be a string, a list of strings, a list of token ids or a list of such lists"
        )
    # "" is a valid prompt for a model whose texts begin with a special token.
    may_be_empty = value == "" or (empty_texts and _all_of(str, items))
    if not may_be_empty and not all(items):
        raise ValueError(f"a{'n' if what[0] in 'aeiou' else ''} {what} is empty")
    return cast("list[str | list[int]]", items)


def _all_of(kind: type, values: list[JsonValue]) -> bool:
    """Whether all values have exactly this type (true is no integer). A generator expression would
    take 20 ms for half a million ids.
    """
    return set(map(type, values)) <= {kind}


def _is_token_list(value: JsonValue) -> bool:
    return isinstance(value, list) and _all_of(int, value)


def kind_of(value: JsonValue) -> str | None:
    """The type that an object says it has; None if it says none."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def text_content(value: JsonValue) -> str | None:
    """Content as one string, parts joined by line breaks."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts")
    return "\n".join(_text_part(index, part) for index, part in enumerate(value))


def _text_part(index: int, part: JsonValue) -> str:
    kind = kind_of(part)
    if kind in _MEDIA_PARTS:
        raise unsupported(f"part {index}: this model reads text only")
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        raise ValueError(f'part {index} must be {{"type": "text", "text": string}}')
    return text


def _safe_id(value: str | None) -> str | None:
    if value is not None and not Context.SAFE_ID.match(value):
        raise ValueError("must have 1 to 128 characters of A-Z, a-z, 0-9, _, . and -")
    return value


CacheSalt = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
Label = Annotated[str, Field(max_length=LIMITS.label_chars)]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)]


class ModelBody(Part):
    """A body that may name the model."""

    #: Fields of a base that this route refuses -> values that ask for nothing.
    refused: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {}
    #: Fields with lists of messages, whose length is checked first.
    counted: ClassVar[tuple[str, ...]] = ("messages", "input")

    #: None: the served model.
    model: Annotated[str, Field(min_length=1)] | None = None

    @classmethod
    def parse(cls, raw: JsonObject) -> tuple[Self, list[str]]:
        """The body and the fields that change nothing. Raises RequestError naming the field."""
        ignored = ignored_fields(raw, cls.rules(), cls.model_fields)
        for name in cls.counted:
            messages = raw.get(name)
            if isinstance(messages, list) and len(messages) > LIMITS.messages:
                raise RequestError(f"{name} may hold at most {LIMITS.messages}", param=name)
        body = checked(cls, raw)
        return body, ignored + body.unfollowed()

    @classmethod
    def rules(cls) -> dict[str, Rule]:
        """Treatment of fields that the body does not declare."""
        return rules_of(cls.model_fields, cls.refused)

    def unfollowed(self) -> list[str]:
        """Paths of declared fields whose values have no effect."""
        return []

    def unenforced(self) -> list[str]:
        """Paths of formats that are not enforced."""
        return []


class EngineBody(ModelBody):
    """A body of a route that uses the engine, with tenant, priority and time limit."""

    #: Used if the server's order is `priority`.
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    timeout_ms: Annotated[int, Field(ge=1, le=_DAY_MS)] | None = None
    user: Label | None = None


_BadWord = Annotated[str, Field(min_length=1, max_length=LIMITS.bad_word_chars)]


class GenerationBody(EngineBody):
    """Fields that the generation routes share."""

    model_config = ConfigDict(json_schema_extra=_described)

    n: Annotated[int | None, ranged("n")] = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    #: Its name in llama.cpp and Ollama.
    repeat_penalty: Annotated[float | None, ranged("repetition_penalty")] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[
        dict[int, float],
        PlainValidator(_logit_bias, json_schema_input_type=dict[str, float] | None),
    ] = {}
    stop: Annotated[
        tuple[str, ...], PlainValidator(_stops, json_schema_input_type=_Stop | None)
    ] = ()
    stop_token_ids: Annotated[list[int], Field(max_length=LIMITS.stop_tokens)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    #: Whether log-probabilities name tokens as "token_id:123" instead of by their text.
    return_tokens_as_token_ids: bool | None = None
    #: -1: as many as leave room for max_tokens.
    truncate_prompt_tokens: Annotated[
        Literal[-1] | Annotated[int, Field(ge=1, lt=2**31)] | None, PlainValidator(_truncation)
    ] = None
    #: None: all.
    allowed_token_ids: (
        Annotated[list[int], Field(min_length=1, max_length=LIMITS.allowed_tokens)] | None
    ) = None
    bad_words: Annotated[list[_BadWord], Field(max_length=LIMITS.bad_words)] | None = None
    prompt_logprobs: Annotated[int | None, ranged("prompt_logprobs")] = None
    cache_salt: CacheSalt | None = None
    response_format: grammar_fields.ResponseFormat | None = None
    structured_outputs: grammar_fields.StructuredOutputs | None = None
    guided_json: grammar_fields.Schema | None = None
    guided_regex: grammar_fields.Pattern | None = None
    guided_choice: grammar_fields.Choices | None = None
    guided_grammar: grammar_fields.Pattern | None = None
    request_id: Annotated[str | None, AfterValidator(_safe_id)] = None
    safety_identifier: Label | None = None
    metadata: Metadata | None = None
    #: A hint: prompts of one key share the prefix cache at any value.
    prompt_cache_key: Label | None = None

    def unfollowed(self) -> list[str]:
        options = self.stream_options
        extra = [] if options is None else list(options.model_extra or {})
        if options is not None and options.include_obfuscation:
            extra.append("include_obfuscation")
        return [f"stream_options.{name}" for name in extra]

    @property
    def wanted_grammar(self) -> WantedGrammar | None:
        """The grammar of the answer. Raises RequestError for more than one."""
        grammars: list[WantedGrammar] = []
        if self.response_format is not None:
            grammars += self.response_format.grammars()
        if self.structured_outputs is not None:
            grammars += self.structured_outputs.grammars()
        grammars += WantedGrammar.of_fields(
            "guided_",
            self.guided_json,
            self.guided_regex,
            self.guided_choice,
            self.guided_grammar,
        )
        if len(grammars) > 1:
            raise RequestError(
                f"an answer is held to one grammar, and {grammars[0].param} names another",
                param=grammars[1].param,
            )
        return grammars[0] if grammars else None

    @property
    def chosen_names(self) -> list[str] | None:
        """The tools that a choice of them names; None if it names none."""
        return None

    def check_tools(self, names: list[str], *, needs_tools: bool, what: str = "functions") -> None:
        """Raise a pydantic error unless tools with these names exist."""
        if len(set(names)) < len(names):
            raise at_field("tools", f"must not have two {what} of one name")
        if needs_tools and not names:
            raise at_field("tool_choice", "is only allowed with tools")
        for name in self.chosen_names or ():
            if name not in names:
                raise at_field("tool_choice", f"names {echo(name)}, which is not among the tools")

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise at_field("stream_options", "is only allowed when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise at_field("prompt_logprobs", "is not available in a stream")
        if None not in (self.repeat_penalty, self.repetition_penalty):
            raise at_field("repeat_penalty", "excludes repetition_penalty, its other name")
        return self


FunctionName = Annotated[str, Field(pattern=_FUNCTION_NAME)]


def object_schema(value: JsonDict | None) -> JsonDict | None:
    """The JSON schema of a function's arguments, which are an object. Raises ValueError."""
    if value is not None and value.get("type", "object") != "object":
        raise ValueError('must be a JSON schema whose type is "object"')
    return value


class FunctionFields(Part):
    """A function that the model may ask the client to call, as OpenAI's routes describe it."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[JsonDict | None, AfterValidator(object_schema)] = None
    strict: bool | None = None

    def as_tool(self) -> Tool:
        """The tool in the form that all routes share."""
        return Tool(self.name, self.description, self.parameters, bool(self.strict))


class _InputFormat(Part):
    """The form of a custom tool's input: any text, or the texts of a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, raw: JsonValue) -> JsonValue:
        """Flatten the form of chats, which nest the grammar in an object of its own."""
        grammar = raw.get("grammar") if isinstance(raw, dict) else None
        return raw | grammar if isinstance(raw, dict) and isinstance(grammar, dict) else raw

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "grammar" and None in (self.syntax, self.definition):
            raise at_field("type", "a grammar needs a syntax and a definition")
        return self


class CustomFields(Part):
    """A tool that takes a text, as OpenAI's routes describe it."""

    name: FunctionName
    description: str | None = None
    format: _InputFormat | None = None

    def as_tool(self) -> Tool:
        form = self.format
        if form is None or form.syntax is None or form.definition is None:
            return Tool.custom(self.name, self.description)
        return Tool.custom(self.name, self.description, form.syntax, form.definition)

    def is_enforced(self, *, required: bool) -> bool:
        """Whether the input's format is enforced. Lark is not, as the input is part of a JSON
        string.
        """
        syntax = None if self.format is None else self.format.syntax
        return syntax is None or (syntax == "regex" and required)


class OtherTool(Part):
    """A tool that the model does not get: a provider's servers run it, or only they may call it."""

    type: str

    @classmethod
    def of(cls, value: JsonValue) -> OtherTool:
        """A tool by its `type`, which functions may omit."""
        return cls(type=kind_of(value) or "function")


def is_for_the_model(tool: JsonValue) -> bool:
    """Whether a tool may be called by the model itself, not only by programs that it writes."""
    callers = tool.get("allowed_callers") if isinstance(tool, dict) else None
    return callers is None or (isinstance(callers, list) and "direct" in callers)


def left_out(tools: Sequence[Part] | None) -> list[str]:
    """Paths of the tools that the model does not get."""
    return [
        f"tools[{place}]" for place, tool in enumerate(tools or ()) if isinstance(tool, OtherTool)
    ]


def with_names(value: JsonValue) -> JsonValue:
    """The allowed tools that have names; the model gets no others."""
    if not isinstance(value, list):
        return value
    return [each for each in value if kind_of(each) in (None, "function", "custom")]


#: How long a model shall think.
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def checked[M: BaseModel](kind: type[M], raw: JsonObject) -> M:
    """The sent fields as a model. Raises RequestError naming the first field at fault."""
    try:
        return kind.model_validate(dict(raw))
    except ValidationError as error:
        raise readable(error, raw) from None


def at_field(field: str, message: str) -> PydanticCustomError:
    """A validation error of a combination of fields that names one of them."""
    return PydanticCustomError("combination", "{reason}", {"field": field, "reason": message})


def unsupported(reason: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported_parameter", "{reason}", {"reason": reason})
