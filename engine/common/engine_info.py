"""Description of a running engine: model, device, kernels, sizes, queue, state."""

from __future__ import annotations

from typing import Literal

import msgspec

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import REQUEST_MOST, JsonDict, Pooling, RequestLimits, pooling_of
from jitney.engine.common.step_cost import DeviceCeiling, StepCost

type EngineState = Literal["loading", "ready", "sleeping", "restarting", "draining", "dead"]
#: Characters of a digest that are shown to people.
_SHORT = 12


class KernelProof(msgspec.Struct, frozen=True):
    """Comparison of a kernel with its definition at the start, on the serving machine."""

    # attention, norm, products, head, int4, int8 or fp8 product, or sampling cut
    kernel: str
    # the largest error, relative to the expected value; infinite: the kernel could not run
    error: float
    limit: float  # the error that rounding explains
    reason: str = ""  # why it could not run

    @property
    def ok(self) -> bool:
        """False if the reference kernel replaces this one."""
        return self.error <= self.limit


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The served model."""

    #: Name by the configuration.
    name: str = msgspec.field(name="model")
    #: Most tokens of a sequence, prompt included.
    context_length: int
    #: V.
    vocab_size: int
    #: Class name in its `config.json`, such as Qwen3ForCausalLM.
    architecture: str = ""
    #: Number of weights, and bytes of all weights as stored.
    parameters: int = 0
    weight_bytes: int = 0
    #: Defaults of requests, by field of SamplingParams.
    sampling_defaults: dict[str, int | float] = {}
    #: How text vectors are made (off or a `Pooling`), and their length.
    embedding_pooling: str = "off"
    embedding_size: int = 0
    #: Lengths that a vector may be cut to, by the model's files; empty: any; None: none.
    embedding_dimensions: tuple[int, ...] | None = None
    #: An encoder: it reads a text in one step, without KV cache, and makes a vector or a score.
    encoder: bool = False
    #: Adapters' names in requests -> numbers.
    adapters: dict[str, int] = {}

    def number_of(self, adapter: str) -> int:
        """The number of an adapter. Raises RequestError."""
        if adapter not in self.adapters:
            names = ", ".join(self.adapters) or "none"
            raise RequestError(
                f"there is no adapter {adapter!r}; available: {names}", param="adapter"
            )
        return self.adapters[adapter]

    @property
    def pooling(self) -> Pooling | None:
        """The way text vectors are made; None: the model makes none."""
        return pooling_of(self.embedding_pooling)


class NumberFormats(msgspec.Struct, frozen=True, kw_only=True):
    """Number formats of an engine."""

    #: Format of the computation, a numpy name.
    dtype: str
    #: Format of the matrices: a dtype, a scheme, or several with their counts.
    weights: str = ""
    #: Format of stored keys and values; "": there are none.
    kv_dtype: str


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of an engine."""

    #: JAX's name: cpu, gpu or tpu.
    platform: str
    #: Name and number of the chips.
    name: str = msgspec.field(name="device")
    #: Devices that the weights are split over.
    tensor_parallel: int = 1
    #: Groups of these devices that hold different experts of a mixture.
    expert_parallel: int = 1
    #: Engines that share the experts, this one included.
    data_parallel: int = 1


class BucketCompilation(msgspec.Struct, frozen=True, kw_only=True):
    """The compilation of the programs that run a bucket's steps."""

    #: As the page and the ledger name it, such as "mixed-512".
    bucket: str
    #: Of all its programs; several are compiled at a time.
    seconds: float
    #: All were read from the folder of compiled programs.
    from_cache: bool


class KernelsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels and compiled programs of an engine."""

    #: The kernel set, with its level if it has several.
    label: str = msgspec.field(name="kernels")
    #: One for each kernel that is not the reference's.
    proofs: list[KernelProof] = []
    #: One in this many requests is computed again with the reference; 0: none.
    canary_every: int = 0
    #: Programs compiled before serving, and the seconds of compilation.
    executables: int = 0
    compile_seconds: float = 0.0
    compilations: list[BucketCompilation] = []
    #: On each device: the largest step's need beside weights, pools and seats; code of all
    #: programs.
    step_bytes: int = 0
    code_bytes: int = 0

    @property
    def out(self) -> list[str]:
        """Kernels that were wrong at the start; the reference's replace them."""
        return [proof.kernel for proof in self.proofs if not proof.ok]


class EngineSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of an engine and of its compiled programs."""

    #: Most sequences that run at once.
    seats: int
    #: Pages of the KV pool without the trash page; positions of a page.
    pages: int
    page_size: int
    #: Pages of the layers with a window, by window, where they have pages of their own.
    window_pages: dict[int, int] = {}
    #: Capacity for checkpoints of recurrent layers' state.
    checkpoints: int = 0
    #: Whether prompts that start alike share pages.
    prefix_cache: bool
    #: Most rows of a step.
    token_budget: int
    #: Compiled row counts of decode-only steps and of steps with prompt rows, ascending.
    seat_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()
    #: See `scheduler.buckets.Buckets`.
    padding_is_free: bool = False
    most_segments: int = 1
    #: Alternatives computed per token.
    max_logprobs: int = REQUEST_MOST.logprobs


class QueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Policy, order and limits of the waiting queue."""

    #: Names of `engine.core.scheduler.policies`.
    policy: str
    order: str
    #: More are refused.
    max_waiting_requests: int
    #: Longer predicted waits are refused; 0: no limit.
    max_predicted_wait_s: float = 0.0


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of an engine, as the API, the page and `doctor` show it; only adapters change."""

    #: Version of Jitney.
    version: str
    #: `config.digest`, 64 hex digits.
    config_digest: str = ""
    model: ModelInfo
    formats: NumberFormats
    device: DeviceInfo
    kernels: KernelsInfo
    sizes: EngineSizes
    queue: QueueInfo
    #: Cost of steps on all devices together; None: unknown for this model.
    step_cost: StepCost | None = None
    #: Measured maximum of these devices; None: not measured.
    ceiling: DeviceCeiling | None = None

    @property
    def request_limits(self) -> RequestLimits:
        """The limits that requests are checked against."""
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
        """A flat object for page and reports, with the keys "model", "device" and "kernels"."""
        fields: JsonDict = {"version": self.version, "config_digest": self.config_digest}
        groups = (self.model, self.formats, self.device, self.kernels, self.sizes, self.queue)
        for group in groups:
            fields |= msgspec.to_builtins(group)
        fields["adapters"] = list(self.model.adapters)
        return fields


def short_digest(digest: str) -> str:
    """The first characters of a configuration's digest, as shown to people; "" stays ""."""
    return digest[:_SHORT]


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A seat as `/slots` and the page show it."""

    #: Number from 0.
    seat: int
    #: free | prefill | decode | held (the sequence has ended, but its batch holds the seat).
    state: str
    #: None: the seat is free, and the fields below have their defaults.
    request_id: str | None = None
    #: Whether it is a background sequence, which others may preempt.
    background: bool = False
    #: Number of the sequence among the request's n.
    index: int = 0
    #: Tokens of the prompt.
    n_prompt: int = 0
    #: Tokens of prompt and answer that are computed, or will be by steps in flight.
    n_computed: int = 0
    #: Tokens of the answer so far, and at most.
    n_output: int = 0
    max_tokens: int = 0
    #: Pages of the sequence.
    pages: int = 0
