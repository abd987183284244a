"""A request as the engine takes it: sampling parameters, limits and their ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec

from jitney.engine.common.errors import ContextOverflow, RequestError

#: What JSON can say, before anybody has looked at it.
type JsonValue = dict[str, JsonValue] | list[JsonValue] | str | int | float | bool | None
#: An object of JSON, to be read; and one in the making.
JsonObject = Mapping[str, Any]
JsonDict = dict[str, Any]


class _Most(NamedTuple):
    """What one request may ask for."""

    #: Sequences that answer its prompt.
    n: int = 128
    #: Alternatives of a token, unless the server says otherwise (max_logprobs); the compiled
    #: sampler always computes this many.
    logprobs: int = 20
    #: Entries of logit_bias + stop ids held back by min_tokens that one seat can carry on the
    #: device.
    biases: int = 512


REQUEST_MOST = _Most()
#: The most alternatives that a server may say.
_MOST_LOGPROBS = 500
#: Entries of `biases` that the model's own end tokens do not take, which are the request's.
_MOST_NAMED = REQUEST_MOST.biases - 8
_MAX_STOP_CHARS = 256
#: Most tokens of a banned word.
_MAX_WORD_TOKENS = 256
_MAX_INT = 2**31 - 1
#: Temperatures too small to divide by.
_GREEDY_BELOW = 1e-5


class Range(NamedTuple):
    """What a sampling parameter may be."""

    #: Least and greatest value.
    low: float
    high: float
    open_low: bool = False  #: `low` itself is out of range

    def check(self, name: str, value: float) -> None:
        """Raise RequestError naming the field unless the value is in range; NaN never is."""
        inside = self.low <= value <= self.high
        if not inside or (self.open_low and value == self.low):
            least = "more than" if self.open_low else "at least"
            raise RequestError(
                f"{name} must be {least} {self.low} and at most {self.high}", param=name
            )


#: What logit_bias may add.
_BIASES = Range(-100.0, 100.0)


class Uploaded(NamedTuple):
    """A sampling parameter that the sampler reads, under its own name, on the device."""

    dtype: Literal["float32", "int32"]
    #: What is uploaded in the field's place.
    value: Callable[[SamplingParams], float] | None = None


def _drawn_temperature(params: SamplingParams) -> float:
    """The temperature, 0 where it is too small to divide by."""
    return 0.0 if params.greedy else params.temperature


def _kept_candidates(params: SamplingParams) -> int:
    """top_k, 0 where it is off."""
    return max(params.top_k, 0)


#: What a grammar is written in.
_GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf"]


class Grammar(msgspec.Struct, frozen=True):
    """What the whole text of an answer must be. `engine.core.grammar.grammar` makes them."""

    kind: _GrammarKind
    #: json_schema: the schema as JSON. choice: a JSON list of strings. regex, lark and gbnf: as the
    #: client wrote it. json_object, any object of JSON: nothing.
    text: str = ""
    #: Its JSON schemas are as llguidance is given them (`engine.core.grammar.enforcement`).
    ready: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the tokens of one request.

    A field's `Range` is checked by `validate`; its `Uploaded` makes it part of every step's upload
    (`engine.core.executor.inputs`), so that the sampler can read it.
    """

    #: Sequences that answer the prompt.
    n: Annotated[int, Range(1, REQUEST_MOST.n)] = 1
    #: None: up to the end of the context.
    max_tokens: Annotated[int | None, Range(1, _MAX_INT)] = 16
    #: No end token is sampled before this many.
    min_tokens: Annotated[int, Range(0, _MAX_INT)] = 0
    #: 0 is greedy.
    temperature: Annotated[float, Range(0.0, 2.0), Uploaded("float32", _drawn_temperature)] = 1.0
    #: 0 and -1 are off.
    top_k: Annotated[int, Range(-1, _MAX_INT), Uploaded("int32", _kept_candidates)] = 0
    #: 1 is off.
    top_p: Annotated[float, Range(0.0, 1.0, open_low=True), Uploaded("float32")] = 1.0
    #: 0 is off; else the least share of the likeliest token's probability.
    min_p: Annotated[float, Range(0.0, 1.0), Uploaded("float32")] = 0.0
    #: None: drawn at random.
    seed: Annotated[int | None, Range(-(2**63), 2**63 - 1)] = None
    #: 1 is off. Logits are divided by it: by less than about 1e-36 they would not be finite.
    repetition_penalty: Annotated[float, Range(0.001, 10.0), Uploaded("float32")] = 1.0
    #: Taken from the logits of tokens that have come: once, and for each time. 0 is off.
    presence_penalty: Annotated[float, Range(-2.0, 2.0), Uploaded("float32")] = 0.0
    frequency_penalty: Annotated[float, Range(-2.0, 2.0), Uploaded("float32")] = 0.0
    #: Token id -> what is added to its logit.
    logit_bias: dict[int, float] = {}
    #: Found by the text half (`jitney.engine.core.text.detokenizer`).
    stop: tuple[str, ...] = ()
    #: Found by the core.
    stop_token_ids: tuple[int, ...] = ()
    #: The stop string that ended the text stays in it.
    include_stop_str_in_output: bool = False
    #: They are left out of the text.
    skip_special_tokens: bool = True
    #: The model's end tokens end nothing.
    ignore_eos: bool = False
    #: Log-probabilities of output tokens; None: none, 0: the chosen token's, n: also the n best.
    logprobs: Annotated[int | None, Range(0, _MOST_LOGPROBS)] = None
    #: Likewise of the prompt's own tokens.
    prompt_logprobs: Annotated[int | None, Range(0, _MOST_LOGPROBS)] = None
    #: None: any text.
    grammar: Grammar | None = None
    #: The only tokens that may be chosen; empty: all.
    allowed_token_ids: tuple[int, ...] = ()
    #: Words as tokens, each of which never comes whole.
    banned_sequences: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def declared(cls) -> _Declared:
        """What each field is annotated with, by its name."""
        return _declared(cls)

    @classmethod
    def fields_with(cls, defaults: Mapping[str, float], given: JsonDict) -> JsonDict:
        """The fields that a request gives, over a model's defaults. At temperature 0 a default
        repetition penalty is left out: greedy means the model's own likeliest token.
        """
        fields: JsonDict = {**defaults, **given}
        is_greedy = fields.get("temperature", 1.0) < _GREEDY_BELOW
        if is_greedy and "repetition_penalty" not in given:
            fields.pop("repetition_penalty", None)
        return fields

    @property
    def greedy(self) -> bool:
        """True when no randomness is wanted (temperature 0, or too small to divide by)."""
        return self.temperature < _GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """True when past tokens change the logits, so that the seat must count them."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def biased(self) -> bool:
        """True when fixed amounts are added to some logits (logit_bias, or min_tokens banning the
        ends).
        """
        return bool(self.logit_bias) or self.min_tokens > 0

    @property
    def scored(self) -> bool:
        """True when log-probabilities of any kind are wanted."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def greedy_only(self) -> bool:
        """True when argmax of the logits is the whole answer: the all-greedy executable serves this
        row.
        """
        masked = self.grammar is not None or self.constrained
        return self.greedy and not (self.penalised or self.biased or masked or self.scored)

    @property
    def constrained(self) -> bool:
        """True when some tokens may not be chosen, whatever its grammar says."""
        return bool(self.allowed_token_ids or self.banned_sequences)

    def validate(self, vocab_size: int) -> None:
        """Raise RequestError naming a field that is out of range.

        Token ids are checked here, on the host: an index past the vocabulary is clamped in silence
        on a device.
        """
        for name, allowed in _ranges(type(self)):
            value = getattr(self, name)
            if value is not None:
                allowed.check(name, value)
        if self.min_tokens and self.max_tokens is not None:
            Range(0, self.max_tokens).check("min_tokens", self.min_tokens)
        if self.logit_bias or self.stop_token_ids:
            self._check_token_ids(vocab_size)
        if self.constrained:
            self._check_rules(vocab_size)
        for text in self.stop:
            if not text or len(text) > _MAX_STOP_CHARS:
                raise RequestError(
                    f"stop strings must have 1 to {_MAX_STOP_CHARS} characters", param="stop"
                )

    def _check_rules(self, vocab_size: int) -> None:
        token_ids = Range(0, vocab_size - 1)
        allowed = self.allowed_token_ids
        if allowed:
            token_ids.check("allowed_token_ids", min(allowed))
            token_ids.check("allowed_token_ids", max(allowed))
        alone: set[int] = set()
        for banned in self.banned_sequences:
            if not banned or len(banned) > _MAX_WORD_TOKENS:
                raise RequestError(
                    f"bad_words must have 1 to {_MAX_WORD_TOKENS} tokens", param="bad_words"
                )
            token_ids.check("bad_words", min(banned))
            token_ids.check("bad_words", max(banned))
            if len(banned) == 1:
                alone.add(banned[0])
        if allowed and alone.issuperset(allowed):
            raise RequestError("bad_words leave none of allowed_token_ids", param="bad_words")

    def _check_token_ids(self, vocab_size: int) -> None:
        token_ids = Range(0, vocab_size - 1)
        for token, bias in self.logit_bias.items():
            token_ids.check("logit_bias", token)
            _BIASES.check("logit_bias", bias)
        for token in self.stop_token_ids:
            token_ids.check("stop_token_ids", token)
        if len(self.logit_bias) + len(self.stop_token_ids) > _MOST_NAMED:
            blamed = "stop_token_ids"
            if self.logit_bias:
                blamed = "logit_bias"
            raise RequestError(
                f"logit_bias and stop_token_ids together may name at most {_MOST_NAMED} tokens",
                param=blamed,
            )


