"""Requests of the engine: sampling parameters with their ranges, and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec

from jitney.engine.common.errors import ContextOverflow, RequestError

#: Any JSON value, not yet checked.
type JsonValue = dict[str, JsonValue] | list[JsonValue] | str | int | float | bool | None
#: A JSON object to read, and one to build.
JsonObject = Mapping[str, Any]
JsonDict = dict[str, Any]


class _Most(NamedTuple):
    """Largest values of one request."""

    #: Sequences for a prompt.
    n: int = 128
    #: Default number of alternatives per token, which the compiled sampler computes (max_logprobs).
    logprobs: int = 20
    #: Logit biases of a seat on the device: logit_bias, and end tokens held back by min_tokens.
    biases: int = 512


REQUEST_MOST = _Most()
#: Largest max_logprobs of a server.
_MOST_LOGPROBS = 500
#: Biases of a request; the others are for the model's end tokens.
_MOST_NAMED = REQUEST_MOST.biases - 8
_MAX_STOP_CHARS = 256
#: Most tokens of a banned word.
_MAX_WORD_TOKENS = 256
_MAX_INT = 2**31 - 1
#: Smaller temperatures count as 0, since logits are divided by the temperature.
_GREEDY_BELOW = 1e-5


class Range(NamedTuple):
    """The range of a sampling parameter."""

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


#: Range of logit_bias.
_BIASES = Range(-100.0, 100.0)


class Uploaded(NamedTuple):
    """Marks a sampling parameter that the sampler reads on the device, under its own name."""

    dtype: Literal["float32", "int32"]
    #: The value to upload; None: the field's.
    value: Callable[[SamplingParams], float] | None = None


def _uploaded_temperature(params: SamplingParams) -> float:
    return 0.0 if params.greedy else params.temperature


def _uploaded_top_k(params: SamplingParams) -> int:
    return max(params.top_k, 0)


#: Languages of grammars.
_GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf"]


class Grammar(msgspec.Struct, frozen=True):
    """A grammar for the whole text of an answer, made by `engine.core.grammar.grammar`."""

    kind: _GrammarKind
    #: json_schema: the schema as JSON. choice: a JSON list of strings. regex, lark and gbnf: as the
    #: client wrote it. json_object (any JSON object): "".
    text: str = ""
    #: Its JSON schemas are prepared for llguidance (`engine.core.grammar.enforcement`).
    ready: bool = False


#: Fields of `SamplingParams` for `in_words`: numbers only, no text of a client.
_IN_WORDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "logprobs",
)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters that choose the tokens of one request. `validate` checks each field's `Range`;
    those with `Uploaded` are part of every step's upload (`engine.core.executor.inputs`).
    """

    #: Sequences for the prompt.
    n: Annotated[int, Range(1, REQUEST_MOST.n)] = 1
    #: None: up to the end of the context.
    max_tokens: Annotated[int | None, Range(1, _MAX_INT)] = 16
    #: No end token is sampled before this many tokens.
    min_tokens: Annotated[int, Range(0, _MAX_INT)] = 0
    #: 0 is greedy.
    temperature: Annotated[float, Range(0.0, 2.0), Uploaded("float32", _uploaded_temperature)] = 1.0
    #: 0 and -1 are off.
    top_k: Annotated[int, Range(-1, _MAX_INT), Uploaded("int32", _uploaded_top_k)] = 0
    #: 1 is off.
    top_p: Annotated[float, Range(0.0, 1.0, open_low=True), Uploaded("float32")] = 1.0
    #: Least share of the likeliest token's probability; 0 is off.
    min_p: Annotated[float, Range(0.0, 1.0), Uploaded("float32")] = 0.0
    #: None: drawn at random.
    seed: Annotated[int | None, Range(-(2**63), 2**63 - 1)] = None
    #: 1 is off. Logits are divided by it: below about 1e-36 they would not be finite.
    repetition_penalty: Annotated[float, Range(0.001, 10.0), Uploaded("float32")] = 1.0
    #: Subtracted from the logits of tokens that occurred: once, and per occurrence. 0 is off.
    presence_penalty: Annotated[float, Range(-2.0, 2.0), Uploaded("float32")] = 0.0
    frequency_penalty: Annotated[float, Range(-2.0, 2.0), Uploaded("float32")] = 0.0
    #: Token id -> number added to its logit.
    logit_bias: dict[int, float] = {}
    #: Found in the text, by `jitney.engine.core.text.detokenizer`.
    stop: tuple[str, ...] = ()
    #: Found by the core.
    stop_token_ids: tuple[int, ...] = ()
    #: Keep the stop string that ended the text.
    include_stop_str_in_output: bool = False
    #: Leave special tokens out of the text.
    skip_special_tokens: bool = True
    #: Do not end at the model's end tokens.
    ignore_eos: bool = False
    #: Log-probabilities of output tokens; None: none, 0: the chosen token's, n: also the n best.
    logprobs: Annotated[int | None, Range(0, _MOST_LOGPROBS)] = None
    #: Log-probabilities of prompt tokens, likewise.
    prompt_logprobs: Annotated[int | None, Range(0, _MOST_LOGPROBS)] = None
    #: None: any text.
    grammar: Grammar | None = None
    #: The only tokens that may be chosen; empty: all.
    allowed_token_ids: tuple[int, ...] = ()
    #: Token sequences that must not occur.
    banned_sequences: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def declared(cls) -> _Declared:
        """Field -> its `Range` and `Uploaded`."""
        return _declared(cls)

    @classmethod
    def fields_with(cls, defaults: Mapping[str, float], explicit: JsonDict) -> JsonDict:
        """A request's fields over a model's defaults. At temperature 0 the default repetition
        penalty is left out: greedy means the model's likeliest token.
        """
        fields: JsonDict = {**defaults, **explicit}
        is_greedy = fields.get("temperature", 1.0) < _GREEDY_BELOW
        if is_greedy and "repetition_penalty" not in explicit:
            fields.pop("repetition_penalty", None)
        return fields

    @property
    def in_words(self) -> str:
        """The numbers that are not the defaults, for people: "temperature 0.7, seed 5"."""
        named = [(name, getattr(self, name)) for name in _IN_WORDS]
        defaults = SamplingParams()
        words = [f"{name} {value}" for name, value in named if value != getattr(defaults, name)]
        return ", ".join(words if self.grammar is None else [*words, "a grammar"])

    @property
    def greedy(self) -> bool:
        """True at temperature 0, or one too small to divide by."""
        return self.temperature < _GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """True if past tokens change the logits, so that the seat must count them."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def biased(self) -> bool:
        """True if numbers are added to some logits (logit_bias, or min_tokens banning ends)."""
        return bool(self.logit_bias) or self.min_tokens > 0

    @property
    def scored(self) -> bool:
        """True if log-probabilities are requested."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def greedy_only(self) -> bool:
        """True if the token is the argmax of the logits, as the all-greedy program computes it."""
        masked = self.grammar is not None or self.constrained
        return self.greedy and not (self.penalised or self.biased or masked or self.scored)

    @property
    def constrained(self) -> bool:
        """True if some tokens are excluded apart from a grammar."""
        return bool(self.allowed_token_ids or self.banned_sequences)

    def validate(self, vocab_size: int) -> None:
        """Raise RequestError naming a field that is out of range. Token ids are checked too: a
        device silently clamps an index past the vocabulary.
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
            raise RequestError(
                f"logit_bias and stop_token_ids together may name at most {_MOST_NAMED} tokens",
                param="logit_bias" if self.logit_bias else "stop_token_ids",
            )


#: Field -> annotations.
type _Declared = dict[str, tuple[Range | Uploaded, ...]]
type _Ranges = list[tuple[str, Range]]


@cache
def _declared(params: type[SamplingParams]) -> _Declared:
    hints = get_type_hints(params, include_extras=True)
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}


@cache
def _ranges(params: type[SamplingParams]) -> _Ranges:
    return [
        (name, item)
        for name, items in _declared(params).items()
        for item in items
        if isinstance(item, Range)
    ]


class RequestGroup(msgspec.Struct, frozen=True):
    """The requests for the prompts of one body: all of them may wait, or none."""

    id: str
    #: Number of requests, and tokens of all prompts.
    requests: int
    prompt_tokens: int


#: Output of a prompt in place of tokens. last, mean: a vector from the last token's hidden state,
#: or from the mean of all. Encoders also have cls: a vector from the first token's, and classify:
#: the logits of the model's head.
type Pooling = Literal["last", "mean", "cls", "classify"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request of the core: token ids, no text."""

    #: Set by the engine, unique among open requests.
    id: str
    #: At least one token id.
    prompt: list[int]
    sampling: SamplingParams
    #: Seconds of time.monotonic(), which all processes of a machine share.
    arrival: float
    #: Seconds of time.monotonic(); None: none.
    deadline: float | None = None
    #: Lower ones board sooner.
    priority: int = 0
    #: Digest of the API key; empty without keys. Part of the prefix-cache key, like cache_salt, so
    #: that no tenant can detect another's prompts by time.
    tenant: str = ""
    cache_salt: str = ""
    #: Number of the adapter; 0: none. Numbers are never reused, not even for the same name.
    adapter: int = 0
    #: The body's `user`: the account of requests without a key in the fair order.
    user: str = ""
    #: The x-request-id of the HTTP request, by which people find it; not unique.
    client_id: str = ""
    #: The template of the path that it came to, such as "/v1/chat/completions".
    route: str = ""
    #: A batch request: it boards only into seats that no other request wants, and gives way
    #: (`StepPlanner._plan_background`).
    background: bool = False
    #: The HTTP request's prompts, where it has several: they are submitted one after the other.
    group: RequestGroup | None = None
    #: How to make the prompt's vector or logits; None: generate tokens.
    pooling: Pooling | None = None
    #: For a request of an earlier core: output tokens of each sequence so far, None if it ended.
    resumed: list[list[int] | None] | None = None
    #: Another engine admitted it before that engine was lost: it is not refused for a predicted
    #: wait.
    admitted: bool = False

    @property
    def account(self) -> str:
        """The tenant in the fair order: the API key, or without keys the `user`."""
        return account_of(self.tenant, self.user)


