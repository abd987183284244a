"""What the routes of text tools take and answer."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, RootModel, model_validator

from jitney.engine.server.chat.schema import (
    ChatBody,
    GenerationBody,
    Label,
    ModelBody,
    Part,
    at_field,
)

#: Most ids of a list that is turned into text.
_MOST_IDS = 1 << 20
#: Most other texts of an /infill.
_MOST_EXTRA = 64
#: Fields that the answer of /infill has no place for.
_NOT_OF_INFILL = {
    "n": (1,),
    "prompt_logprobs": (),
    "stream_options": (),
}


class TextTokenizeBody(ModelBody):
    """A text to tokenise: `prompt` as vLLM calls it, or `content` as llama.cpp does, which also
    decides the form of the answer.
    """

    prompt: str | None = None
    content: str | None = None
    #: Of prompt: whether the model's own special tokens are put around it. None: yes.
    add_special_tokens: bool | None = None
    #: Of prompt: whether each token's text is wanted too.
    return_token_strs: bool | None = None
    #: The same of content. None: no.
    add_special: bool | None = None
    with_pieces: bool | None = None
    #: Of content: whether special tokens written out in it are read as such. Always so.
    parse_special: bool | None = None

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if (self.prompt is None) == (self.content is None):
            raise at_field("prompt", "give one of prompt, content and messages")
        if self.parse_special is False:
            raise at_field("parse_special", "must be true: special tokens are always read as such")
        return self


class ChatTokenizeBody(ChatBody):
    """A chat to tokenise: the fields of a chat completion, of which those that make the prompt
    count.
    """

    #: Whether each token's text is wanted too.
    return_token_strs: bool | None = None


class TokenizeBody(RootModel[TextTokenizeBody | ChatTokenizeBody]):
    """POST /tokenize: a text or a chat."""


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or len(value) > _MOST_IDS:
        raise ValueError(f"must be a list of at most {_MOST_IDS} token ids")
    if not set(map(type, value)) <= {int} or (value and min(value) < 0):
        raise ValueError("must be a list of token ids")
    return value


class DetokenizeBody(ModelBody):
    """POST /detokenize."""

    tokens: Annotated[
        list[int],
        PlainValidator(
            _ids,
            json_schema_input_type=Annotated[
                list[Annotated[int, Field(ge=0)]], Field(max_length=_MOST_IDS)
            ],
        ),
    ]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TokenPiece(_Answer):
    """A token and its text; its bytes where they are no whole characters."""

    id: int
    piece: str | list[int]


class TokenizeAnswer(_Answer):
    """Of content: `tokens` alone. count and max_model_len: of the text, and of a sequence."""

    tokens: list[int] | list[TokenPiece]
    count: int = 0
    max_model_len: int = 0
    token_strs: list[str] | None = None


class DetokenizeAnswer(_Answer):
    """The text, under both names."""

    prompt: str
    content: str


class TokenizerAnswer(_Answer):
    """What a client needs to leave tokenising and templates to `/tokenize` and its like; null for
    what the model has not.
    """

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    #: Jinja.
    chat_template: str | None
    vocab_size: int
    model_max_length: int


class TemplateAnswer(_Answer):
    """What the chat template makes of a chat."""

    prompt: str


class _Extra(Part):
    text: str
    filename: Label | None = None


class InfillBody(GenerationBody):
    """POST /infill: input_prefix and prompt come before what is asked for, input_suffix after."""

    refused = _NOT_OF_INFILL

    input_prefix: str
    input_suffix: str
    #: Goes on where input_prefix ends: the line that is being written.
    prompt: str | None = None
    #: Other texts that the model should know of.
    input_extra: Annotated[list[_Extra], Field(max_length=_MOST_EXTRA)] | None = None
    #: llama.cpp's name of max_tokens; -1: as many as there is room for.
    n_predict: Annotated[int, Field(ge=-1, lt=2**31)] | None = None


class InfillAnswer(_Answer):
    """What stands between. tokens come with return_token_ids."""

    index: int
    #: The text of the answer.
    content: str
    tokens: list[int]
    #: Nothing comes after it. Earlier events of a stream have what stands above, and false here.
    stop: bool
    model: str
    #: Of the answer; and of the prompt, of which so many came from the prefix cache.
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    #: Always false: a prompt that is too long is refused.
    truncated: bool
    #: Why it ended, as llama.cpp says it.
    stop_type: str
