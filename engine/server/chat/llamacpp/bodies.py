"""The bodies and answers of the text tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from msgspec import UNSET
from pydantic import Field, PlainValidator, RootModel, model_validator

from jitney.engine.server.chat.openai.schema import ChatBody
from jitney.engine.server.chat.schema import (
    GenerationBody,
    Label,
    ModelBody,
    Part,
    at_field,
)
from jitney.engine.server.http.answers import Maybe, ResponseModel

#: Most ids of a list that is turned into text.
_MOST_IDS = 1 << 20
#: Most further texts in a body of /infill.
_MOST_EXTRA = 64
#: Fields that the answer of /infill cannot represent.
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
    #: prompt: put the model's own special tokens around it. None: yes.
    add_special_tokens: bool | None = None
    #: prompt: also return each token's text.
    return_token_strs: bool | None = None
    #: The same of content. None: no.
    add_special: bool | None = None
    with_pieces: bool | None = None
    #: content: whether special tokens in the text are recognised; they always are.
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

    #: Whether to return each token's text too.
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


class TokenPiece(ResponseModel):
    """A token and its text, or its bytes if they are not whole characters."""

    id: int
    piece: str | list[int]


class PiecesAnswer(ResponseModel):
    """POST /tokenize of content: in llama.cpp's form. Tokens with_pieces, or their ids."""

    tokens: Sequence[int | TokenPiece]


class TokenizeAnswer(ResponseModel):
    """POST /tokenize: in vLLM's form. max_model_len: of a sequence."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeAnswer(ResponseModel):
    """The text, under both names."""

    prompt: str
    content: str


class TokenizerAnswer(ResponseModel):
    """The tokenizer, for clients that leave tokenising and templates to the server. null: the model
    has none.
    """

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    #: Jinja.
    chat_template: str | None
    vocab_size: int
    model_max_length: int


class TemplateAnswer(ResponseModel):
    """The prompt that the chat template makes of a chat."""

    prompt: str


class _Extra(Part):
    text: str
    filename: Label | None = None


class InfillBody(GenerationBody):
    """POST /infill: input_prefix and prompt come before what is asked for, input_suffix after."""

    refused = _NOT_OF_INFILL

    input_prefix: str
    input_suffix: str
    #: Follows input_prefix: the line that is being written.
    prompt: str | None = None
    #: Further texts for the model's context.
    input_extra: Annotated[list[_Extra], Field(max_length=_MOST_EXTRA)] | None = None
    #: llama.cpp's name of max_tokens; -1: as many as there is room for.
    n_predict: Annotated[int, Field(ge=-1, lt=2**31)] | None = None


class InfillAnswer(ResponseModel, kw_only=True):
    """The text in between, or a piece of it: only the last event of a stream has `stop` and the
    fields after it. tokens come with return_token_ids.
    """

    index: int
    #: The text of the answer.
    content: str
    tokens: list[int]
    stop: bool = False
    model: Maybe[str] = UNSET
    #: Tokens of the answer; and of the prompt, with those from the prefix cache.
    tokens_predicted: Maybe[int] = UNSET
    tokens_evaluated: Maybe[int] = UNSET
    tokens_cached: Maybe[int] = UNSET
    #: Always false: a prompt that is too long is refused.
    truncated: Maybe[Literal[False]] = UNSET
    #: Why it ended, as llama.cpp says it.
    stop_type: Maybe[Literal["limit", "word", "eos"]] = UNSET