def account_of(tenant: str, user: str) -> str:
    """The account of a request: the tenant, or without one the user."""
    return tenant or f"user {user}"


class RequestLimits(msgspec.Struct, frozen=True):
    """The limits of one request on an idle engine, checked by the API and again at admission."""

    #: V; token ids are smaller.
    vocab_size: int
    #: Most tokens of a sequence, prompt included.
    context_length: int
    #: KV positions of the whole pool.
    pool_tokens: int
    #: Alternatives computed per token.
    max_logprobs: int = REQUEST_MOST.logprobs
    #: How vectors of prompts are made; None: not at all.
    pooling: Pooling | None = None
    #: Numbers of the adapters.
    adapters: frozenset[int] = frozenset()
    #: See `ModelInfo`.
    encoder: bool = False

    @property
    def longest(self) -> int:
        """Most tokens of a sequence; the last one needs no KV position, as it is not fed back."""
        if self.encoder:
            return self.context_length
        return min(self.context_length, self.pool_tokens + 1)

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt: a decoder needs room for one more."""
        return self.longest if self.encoder else self.longest - 1

    def check(self, request: EngineRequest) -> int:
        """Most tokens that the request may generate. Raises RequestError if it can never run."""
        request.sampling.validate(self.vocab_size)
        self._check_logprobs(request.sampling)
        if request.pooling not in (None, self.pooling):
            raise RequestError(
                f"this engine makes no vectors by {request.pooling} (--embedding-pooling)",
                code="unsupported_parameter",
            )
        if request.adapter and request.adapter not in self.adapters:
            raise RequestError(
                "the adapter was removed or replaced; see /v1/models",
                code="model_not_found",
                param="model",
            )
        self._check_prompt(request.prompt)
        if self.encoder:
            if len(request.prompt) > self.longest:
                raise RequestError.too_long(self.overflow(len(request.prompt), 0), "prompt")
            return 1  # for quotas: an encoder generates nothing
        return self._most_generated(request)

    def overflow(
        self, prompt_tokens: int, completion_tokens: int, *, is_lower_bound: bool = False
    ) -> ContextOverflow:
        """The numbers of a request of more than `longest` tokens."""
        model_context = self.context_length if self.longest < self.context_length else 0
        return ContextOverflow(
            self.longest, prompt_tokens, completion_tokens, is_lower_bound, model_context
        )

    def check_writes(self) -> None:
        """Raise RequestError if the model writes no text."""
        if not self.encoder:
            return
        use = "vectors of texts (/v1/embeddings)"
        if self.pooling == "classify":
            use = "scores of pairs of texts (/v1/rerank, /v1/score)"
        raise RequestError(
            f"this model writes no text: it makes {use}",
            code="unsupported_parameter",
            param="model",
        )

    def _check_logprobs(self, sampling: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(sampling, name)
            if count is not None and count > self.max_logprobs:
                raise RequestError(
                    f"{name} must be at most {self.max_logprobs}, the limit of this server "
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
        """Most tokens of the answer. Raises RequestError if they, or a single one, do not fit."""
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
    """The value of `embedding_pooling`; None: off."""
    return _POOLINGS.get(setting)
