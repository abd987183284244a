"""Builds engine requests from a checked body: prompts to token ids, fields to parameters."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec.structs import replace as with_fields

from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import (
    EngineRequest,
    Grammar,
    JsonDict,
    Pooling,
    RequestGroup,
    SamplingParams,
)
from jitney.engine.common.slices import Work
from jitney.engine.server.chat.conversation.grammars import Turn
from jitney.engine.server.chat.conversation.messages import shaped_messages
from jitney.engine.server.chat.conversation.tools import ToolUse
from jitney.engine.server.chat.generation_request import EncodedPrompt, GenerationRequest
from jitney.engine.server.chat.openai.schema import CompletionBody
from jitney.engine.server.chat.schema import GenerationBody, ReasoningEffort
from jitney.engine.server.http.context import Context, Notes
from jitney.engine.server.http.service import Service

if TYPE_CHECKING:
    from jitney.engine.core import Tokenizer
    from jitney.engine.server.chat.conversation.formats import TurnFormat

#: Most choices of one request, over all its prompts.
_MAX_CHOICES = 128
#: Prompts of one request in the engine per seat: more than one, so that no seat idles.
_PER_SEAT = 4
#: Characters of a prompt's end that are stored.
_TAIL_CHARS = 256
#: The value of `truncate_prompt_tokens` for as many as fit.
_ALL_THERE_IS_ROOM_FOR = -1
#: Fields that are passed to the engine unchanged.
_SAMPLING_FIELDS = [
    name for name in SamplingParams.__struct_fields__ if name in GenerationBody.model_fields
]


@dataclass(frozen=True, slots=True)
class RouteKind:
    """Differences between the routes."""

    id_prefix: str
    #: The field of the body that is to blame for a prompt.
    prompt_field: str
    #: Default max_tokens (OpenAI's); None: to the end of the context.
    default_tokens: int | None = None
    #: The field that asks for alternatives.
    logprobs_field: str = "top_logprobs"
    #: The body's names of a chat's fields.
    names: Mapping[str | None, str] = MappingProxyType({})
    #: Whether a max_tokens beyond the context is reduced to the room left, instead of refused.
    clamps: bool = False
    #: The field of a tool that its schema stands in.
    tool_schema: str = "function.parameters"

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Translate field names in errors to those of the route."""
        try:
            yield
        except RequestError as error:
            param = error.info.param
            name = self.names.get(param)
            if param is not None and param.startswith("tools["):
                name = f"{param}.{self.tool_schema}"
            if name is None:
                raise
            raise error.blaming(name) from error


_COMPLETION = RouteKind("cmpl-", "prompt", 16, "logprobs")
_EMBEDDING = RouteKind("embd-", "input")


