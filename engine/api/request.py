"""From a checked body to engine requests: prompts become token ids, fields become sampling
parameters.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from jitney.engine.api.errors import HttpError, echo
from jitney.engine.api.schema import ChatBody, CompletionBody, GenerationBody, Message
from jitney.engine.api.service import Context, Service
from jitney.engine.errors import RequestError
from jitney.engine.types import MAX_INT, EngineInfo, EngineRequest, Range, SamplingParams

if TYPE_CHECKING:
    from jitney.engine.text.tokenizer import Tokenizer

#: max_tokens of a completion that names none, as OpenAI has it; a chat may go on to the end of the
#: context.
COMPLETION_TOKENS = 16


@dataclass(slots=True)
class EncodedPrompt:
    """text: the prompt as the client wrote it, if it did not send token ids."""

    ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """All that one HTTP request wants.

    requests: one per prompt, in order. n: choices returned per prompt; sampling.n of them are
    generated. top_logprobs: alternatives shown per token, None for no log-probabilities.
    prompt_only: echo without a continuation (max_tokens 0); the one token the engine must generate
    is dropped.
    """

    id: str
    created: int
    model: str
    prompts: list[EncodedPrompt]
    requests: list[EngineRequest]
    sampling: SamplingParams
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    top_logprobs: int | None
    echo: bool = False
    prompt_only: bool = False


async def completion_job(
    service: Service, body: CompletionBody, context: Context
) -> GenerationRequest:
    info, tokenizer = service.ready()
    _check_model(service, body.model)
    prompt_only = body.max_tokens == 0
    wanted = 1 if prompt_only else body.max_tokens
    sampling = _sampling(
        body, info, n=body.best_of or body.n or 1, max_tokens=wanted, logprobs=body.logprobs
    )
    if body.echo and body.logprobs is not None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=body.logprobs)
    if (body.best_of or 1) > (body.n or 1) and sampling.logprobs is None:
        sampling = msgspec.structs.replace(sampling, logprobs=0)  # what the best are chosen by
    _check_choices(service, len(body.prompt) * sampling.n, info)
    texts = [item for item in body.prompt if isinstance(item, str)]
    _check_chars(service, texts, info, "prompt")
    prompts = await service.off_loop(
        lambda: [_completion_prompt(item, tokenizer) for item in body.prompt]
    )
    return _job(
        service,
        body,
        context,
        prompts,
        sampling,
        "cmpl-",
        "prompt",
        default=COMPLETION_TOKENS,
        top_logprobs=body.logprobs,
        echo=bool(body.echo),
        prompt_only=prompt_only,
    )


async def chat_job(service: Service, body: ChatBody, context: Context) -> GenerationRequest:
    info, tokenizer = service.ready()
    _check_model(service, body.model)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.max_completion_tokens is not None:
        Range(1, MAX_INT).check("max_completion_tokens", body.max_completion_tokens)
    sampling = _sampling(body, info, n=body.n or 1, max_tokens=wanted, logprobs=top_logprobs)
    _check_choices(service, sampling.n, info)
    messages = [_template_message(message) for message in body.messages]
    _check_chars(service, [str(message["content"]) for message in messages], info, "messages")
    prompt = await service.off_loop(lambda: _chat_prompt(messages, tokenizer))
    return _job(
        service,
        body,
        context,
        [prompt],
        sampling,
        "chatcmpl-",
        "messages",
        default=None,
        top_logprobs=top_logprobs,
    )


def _job(
    service: Service,
    body: GenerationBody,
    context: Context,
    prompts: list[EncodedPrompt],
    sampling: SamplingParams,
    prefix: str,
    field: str,
    *,
    default: int | None,
    top_logprobs: int | None,
    **extra: Any,
) -> GenerationRequest:
    info, _ = service.ready()
    for prompt in prompts:
        _check_prompt(prompt, body, info, field)
    engine_id = uuid.uuid4().hex
    options = body.stream_options
    deadline = _deadline(service, body, context)
    requests = [
        EngineRequest(
            id=f"{engine_id}-{number}",
            prompt=prompt.ids,
            arrival=context.started,
            deadline=deadline,
            sampling=_with_room(sampling, len(prompt.ids), info.context_length, default, field),
            priority=_priority(body, info),
            tenant=context.tenant,
            cache_salt=body.cache_salt or "",
            user=body.user or "",
        )
        for number, prompt in enumerate(prompts)
    ]
    context.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
    return GenerationRequest(
        id=prefix + (body.request_id or engine_id),
        created=int(time.time()),
        model=body.model,
        prompts=prompts,
        requests=requests,
        sampling=sampling,
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        top_logprobs=top_logprobs,
        **extra,
    )


def _sampling(
    body: GenerationBody, info: EngineInfo, *, n: int, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Sampling parameters, checked; a field that was not given has the model's default, or the
    engine's.
    """
    given = {
        name: value
        for name in (
            "min_tokens",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "ignore_eos",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "include_stop_str_in_output",
            "skip_special_tokens",
        )
        if (value := getattr(body, name)) is not None
    }
    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        logit_bias=body.logit_bias,
        stop=body.stop,
        logprobs=logprobs,
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
    )
    params = msgspec.structs.replace(params, **(info.sampling_defaults | given))
    params.validate(info.vocab_size)
    return (
        params
        if params.top_k <= info.vocab_size
        else msgspec.structs.replace(params, top_k=info.vocab_size)
    )


