"""Routes between texts, tokens and prompts; and the one that fills in between two texts."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.requests import Request
from starlette.types import ASGIApp

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.slices import Pieces
from jitney.engine.core import TokenBytes
from jitney.engine.server.chat.choices import Choice, ChoiceDelta
from jitney.engine.server.chat.endpoints import (
    GenerationAnswer,
    checked_body,
    read_body,
    read_fields,
)
from jitney.engine.server.chat.formats import Format
from jitney.engine.server.chat.generation_request import GenerationRequest
from jitney.engine.server.chat.llamacpp.bodies import (
    ChatTokenizeBody,
    DetokenizeAnswer,
    DetokenizeBody,
    InfillAnswer,
    InfillBody,
    PiecesAnswer,
    TemplateAnswer,
    TextTokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
    TokenizerAnswer,
    TokenPiece,
)
from jitney.engine.server.chat.openai.conversation import chat_conversation
from jitney.engine.server.chat.openai.schema import ChatBody
from jitney.engine.server.chat.request import RequestBuilder, RouteKind
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.errors import ErrorReply
from jitney.engine.server.http.jsonio import LongJson, in_pieces, json_answer
from jitney.engine.server.http.routing import HttpRoute
from jitney.engine.server.http.service import Service
from jitney.engine.server.http.streaming import StreamingResponse

_INFILL = RouteKind("infill-", "input_prefix", clamps=True)


async def _tokenize(service: Service, request: Request) -> ASGIApp:
    """A chat if it has messages, else a text."""
    fields = await read_fields(service, request)
    if fields.get("messages") is not None:
        return await _tokenize_chat(service, request, fields)
    body = checked_body(request, TextTokenizeBody, fields)
    service.check_model(body.model)
    if body.content is not None:
        ids = await _encode(service, body.content, "content", special=bool(body.add_special))
        if not body.with_pieces:
            return _sent(service, PiecesAnswer(ids))
        _, tokenizer = service.ready()
        pieces = LongJson.of(lambda place: _piece(tokenizer, ids[place]), len(ids))
        return _sent(service, PiecesAnswer(pieces))
    special = body.add_special_tokens is not False
    ids = await _encode(service, body.prompt or "", "prompt", special=special)
    return _sent(service, _counted(service, ids, strings=bool(body.return_token_strs)))


async def _tokenize_chat(service: Service, request: Request, fields: JsonDict) -> ASGIApp:
    body = checked_body(request, ChatTokenizeBody, fields)
    text = await _chat_text(service, request, body)
    ids = await _encode(service, text, "messages", special=bool(body.add_special_tokens))
    return _sent(service, _counted(service, ids, strings=bool(body.return_token_strs)))


async def _detokenize(service: Service, request: Request) -> ASGIApp:
    body = await read_body(service, request, DetokenizeBody)
    service.check_model(body.model)
    info, tokenizer = service.ready()
    if body.tokens and max(body.tokens) >= info.model.vocab_size:
        raise RequestError(f"token ids must be 0 to {info.model.vocab_size - 1}", param="tokens")
    text = await service.text.off_loop(
        lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return json_answer(DetokenizeAnswer(text, text))


async def _tokenizer_info(service: Service, request: Request) -> ASGIApp:
    info, tokenizer = service.ready()
    special = tokenizer.special_tokens
    answer = TokenizerAnswer(
        special.get("bos_token"),
        special.get("eos_token"),
        special.get("pad_token"),
        special.get("unk_token"),
        tokenizer.chat_template if tokenizer.has_chat_template else None,
        tokenizer.vocab_size,
        info.model.context_length,
    )
    return json_answer(answer)


async def _apply_template(service: Service, request: Request) -> ASGIApp:
    body = await read_body(service, request, ChatBody)
    return json_answer(TemplateAnswer(await _chat_text(service, request, body)))


async def _chat_text(service: Service, request: Request, body: ChatBody) -> str:
    service.check_model(body.model)
    conversation = await chat_conversation(service, body)
    return await conversation.text(service, Context.of(request).notes)


async def _encode(service: Service, text: str, param: str, *, special: bool) -> list[int]:
    _, tokenizer = service.ready()
    service.text.check_chars(len(text), param)
    try:
        return await service.text.off_loop(
            lambda: tokenizer.encode(text, add_special_tokens=special)
        )
    except RequestError as error:
        raise error.blaming(param) from error


def _counted(service: Service, ids: list[int], *, strings: bool) -> TokenizeAnswer:
    info, tokenizer = service.ready()
    spelled = None
    if strings:
        spelled = LongJson.of(lambda place: tokenizer.id_to_token(ids[place]), len(ids))
    return TokenizeAnswer(len(ids), info.model.context_length, ids, spelled)


def _piece(tokenizer: TokenBytes, id: int) -> TokenPiece:
    data = tokenizer.token_bytes(id)
    try:
        return TokenPiece(id, data.decode())
    except UnicodeDecodeError:
        return TokenPiece(id, list(data))


def _sent(service: Service, body: TokenizeAnswer | PiecesAnswer) -> ASGIApp:
    """Long lists are written in slices of the loop's time."""
    blocks = service.slices.blocks(in_pieces(body))
    return StreamingResponse(blocks, {"content-type": "application/json"})


