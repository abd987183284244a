"""The bodies of Ollama's routes, as the packages `ollama` of PyPI and npm, 0.6, send them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from jitney.engine.common.requests import JsonDict, JsonValue
from jitney.engine.server.chat.schema import (
    LIMITS,
    FunctionFields,
    GenerationBody,
    Label,
    ModelBody,
    Part,
    at_field,
    checked,
    ranged,
    unsupported,
)
from jitney.engine.server.http.context import Notes

#: Texts of one /api/embed.
_MOST_INPUTS = 2048
#: Option -> the field of a generation that it stands for, where that has another name.
_FIELDS = {"repeat_penalty": "repetition_penalty"}
#: Options with the same name as the field of a generation.
_SAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
)
#: Names of a generation's fields on these routes, for errors that blame them.
NAMES: dict[str | None, str] = {
    **{name: f"options.{name}" for name in _SAME},
    **{field: f"options.{option}" for option, field in _FIELDS.items()},
    "max_tokens": "options.num_predict",
    "logprobs": "top_logprobs",
    "reasoning_effort": "think",
    "response_format": "format",
    "structured_outputs.json": "format",
}


class _Options(Part):
    """Options of the generation. Others, for Ollama's own runtime, are ignored."""

    model_config = ConfigDict(extra="allow")

    #: Tokens of the answer; below 1: as many as there is room for.
    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    #: -1: drawn at random.
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    #: Penalises every token of prompt and answer.
    repeat_penalty: float | None = None
    #: 0: no repeat_penalty. Other windows than all tokens (-1) change nothing here.
    repeat_last_n: int | None = None
    #: Tokens of the context, which the server decides.
    num_ctx: int | None = None

    def fields(self) -> JsonDict:
        """The given options, by their names in a generation's body."""
        fields: JsonDict = {name: getattr(self, name) for name in (*_SAME, *_FIELDS)}
        if self.seed == -1:
            del fields["seed"]
        if self.repeat_last_n == 0:
            fields["repeat_penalty"] = 1.0
        return {_FIELDS.get(name, name): value for name, value in fields.items()}

    def ignored(self) -> list[str]:
        """Options that change nothing."""
        extra = self.model_extra or {}
        names = [name for name, value in extra.items() if value is not None]
        if self.num_ctx is not None:
            names.append("num_ctx")
        if self.repeat_last_n not in (None, 0, -1) and self.repeat_penalty not in (None, 1):
            names.append("repeat_last_n")
        return names


class OllamaBody(ModelBody):
    """The base of bodies that use the model."""

    options: Annotated[_Options, Field(default_factory=_Options)]
    #: How long Ollama would keep the model loaded; it stays loaded here.
    keep_alive: float | str | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_nulls(cls, raw: JsonDict) -> JsonDict:
        return {name: value for name, value in raw.items() if value is not None}

    def unfollowed(self) -> list[str]:
        ignored = [f"options.{name}" for name in self.options.ignored()]
        return ignored if self.keep_alive is None else [*ignored, "keep_alive"]

    def note_context(self, context_length: int, notes: Notes) -> None:
        """Warn of an option that asks for a longer context than there is."""
        num_ctx = self.options.num_ctx
        if num_ctx is not None and num_ctx > context_length:
            notes.warnings.append(f"options.num_ctx {num_ctx}: the context has {context_length}")


class _GeneratingBody(OllamaBody):
    """The base of the bodies of /api/chat and /api/generate."""

    #: Whether the answer is streamed; None: yes.
    stream: bool | None = None
    #: Form of the answer: any JSON, or a JSON schema. "": any text.
    format: Literal["", "json"] | JsonDict | None = None
    #: Whether, or how long, the model thinks before it answers; None: as it likes.
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, ranged("logprobs")] = None

    @property
    def own_sampling(self) -> JsonDict:
        """Fields with a meaning of the route's own; see `RequestBuilder.sampling`."""
        most = self.options.num_predict
        return {
            "max_tokens": most if most is not None and most > 0 else None,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }

    def generation(self, model: str | None) -> GenerationBody:
        """The generation's body by options and format. model: as served. Raises RequestError."""
        fields: JsonDict = {"model": model, "stream": self.stream is not False}
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            fields["structured_outputs"] = {"json": self.format}
        return checked(GenerationBody, fields | self.options.fields())

    @model_validator(mode="after")
    def _with_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise at_field("top_logprobs", "is only allowed when logprobs is true")
        return self


class _TextOnly(Part):
    """May have an empty list of images."""

    @model_validator(mode="before")
    @classmethod
    def _no_images(cls, raw: JsonValue) -> JsonValue:
        if isinstance(raw, dict) and raw.get("images"):
            raise unsupported("images are not supported here: this model reads text only")
        return raw


class _MadeFunction(Part):
    name: Annotated[Label, Field(min_length=1)]
    arguments: JsonDict | None = None


class MadeCall(Part):
    """A call made earlier in the conversation."""

    #: Older clients give none.
    id: Label | None = None
    function: _MadeFunction


class OllamaTurn(_TextOnly):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    #: The assistant's thoughts before its answer.
    thinking: str | None = None
    tool_calls: Annotated[list[MadeCall], Field(max_length=128)] | None = None
    #: A tool's result: its function, and the call that it answers.
    tool_name: Label | None = None
    tool_call_id: Label | None = None


class _OfferedTool(Part):
    """A function that the model may ask the client to call."""

    type: Literal["function"] = "function"
    function: FunctionFields


class OllamaChatBody(_GeneratingBody):
    """POST /api/chat. Without messages nothing is generated: it asks for the model to be loaded."""

    messages: Annotated[list[OllamaTurn], Field(default_factory=list)]
    tools: Annotated[list[_OfferedTool], Field(default_factory=list, max_length=LIMITS.tools)]

    @model_validator(mode="after")
    def _tools_differ(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise at_field("tools", "must not have two functions of one name")
        return self


class OllamaGenerateBody(_GeneratingBody, _TextOnly):
    """POST /api/generate. Without prompt and suffix nothing is generated: it asks for the model to
    be loaded.
    """

    refused: ClassVar = {"template": ("",), "context": ([],)}

    prompt: str = ""
    #: The text after the answer, which fills in the middle; "": none.
    suffix: str = ""
    #: System message, which replaces the chat template's default one.
    system: str = ""
    #: Whether the prompt is used without the chat template.
    raw: bool = False

    @model_validator(mode="after")
    def _plain_prompt(self) -> Self:
        if self.system and (self.raw or self.suffix):
            raise at_field("system", "goes with neither raw nor suffix: no template shows it")
        return self


class OllamaEmbedBody(OllamaBody):
    """POST /api/embed."""

    input: str | Annotated[list[str], Field(min_length=1, max_length=_MOST_INPUTS)]
    #: Whether texts that are too long are cut to their beginning; false: refused. None: true.
    truncate: bool | None = None
    #: Numbers of a vector; fewer than the model makes only where it was trained for that.
    dimensions: Annotated[int, Field(ge=1)] | None = None

    counted: ClassVar = ()


class OllamaEmbeddingsBody(OllamaBody):
    """POST /api/embeddings, the older form."""

    prompt: Annotated[str, Field(min_length=1)]


class OllamaShowBody(ModelBody):
    """POST /api/show."""

    #: An older name of `model`.
    name: Annotated[str, Field(min_length=1)] | None = None
    #: Whether long tables are shown too; there are none.
    verbose: bool | None = None