def _with_room(
    sampling: SamplingParams,
    prompt_tokens: int,
    context_length: int,
    default: int | None,
    field: str,
) -> SamplingParams:
    """The parameters with max_tokens made explicit. Raises RequestError if prompt and output exceed
    the context.
    """
    room = context_length - prompt_tokens
    if room < (sampling.max_tokens or 1):
        wanted = f" and max_tokens {sampling.max_tokens}" if sampling.max_tokens else ""
        raise RequestError(
            f"the context holds {context_length} tokens; the prompt has {prompt_tokens}{wanted}",
            code="context_length_exceeded",
            param=field,
        )
    if sampling.max_tokens is not None:
        return sampling
    tokens = room if default is None else min(default, room)
    if sampling.min_tokens > tokens:
        raise RequestError(
            f"min_tokens is more than max_tokens, which is {tokens} here", param="min_tokens"
        )
    return msgspec.structs.replace(sampling, max_tokens=tokens)


def _check_model(service: Service, name: str) -> None:
    if name != service.model_name:
        raise HttpError(
            404,
            f"no model {echo(name)}; /v1/models lists what there is",
            code="model_not_found",
            param="model",
        )


def _check_choices(service: Service, choices: int, info: EngineInfo) -> None:
    most = min(service.settings.max_choices, info.seats + info.max_waiting_requests)
    if choices > most:
        raise RequestError(f"prompts times n (or best_of) may be at most {most}", param="n")


def _check_chars(service: Service, texts: Sequence[str], info: EngineInfo, field: str) -> None:
    """Refuse text that cannot fit before any time goes into tokenising it."""
    most = info.context_length * service.settings.max_chars_per_token
    chars = max(map(len, texts), default=0) if field == "prompt" else sum(map(len, texts))
    if chars > most:
        raise RequestError(
            f"the text has {chars} characters; at most {most} are tokenised here",
            code="context_length_exceeded",
            param=field,
        )


def _check_prompt(
    prompt: EncodedPrompt, body: GenerationBody, info: EngineInfo, field: str
) -> None:
    if not prompt.ids:
        raise RequestError("the prompt is empty", param=field)
    if min(prompt.ids) < 0 or max(prompt.ids) >= info.vocab_size:
        raise RequestError(
            f"token ids must be at least 0 and at most {info.vocab_size - 1}", param=field
        )
    if body.truncate_prompt_tokens is not None and len(prompt.ids) > body.truncate_prompt_tokens:
        prompt.ids = prompt.ids[-body.truncate_prompt_tokens :]
        prompt.text = None  # an echo shows what the model read


def _completion_prompt(item: str | list[int], tokenizer: Tokenizer) -> EncodedPrompt:
    return (
        EncodedPrompt(tokenizer.encode(item), item)
        if isinstance(item, str)
        else EncodedPrompt(item)
    )


def _chat_prompt(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> EncodedPrompt:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return EncodedPrompt(tokenizer.encode(text, add_special_tokens=False))


def _template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates know it: no nulls, and "system" for its newer name."""
    fields = message.model_dump(exclude_none=True)
    fields["role"] = "system" if message.role == "developer" else message.role
    fields.setdefault("content", "")
    return fields


def _priority(body: GenerationBody, info: EngineInfo) -> int:
    if body.priority and info.order != "priority":
        raise RequestError("priority needs a server started with order priority", param="priority")
    return body.priority or 0


def _deadline(service: Service, body: GenerationBody, context: Context) -> float | None:
    limits = [
        limit
        for limit in (service.settings.request_timeout_s, (body.timeout_ms or 0) / 1000)
        if limit
    ]
    return context.started + min(limits) if limits else None