async def _infill(service: Service, request: Request) -> ASGIApp:
    body = await read_body(service, request, InfillBody)
    generation = await _infill_request(service, body, Context.of(request))
    return GenerationAnswer(service, generation, _InfillFormat)


async def _infill_request(
    service: Service, body: InfillBody, context: Context
) -> GenerationRequest:
    _, tokenizer = service.ready()
    service.check_model(body.model)
    fill_in = service.text.fill_in("input_suffix")
    extra = body.input_extra or []
    texts = [body.input_prefix, body.input_suffix, body.prompt or "", *(e.text for e in extra)]
    service.text.check_chars(sum(map(len, texts)), _INFILL.prompt_field)
    others = [(each.filename or "file", each.text) for each in extra]
    before = body.input_prefix + (body.prompt or "")
    most = body.max_tokens if body.n_predict in (None, -1) else body.n_predict
    builder = RequestBuilder(service, body, context)
    sampling = builder.sampling({"max_tokens": most}, fill_in.ends)
    ids = await service.text.off_loop(
        lambda: fill_in.prompt(tokenizer, before, body.input_suffix, others)
    )
    return await builder.tokens(_INFILL, [ids], sampling)


class _InfillFormat(Format):
    """llama.cpp's events: no [DONE], the last one says `stop`."""

    def whole(self) -> Pieces:
        [choice] = self.generation.choices
        return in_pieces(self._last(choice, self._totals[choice.index]))

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        if delta.finish is not None:
            return self.event(self._last(choice, delta))
        return self.event(self._piece(choice, delta))

    def failure(self, error: Exception, request_id: str) -> Pieces:
        yield ErrorReply.of(error, request_id).event()

    def _piece(self, choice: Choice, delta: ChoiceDelta) -> InfillAnswer:
        tokens = delta.tokens.ids if self.request.body.return_token_ids else []
        return InfillAnswer(index=choice.index, content=delta.text, tokens=tokens)

    def _last(self, choice: Choice, delta: ChoiceDelta) -> InfillAnswer:
        counts = self.generation.counts
        answer = self._piece(choice, delta)
        answer.stop = True
        answer.model = self.request.model
        answer.tokens_predicted = counts.completion
        answer.tokens_evaluated = counts.prompt
        answer.tokens_cached = counts.cached
        answer.truncated = False
        answer.stop_type = "limit"
        if delta.finish == "stop":
            answer.stop_type = "word" if choice.stop_string else "eos"
        return answer


TEXT_ROUTES = (
    HttpRoute(
        "POST /infill",
        _infill,
        "what stands between two texts, as llama.cpp has it",
        generates=True,
        body=InfillBody,
        answer=InfillAnswer,
        event=InfillAnswer,
    ),
    HttpRoute(
        "POST /tokenize",
        _tokenize,
        "the tokens of a text or of a chat, as vLLM and llama.cpp have it",
        body=TokenizeBody,
        answer=TokenizeAnswer | PiecesAnswer,
    ),
    HttpRoute(
        "POST /detokenize",
        _detokenize,
        "the text of tokens",
        body=DetokenizeBody,
        answer=DetokenizeAnswer,
    ),
    HttpRoute(
        "GET /tokenizer_info",
        _tokenizer_info,
        "the tokenizer's special tokens and the chat template, as vLLM has it",
        answer=TokenizerAnswer,
    ),
    HttpRoute(
        "POST /apply-template",
        _apply_template,
        "what the chat template makes of a chat",
        body=ChatBody,
        answer=TemplateAnswer,
    ),
)
