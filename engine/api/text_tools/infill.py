"""POST /infill, in llama.cpp's form: what stands between two texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.types import ASGIApp

from jitney.engine.api.choices import Choice, ChoiceDelta
from jitney.engine.api.context import Context
from jitney.engine.api.endpoints import GenerationAnswer, read_body
from jitney.engine.api.errors import ErrorReply
from jitney.engine.api.formats import Format
from jitney.engine.api.generation_request import GenerationRequest
from jitney.engine.api.jsonio import in_pieces
from jitney.engine.api.request import RequestBuilder, RouteKind
from jitney.engine.api.routing import HttpRoute
from jitney.engine.api.schema import GenerationBody, Label, Part
from jitney.engine.api.service import Service
from jitney.engine.api.slices import Pieces
from jitney.engine.text.fill_in import OtherFile
from jitney.engine.types import JsonDict, JsonValue

#: Most other texts of a request.
_MOST_EXTRA = 64
#: Fields of other routes; and those that the answer has no place for.
_REFUSED: dict[str, tuple[JsonValue, ...]] = {
    "max_completion_tokens": (),
    "messages": (),
    "n": (1,),
    "prompt_logprobs": (),
    "stream_options": (),
    "suffix": (),
}
_KIND = RouteKind("infill-", "input_prefix", clamps=True)


class _Extra(Part):
    text: str
    filename: Label | None = None


class InfillBody(GenerationBody):
    """POST /infill: input_prefix and prompt come before what is asked for, input_suffix after."""

    refused = _REFUSED

    input_prefix: str
    input_suffix: str
    #: Goes on where input_prefix ends: the line that is being written.
    prompt: str | None = None
    #: Other texts that the model should know of.
    input_extra: Annotated[list[_Extra], Field(max_length=_MOST_EXTRA)] | None = None
    #: llama.cpp's name of max_tokens; -1: as many as there is room for.
    n_predict: Annotated[int, Field(ge=-1, lt=2**31)] | None = None


class InfillAnswer(BaseModel):
    """What stands between. tokens come with return_token_ids."""

    model_config = ConfigDict(extra="forbid")

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


async def _infill(service: Service, request: Request) -> ASGIApp:
    body, headers = await read_body(service, request, InfillBody)
    wanted = await _infill_request(service, body, Context.of(request))
    return GenerationAnswer(service, wanted, _InfillFormat, headers)


async def _infill_request(
    service: Service, body: InfillBody, context: Context
) -> GenerationRequest:
    _, tokenizer = service.ready()
    service.check_model(body.model)
    fill_in = service.fill_in("input_suffix")
    extra = body.input_extra or []
    texts = [body.input_prefix, body.input_suffix, body.prompt or "", *(e.text for e in extra)]
    service.check_chars(sum(map(len, texts)), _KIND.prompt_field)
    others = [OtherFile(each.filename or "file", each.text) for each in extra]
    before = body.input_prefix + (body.prompt or "")
    most = body.max_tokens if body.n_predict in (None, -1) else body.n_predict
    builder = RequestBuilder(service, body, context)
    sampling = builder.sampling({"max_tokens": most}, fill_in.ends)
    ids = await service.off_loop(
        lambda: fill_in.prompt(tokenizer, before, body.input_suffix, others)
    )
    return await builder.tokens(_KIND, ids, sampling)


class _InfillFormat(Format):
    """llama.cpp's events: no [DONE], the last one says `stop`."""

    def whole(self) -> Pieces:
        [choice] = self.generation.choices
        return in_pieces(self._last(choice, self._totals[choice.index]))

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        if delta.finish is not None:
            return self._event(self._last(choice, delta))
        return self._event(self._piece(choice, delta))

    def tail(self) -> Pieces:
        yield from ()

    def failure(self, error: Exception, request_id: str) -> Pieces:
        yield ErrorReply.of(error, request_id).event()

    def _piece(self, choice: Choice, delta: ChoiceDelta) -> JsonDict:
        tokens = delta.tokens.ids if self.request.return_token_ids else []
        return {"index": choice.index, "content": delta.text, "tokens": tokens, "stop": False}

    def _last(self, choice: Choice, delta: ChoiceDelta) -> JsonDict:
        usage: JsonDict = self.generation.usage()
        return self._piece(choice, delta) | {
            "stop": True,
            "model": self.request.model,
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
            "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
            "truncated": False,
            "stop_type": _stop_type(choice, delta),
        }


def _stop_type(choice: Choice, delta: ChoiceDelta) -> str:
    if delta.finish != "stop":
        return "limit"
    return "word" if choice.stop_string else "eos"


INFILL_ROUTES = (
    HttpRoute(
        "/infill",
        ("POST",),
        _infill,
        "what stands between two texts, as llama.cpp has it",
        generates=True,
        body=InfillBody,
        answer=InfillAnswer,
    ),
)
