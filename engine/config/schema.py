"""All settings: names, types, defaults, ranges and descriptions. Imports no jax.

Each field can be set in a TOML file, as `JITNEY_<NAME>` in the environment and as `--<name>` on
the command line. The text below a field is the flag's help. Names are unique across sections,
because flags have no section. `jitney.engine.config.layers` reads the values.
"""

from __future__ import annotations

import re
from ipaddress import ip_network
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from jitney.engine.common.cache_folder import cache_dir

_MIN_PAGE, _MAX_PAGE = 8, 256
#: Smallest token bucket: a step of few rows holds one sequence for every four of them.
_FEWEST_ROWS = 4
#: Kernel sets that `jitney.kernels.select` makes; listed here to refuse wrong names without jax.
_KernelsName = Literal["auto", "reference", "native", "triton", "flashinfer", "pallas"]
#: Policies and orders that `jitney.engine.core.scheduler.policies` makes.
_PolicyName = Literal["continuous", "static", "dynamic"]
_OrderName = Literal["fcfs", "priority", "shortest", "fair"]
#: Formats of tool calls and reasoning: `engine.server.chat.conversation.families`.
_ToolParserName = Literal[
    "auto",
    "none",
    "harmony",
    "openai",
    "gptoss",
    "deepseek_v31",
    "deepseek_v3",
    "deepseek_r1",
    "kimi_k2",
    "solar_open",
    "mistral_named",
    "mistral_v11",
    "mistral",
    "gemma4",
    "functiongemma",
    "functionary",
    "glm45",
    "glm47",
    "seed_oss",
    "minimax_m2",
    "qwen3_coder",
    "qwen3_xml",
    "apriel",
    "hermes",
    "qwen",
    "qwen25",
    "qwen3",
    "nemotron_v2",
    "minimax",
    "minimax_m1",
    "cohere_command",
    "granite",
    "gigachat31",
    "gigachat3",
    "apertus",
    "llama3_json",
    "llama3",
    "llama4_json",
    "lfm2",
    "gemma",
    "gemma3",
]
_ReasoningParserName = Literal[
    "auto",
    "none",
    "harmony",
    "openai",
    "openai_gptoss",
    "gptoss",
    "qwen3",
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v31",
    "think",
    "mistral",
    "magistral",
    "gemma4",
    "seed_oss",
    "cohere_command",
    "apertus",
    "apriel",
]
#: Formats of weight matrices.
_Weights = Literal["auto", "plain", "int8", "fp8", "int4"]
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
#: A host name as in a Host header.
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
_URL_PREFIX = re.compile(
    r"https?://(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?(?:/[^\s?#\\]*)?"
)
#: HOST:PORT.
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
#: Smallest `body_limit` that is not 0.
_LEAST_BODY_LIMIT = 1024
#: Origins of web pages (as browsers send them: lower case, no path), and of pages of programs and
#: extensions. The first label of the name may be `*`.
_WEB_ORIGIN = re.compile(r"https?://(?:(?:\*\.)?[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_APP_ORIGIN = re.compile(
    r"(?!https?:)[a-z][a-z0-9+.-]*://(?:\*|(?:\*\.)?[A-Za-z0-9._-]+)(?::[0-9]{1,5})?"
)


def _tuple_from_list(value: object) -> object:
    """Turn a TOML list into a tuple, since settings are immutable."""
    return tuple(value) if isinstance(value, list) else value


_Sizes = Annotated[tuple[int, ...], BeforeValidator(_tuple_from_list)]
_Names = Annotated[tuple[str, ...], BeforeValidator(_tuple_from_list)]
#: The value that leaves a choice to the engine.
AUTO: Literal["auto"] = "auto"


def _share(value: object) -> object:
    """Parse a share from text, as flags and the environment give it."""
    if isinstance(value, str) and value != AUTO:
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"must be a number or {AUTO}") from None
    return value


Share = float | Literal["auto"]


