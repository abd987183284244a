"""Routes that turn texts into tokens, tokens into texts and chats into prompts."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.requests import Request
from starlette.types import ASGIApp

from jitney.engine.api.blocks import BlockAnswer
from jitney.engine.api.endpoints import ignored_header, read_body
from jitney.engine.api.jsonio import LongJson, in_pieces, read_object
from jitney.engine.api.request import Conversation
from jitney.engine.api.routing import HttpRoute
from jitney.engine.api.schema import ChatBody
from jitney.engine.api.service import Service
from jitney.engine.api.slices import Pieces
from jitney.engine.api.text_tools.bodies import (
    ChatTokenizeBody,
    DetokenizeAnswer,
    DetokenizeBody,
    TemplateAnswer,
    TextTokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
    TokenizerAnswer,
)
from jitney.engine.errors import RequestError
from jitney.engine.text.detokenizer import TokenBytes
from jitney.engine.types import JsonDict

_POST = ("POST",)


async def _tokenize(service: Service, request: Request) -> ASGIApp:
    """A chat if it has messages, else a text."""
    service.ready()
    raw = await service.slices.result(read_object(await request.body()))
    if raw.get("messages") is not None:
        return await _tokenize_chat(service, raw)
    body, ignored = TextTokenizeBody.parse(raw)
    service.check_model(body.model)
    if body.content is not None:
        ids = await _encode(service, body.content, "content", special=bool(body.add_special))
        tokens = _pieces(service, ids) if body.with_pieces else ids
        return _answer(service, {"tokens": tokens}, ignored)
    special = body.add_special_tokens is not False
    ids = await _encode(service, body.prompt or "", "prompt", special=special)
    return _answer(service, _counted(service, ids, strings=bool(body.return_token_strs)), ignored)


async def _tokenize_chat(service: Service, raw: JsonDict) -> ASGIApp:
    body, ignored = ChatTokenizeBody.parse(raw)
    text = await _chat_text(service, body)
    ids = await _encode(service, text, "messages", special=bool(body.add_special_tokens))
    return _answer(service, _counted(service, ids, strings=bool(body.return_token_strs)), ignored)


async def _detokenize(service: Service, request: Request) -> ASGIApp:
    body, headers = await read_body(service, request, DetokenizeBody)
    service.check_model(body.model)
    info, tokenizer = service.ready()
    if body.tokens and max(body.tokens) >= info.model.vocab_size:
        raise RequestError(f"token ids must be 0 to {info.model.vocab_size - 1}", param="tokens")
    text = await service.off_loop(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return _sent(service, {"prompt": text, "content": text}, headers)


async def _tokenizer_info(service: Service, request: Request) -> ASGIApp:
    info, tokenizer = service.ready()
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    body: JsonDict = {name: tokenizer.special_tokens.get(name) for name in names}
    body["chat_template"] = tokenizer.chat_template if tokenizer.has_chat_template else None
    body["vocab_size"] = tokenizer.vocab_size
    body["model_max_length"] = info.model.context_length
    return _sent(service, body, {})


async def _apply_template(service: Service, request: Request) -> ASGIApp:
    body, headers = await read_body(service, request, ChatBody)
    return _sent(service, {"prompt": await _chat_text(service, body)}, headers)


async def _chat_text(service: Service, body: ChatBody) -> str:
    service.check_model(body.model)
    conversation = await Conversation.of_chat(service, body)
    return await conversation.text(service)


async def _encode(service: Service, text: str, param: str, *, special: bool) -> list[int]:
    _, tokenizer = service.ready()
    service.check_chars(len(text), param)
    try:
        return await service.off_loop(lambda: tokenizer.encode(text, add_special_tokens=special))
    except RequestError as error:
        raise error.blaming(param) from error


def _counted(service: Service, ids: list[int], *, strings: bool) -> JsonDict:
    """vLLM's answer."""
    info, tokenizer = service.ready()
    spelled = LongJson.of(lambda place: tokenizer.id_to_token(ids[place]), len(ids))
    return {
        "count": len(ids),
        "max_model_len": info.model.context_length,
        "tokens": ids,
        "token_strs": spelled if strings else None,
    }


def _pieces(service: Service, ids: list[int]) -> list[JsonDict] | LongJson:
    """The tokens with their texts, in llama.cpp's form."""
    _, tokenizer = service.ready()
    return LongJson.of(lambda place: _piece(tokenizer, ids[place]), len(ids))


def _piece(tokenizer: TokenBytes, id: int) -> JsonDict:
    data = tokenizer.token_bytes(id)
    try:
        return {"id": id, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": id, "piece": list(data)}


def _answer(service: Service, body: JsonDict, ignored: list[str]) -> ASGIApp:
    return _sent(service, body, ignored_header(ignored))


def _sent(service: Service, body: JsonDict, headers: dict[str, str]) -> ASGIApp:
    """Long lists are written in slices of the loop's time."""
    blocks = service.slices.blocks(_written(in_pieces(body)))
    return BlockAnswer(blocks, headers | {"content-type": "application/json"})


def _written(pieces: Iterator[bytes]) -> Pieces:
    yield from pieces


TEXT_ROUTES = (
    HttpRoute(
        "/tokenize",
        _POST,
        _tokenize,
        "the tokens of a text or of a chat, as vLLM and llama.cpp have it",
        body=TokenizeBody,
        answer=TokenizeAnswer,
    ),
    HttpRoute(
        "/detokenize",
        _POST,
        _detokenize,
        "the text of tokens",
        body=DetokenizeBody,
        answer=DetokenizeAnswer,
    ),
    HttpRoute(
        "/tokenizer_info",
        ("GET",),
        _tokenizer_info,
        "the tokenizer's special tokens and the chat template, as vLLM has it",
        answer=TokenizerAnswer,
    ),
    HttpRoute(
        "/apply-template",
        _POST,
        _apply_template,
        "what the chat template makes of a chat",
        body=ChatBody,
        answer=TemplateAnswer,
    ),
)
