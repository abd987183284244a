"""What goes into the engine and what comes out: plain, immutable, jax-free, the same in every
process.

These structs cross the process boundary as they are (msgspec). Token ids are ints in [0, V); times
are seconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec

from jitney.engine.errors import ContextOverflow, ErrorInfo, RequestError
from jitney.engine.step_cost import DeviceCeiling, StepCost

#: What JSON can say, before anybody has looked at it.
type JsonValue = dict[str, JsonValue] | list[JsonValue] | str | int | float | bool | None
#: An object of JSON, to be read; and one in the making.
JsonObject = Mapping[str, Any]
JsonDict = dict[str, Any]

#: Why a sequence ended. "stop": end-of-sequence, a stop token or a stop string. "length":
#: max_tokens or the context. "abort": the client left or cancelled. "deadline": its time ran out.
#: "error": see SequenceOutput.error.
type FinishReason = Literal["stop", "length", "abort", "deadline", "error"]
type EngineState = Literal["loading", "ready", "sleeping", "restarting", "draining", "dead"]


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
    """What the whole text of an answer must be. `engine.structured.grammar` makes them."""

    kind: _GrammarKind
    #: json_schema: the schema as JSON. choice: a JSON list of strings. regex, lark and gbnf: as the
    #: client wrote it. json_object, any object of JSON: nothing.
    text: str = ""
    #: Its JSON schemas are as llguidance is given them (`engine.structured.enforcement`).
    ready: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the tokens of one request.

    A field's `Range` is checked by `validate`; its `Uploaded` makes it part of every step's upload
    (`engine.executor.inputs`), so that the sampler can read it.
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
    #: Found by the text half (`jitney.engine.text.detokenizer`).
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
    def plain(self) -> bool:
        """True when argmax of the logits is the whole answer: the all-greedy executable serves this
        row.
        """
        masked = self.grammar is not None or self.ruled
        return self.greedy and not (self.penalised or self.biased or masked or self.scored)

    @property
    def ruled(self) -> bool:
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
        if self.ruled:
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
    #: Which of the engine's adapters changes the model for it, from 1; 0: none.
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
    #: How many there are.
    adapters: int = 0
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
        if not 0 <= request.adapter <= self.adapters:
            raise RequestError(f"this engine has {self.adapters} adapters", param="model")
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


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities (natural log) of one position: the chosen token's, and the most likely
    tokens in order.
    """

    #: Of the chosen token.
    logprob: float
    #: Of as many as were asked for, the likeliest first.
    top_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(msgspec.Struct, frozen=True):
    """The log-probabilities of a prompt's tokens, in columns: whoever reads a message reads them
    all at once, and 8,000 objects with 20 alternatives each hold the event loop for 20 ms and more.
    """

    #: Tokens at the beginning of which nothing is known: the first one.
    n_unknown: int
    #: Alternatives of each other token.
    width: int
    #: float64[n] of the tokens themselves, int32[n * width] and float64[n * width] of the
    #: alternatives, in this machine's order of bytes.
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes

    @classmethod
    def of(cls, entries: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
        """entries: one a token, of one width; None at the beginning alone."""
        known = [entry for entry in entries if entry is not None]
        logprobs = array("d", [entry.logprob for entry in known])
        top_ids, top_logprobs = array("i"), array("d")
        for entry in known:
            top_ids.extend(entry.top_ids)
            top_logprobs.extend(entry.top_logprobs)
        width = len(known[0].top_ids) if known else 0
        if len(top_ids) != width * len(known) or len(top_logprobs) != len(top_ids):
            raise ValueError("the tokens of a prompt have different numbers of alternatives")
        return cls(
            len(entries) - len(known),
            width,
            logprobs.tobytes(),
            top_ids.tobytes(),
            top_logprobs.tobytes(),
        )

    def __len__(self) -> int:
        return self.n_unknown + len(self.logprobs) // array("d").itemsize

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        """One entry a token."""
        yield from [None] * self.n_unknown
        logprobs = array("d", self.logprobs)
        top_ids = array("i", self.top_ids)
        top_logprobs = array("d", self.top_logprobs)
        for place, logprob in enumerate(logprobs):
            its = slice(place * self.width, (place + 1) * self.width)
            yield TokenLogprobs(logprob, top_ids[its].tolist(), top_logprobs[its].tolist())


class SequenceOutput(msgspec.Struct, omit_defaults=True):
    """New tokens of one sequence, or its end, or both. Exactly one output of a sequence has
    `finish` set.
    """

    request_id: str
    #: Of the sequence among the request's n.
    index: int
    tokens: list[int] = []
    #: One entry per new token, if asked for.
    logprobs: list[TokenLogprobs] | None = None
    #: Once, with the first token; entry i is for prompt token i, None for i = 0.
    prompt_logprobs: PromptLogprobs | None = None
    #: None while it goes on.
    finish: FinishReason | None = None
    #: The token that ended the sequence (already part of `tokens`), if one did.
    stop_token: int | None = None
    #: None unless it ended with one.
    error: ErrorInfo | None = None
    #: Prompt tokens whose KV came from the prefix cache.
    cached_tokens: int = 0
    #: Seconds until boarding, once known.
    queued_s: float | None = None
    #: Seconds from boarding to the first token, once known.
    prefill_s: float | None = None
    #: With the end, of a request that wants it: the prompt's vector of length 1, or by classify its
    #: logits as they are; float32 in this machine's order of bytes.
    embedding: bytes | None = None

    @property
    def error_code(self) -> str:
        """Empty without an error."""
        return "" if self.error is None else self.error.code


_POOLINGS: Mapping[str, Pooling] = {
    "last": "last",
    "mean": "mean",
    "cls": "cls",
    "classify": "classify",
}


def pooling_of(setting: str) -> Pooling | None:
    """What `embedding_pooling` says; None: off."""
    return _POOLINGS.get(setting)


class KernelProof(msgspec.Struct, frozen=True):
    """What came of comparing one kernel with its definition, at start, on the machine that
    serves.
    """

    # attention, norm, products, head, int4, int8 or fp8 product, or sampling cut
    kernel: str
    # the largest one seen, in units of what it should be; infinite where it could not run
    error: float
    limit: float  # the error that rounding explains
    reason: str = ""  # why it could not run

    @property
    def ok(self) -> bool:
        """False if the kernel was taken out, and the reference's serves in its place."""
        return self.error <= self.limit


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that answers, and what it can be asked for."""

    #: What the configuration calls it.
    name: str = msgspec.field(name="model")
    #: Tokens of a sequence, prompt included.
    context_length: int
    #: V.
    vocab_size: int
    #: Class name in its `config.json`, such as Qwen3ForCausalLM.
    architecture: str = ""
    #: Numbers in its matrices, and bytes of all its weights as they are kept.
    parameters: int = 0
    weight_bytes: int = 0
    #: What a request gets that does not say; by field of SamplingParams.
    sampling_defaults: dict[str, int | float] = {}
    #: What vectors of texts are made of, off or a `Pooling`; and how many numbers one has.
    embedding_pooling: str = "off"
    embedding_size: int = 0
    #: Lengths that a vector may be cut to, by the model's files; empty: any; None: none.
    embedding_dimensions: tuple[int, ...] | None = None
    #: It reads a whole text in one step and writes none: it makes vectors of texts, or scores pairs
    #: of them. No keys and values are kept.
    encoder: bool = False
    #: Names that requests call adapters by, in the order of their numbers.
    adapters: tuple[str, ...] = ()

    def number_of(self, adapter: str) -> int:
        """An adapter's number, from its name. Raises RequestError."""
        if adapter not in self.adapters:
            there = ", ".join(self.adapters) or "none"
            raise RequestError(
                f"there is no adapter {adapter!r} here; there are: {there}", param="adapter"
            )
        return 1 + self.adapters.index(adapter)

    @property
    def pooling(self) -> Pooling | None:
        """How vectors of prompts are made; None: none are."""
        return pooling_of(self.embedding_pooling)


class NumberFormats(msgspec.Struct, frozen=True, kw_only=True):
    """In which numbers an engine keeps what it has."""

    #: What it computes in, a name of numpy's.
    dtype: str
    #: How matrices are kept: a dtype, a scheme, or several with their counts.
    weights: str = ""
    #: Of stored keys and values; empty: none are.
    kv_dtype: str


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine runs on."""

    #: JAX's name: cpu, gpu or tpu.
    platform: str
    #: The chip in words, with how many there are.
    name: str = msgspec.field(name="device")
    #: Devices that the weights are split over.
    tensor_parallel: int = 1
    #: Groups of these devices that hold different experts of a mixture.
    expert_parallel: int = 1
    #: Engines that the experts are dealt out to, this one among them.
    data_parallel: int = 1


class KernelsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The compiled code of an engine, and how it is checked."""

    #: The kernel set, with its level where it has several.
    label: str = msgspec.field(name="kernels")
    #: Of every kernel that is not the reference's own.
    proofs: list[KernelProof] = []
    #: One request in so many is computed again with the reference; 0: none.
    canary_every: int = 0
    #: Programs compiled before serving, and seconds that took.
    executables: int = 0
    compile_seconds: float = 0.0

    @property
    def out(self) -> list[str]:
        """Kernels that were wrong at start, so that the reference's serve in their place."""
        return [proof.kernel for proof in self.proofs if not proof.ok]


class EngineSizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much an engine takes at once, and what its programs were compiled for."""

    #: Sequences that run at once.
    seats: int
    #: Of the KV pool, the trash page not among them; and tokens of one.
    pages: int
    page_size: int
    #: Whether prompts that start alike share pages.
    prefix_cache: bool
    #: Most rows of a step.
    token_budget: int
    #: Rows of the steps without prompts that programs were compiled for, ascending; and of those
    #: with prompts.
    seat_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()
    #: See `scheduler.buckets.Buckets`.
    padding_is_free: bool = False
    #: Alternatives that are computed for each token.
    max_logprobs: int = REQUEST_MOST.logprobs


class QueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who boards next, and how many may wait for it."""

    #: Names of `engine.scheduler.policies`.
    policy: str
    order: str
    #: More are refused.
    max_waiting_requests: int
    #: Longer predicted waits are refused; 0: none is.
    max_predicted_wait_s: float = 0.0


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is running, fixed once the engine is ready; the API, the page and `doctor` all show
    this.
    """

    #: Of this package.
    version: str
    #: Of what decides answers and speed (`config.digest`), 64 hex digits.
    config_digest: str = ""
    model: ModelInfo
    formats: NumberFormats
    device: DeviceInfo
    kernels: KernelsInfo
    sizes: EngineSizes
    queue: QueueInfo
    #: What a step reads and computes, all devices together; None: not known of this model.
    step_cost: StepCost | None = None
    #: The most that was measured of these devices; None: it was not.
    ceiling: DeviceCeiling | None = None

    @property
    def request_limits(self) -> RequestLimits:
        """What a request is checked against."""
        return RequestLimits(
            vocab_size=self.model.vocab_size,
            context_length=self.model.context_length,
            pool_tokens=self.sizes.pages * self.sizes.page_size,
            max_logprobs=self.sizes.max_logprobs,
            pooling=self.model.pooling,
            adapters=len(self.model.adapters),
            encoder=self.model.encoder,
        )

    def flat(self) -> JsonDict:
        """All of it as one object of JSON without groups, as the page and reports have it: the
        model's, the device's and the kernels' names are "model", "device" and "kernels".
        """
        shown: JsonDict = {"version": self.version, "config_digest": self.config_digest}
        groups = (self.model, self.formats, self.device, self.kernels, self.sizes, self.queue)
        for group in groups:
            shown |= msgspec.to_builtins(group)
        return shown


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """One seat as `/slots` and the page show it.

    state: free | prefill | decode | held: the batch keeps the seat though its sequence, the one
    named here, has left.
    """

    #: Its number, from 0.
    seat: int
    state: str
    #: None, and all below as declared here: nobody sits in it.
    request_id: str | None = None
    #: Its sequence gives way to others.
    background: bool = False
    #: Which of its request's `n` answers the sequence is, from 0.
    index: int = 0
    #: Tokens of the prompt.
    n_prompt: int = 0
    #: Tokens, of prompt and answer, that are computed or are in the steps on their way.
    n_computed: int = 0
    #: Tokens of the answer so far, and at most.
    n_output: int = 0
    max_tokens: int = 0
    #: Of the pool, that the sequence has.
    pages: int = 0
