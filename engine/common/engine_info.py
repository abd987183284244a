"""What an engine says of itself: model, device, kernels, sizes, queue, state."""

from __future__ import annotations

from typing import Literal

import msgspec

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import REQUEST_MOST, JsonDict, Pooling, RequestLimits, pooling_of
from jitney.engine.common.step_cost import DeviceCeiling, StepCost

type EngineState = Literal["loading", "ready", "sleeping", "restarting", "draining", "dead"]


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
    #: Numbers of adapters, by the names that requests call them.
    adapters: dict[str, int] = {}

    def number_of(self, adapter: str) -> int:
        """An adapter's number, from its name. Raises RequestError."""
        if adapter not in self.adapters:
            there = ", ".join(self.adapters) or "none"
            raise RequestError(
                f"there is no adapter {adapter!r} here; there are: {there}", param="adapter"
            )
        return self.adapters[adapter]

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
    #: Pages of the layers with a window, by window, where they have pages of their own.
    window_pages: dict[int, int] = {}
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

    #: Names of `engine.core.scheduler.policies`.
    policy: str
    order: str
    #: More are refused.
    max_waiting_requests: int
    #: Longer predicted waits are refused; 0: none is.
    max_predicted_wait_s: float = 0.0


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is running, fixed once the engine is ready but for its adapters; the API, the page and
    `doctor` all show this.
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
            adapters=frozenset(self.model.adapters.values()),
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
        shown["adapters"] = list(self.model.adapters)
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