def continuing(messages: Sequence[JsonDict]) -> JsonDict:
    """Template variables that continue a last message of the assistant; none after another one."""
    if messages[-1]["role"] != "assistant":
        return {}
    return {"add_generation_prompt": False, "continue_final_message": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation to be continued, whichever route it came by."""

    kind: RouteKind
    #: As chat templates know them.
    messages: list[JsonDict]
    #: Further variables of the template.
    variables: JsonDict = field(default_factory=dict)
    #: Tools that the model may call; None: none.
    tools: ToolUse | None = None
    #: Reasoning effort; None: the model's default.
    effort: ReasoningEffort | None = None
    #: Most tokens of thoughts; None: unlimited.
    thinking_budget: int | None = None
    #: Whether its thoughts are shown.
    shows_reasoning: bool = True
    #: Whether the model's special tokens are put around what the template writes.
    special_tokens: bool = False

    async def prompt(
        self, service: Service, notes: Notes, *, is_truncated: bool = False
    ) -> EncodedPrompt:
        """The prompt's tokens. notes: written; is_truncated: any length. Raises RequestError."""
        _, tokenizer = service.ready()
        notes.ignored.extend(self._unfollowed(service.turns.format))
        text = await self.text(service, notes, is_truncated=is_truncated)
        with self.kind.blaming():
            special = self.special_tokens
            return await service.text.off_loop(lambda: _chat_prompt(text, tokenizer, special))

    def _unfollowed(self, turns: TurnFormat) -> list[str]:
        """Hints about thoughts that this model cannot follow, by the route's names."""
        names: list[str] = []
        can_stop = turns.takes_effort or (self.effort == "none" and not turns.thinks)
        if self.effort is not None and not can_stop:
            names.append("reasoning_effort")
        if self.thinking_budget is not None and not turns.thinks:
            names.append("thinking_token_budget")
        return [self.kind.names.get(name, name) for name in names]

    async def text(self, service: Service, notes: Notes, *, is_truncated: bool = False) -> str:
        """The chat template's text. notes: get the changes made for it. Raises RequestError."""
        use, abilities = self.tools, await service.turns.abilities()
        with self.kind.blaming():
            variables = self.variables | service.turns.format.effort_variables(self.effort)
            variables |= abilities.variables(use)
            shaping = shaped_messages(
                self.messages, abilities, service.turns.format, use, notes.warnings
            )
            messages = await service.slices.result(shaping)
            return await service.text.render_chat(messages, variables, is_truncated=is_truncated)


@dataclass(frozen=True, slots=True)
class RequestBuilder[B: GenerationBody]:
    """Makes engine requests of one body. Its methods raise RequestError and HttpError."""

    service: Service
    body: B
    context: Context

    async def completion(self: RequestBuilder[CompletionBody]) -> GenerationRequest:
        """The request that continues the prompts of a completion."""
        service, body = self.service, self.body
        info = service.info
        service.check_model(body.model)
        sampling = self._completion_sampling()
        _check_choices(len(body.prompt) * sampling.n, info)
        self._check_texts(body.prompt, "prompt", also=len(body.suffix or ""))
        if body.suffix:
            sampling = _with_ends(sampling, service.text.fill_in("suffix").ends)
        sampling = await self._with_checked_grammar(sampling)
        special = body.add_special_tokens is not False
        prompts = await _encoded(service, body.prompt, body.suffix, special)
        request = await service.slices.result(self._request(_COMPLETION, prompts, sampling))
        return replace(
            request,
            top_logprobs=body.logprobs,
            echo=bool(body.echo),
            prompt_only=body.max_tokens == 0,
        )

    def _completion_sampling(self: RequestBuilder[CompletionBody]) -> SamplingParams:
        body = self.body
        own: JsonDict = {"max_tokens": body.max_tokens, "logprobs": body.logprobs}
        if body.max_tokens == 0:
            own["max_tokens"] = 1
        if body.echo:
            own["prompt_logprobs"] = _wider(body.logprobs, body.prompt_logprobs)
        if body.best_of is not None:
            own["n"] = body.best_of
            if body.best_of > (body.n or 1) and body.logprobs is None:
                own["logprobs"] = 0  # by which the best are chosen
        return self.sampling(own)

    async def embeddings(
        self,
        items: Sequence[str | list[int]],
        special: bool = True,
        dimensions: int | None = None,
    ) -> GenerationRequest:
        """Request a vector per item. special: with its own tokens. dimensions: None: all."""
        self._check_texts(items, "input")
        with _EMBEDDING.blaming():
            prompts = await _encoded(self.service, items, None, special)
        ids = [prompt.ids for prompt in prompts]
        if not all(ids):
            raise RequestError(
                f"input {ids.index([])} (counted from 0) is empty, and this model's tokenizer puts "
                "no token of its own around a text",
                param="input",
            )
        request = await self.vectors(_EMBEDDING, ids)
        return replace(request, in_flight=self.group_size, dimensions=dimensions)

    @property
    def group_size(self) -> int:
        """Prompts of a request in the engine at a time, within the key's limit of open
        sequences.
        """
        info = self.service.info
        most = info.sizes.seats + info.queue.max_waiting_requests
        return min(_PER_SEAT * info.sizes.seats, most, self.service.most_of_key or most)

    async def vectors(self, kind: RouteKind, prompts: Sequence[list[int]]) -> GenerationRequest:
        """The request that pools each prompt of tokens."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        pooling = self.service.info.model.pooling
        request = await self.tokens(kind, prompts, sampling, pooling)
        return replace(request, prompt_only=True)

    @property
    def _is_truncated(self) -> bool:
        """Whether longer prompts are cut to the context, or to less."""
        return self.body.truncate_prompt_tokens is not None

    def _check_texts(self, prompts: Sequence[str | list[int]], param: str, also: int = 0) -> None:
        """Raise RequestError for texts that cannot fit. also: further characters per text."""
        lengths = [len(prompt) for prompt in prompts if isinstance(prompt, str)]
        if not self._is_truncated:
            self.service.text.check_chars(max(lengths, default=0) + also, param)

    async def answer(
        self, conversation: Conversation, sampling: SamplingParams
    ) -> GenerationRequest:
        """The request that continues a conversation."""
        service = self.service
        service.check_model(self.body.model)
        _check_choices(sampling.n, service.info)
        sampling = await self._with_checked_grammar(sampling)
        notes = self.context.notes
        prompt = await conversation.prompt(service, notes, is_truncated=self._is_truncated)
        use = (await service.turns.abilities()).limited(conversation.tools)
        conversation = replace(conversation, tools=use)
        with conversation.kind.blaming():
            sampling = await self._held_to_grammar(conversation, prompt.tail, sampling)
        request = await service.slices.result(self._request(conversation.kind, [prompt], sampling))
        names = frozenset() if use is None else use.names
        functions = {} if use is None else use.functions
        must_call = use is not None and use.is_required
        turns = service.turns.format
        return replace(
            request,
            top_logprobs=sampling.logprobs,
            make_parser=lambda: turns.parser(prompt.tail, functions, forced=must_call),
            seen_ids=service.turns.marker_ids(names),
            most_calls=None if use is None else use.most_calls,
            must_call=must_call,
            custom_names=frozenset() if use is None else use.custom_names,
            shows_reasoning=conversation.shows_reasoning,
        )

    async def tokens(
        self,
        kind: RouteKind,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        pooling: Pooling | None = None,
    ) -> GenerationRequest:
        """The request that continues each prompt of tokens, or pools it."""
        sampling = await self._with_checked_grammar(sampling)
        encoded = [EncodedPrompt(ids) for ids in prompts]
        work = self._request(kind, encoded, sampling, pooling)
        request = await self.service.slices.result(work)
        return replace(request, top_logprobs=sampling.logprobs)

    def sampling(self, own: JsonDict, ends: Iterable[int] = ()) -> SamplingParams:
        """Checked sampling parameters. own: the route's fields; ends: more end tokens. Raises
        RequestError if the model writes no text.
        """
        body, info = self.body, self.service.info
        info.request_limits.check_writes()
        values = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
        if body.repeat_penalty is not None:
            values["repetition_penalty"] = body.repeat_penalty
        values = {name: value for name, value in values.items() if value is not None}
        fields = SamplingParams.fields_with(info.model.sampling_defaults, values)
        fields["allowed_token_ids"] = tuple(dict.fromkeys(body.allowed_token_ids or ()))
        fields["stop_token_ids"] = tuple(dict.fromkeys(body.stop_token_ids or ()))
        fields["grammar"] = self._wanted_grammar
        params = SamplingParams(**(fields | own))
        params.validate(info.model.vocab_size)
        if params.top_k > info.model.vocab_size:
            params = with_fields(params, top_k=info.model.vocab_size)
        return _with_ends(params, ends)

    async def _held_to_grammar(
        self, conversation: Conversation, prompt: str, sampling: SamplingParams
    ) -> SamplingParams:
        """The parameters with the turn's grammar, where calls, thoughts or answer need one."""
        service = self.service
        turns = service.turns.format
        budget = conversation.thinking_budget if turns.thinks else None
        turn = Turn(turns, prompt, service.turns.special_texts, budget)
        answer = self._wanted_grammar
        grammar = turn.grammar(conversation.tools, answer)
        self.context.notes.unenforced.extend(turn.unenforced)
        if grammar is None or grammar == answer:
            return sampling  # the answer's own grammar is checked elsewhere
        param = "tools" if conversation.tools is not None else self._grammar_field
        return await self._held_to(sampling, grammar, param)

    async def _with_checked_grammar(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters with their grammar made usable. Raises RequestError, blaming its field."""
        if sampling.grammar is None:
            return sampling
        return await self._held_to(sampling, sampling.grammar, self._grammar_field)

    async def _held_to(
        self, sampling: SamplingParams, grammar: Grammar, param: str
    ) -> SamplingParams:
        """The parameters with a usable grammar; its gaps are noted. Raises RequestError."""
        checked = await self.service.text.checked_grammar(grammar, param)
        notes = self.context.notes.unenforced
        notes += [place for place in checked.unenforced if place not in notes]
        return with_fields(sampling, grammar=checked.grammar)

    @property
    def _wanted_grammar(self) -> Grammar | None:
        """The grammar of the answer, as the client wrote it."""
        field = self.body.wanted_grammar
        return None if field is None else field.grammar

    @property
    def _grammar_field(self) -> str:
        """The field to blame for a grammar, "tools" if the answer has none of its own."""
        field = self.body.wanted_grammar
        return "tools" if field is None else field.param

    def _request(
        self,
        kind: RouteKind,
        prompts: list[EncodedPrompt],
        sampling: SamplingParams,
        pooling: Pooling | None = None,
    ) -> Work[GenerationRequest]:
        """The request with the fields that all routes share."""
        body = self.body
        info, tokenizer = self.service.ready()
        banned = yield from _banned_sequences(body.bad_words or (), tokenizer)
        if banned:
            sampling = with_fields(sampling, banned_sequences=banned)
        most = self._most_prompt_tokens(kind, sampling)
        if most is not None:
            for prompt in prompts:
                _truncate(prompt, most, keeps_ends=info.model.encoder)
        self.context.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        request = self._engine_request(sampling, len(prompts), pooling)
        engine_requests: list[EngineRequest] = []
        for number, prompt in enumerate(prompts):
            engine_requests.append(_for_prompt(request, number, prompt.ids, info, kind))
            yield
        return GenerationRequest(
            id=kind.id_prefix + (body.request_id or request.id),
            created=int(time.time()),
            model=self.service.name_in_answers(body.model),
            prompts=prompts,
            engine_requests=engine_requests,
            sampling=sampling,
            body=body,
            top_logprobs=None,
        )

    def _engine_request(
        self, sampling: SamplingParams, prompts: int, pooling: Pooling | None
    ) -> EngineRequest:
        """The common part of all engine requests of this request."""
        body, context, info = self.body, self.context, self.service.info
        if body.priority and info.queue.order != "priority":
            raise RequestError(
                "priority needs a server started with order priority", param="priority"
            )
        id = uuid.uuid4().hex
        group = None
        if prompts > 1:
            group = RequestGroup(id, prompts, context.prompt_tokens)
        return EngineRequest(
            id=id,
            group=group,
            prompt=[],
            sampling=sampling,
            arrival=context.started,
            deadline=self._deadline,
            priority=body.priority or 0,
            tenant=context.tenant,
            cache_salt=body.cache_salt or "",
            user=body.user or "",
            client_id=context.request_id,
            route=context.route.path if context.route is not None else "",
            background=context.background,
            admitted=context.admitted,
            adapter=self.service.adapter_number(body.model),
            pooling=pooling,
        )

    def _most_prompt_tokens(self, kind: RouteKind, sampling: SamplingParams) -> int | None:
        """Tokens that a longer prompt is cut to; None: it is not cut."""
        if self.body.truncate_prompt_tokens != _ALL_THERE_IS_ROOM_FOR:
            return self.body.truncate_prompt_tokens
        answer = sampling.max_tokens or kind.default_tokens or 1
        return max(1, self.service.info.request_limits.longest - answer)

    @property
    def _deadline(self) -> float | None:
        """Deadline of time.monotonic(), the nearer; background requests have only the client's."""
        limits = [(self.body.timeout_ms or 0) / 1000]
        if not self.context.background:
            limits.append(self.service.settings.server.request_timeout_s)
        limits = [limit for limit in limits if limit]
        return self.context.started + min(limits) if limits else None


def _with_ends(sampling: SamplingParams, ends: Iterable[int]) -> SamplingParams:
    """The parameters, ended also by these tokens."""
    all_ends = tuple(dict.fromkeys((*sampling.stop_token_ids, *ends)))
    return with_fields(sampling, stop_token_ids=all_ends)


def _check_choices(choices: int, info: EngineInfo) -> None:
    most = min(_MAX_CHOICES, info.sizes.seats + info.queue.max_waiting_requests)
    if choices > most:
        raise RequestError(f"prompts times n (or best_of) may be at most {most}", param="n")


async def _encoded(
    service: Service, items: Sequence[str | list[int]], suffix: str | None, special: bool
) -> list[EncodedPrompt]:
    """Tokens of items. Token ids are handled here, as a thread is needed for texts only."""
    _, tokenizer = service.ready()

    def encode() -> list[EncodedPrompt]:
        return [_completion_prompt(item, suffix, tokenizer, special) for item in items]

    if any(isinstance(item, str) for item in items):
        return await service.text.off_loop(encode)
    return encode()


def _completion_prompt(
    item: str | list[int], suffix: str | None, tokenizer: Tokenizer, special: bool
) -> EncodedPrompt:
    """special: whether the model's own special tokens are put around a text."""
    if not isinstance(item, str):
        return EncodedPrompt(item)
    if suffix:
        fill_in = tokenizer.fill_in
        assert fill_in is not None  # `completion` has asked for it
        return EncodedPrompt(fill_in.prompt(tokenizer, item, suffix), item)
    return EncodedPrompt(tokenizer.encode(item, add_special_tokens=special), item)


def _banned_sequences(
    words: Sequence[str], tokenizer: Tokenizer
) -> Work[tuple[tuple[int, ...], ...]]:
    """Token sequences of the words, at the beginning of a text and after a blank."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        texts = [word] if word[0].isspace() else [word, " " + word]
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids:
                sequences[tuple(ids)] = None
        yield
    return tuple(sequences)


def _for_prompt(
    template: EngineRequest, number: int, ids: list[int], info: EngineInfo, kind: RouteKind
) -> EngineRequest:
    """One prompt's engine request; refusals blame the field that the client sent."""
    request = with_fields(
        template,
        id=f"{template.id}-{number}",
        prompt=ids,
        sampling=_with_max_tokens(template.sampling, len(ids), info, kind),
    )
    try:
        info.request_limits.check(request)
    except RequestError as error:
        param = error.info.param
        if param == "logprobs":
            param = kind.logprobs_field
        if param in ("prompt", "max_tokens"):  # the prompt was checked: both are too long together
            param = kind.prompt_field
        raise error.blaming(param) from None
    return request


def _with_max_tokens(
    sampling: SamplingParams, prompt_tokens: int, info: EngineInfo, kind: RouteKind
) -> SamplingParams:
    """The parameters with max_tokens made explicit, unless the prompt itself does not fit."""
    room = info.request_limits.longest - prompt_tokens
    max_tokens = sampling.max_tokens
    if room < 1 or (max_tokens is not None and (max_tokens <= room or not kind.clamps)):
        return sampling
    if max_tokens is not None:
        return with_fields(sampling, max_tokens=room)
    return with_fields(sampling, max_tokens=min(kind.default_tokens or room, room))


def _chat_prompt(text: str, tokenizer: Tokenizer, special: bool) -> EncodedPrompt:
    try:
        ids = tokenizer.encode(text, add_special_tokens=special)
        return EncodedPrompt(ids, tail=text[-_TAIL_CHARS:])
    except RequestError as error:
        raise error.blaming("messages") from error


def _wider(one: int | None, other: int | None) -> int | None:
    """The larger of two numbers of alternatives; None is none at all."""
    if one is None or other is None:
        return one if other is None else other
    return max(one, other)


def _truncate(prompt: EncodedPrompt, tokens: int, *, keeps_ends: bool) -> None:
    """Keep the last tokens. keeps_ends: the first and the very last (an encoder's special ones)."""
    if len(prompt.ids) > tokens:
        first = prompt.ids[: tokens - 1] if keeps_ends else []
        prompt.ids = first + prompt.ids[len(first) - tokens :]
        prompt.text = None  # an echo shows what the model read