class Section(BaseModel):
    """Base of the sections: refuses unknown keys, converts no types ("16" is not 16), immutable."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        """Join the lines of each description."""
        super().__pydantic_init_subclass__(**kwargs)
        for field in cls.model_fields.values():
            field.description = field.description and " ".join(field.description.split())


class _ModelSection(Section):
    """[model]: what to run."""

    id: str = Field(default="smollm2-135m", min_length=1, json_schema_extra={"name": "model"})
    """model to serve: a folder, a .gguf file, a Hugging Face repository id, or a built-in name
    (smollm2-135m, tiny-random)
    """

    revision: str = ""
    """branch, tag or commit of the Hugging Face repository; empty: its default"""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """number format of weights, activations and KV cache; auto: bfloat16 where the device
    multiplies it fast, else float32
    """

    weights: _Weights = "auto"
    """format of the weight matrices: plain (dtype), int8 or fp8 with a scale per output, int4 with
    a scale per group of inputs; with int8 the CPU's native kernels also round activations to int8;
    auto: a quantised checkpoint's own format where the device computes in it, else plain
    """

    load_format: Literal["auto", "dummy"] = "auto"
    """auto: read the model's weights; dummy: random weights of the same shapes, made on the device,
    for benchmarks: no weights are fetched or read, and outputs are meaningless
    """

    context: int = Field(default=0, ge=0, le=2**20)
    """most tokens of a sequence, prompt included; 0: the model's own limit"""

    adapters: _Names = Field(default=(), json_schema_extra={"several": True})
    """LoRA adapters as NAME=FOLDER, each folder as PEFT saves it; a request whose model is NAME
    uses that adapter
    """

    adapter_room: int = Field(default=0, ge=0, le=65536)
    """total rank reserved for adapters loaded while serving, beyond the rank of those in adapters;
    every step multiplies with all of it
    """

    chat_template: str = ""
    """file with a Jinja chat template; empty: the model's own"""

    @field_validator("adapters")
    @classmethod
    def _adapters_are_named(cls, adapters: _Names) -> _Names:
        names = set[str]()
        for adapter in adapters:
            name, _, folder = adapter.partition("=")
            if not name or not folder or not name.isprintable() or len(name) > _MOST_NAME:
                raise ValueError(f"{adapter!r} is not NAME=FOLDER")
            if name in names:
                raise ValueError(f"two adapters are called {name!r}")
            names.add(name)
        return adapters

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Adapter name -> folder."""
        parts = (adapter.partition("=") for adapter in self.adapters)
        return {name: folder for name, _, folder in parts}


class EngineSection(Section):
    """[engine]: seats, pages, buckets, device."""

    max_seats: int = Field(default=32, ge=1, le=1024)
    """most sequences that run at once"""

    page_size: int = 16
    """KV positions per page, also the block of the prefix cache; a power of two from 8 to 256"""

    token_budget: int = Field(default=512, ge=2, le=65536)
    """most rows of a step; must be more than max_seats"""

    seat_buckets: _Sizes = ()
    """batch sizes to compile for decode-only steps, ascending; empty: 1 and powers of two from 4 up
    to max_seats, on a GPU or TPU 1, 4, 16, 64 and multiples of 64 or more beyond
    """

    token_buckets: _Sizes = ()
    """row counts to compile for steps with prompt rows, ascending; a count of at most max_seats
    holds one sequence for every four rows; empty: powers of two up to token_budget, on a GPU or TPU
    also 64 and 256
    """

    pages: int = Field(default=0, ge=0)
    """pages in the KV pool, of a model with windows those of its layers that see all positions; 0:
    as many as fit in the free memory
    """

    memory_gib: float = Field(default=0.0, ge=0.0)
    """most memory of the KV pool in GiB; 0: chosen from the free memory"""

    memory_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """share of a GPU's or TPU's memory to use in all, or on a CPU of the free memory to use for the
    KV pool; 0: 0.92 of a GPU, all of a TPU, a quarter of a CPU's and at most 1 GiB
    """

    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """format of stored keys and values; int8 and fp8 hold twice as many positions as bfloat16;
    auto: dtype
    """

    prefix_cache: bool = True
    """keep the pages of finished sequences and reuse them for prompts that start alike"""

    share_outputs: Literal["auto", "on", "off"] = "auto"
    """also reuse pages of generated tokens, as the next turn of a conversation does; their last
    bits differ from those of a prompt's step, so a greedy answer may depend on earlier requests;
    auto: off on a CPU, where answers otherwise depend on no other request, on elsewhere
    """

    policy: _PolicyName = "continuous"
    """when waiting requests board: continuous: whenever a seat is free; static: in batches of
    batch_size, padded to the longest prompt, with all seats held until the last sequence ends;
    dynamic: like static, but the oldest request waits at most max_wait_ms
    """

    batch_size: int = Field(default=0, ge=0)
    """sequences of a batch with static and dynamic; 0: max_seats"""

    max_wait_ms: float = Field(default=200.0, ge=0)
    """with dynamic, most milliseconds that the oldest request waits for a batch to fill"""

    static_timeout_ms: float = Field(default=5000.0, ge=0)
    """with static, milliseconds without an arrival after which fewer than batch_size board; 0:
    never; comparisons of policies use 0 unless it is given
    """

    order: _OrderName = "fcfs"
    """which waiting request boards first: fcfs: the oldest; priority: by the request's priority
    field, a level counting as 10 s of waiting; shortest: by the expected output length, a token
    counting as 0.1 s; fair: one of the API key (without keys the user field) that got the fewest
    tokens; a server with API keys defaults to fair
    """

    prefill_share: Annotated[Share, BeforeValidator(_share)] = AUTO
    """most of token_budget that prompt rows may take in a step while others decode, so that a long
    prompt does not stall them; auto: waiting prompt rows divided by decoding sequences, between a
    quarter (for a short prompt a half) and all
    """

    target_itl_ms: float = Field(default=0.0, ge=0)
    """milliseconds between tokens to keep for running streams, by smaller prompt chunks where
    measured step times require it; 0: no target
    """

    max_predicted_wait_s: float = Field(default=60.0, ge=0)
    """most seconds of predicted wait; requests beyond it get 429; 0: no limit"""

    max_waiting_requests: int = Field(default=256, ge=1)
    """most sequences that wait beyond the free seats, n for each request; more get 429"""

    max_waiting_tokens: int = Field(default=262144, ge=1)
    """most tokens that wait to be computed: prompts, and answers of the expected length; more get
    429
    """

    background_seats: int = Field(default=0, ge=0)
    """seats that batch requests (/v1/batches) may hold while others arrive; they still give way,
    and may take every seat after ten seconds without other requests; 0: a quarter of max_seats
    """

    kernels: _KernelsName = "auto"
    """kernel set; auto: the device's own; where it is missing, a GPU or TPU does not start and a
    CPU uses reference with a warning; flashinfer: triton, with FlashInfer's attention for prompts,
    which auto also uses on cards where it was measured to be faster
    """

    max_logprobs: int = Field(default=20, ge=1, le=500)
    """most alternatives per token that a request may ask for (logprobs, top_logprobs,
    prompt_logprobs); this many are computed whenever any are asked for
    """

    speculative: Literal["off", "ngram", "draft", "mtp", "eagle3"] = "off"
    """check drafts of the next tokens in further rows of steps, where that is measured to pay; no
    token of an answer changes, but for near ties where last bits depend on a step's rows (see
    product_rows); ngram: drafts what followed the same tokens before, in prompt or answer; draft: a
    small model drafts (draft_model); mtp: the layer behind the model's last drafts, if its files
    have one (DeepSeek-V3, GLM-4.7-Flash, Qwen3-Next, Qwen3.5); eagle3: an EAGLE-3 head
    drafts (draft_model); for engines on one host; recurrent layers keep a state more in each seat
    for each of speculative_tokens
    """

    draft_model: str = ""
    """with speculative draft: a small model with the tokens of the served one, named as in model;
    with eagle3: the folder or repository of a head that was trained with it; it reads whatever the
    served model computes, and has as many pages
    """

    draft_weights: _Weights = "auto"
    """with speculative draft or eagle3: format of the matrices of draft_model, as weights"""

    speculative_tokens: int = Field(default=7, ge=1, le=7)
    """most drafts that a sequence checks in a step"""

    speculative_acceptance: float = Field(default=0.0, ge=0, le=1)
    """for benchmarks of speculation: accept each draft by this chance, whatever it is; answers are
    then not the model's; 0: accept those that the model samples
    """

    prompt_lookup_max: int = Field(default=3, ge=1, le=8)
    """with speculative ngram: most tokens at the end of the text by which an earlier place is
    found
    """

    prompt_lookup_min: int = Field(default=1, ge=1, le=8)
    """with speculative ngram: fewest such tokens"""

    embedding_pooling: Literal["auto", "off", "last", "mean"] = AUTO
    """how /v1/embeddings makes a vector: last: the last token's hidden state after the final norm;
    mean: the mean over all tokens, without the prefix cache; off: the route is refused; auto: as
    the model's files say (modules.json of sentence-transformers, pooling_type of GGUF), else off;
    an encoder (BERT, XLM-RoBERTa) always follows its files; compiled at the start
    """

    canary_every: int = Field(default=0, ge=0)
    """compute one in this many requests again, alone, with the reference kernels, and compare the
    log-probabilities; 0: none
    """

    compilation_cache: bool = True
    """keep compiled programs on disk (~/.cache/jitney/xla, or xla/ in $JITNEY_CACHE) for the next
    start
    """

    platform: Literal["auto", "cpu", "cuda", "tpu"] = "auto"
    """where to run; a named platform that cannot start is an error, never a silent fallback"""

    device: str = Field(default="", pattern=r"^(\d+(,\d+)*)?$")
    """number of the GPU or TPU chip to use, with tensor_parallel as many numbers separated by
    commas; empty: the first
    """

    threads: int = Field(default=0, ge=0, le=4096)
    """processors that the core process may use; 0: on a CPU one per physical core available to it,
    up to its container's quota; elsewhere all
    """

    product_rows: int = Field(default=8, ge=1)
    """on a CPU, for weights not packed for the native kernels (float32, or no instructions that
    multiply pairs of bfloat16): products of at most this many rows use the native kernels, larger
    ones XLA, whose last bits differ
    """

    measured_sizes: bool = True
    """on a CPU with no sizes given: jitney serve times this machine's steps while the first engine
    is idle, and chooses threads, max_seats, token_budget, buckets and product_rows from them at the
    next start
    """

    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """devices that the model's heads, feed-forward and vocabulary are split over; with several
    hosts, of all of them together
    """

    expert_parallel: int = Field(default=1, ge=1, le=64)
    """groups of devices that a mixture's experts are divided among; within a group every expert is
    split over its devices; 1: every device has a share of every expert
    """

    data_parallel: int = Field(default=1, ge=1, le=64)
    """engines that share a mixture's experts, one on each of n_hosts hosts, each with
    tensor_parallel devices and its own requests and pages; they run each step together
    """

    coordinator: str = ""
    """address of the first of several hosts that run one engine, HOST:PORT, the same on all of
    them; auto: from the environment of a TPU slice, LeaderWorkerSet or Slurm, which also gives
    n_hosts and host_id
    """

    n_hosts: int = Field(default=1, ge=1, le=64)
    """hosts that run one engine, each with an equal part of tensor_parallel devices; with
    data_parallel, one engine on each
    """

    host_id: int = Field(default=0, ge=0)
    """number of this host: 0 plans and serves HTTP, the others follow it and serve nothing; with
    data_parallel all plan and serve
    """

    @field_validator("page_size")
    @classmethod
    def _page_is_a_power_of_two(cls, size: int) -> int:
        if not _MIN_PAGE <= size <= _MAX_PAGE or size & (size - 1):
            raise ValueError(f"must be a power of two from {_MIN_PAGE} to {_MAX_PAGE}")
        return size

    @field_validator("prefill_share")
    @classmethod
    def _share_is_a_part(cls, share: Share) -> Share:
        if share != AUTO and share <= 0:
            raise ValueError(f"must be greater than 0, or {AUTO}")
        if share != AUTO and share > 1:
            raise ValueError(f"must be less than or equal to 1, or {AUTO}")
        return share

    @field_validator("seat_buckets", "token_buckets")
    @classmethod
    def _buckets_ascend(cls, sizes: _Sizes) -> _Sizes:
        if any(low >= high for low, high in pairwise((0, *sizes))):
            raise ValueError("must be positive and ascending")
        return sizes

    @model_validator(mode="after")
    def _sizes_agree(self) -> EngineSection:
        # Strictly more, since a mixed bucket of max_seats rows would equal a decode-only one.
        if self.token_budget <= self.max_seats:
            raise ValueError(
                f"token_budget ({self.token_budget}) must be more than max_seats ({self.max_seats})"
            )
        for name in ("batch_size", "background_seats"):
            if getattr(self, name) > self.max_seats:
                raise ValueError(f"{name} must not exceed max_seats ({self.max_seats})")
        if self.seat_buckets and self.seat_buckets[-1] > self.max_seats:
            raise ValueError(f"seat_buckets must not exceed max_seats ({self.max_seats})")
        tokens = self.token_buckets
        if tokens and not _FEWEST_ROWS <= tokens[0] <= tokens[-1] <= self.token_budget:
            raise ValueError(
                f"token_buckets must be at least {_FEWEST_ROWS} and not exceed token_budget "
                f"({self.token_budget})"
            )
        return self

    @model_validator(mode="after")
    def _device_has_its_chips(self) -> EngineSection:
        if not self.device:
            return self
        if self.platform == "cpu":
            raise ValueError("device chooses a GPU or TPU chip: leave it out with platform cpu")
        chips = self.device.split(",")
        if len(set(chips)) != len(chips) or len(chips) != self.devices_here:
            count = f"tensor_parallel ({self.tensor_parallel})"
            if self.devices_here < self.tensor_parallel:
                count += f" has on each of {self.n_hosts} hosts"
            raise ValueError(f"device {self.device} must name as many different chips as {count}")
        return self

    @model_validator(mode="after")
    def _drafts_are_possible(self) -> EngineSection:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must not exceed prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        drafts_by_model = self.speculative in ("draft", "eagle3")
        if drafts_by_model and not self.draft_model:
            kind = "a small model" if self.speculative == "draft" else "an EAGLE-3 head"
            raise ValueError(f"speculative {self.speculative} needs draft_model, {kind}")
        if self.draft_model and not drafts_by_model:
            raise ValueError(
                f"draft_model {self.draft_model} is for speculative draft and eagle3, not "
                f"{self.speculative}: set one of these, or leave it out"
            )
        if self.speculative == "off":
            if self.speculative_acceptance:
                raise ValueError(
                    f"speculative_acceptance {self.speculative_acceptance:g} is for speculative "
                    "ngram, not off: leave it at 0"
                )
            return self
        for name in ("data_parallel", "n_hosts"):
            if getattr(self, name) > 1:
                raise ValueError(
                    f"speculative {self.speculative} is for an engine on one host: leave it off "
                    f"with {name} {getattr(self, name)}"
                )
        return self

    @model_validator(mode="after")
    def _groups_are_even(self) -> EngineSection:
        if self.tensor_parallel % self.expert_parallel:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} counts the devices of all groups: it must "
                f"be a multiple of expert_parallel ({self.expert_parallel})"
            )
        return self

    @model_validator(mode="after")
    def _hosts_are_named(self) -> EngineSection:
        if self.coordinator == AUTO:
            if self.n_hosts > 1 or self.host_id:
                raise ValueError("coordinator auto also finds n_hosts and host_id: leave them out")
        elif self.n_hosts == 1:
            if self.coordinator or self.host_id:
                raise ValueError("coordinator and host_id are for several hosts: give n_hosts")
        elif not _ADDRESS.fullmatch(self.coordinator):
            raise ValueError(
                f"n_hosts {self.n_hosts} needs coordinator HOST:PORT, an address of the first host"
            )
        elif self.host_id >= self.n_hosts:
            raise ValueError(
                f"host_id {self.host_id} must be less than n_hosts ({self.n_hosts}): the first is 0"
            )
        return self

    @model_validator(mode="after")
    def _each_engine_has_a_host(self) -> EngineSection:
        if self.data_parallel == 1 or self.coordinator == AUTO:
            return self
        if self.n_hosts != self.data_parallel:
            raise ValueError(
                f"data_parallel {self.data_parallel} is one engine on each of as many hosts: "
                f"n_hosts must be as many, not {self.n_hosts}"
            )
        return self

    @model_validator(mode="after")
    def _hosts_can_do_it(self) -> EngineSection:
        if self.n_hosts == 1:
            return self
        if self.embedding_pooling not in (AUTO, "off"):
            raise ValueError("embedding_pooling is not for several hosts (n_hosts): leave it off")
        if self.data_parallel == 1 and self.tensor_parallel % self.n_hosts:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} counts the devices of all hosts: it must "
                f"be a multiple of n_hosts ({self.n_hosts})"
            )
        if self.canary_every:
            raise ValueError("canary_every is for one host: leave it out with n_hosts")
        return self

    @property
    def jax_environment(self) -> dict[str, str]:
        """Environment variables for `platform` and `device`, set before jax is imported. cpu comes
        second, for host-side arrays. Without its plugin jax starts on the CPU: see `platforms`.
        """
        variables = {}
        if self.platform == "cpu":
            variables["JAX_PLATFORMS"] = "cpu"
        elif self.platform != "auto":
            variables["JAX_PLATFORMS"] = f"{self.platform},cpu"
        if self.device:
            variables["CUDA_VISIBLE_DEVICES"] = self.device
            variables["TPU_VISIBLE_DEVICES"] = self.device
        return variables

    @property
    def most_drafts(self) -> int:
        """Drafts of a sequence in a step at most."""
        return 0 if self.speculative == "off" else self.speculative_tokens

    @property
    def devices_here(self) -> int:
        """Devices of one host."""
        if self.data_parallel > 1:
            return self.tensor_parallel
        return self.tensor_parallel // self.n_hosts

    @property
    def follows(self) -> bool:
        """True on a host that runs the steps which the first host plans, and serves nothing."""
        return self.host_id > 0 and self.data_parallel == 1


class SamplingSection(Section):
    """[sampling]: defaults for requests that set no value; -1: from generation_config."""

    generation_config: str = Field(default="auto", min_length=1)
    """source of the model's default sampling: auto: its generation_config.json or GGUF metadata;
    none: nothing; else the path of such a JSON file
    """

    temperature: float = Field(
        default=-1.0, le=2.0, json_schema_extra={"name": "default_temperature"}
    )
    """default temperature, 0 is greedy; -1: from generation_config, else 1"""

    top_p: float = Field(default=-1.0, le=1.0, json_schema_extra={"name": "default_top_p"})
    """default top_p; -1: from generation_config, else 1"""

    top_k: int = Field(default=-1, ge=-1, json_schema_extra={"name": "default_top_k"})
    """default top_k, 0 is off; -1: from generation_config, else 0"""

    min_p: float = Field(default=-1.0, le=1.0, json_schema_extra={"name": "default_min_p"})
    """default min_p; -1: from generation_config, else 0"""

    repetition_penalty: float = Field(
        default=-1.0, le=10.0, json_schema_extra={"name": "default_repetition_penalty"}
    )
    """default repetition_penalty, 1 is off; not used by greedy requests; -1: from
    generation_config, else 1
    """

    @field_validator("temperature", "min_p")
    @classmethod
    def _from_zero(cls, value: float) -> float:
        if value < 0 and value != -1:
            raise ValueError("must be at least 0, or -1 for the model's own")
        return value

    @field_validator("top_p")
    @classmethod
    def _above_zero(cls, value: float) -> float:
        if value <= 0 and value != -1:
            raise ValueError("must be more than 0, or -1 for the model's own")
        return value

    @field_validator("repetition_penalty")
    @classmethod
    def _to_divide_by(cls, value: float) -> float:
        if value < 0.001 and value != -1:
            raise ValueError("must be at least 0.001, or -1 for the model's own")
        return value


#: Most characters of a model's or adapter's name.
_MOST_NAME = 256
#: Smallest `step_timeout_s` that is not 0.
_LEAST_TIMEOUT_S = 2.0


class ServerSection(Section):
    """[server]: the HTTP endpoint and its core process. Times in seconds, sizes in bytes."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """address to listen on"""

    port: int = Field(default=8000, ge=0, le=65535)
    """port to listen on; 0: any free one"""

    api_key_file: str = ""
    """file with the API keys of users, one per line, readable by its owner only (if root's, also by
    its group); users generate, and see their own requests
    """

    api_keys: _Names = Field(default=(), json_schema_extra={"secret": True})
    """API keys of users, separated by commas; from the environment or a file, never a flag, which
    other users could read
    """

    admin_key_file: str = ""
    """like api_key_file, for administrators: they see everything (texts, all requests, metrics,
    traces, reports) and use the policy lab; without any key every client is one, with API keys
    alone none is
    """

    admin_keys: _Names = Field(default=(), json_schema_extra={"secret": True})
    """like api_keys, for administrators"""

    insecure: bool = False
    """allow listening beyond this machine without an API key"""

    allowed_hosts: _Names = ()
    """names by which clients may call this server (Host header, without port), besides localhost,
    127.0.0.1, [::1] and host; empty: only those if host is localhost, 127.0.0.1 or ::1, else any
    name
    """

    ssl_certfile: str = ""
    """certificate (PEM, with its chain); the server then speaks TLS only"""

    ssl_keyfile: str = ""
    """private key of ssl_certfile; empty: it is in the same file"""

    root_path: str = Field(default="", pattern=r"^(/[A-Za-z0-9._~-]+)*$")
    """path prefix that a proxy in front removes, such as /jitney"""

    trusted_proxies: _Names = ()
    """addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted;
    empty: none
    """

    cors_origins: _Names = ()
    """origins whose pages may send requests, such as https://example.org, https://*.example.org (*
    is any one name), app://obsidian.md or chrome-extension://*; null: pages without an origin,
    which are local files and frames that any site can make; *: all; empty: only this server's own
    pages
    """

    served_model_name: _Names = Field(default=(), json_schema_extra={"several": True})
    """names of the model in requests, the first of them also in answers; empty: the model's own"""

    tool_call_parser: _ToolParserName = "auto"
    """format of the model's tool calls, by the names of vLLM's parsers; auto: from its chat
    template; none: calls are content
    """

    rerank: Literal["auto", "yes_no"] = "auto"
    """how the model ranks documents (/v1/rerank, /v1/score): yes_no: by its answer to
    Qwen3-Reranker's prompt; auto: yes_no if its name contains qwen3-reranker, else its classifier
    or its embeddings, if it has any
    """

    reasoning_parser: _ReasoningParserName = "auto"
    """format of the model's reasoning, by the names of vLLM's parsers; auto: from its chat
    template; none: reasoning is content
    """

    body_limit: int = Field(default=0, ge=0, le=1 << 30)
    """most bytes of a request body; 0: 48 per token of the model's context (in a fleet, of its
    longest), at least 1 MiB
    """

    read_timeout_s: float = Field(default=10.0, gt=0)
    """seconds a client has to send its headers, and its body"""

    template_timeout_s: float = Field(default=2.0, gt=0)
    """most seconds that the chat template may take for one request"""

    write_timeout_s: float = Field(default=30.0, gt=0)
    """seconds a client has to read what is sent; a slower one is disconnected and its sequences end
    """

    keep_alive_s: float = Field(default=120.0, gt=0)
    """seconds an idle connection stays open unless a new one needs its place; longer than clients
    and proxies keep theirs, since one that sends as the server closes sees a reset
    """

    max_connections: int = Field(default=1024, ge=1, le=1_000_000)
    """most connections with a request under way; idle ones give way to new ones; more get 503, and
    more than three quarters of them from one key (without keys one address) get 429, except probes
    and /metrics; lowered to what the limit of open files (ulimit -Hn) allows
    """

    request_timeout_s: float = Field(default=0.0, ge=0)
    """deadline in seconds of a request that sets none; 0: none"""

    key_max_concurrent: int = Field(default=0, ge=0)
    """most open sequences of one API key (without keys, of all clients), n for each prompt of a
    request; more get 429; 0: no limit
    """

    key_tokens_per_minute: int = Field(default=0, ge=0)
    """most prompt and output tokens per minute of one API key (without keys, of all clients),
    output at its expected length until it ends; more get 429; 0: no limit
    """

    data_dir: str = ""
    """folder for clients' files, batches and jobs, and for incidents and the history, private and
    used by one server only; empty: data/ in $JITNEY_CACHE or ~/.cache/jitney
    """

    history_hours: float = Field(default=24.0, ge=0, le=168)
    """hours that the page looks back, in data_dir: figures, and ended requests (ids, `user` and
    times, no text; at most 50,000, some 40 MB); 0: ten minutes, in memory
    """

    file_limit: int = Field(default=200 << 20, ge=1024, le=1 << 40)
    """most bytes of an uploaded file"""

    key_files: int = Field(default=1000, ge=1, le=1_000_000)
    """most files of one API key (without keys, of all clients), files with answers of batches
    included
    """

    key_file_bytes: int = Field(default=4 << 30, ge=1024, le=1 << 50)
    """most bytes stored for one API key: these files, its jobs with their answers, and answers of
    unfinished batches
    """

    answer_limit: int = Field(default=16 << 20, ge=1024, le=1 << 30)
    """most bytes of the answer of a job or of a batch's line"""

    key_batches: int = Field(default=100, ge=1, le=10_000)
    """most unfinished batches of one API key; more get 429"""

    key_jobs: int = Field(default=2000, ge=1, le=1_000_000)
    """most unfinished jobs of one API key; more get 429"""

    batch_lines: int = Field(default=50_000, ge=1, le=10_000_000)
    """most lines of a batch's file"""

    webhook_prefixes: _Names = ()
    """URL prefixes, such as https://example.org/hooks/, that requests may name to be notified when
    their batch or job ends (webhook_url); empty: none
    """

    webhook_secret_file: str = ""
    """file with the secret that signs these notifications (Standard Webhooks; whsec_ and base64, or
    any text), readable by its owner only
    """

    responses_kept: int = Field(default=1000, ge=0)
    """most answers of /v1/responses kept in memory for clients that continue or fetch them; the
    oldest one of the key with the most is dropped first; 0: none
    """

    responses_bytes: int = Field(default=64 << 20, ge=0)
    """most bytes of those answers and their inputs"""

    responses_ttl_s: float = Field(default=86_400.0, gt=0)
    """seconds that such an answer is kept"""

    metrics_compat: Literal["", "vllm"] = ""
    """also publish metrics under another engine's names"""

    dashboard_show_text: bool = False
    """show prompts and answers on the page to everyone who may open it"""

    otel: bool = False
    """send spans of every generating request to OpenTelemetry (extra otel), as its OTEL_ variables
    say
    """

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """lowest level that is logged; requests are logged at info"""

    record: str = ""
    """file that gets one line for every ended request: times and lengths, no text; for jitney
    simulate --trace
    """

    drain_s: float = Field(default=30.0, ge=0)
    """seconds that running requests get to finish after SIGTERM"""

    heartbeat_s: float = Field(default=30.0, gt=0)
    """seconds without a step or an idle tick after which the server is not ready"""

    step_timeout_s: float = Field(default=0.0, ge=0)
    """seconds without a step or an idle tick after which the core process is killed and started
    again; the first step of each bucket gets at least 60; 0: 10, or eight times the longest step
    seen if that is more (at most 120 more than that step)
    """

    start_timeout_s: float = Field(default=600.0, ge=0)
    """seconds without progress (a tensor loaded, a program compiled) after which the first start of
    the core process fails with status 1; later starts are limited by what the first one took; 0: no
    limit
    """

    restart: bool = True
    """start a new core process when the old one dies"""

    on_core_death: Literal["resume", "fail"] = "resume"
    """what happens to open requests when the core process dies: resume: the new one continues them
    from their tokens; fail: they end with an error
    """

    max_restarts: int = Field(default=5, ge=0)
    """most restarts within ten minutes; a core that has served for a minute resets the count"""

    @field_validator("step_timeout_s")
    @classmethod
    def _longer_than_a_tick(cls, value: float) -> float:
        if 0 < value < _LEAST_TIMEOUT_S:
            raise ValueError(
                f"must be 0 or at least {_LEAST_TIMEOUT_S:g}: an idle core ticks once a second"
            )
        return value

    @property
    def data_folder(self) -> Path:
        """Folder of clients' files, batches and jobs."""
        return Path(self.data_dir).expanduser() if self.data_dir else cache_dir() / "data"

    @property
    def open_to_others(self) -> bool:
        """True when other machines can reach the endpoint."""
        return self.host not in _LOOPBACK

    @property
    def has_keys(self) -> bool:
        """True if every request needs a key."""
        return bool(self.api_key_file or self.api_keys or self.admin_key_file or self.admin_keys)

    @property
    def answered_hosts(self) -> tuple[str, ...] | None:
        """Accepted Host header names, lower case; None: any."""
        if self.open_to_others and not self.allowed_hosts:
            return None
        own = self.host
        if ":" in own:
            own = f"[{own}]"
        names = ("localhost", "127.0.0.1", "[::1]", own, *self.allowed_hosts)
        return tuple(dict.fromkeys(name.lower() for name in names))

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_are_names(cls, names: _Names) -> _Names:
        for name in names:
            if not _HOST_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a host name: give it without scheme and port")
        return names

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies_are_addresses(cls, proxies: _Names) -> _Names:
        for proxy in proxies:
            try:
                ip_network(proxy)
            except ValueError:
                raise ValueError(
                    f"{proxy!r} is not an address such as 10.0.0.1, nor a network such as "
                    "10.0.0.0/8"
                ) from None
        return proxies

    @field_validator("served_model_name")
    @classmethod
    def _names_are_names(cls, names: _Names) -> _Names:
        for name in names:
            if not 0 < len(name) <= _MOST_NAME or not name.isprintable():
                raise ValueError(f"a name must have 1 to {_MOST_NAME} printable characters")
        return tuple(dict.fromkeys(names))

    @field_validator("body_limit")
    @classmethod
    def _limit_holds_a_body(cls, limit: int) -> int:
        if 0 < limit < _LEAST_BODY_LIMIT:
            raise ValueError(f"must be 0 or at least {_LEAST_BODY_LIMIT}")
        return limit

    @field_validator("cors_origins")
    @classmethod
    def _origins_are_origins(cls, origins: _Names) -> _Names:
        for origin in origins:
            is_word = origin in ("*", "null")
            if not (is_word or _WEB_ORIGIN.fullmatch(origin) or _APP_ORIGIN.fullmatch(origin)):
                raise ValueError(
                    f"{origin!r} is not an origin: give SCHEME://NAME or SCHEME://NAME:PORT, of "
                    "http and https in lower case, without a path; * may stand for all, or for the "
                    "first part of a name (https://*.example.org)"
                )
        return origins

    @field_validator("webhook_prefixes")
    @classmethod
    def _prefixes_are_urls(cls, prefixes: _Names) -> _Names:
        for prefix in prefixes:
            if not _URL_PREFIX.fullmatch(prefix):
                raise ValueError(
                    f"{prefix!r} is not the beginning of a URL: give https://NAME/ or more of it"
                )
        return prefixes

    @model_validator(mode="after")
    def _webhooks_are_signed(self) -> ServerSection:
        if self.webhook_prefixes and not self.webhook_secret_file:
            raise ValueError("webhook_prefixes needs webhook_secret_file: messages are signed")
        return self

    @model_validator(mode="after")
    def _tls_key_needs_a_certificate(self) -> ServerSection:
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ValueError("ssl_keyfile is given without ssl_certfile")
        return self

    @model_validator(mode="after")
    def _network_needs_a_key(self) -> ServerSection:
        if self.open_to_others and not (self.has_keys or self.insecure):
            raise ValueError(
                f"host {self.host} is open to other machines and no API key is set: give "
                "api_key_file or JITNEY_API_KEYS, or accept it with insecure"
            )
        return self


class Config(Section):
    """All settings of an engine and its server."""

    model: _ModelSection = _ModelSection()
    engine: EngineSection = EngineSection()
    sampling: SamplingSection = SamplingSection()
    server: ServerSection = ServerSection()
