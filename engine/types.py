"""What goes into the engine and what comes out: plain, immutable, jax-free, the same in every
process.

These structs cross the process boundary as they are (msgspec). Token ids are ints in [0, V); times
are seconds.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from jitney.engine.errors import ErrorInfo, RequestError

#: Why a sequence ended. "stop": end-of-sequence, a stop token or a stop string. "length":
#: max_tokens or the context. "abort": the client left or cancelled. "deadline": its time ran out.
#: "error": see SequenceOutput.error.
FinishReason = Literal["stop", "length", "abort", "deadline", "error"]

#: The most alternatives a request may ask for per token; the compiled sampler always computes this
#: many.
MAX_LOGPROBS = 20
#: Entries of logit_bias + stop ids held back by min_tokens that one seat can carry on the device.
MAX_BIAS = 512
MAX_N = 128
#: Fields of SamplingParams that a model may bring its own defaults of.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the tokens of one request.

    max_tokens None means: up to the end of the context. temperature 0 is greedy. top_k 0 (or -1)
    and top_p 1 are off. seed None draws one at random. logprobs None: none; 0: the chosen token's;
    n: also the n most likely (n <= 20). prompt_logprobs likewise for the prompt's own tokens. stop
    strings are found by the text half (`jitney.engine.text.detokenizer`); stop_token_ids by the
    core.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """True when no randomness is wanted (temperature 0, or too small to divide by)."""
        return self.temperature < 1e-5

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
        return self.greedy and not (self.penalised or self.biased or self.scored)

    def validate(self, vocab_size: int) -> None:
        """Raise RequestError naming the first field that is out of range.

        Token ids are checked here, on the host: an index past the vocabulary is clamped in silence
        on a device.
        """
        in_range("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            in_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        in_range(
            "min_tokens",
            self.min_tokens,
            0,
            self.max_tokens if self.max_tokens is not None else 2**31 - 1,
        )
        in_range("temperature", self.temperature, 0.0, 2.0)
        in_range("top_k", self.top_k, -1, 2**31 - 1)
        in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        in_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            in_range("seed", self.seed, -(2**63), 2**63 - 1)
        in_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, bias in self.logit_bias.items():
            in_range("logit_bias", token, 0, vocab_size - 1)
            in_range("logit_bias", bias, -100.0, 100.0)
        for token in self.stop_token_ids:
            in_range("stop_token_ids", token, 0, vocab_size - 1)
        if (
            len(self.logit_bias) + len(self.stop_token_ids) > MAX_BIAS - 8
        ):  # 8: the model's own end tokens
            raise RequestError(
                f"logit_bias and stop_token_ids together may name at most {MAX_BIAS - 8} tokens",
                param="logit_bias" if self.logit_bias else "stop_token_ids",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                in_range(name, value, 0, MAX_LOGPROBS)
        for text in self.stop:
            if not text or len(text) > 256:
                raise RequestError("stop strings must have 1 to 256 characters", param="stop")


def in_range(param: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise RequestError unless low <= value <= high (low < value if open_low); NaN is never in
    range.
    """
    finite = not isinstance(value, float) or math.isfinite(value)
    if not finite or not low <= value <= high or (open_low and value == low):
        left = "more than" if open_low else "at least"
        raise RequestError(f"{param} must be {left} {low} and at most {high}", param=param)


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the core sees it: token ids, never text.

    id: the engine's own, unique among open requests. deadline, arrival: seconds of
    time.monotonic(), which all processes of one machine share. priority: lower boards sooner.
    tenant (a digest of the API key) and cache_salt are part of the prefix-cache key, so no tenant
    can time another's prompts. user: whom the client says it asks for; tells apart, in the fair
    order, those who come without a key.
    """

    id: str
    prompt: list[int]
    sampling: SamplingParams
    arrival: float
    deadline: float | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    user: str = ""

    @property
    def account(self) -> str:
        """Who is charged for it in the fair order: the key's tenant, or else the user."""
        return self.tenant or f"user {self.user}"


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities (natural log) of one position: the chosen token's, and the most likely
    tokens in order.
    """

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class SequenceOutput(msgspec.Struct, omit_defaults=True):
    """News of one sequence: new tokens, or its end, or both. Exactly one output of a sequence has
    `finish` set.

    logprobs: one entry per new token, if asked for. prompt_logprobs: once, with the first token;
    entry i is for prompt token i, None for i = 0. cached_tokens: prompt tokens whose KV came from
    the prefix cache. stop_token: the token that ended it (already part of `tokens`), if one did.
    queued_s, prefill_s: seconds until boarding / from boarding to the first token, once known.
    """

    request_id: str
    index: int
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: ErrorInfo | None = None
    cached_tokens: int = 0
    queued_s: float | None = None
    prefill_s: float | None = None


class KernelProof(msgspec.Struct, frozen=True):
    """What came of comparing one kernel with its definition, at start, on the machine that
    serves.
    """

    kernel: str  # attention, norm, products, head, int4 product or sampling cut
    # the largest one seen, in units of what it should be; infinite where it could not run
    error: float
    limit: float  # the error that rounding explains
    reason: str = ""  # why it could not run

    @property
    def ok(self) -> bool:
        """False if the kernel was taken out, and the reference's serves in its place."""
        return self.error <= self.limit


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is running, fixed once the engine is ready; the API, the page and `doctor` all show
    this.
    """

    model: str
    context_length: int
    vocab_size: int
    seats: int
    pages: int
    page_size: int
    token_budget: int
    policy: str
    order: str
    kernels: str
    platform: str
    device: str
    dtype: str
    kv_dtype: str
    prefix_cache: bool
    version: str
    max_waiting_requests: int
    executables: int = 0
    compile_seconds: float = 0.0
    tensor_parallel: int = 1
    sampling_defaults: dict[
        str, int | float
    ] = {}  # what a request gets that does not say; by field of SamplingParams
    weights: str = ""  # how matrices are kept: a dtype, a scheme, or several with their counts
    seat_buckets: tuple[
        int, ...
    ] = ()  # rows of the decode-only steps that programs were compiled for, ascending
    token_buckets: tuple[int, ...] = ()  # rows of those with prompts
    proofs: list[KernelProof] = []  # of every kernel that is not the reference's own
    canary_every: int = 0  # one request in so many is computed again with the reference; 0: none

    @property
    def kernels_out(self) -> list[str]:
        """Kernels that were wrong at start, so that the reference's serve in their place."""
        return [proof.kernel for proof in self.proofs if not proof.ok]


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One seat as `/slots` and the page show it.

    state: free | prefill | decode | held: the batch keeps the seat though its sequence, the one
    named here, has left.
    """

    seat: int
    state: str
    request_id: str | None = None
    index: int = 0
    n_prompt: int = 0
    n_computed: int = 0
    n_output: int = 0
    max_tokens: int = 0
    pages: int = 0