#: By field.
type _Declared = dict[str, tuple[Range | Uploaded, ...]]
type _Ranges = list[tuple[str, Range]]


@cache
def _declared(params: type[SamplingParams]) -> _Declared:
    """What each field of a class of sampling parameters is annotated with."""
    hints = get_type_hints(params, include_extras=True)
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}


@cache
def _ranges(params: type[SamplingParams]) -> _Ranges:
    """The fields that have a range, and what it is."""
    return [
        (name, item)
        for name, items in _declared(params).items()
        for item in items
        if isinstance(item, Range)
    ]


class Whole(msgspec.Struct, frozen=True):
    """Requests that came together, one for each prompt of a client's: all wait, or none does."""

    id: str
    #: How many they are, and the tokens of all their prompts.
    requests: int
    prompt_tokens: int


#: What becomes of a prompt's hidden states instead of a token. last, mean: a vector of the last
#: token's, or of the mean of all. Of encoders also cls: a vector of the first token's; and
#: classify: the logits of the model's own head.
type Pooling = Literal["last", "mean", "cls", "classify"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the core sees it: token ids, never text."""

    #: The engine's own, unique among open requests.
    id: str
    #: At least one token id.
    prompt: list[int]
    sampling: SamplingParams
    #: Seconds of time.monotonic(), which all processes of one machine share; so is the deadline.
    arrival: float
    #: None: it may take as long as it takes.
    deadline: float | None = None
    #: Lower boards sooner.
    priority: int = 0
    #: A digest of the API key. With cache_salt it is part of the prefix-cache key, so no tenant can
    #: time another's prompts.
    tenant: str = ""
    cache_salt: str = ""
    #: The number of the adapter that changes the model for it; 0: none. One that comes while the
    #: engine serves gets a number that none had, also where it takes another's name.
    adapter: int = 0
    #: Whom the client says it asks for; in the fair order it tells apart those without a key.
    user: str = ""
    #: Nobody waits for it: it boards only where no other request wants the seat, and gives way to
    #: them (`Scheduler._plan_background` plans for it).
    background: bool = False
    #: What it is a part of, if it did not come alone. Its parts are submitted one after the other.
    whole: Whole | None = None
    #: A vector of the prompt is wanted, or the logits of it, made this way, and no token; None:
    #: tokens.
    pooling: Pooling | None = None
    #: Of a request that an earlier core had: the output tokens of each of its sequences so far,
    #: None for one that has ended.
    resumed: list[list[int] | None] | None = None

    @property
    def account(self) -> str:
        """Who is charged for it in the fair order: the key's tenant, or else the user."""
        return self.tenant or f"user {self.user}"


class RequestLimits(msgspec.Struct, frozen=True):
    """What one request may ask of an engine, however idle: asked early by the API, and once more
    at admission.
    """

    #: V; token ids are below it.
    vocab_size: int
    #: Tokens a sequence may have, prompt included.
    context_length: int
    #: KV positions of the whole pool.
    pool_tokens: int
    #: Alternatives that are computed for each token.
    max_logprobs: int = REQUEST_MOST.logprobs
    #: How vectors of prompts are made; None: none are.
    pooling: Pooling | None = None
    #: Numbers of those that there are.
    adapters: frozenset[int] = frozenset()
    #: See `ModelInfo`.
    encoder: bool = False

    @property
    def longest(self) -> int:
        """Most tokens of a sequence; its last one is never fed back, so it needs no KV position."""
        if self.encoder:
            return self.context_length
        return min(self.context_length, self.pool_tokens + 1)

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt: a model that writes needs room for one token more."""
        return self.longest if self.encoder else self.longest - 1

    def check(self, request: EngineRequest) -> int:
        """The most tokens the request may generate. Raises RequestError if it can never run."""
        request.sampling.validate(self.vocab_size)
        self._check_logprobs(request.sampling)
        if request.pooling not in (None, self.pooling):
            raise RequestError(
                f"this engine makes no vectors of prompts by {request.pooling} "
                "(--embedding-pooling)",
                code="unsupported_parameter",
            )
        if request.adapter and request.adapter not in self.adapters:
            raise RequestError(
                "the adapter was removed or replaced; /v1/models lists what there is",
                code="model_not_found",
                param="model",
            )
        self._check_prompt(request.prompt)
        if self.encoder:
            return self._no_tokens(len(request.prompt))
        return self._most_generated(request)

    def overflow(
        self, prompt_tokens: int, completion_tokens: int, *, is_lower_bound: bool = False
    ) -> ContextOverflow:
        """What is said of a request that needs more than `longest` tokens. is_lower_bound: of the
        prompt's.
        """
        model_context = self.context_length if self.longest < self.context_length else 0
        return ContextOverflow(
            self.longest, prompt_tokens, completion_tokens, is_lower_bound, model_context
        )

    def check_writes(self) -> None:
        """Raise RequestError if the model writes no text."""
        if not self.encoder:
            return
        made = "vectors of texts (/v1/embeddings)"
        if self.pooling == "classify":
            made = "scores of pairs of texts (/v1/rerank, /v1/score)"
        raise RequestError(
            f"this model writes no text: it makes {made}",
            code="unsupported_parameter",
            param="model",
        )

    def _no_tokens(self, prompt_tokens: int) -> int:
        """What an encoder's request counts as; its prompt may fill the context."""
        if prompt_tokens > self.longest:
            raise RequestError.too_long(self.overflow(prompt_tokens, 0), "prompt")
        return 1

    def _check_logprobs(self, sampling: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(sampling, name)
            if wanted is not None and wanted > self.max_logprobs:
                raise RequestError(
                    f"{name} must be at most {self.max_logprobs}, as many as this server computes "
                    "(--max-logprobs)",
                    param=name,
                )

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise RequestError("the prompt must have at least one token", param="prompt")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise RequestError(
                f"token ids of the prompt must be 0 to {self.vocab_size - 1}", param="prompt"
            )

    def _most_generated(self, request: EngineRequest) -> int:
        """Tokens of the answer: max_tokens, or all that there is room for. Raises RequestError if
        there is not that much, or none for a single token.
        """
        sampling = request.sampling
        prompt_tokens = len(request.prompt)
        left = self.longest - prompt_tokens
        requested = max(sampling.max_tokens or 1, sampling.min_tokens)
        if requested <= left:
            return sampling.max_tokens or left
        param = "min_tokens" if sampling.max_tokens is None else "max_tokens"
        if left < 1:
            param = "prompt"
        raise RequestError.too_long(self.overflow(prompt_tokens, requested), param)


_POOLINGS: Mapping[str, Pooling] = {
    "last": "last",
    "mean": "mean",
    "cls": "cls",
    "classify": "classify",
}


def pooling_of(setting: str) -> Pooling | None:
    """What `embedding_pooling` says; None: off."""
    return _POOLINGS.get(setting)
