"""The one description of how Jitney runs: frozen, validated, jax-free.

Every field is settable in a TOML file, as `JITNEY_<NAME>` in the environment and as `--<name>` on
the command line, and its description is the help of that flag. Names are unique across the
sections, so that flags are flat. `jitney.engine.config.layers` reads the layers; this file says
what they may contain.
"""

from __future__ import annotations

import os
import re
from ipaddress import ip_network
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

_MIN_PAGE, _MAX_PAGE = 8, 256
#: Steps with prompts of few rows have a sequence for every so many.
_FEWEST_ROWS = 4
#: The kernel sets by name, which `jitney.kernels.select` makes; here, so that a wrong name is
#: refused without jax.
_KernelsName = Literal["auto", "reference", "native", "triton", "flashinfer", "pallas"]
#: The policies and orders by name, which `jitney.engine.core.scheduler.policies` makes.
_PolicyName = Literal["continuous", "static", "dynamic"]
_OrderName = Literal["fcfs", "priority", "shortest", "fair"]
#: Ways to write calls and thoughts, which `jitney.engine.server.chat.conversation.families`
#: describes.
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
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
#: A host as the Host header has it, and an origin as a browser sends it (lower case, no path).
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
_URL_PREFIX = re.compile(
    r"https?://(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?(?:/[^\s?#\\]*)?"
)
#: A host's address and a port.
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
#: Of `body_limit`, where it is not 0.
_LEAST_BODY_LIMIT = 1024
#: Origins of web pages, and of pages that programs and extensions bring with them; of both the
#: first label of the name may be `*`.
_WEB_ORIGIN = re.compile(r"https?://(?:(?:\*\.)?[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_APP_ORIGIN = re.compile(
    r"(?!https?:)[a-z][a-z0-9+.-]*://(?:\*|(?:\*\.)?[A-Za-z0-9._-]+)(?::[0-9]{1,5})?"
)


def _tuple_from_list(value: object) -> object:
    """TOML has lists; the description is frozen, so it holds tuples."""
    return tuple(value) if isinstance(value, list) else value


_Sizes = Annotated[tuple[int, ...], BeforeValidator(_tuple_from_list)]
_Names = Annotated[tuple[str, ...], BeforeValidator(_tuple_from_list)]


#: A share that is chosen from step to step.
AUTO: Literal["auto"] = "auto"


def _share(value: object) -> object:
    """A number written as text, as flags and the environment have it, is a number."""
    if isinstance(value, str) and value != AUTO:
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"must be a number or {AUTO}") from None
    return value


Share = float | Literal["auto"]


class Section(BaseModel):
    """Base of the sections: unknown keys are errors, types are exact ("16" is not 16), values never
    change.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class _ModelSection(Section):
    """[model]: what to run."""

    id: str = Field(
        default="smollm2-135m",
        min_length=1,
        json_schema_extra={"name": "model"},
        description=(
            "the model: a folder, a .gguf file, a Hugging Face repository id, or a built-in name "
            "(smollm2-135m, tiny-random)"
        ),
    )
    revision: str = Field(
        default="",
        description=("branch, tag or commit of a Hugging Face repository; empty: its default"),
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description=(
            "type of weights, activations and KV; auto: bfloat16 where the device multiplies it "
            "fast, else float32"
        ),
    )
    weights: Literal["auto", "plain", "int8", "fp8", "int4"] = Field(
        default="auto",
        description=(
            "how matrices are kept: plain in dtype, int8 or fp8 with a scale per output, int4 with "
            "one per group of inputs; the CPU's own kernels multiply int8 with rows rounded to "
            "int8; auto: a quantised checkpoint as it is where the device multiplies it so, "
            "everything else plain"
        ),
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto",
        description=(
            "auto: the model's own weights; dummy: random ones of the same shapes, made on the "
            "device, for benches: no weights are fetched or read, and answers mean nothing"
        ),
    )
    context: int = Field(
        default=0,
        ge=0,
        le=2**20,
        description=("tokens a sequence may have, prompt included; 0: the model's own"),
    )

    adapters: _Names = Field(
        default=(),
        json_schema_extra={"several": True},
        description=(
            "low-rank adapters (LoRA) of the model as NAME=FOLDER, each a folder as PEFT saves it; "
            "a request whose model is NAME is answered with that one"
        ),
    )
    adapter_room: int = Field(
        default=0,
        ge=0,
        le=65536,
        description=(
            "ranks, all together, of adapters that may come while the engine serves, beside those "
            "of adapters that are given at the start; every step multiplies with them"
        ),
    )
    chat_template: str = Field(
        default="",
        description=(
            "file with the Jinja template that makes a prompt of a chat; empty: the model's own"
        ),
    )

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
        """Adapters by name."""
        parts = (adapter.partition("=") for adapter in self.adapters)
        return {name: folder for name, _, folder in parts}


class EngineSection(Section):
    """[engine]: seats, pages, buckets, device."""

    max_seats: int = Field(default=32, ge=1, le=1024, description="sequences that run at once")
    page_size: int = Field(
        default=16,
        description=("KV positions per page and prefix-cache block; a power of two, 8 to 256"),
    )
    token_budget: int = Field(
        default=512,
        ge=2,
        le=65536,
        description=("most rows that one step computes; more than max_seats"),
    )
    seat_buckets: _Sizes = Field(
        default=(),
        description=(
            "batch sizes to compile for decode-only steps, ascending; empty: 1 and powers of two "
            "from 4 up to max_seats, "
            "on a GPU or TPU 1, 4, 16, 64 and multiples of 64 or more beyond"
        ),
    )
    token_buckets: _Sizes = Field(
        default=(),
        description=(
            "row counts to compile for steps with prompt rows, ascending; those of at most "
            "max_seats rows serve a sequence for every four; empty: powers of two up to "
            "token_budget, on a GPU or TPU 64 and 256 too"
        ),
    )
    pages: int = Field(
        default=0, ge=0, description="pages in the KV pool; 0: as many as the free memory holds"
    )
    memory_gib: float = Field(
        default=0.0,
        ge=0.0,
        description=("most memory for the KV pool in GiB; 0: decided from what is free"),
    )
    memory_share: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description=(
            "share of a GPU's or TPU's memory that may be taken in all, or on a CPU of the free "
            "memory by the KV pool; 0: 0.92 of a GPU, all of a TPU, a quarter of a CPU's and at "
            "most 1 GiB"
        ),
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        default="auto",
        description=(
            "type of stored keys and values; int8 and fp8 hold twice as many positions as "
            "bfloat16; auto: dtype"
        ),
    )
    prefix_cache: bool = Field(
        default=True,
        description=("keep the pages of finished sequences for prompts that start alike"),
    )
    share_outputs: Literal["auto", "on", "off"] = Field(
        default="auto",
        description=(
            "whether pages of generated tokens, too, serve prompts that start alike, as the next "
            "turn of a conversation does. Their last bits differ from what a prompt's step would "
            "compute, so a greedy answer may then depend on who came before; auto: off on a CPU, "
            "where nothing else makes it depend on others, on elsewhere"
        ),
    )
    policy: _PolicyName = Field(
        default="continuous",
        description=(
            "when a waiting request may board: continuous whenever a seat is free; static a whole "
            "batch at a time, padded "
            "to its longest prompt, all seats held until its last sequence is done, the next one "
            "once batch_size wait; "
            "dynamic likewise, but the oldest waits at most max_wait_ms"
        ),
    )
    batch_size: int = Field(
        default=0,
        ge=0,
        description=("sequences of a batch under static and dynamic; 0: as many as max_seats"),
    )
    max_wait_ms: float = Field(
        default=200.0,
        ge=0,
        description=(
            "milliseconds that the oldest waiting request waits for a batch to fill under dynamic"
        ),
    )
    static_timeout_ms: float = Field(
        default=5000.0,
        ge=0,
        description=(
            "milliseconds without an arrival after which static lets fewer than batch_size board, "
            "so that the last few of a server need not wait for ever; 0: it waits for its number, "
            "for ever; comparisons of policies use none unless it is given"
        ),
    )
    order: _OrderName = Field(
        default="fcfs",
        description=(
            "who boards first: fcfs by arrival; priority by the request's priority field, a level "
            "being worth 10 s of "
            "waiting; shortest by the answer's foreseen length, a token being worth 0.1 s; fair "
            "the API key, or without "
            "keys the user field, that got the fewest tokens; where it is not given, a server with "
            "API keys has fair"
        ),
    )
    prefill_share: Annotated[Share, BeforeValidator(_share)] = Field(
        default=AUTO,
        description=(
            "most of token_budget that prompt rows may take in a step while others decode, so that "
            "a long prompt does not "
            "stall them; auto: the prompts that want rows over the sequences that decode, between "
            "a quarter (for a short prompt a half) and all"
        ),
    )
    target_itl_ms: float = Field(
        default=0.0,
        ge=0,
        description=(
            "time between tokens to keep for running streams, by smaller prompt chunks where "
            "measured step times ask for "
            "it; 0: no target"
        ),
    )
    max_predicted_wait_s: float = Field(
        default=60.0,
        ge=0,
        description=(
            "seconds a request may have to wait by prediction; more is answered 429; 0: no limit"
        ),
    )
    max_waiting_requests: int = Field(
        default=256,
        ge=1,
        description=(
            "sequences that may wait beyond the free seats, of which a request has n; more are "
            "answered 429"
        ),
    )
    max_waiting_tokens: int = Field(
        default=262144,
        ge=1,
        description=(
            "tokens that may wait to be computed: prompts, and answers as long as they are "
            "expected to get; more are answered 429"
        ),
    )
    background_seats: int = Field(
        default=0,
        ge=0,
        description=(
            "seats that requests of batches (/v1/batches) may have while others come; they give "
            "way to these all the same, and may take every seat once nobody else has come for ten "
            "seconds; 0: a quarter of max_seats"
        ),
    )
    kernels: _KernelsName = Field(
        default="auto",
        description=(
            "kernel set; auto: the device's own, without which a GPU or TPU does not start; on a "
            "CPU the reference stands "
            "in for it, with a warning; flashinfer: triton, but prompts are attended to by "
            "FlashInfer's kernels, which auto takes too on cards where they were measured to be "
            "quicker"
        ),
    )
    max_logprobs: int = Field(
        default=20,
        ge=1,
        le=500,
        description=(
            "most alternatives a request may ask for with each token (logprobs, top_logprobs, "
            "prompt_logprobs); so many are computed wherever any are asked for"
        ),
    )
    embedding_pooling: Literal["auto", "off", "last", "mean"] = Field(
        default=AUTO,
        description=(
            "what the vectors of /v1/embeddings are made of: the last token's hidden state behind "
            "the final norm (last), or the mean of all tokens' (mean), which then share no prefix; "
            "auto: as the model's files say (sentence-transformers' modules.json, a GGUF file's "
            "pooling_type), off where they do not; off: the route is refused. Their programs are "
            "compiled at the start. Of an encoder (BERT, XLM-RoBERTa) its files alone decide"
        ),
    )
    canary_every: int = Field(
        default=0,
        ge=0,
        description=(
            "compute one request in so many again, alone, with the reference kernels, and compare "
            "the log-probabilities; "
            "0: none"
        ),
    )
    compilation_cache: bool = Field(
        default=True,
        description=(
            "keep compiled programs on disk (~/.cache/jitney/xla, or xla/ in $JITNEY_CACHE) for "
            "the next start"
        ),
    )
    platform: Literal["auto", "cpu", "cuda", "tpu"] = Field(
        default="auto",
        description=(
            "where to run; a named platform that cannot start is an error, never a silent fallback"
        ),
    )
    device: str = Field(
        default="",
        pattern=r"^(\d+(,\d+)*)?$",
        description=(
            "number of the GPU or TPU chip to use, or with tensor_parallel as many numbers, "
            "separated by commas; empty: "
            "the first"
        ),
    )
    threads: int = Field(
        default=0,
        ge=0,
        le=4096,
        description=(
            "processors that the core may use; 0: on a CPU one of each core that this process may "
            "use (not the second hyperthread), as many as its container's quota holds; else all"
        ),
    )
    product_rows: int = Field(
        default=8,
        ge=1,
        description=(
            "on a CPU, where weights are not laid out for its own kernels (in float32, or without "
            "instructions that multiply pairs of bfloat16): products of up to so many rows are "
            "theirs, of more XLA's"
        ),
    )
    measured_sizes: bool = Field(
        default=True,
        description=(
            "on a CPU, where none of the sizes is given: have jitney serve time this machine's "
            "steps while its first engine has nothing to do, and choose threads, max_seats, "
            "token_budget, buckets and product_rows by them at the next start"
        ),
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description=(
            "devices that the model is split over, each with its share of heads, feed-forward and "
            "vocabulary; of several hosts, all of them together"
        ),
    )
    expert_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description=(
            "of a mixture of experts over several devices: groups of devices that hold different "
            "experts, each whole within its group; 1: every device has a share of every expert"
        ),
    )
    data_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description=(
            "engines that a mixture's experts are dealt out to, one on each of n_hosts hosts with "
            "tensor_parallel devices, requests and pages of its own; they run each step together"
        ),
    )
    coordinator: str = Field(
        default="",
        description=(
            "address of the first of several hosts that run one engine, HOST:PORT, the same on all "
            "of them; auto: by what a TPU slice, a LeaderWorkerSet or Slurm set in the environment "
            "of each, which also says n_hosts and host_id"
        ),
    )
    n_hosts: int = Field(
        default=1,
        ge=1,
        le=64,
        description=(
            "hosts that run one engine together, each with an equal part of tensor_parallel "
            "devices; or the engines of data_parallel, one on each"
        ),
    )
    host_id: int = Field(
        default=0,
        ge=0,
        description=(
            "number of this host: 0 plans and serves HTTP, the others follow it and serve nothing; "
            "with data_parallel all plan and serve"
        ),
    )

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
        # Strictly more: a mixed bucket with as many rows as seats would look like a decode-only
        # one.
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
            raise ValueError("device chooses a GPU or TPU chip; it says nothing on platform cpu")
        chips = self.device.split(",")
        if len(set(chips)) != len(chips) or len(chips) != self.devices_here:
            wanted = f"tensor_parallel ({self.tensor_parallel})"
            if self.devices_here < self.tensor_parallel:
                wanted += f" has on each of {self.n_hosts} hosts"
            raise ValueError(f"device {self.device} must name as many different chips as {wanted}")
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
        """Environment variables that must stand before jax is imported, for `platform` and
        `device` to hold.

        A GPU or TPU run lists cpu second, so that host-side arrays have a home; the first one is
        the default. If its plugin is absent, jax starts on the CPU alone without a word:
        `engine.config.platforms` and `build.start_jax` look.
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
    def devices_here(self) -> int:
        """Devices of one host."""
        if self.data_parallel > 1:
            return self.tensor_parallel
        return self.tensor_parallel // self.n_hosts

    @property
    def follows(self) -> bool:
        """True on a host that does what the first one plans, and serves nothing."""
        return self.host_id > 0 and self.data_parallel == 1


class SamplingSection(Section):
    """[sampling]: how tokens are chosen for a request that does not say. -1: as generation_config
    says.
    """

    generation_config: str = Field(
        default="auto",
        min_length=1,
        description=(
            "where a model's own sampling defaults are read from: auto its generation_config.json "
            "or GGUF metadata; none nowhere; or a path of such a JSON file"
        ),
    )
    temperature: float = Field(
        default=-1.0,
        le=2.0,
        json_schema_extra={"name": "default_temperature"},
        description=(
            "temperature of a request that names none, 0 is greedy; -1: as generation_config says, "
            "else 1"
        ),
    )
    top_p: float = Field(
        default=-1.0,
        le=1.0,
        json_schema_extra={"name": "default_top_p"},
        description=("top_p of a request that names none; -1: as generation_config says, else 1"),
    )
    top_k: int = Field(
        default=-1,
        ge=-1,
        json_schema_extra={"name": "default_top_k"},
        description=(
            "top_k of a request that names none, 0 is off; -1: as generation_config says, else 0"
        ),
    )
    min_p: float = Field(
        default=-1.0,
        le=1.0,
        json_schema_extra={"name": "default_min_p"},
        description=("min_p of a request that names none; -1: as generation_config says, else 0"),
    )
    repetition_penalty: float = Field(
        default=-1.0,
        le=10.0,
        json_schema_extra={"name": "default_repetition_penalty"},
        description=(
            "repetition_penalty of a request that names none and is not greedy, 1 is off; -1: as "
            "generation_config says, else 1"
        ),
    )

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


#: Most characters of a name of the model.
_MOST_NAME = 256
#: Least seconds of `step_timeout_s`.
_LEAST_TIMEOUT_S = 2.0


class ServerSection(Section):
    """[server]: the HTTP endpoint and the life of its core process. Times in seconds, sizes in
    bytes.
    """

    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(
        default=8000, ge=0, le=65535, description="port to listen on; 0: any free one"
    )
    api_key_file: str = Field(
        default="",
        description=(
            "file with one API key of a user per line, readable by its owner only: users generate, "
            "and see their own requests"
        ),
    )
    api_keys: _Names = Field(
        default=(),
        json_schema_extra={"secret": True},
        description=(
            "API keys of users, separated by commas; from the environment or a file, never a flag, "
            "which other users could read"
        ),
    )
    admin_key_file: str = Field(
        default="",
        description=(
            "like api_key_file, of administrators: they see everything (texts, everybody's "
            "requests, metrics, traces, reports) and use the policy lab; without any key everybody "
            "is one, with API keys alone nobody"
        ),
    )
    admin_keys: _Names = Field(
        default=(),
        json_schema_extra={"secret": True},
        description="like api_keys, of administrators",
    )
    insecure: bool = Field(
        default=False, description="allow listening beyond this machine without an API key"
    )
    allowed_hosts: _Names = Field(
        default=(),
        description=(
            "names that clients may call this server by (the Host header, without port), beside "
            "localhost, 127.0.0.1, [::1] and host; empty: only those where host is one of "
            "localhost, 127.0.0.1 and ::1, else any name"
        ),
    )
    ssl_certfile: str = Field(
        default="", description="certificate (PEM, with its chain): speak TLS, and nothing else"
    )
    ssl_keyfile: str = Field(
        default="", description="private key of ssl_certfile; empty: it stands in the same file"
    )
    root_path: str = Field(
        default="",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="path before all routes that a proxy in front takes away, such as /jitney",
    )
    trusted_proxies: _Names = Field(
        default=(),
        description=(
            "addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are "
            "believed; empty: nobody's"
        ),
    )
    cors_origins: _Names = Field(
        default=(),
        description=(
            "origins whose pages may send requests here, such as https://example.org, "
            "https://*.example.org (any one name in the place of *), app://obsidian.md or "
            "chrome-extension://*; null: pages without an origin, which are local files, and "
            "frames that any site can make; *: all; empty: only the pages of this server itself"
        ),
    )
    served_model_name: _Names = Field(
        default=(),
        json_schema_extra={"several": True},
        description=(
            "names that requests may call the model by, the first of them in answers; empty: the "
            "model's own"
        ),
    )
    tool_call_parser: _ToolParserName = Field(
        default="auto",
        description=(
            "how the model writes calls of tools, by the names of vLLM's parsers; auto: by its "
            "chat template; none: calls are content"
        ),
    )
    rerank: Literal["auto", "yes_no"] = Field(
        default="auto",
        description=(
            "how the model ranks documents (/v1/rerank, /v1/score); yes_no: by its answer to "
            "Qwen3-Reranker's prompt; auto: so if its name has qwen3-reranker in it, else by its "
            "classifier or its vectors, if it has any"
        ),
    )
    reasoning_parser: _ReasoningParserName = Field(
        default="auto",
        description=(
            "how the model marks what it thinks, by the names of vLLM's parsers; auto: by its chat "
            "template; none: thoughts are content"
        ),
    )
    body_limit: int = Field(
        default=0,
        ge=0,
        le=1 << 30,
        description=(
            "most bytes of a request body; 0: 48 for each token of the model's context (at a "
            "fleet: of its longest one), and at least 1 MiB"
        ),
    )
    read_timeout_s: float = Field(
        default=10.0, gt=0, description=("seconds a client has to send its headers, and its body")
    )
    template_timeout_s: float = Field(
        default=2.0,
        gt=0,
        description="seconds that the model's chat template may take for one request",
    )
    write_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description=(
            "seconds a client has to read what is written to it; who takes longer is let go, and "
            "its sequences end"
        ),
    )
    keep_alive_s: float = Field(
        default=120.0,
        gt=0,
        description=(
            "seconds an idle connection stays open, if nobody else needs its place: longer than "
            "clients and proxies keep theirs, or one that sends as it closes sees a reset"
        ),
    )
    max_connections: int = Field(
        default=1024,
        ge=1,
        le=1_000_000,
        description=(
            "connections with a request under way; those without one give way to new ones; more "
            "are answered 503, and more than three quarters of one key (of one address, where no "
            "key is asked for) 429, but for probes and /metrics; fewer where the limit of open "
            "files (ulimit -Hn) allows no more"
        ),
    )
    request_timeout_s: float = Field(
        default=0.0, ge=0, description="deadline of a request that names none; 0: none"
    )
    key_max_concurrent: int = Field(
        default=0,
        ge=0,
        description=(
            "sequences that one API key (or everybody, where no key is asked for) may have open, "
            "of which a request has n for each prompt; more are answered 429; 0: no limit"
        ),
    )
    key_tokens_per_minute: int = Field(
        default=0,
        ge=0,
        description=(
            "prompt and output tokens a minute of one API key (or of everybody, where no key is "
            "asked for), the output as it is expected until it came; more are answered 429; 0: no "
            "limit"
        ),
    )
    data_dir: str = Field(
        default="",
        description=(
            "folder for the files, batches and jobs of clients, ours alone and one server's; "
            "empty: data/ beside the compiled programs, in $JITNEY_CACHE or ~/.cache/jitney"
        ),
    )
    file_limit: int = Field(
        default=200 << 20, ge=1024, le=1 << 40, description="most bytes of an uploaded file"
    )
    key_files: int = Field(
        default=1000,
        ge=1,
        le=1_000_000,
        description=(
            "files that one API key (or everybody, where no key is asked for) may have, those with "
            "the answers of batches included"
        ),
    )
    key_file_bytes: int = Field(
        default=4 << 30,
        ge=1024,
        le=1 << 50,
        description=(
            "bytes that one API key may have of all that is kept for it: these files, its jobs and "
            "their answers, and the answers of batches that are not over"
        ),
    )
    answer_limit: int = Field(
        default=16 << 20,
        ge=1024,
        le=1 << 30,
        description="most bytes of the answer of a job, or of a line of a batch",
    )
    key_batches: int = Field(
        default=100,
        ge=1,
        le=10_000,
        description="batches of one API key that are not over; more are answered 429",
    )
    key_jobs: int = Field(
        default=2000,
        ge=1,
        le=1_000_000,
        description="jobs of one API key that are not over; more are answered 429",
    )
    batch_lines: int = Field(
        default=50_000, ge=1, le=10_000_000, description="most lines of a batch's file"
    )
    webhook_prefixes: _Names = Field(
        default=(),
        description=(
            "beginnings of URLs, such as https://example.org/hooks/, that the end of a batch or a "
            "job may be told to when it asks for it (webhook_url); empty: none"
        ),
    )
    webhook_secret_file: str = Field(
        default="",
        description=(
            "file with the secret that these messages are signed with (Standard Webhooks; whsec_ "
            "and base64, or any text), readable by its owner only"
        ),
    )
    responses_kept: int = Field(
        default=1000,
        ge=0,
        description=(
            "answers of /v1/responses that are kept in memory, for clients that come back to them; "
            "the oldest of the key that has most goes first; 0: none"
        ),
    )
    responses_bytes: int = Field(
        default=64 << 20, ge=0, description="most bytes of those answers and of what they answer"
    )
    responses_ttl_s: float = Field(
        default=86_400.0, gt=0, description="seconds that such an answer is kept"
    )
    metrics_compat: Literal["", "vllm"] = Field(
        default="", description=("also publish metrics under another engine's names")
    )
    dashboard_show_text: bool = Field(
        default=False,
        description=("let the page show prompts and answers to whoever may look at it"),
    )
    otel: bool = Field(
        default=False,
        description=(
            "send spans of every request that generates to OpenTelemetry (extra otel), as the "
            "OTEL_ variables of the environment say"
        ),
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least level of what is logged; requests are logged at info"
    )
    record: str = Field(
        default="",
        description=(
            "file to write one line to for every ended request: times and lengths, no text; for "
            "jitney simulate --trace"
        ),
    )
    drain_s: float = Field(
        default=30.0, ge=0, description="seconds that running requests get to finish after SIGTERM"
    )
    heartbeat_s: float = Field(
        default=30.0, gt=0, description=("not ready if no step and no idle tick came for this long")
    )
    step_timeout_s: float = Field(
        default=0.0,
        ge=0,
        description=(
            "seconds without a step, or without an idle tick, after which the core process is "
            "killed and started again; the first step of each bucket gets 60 at least; 0: ten "
            "seconds, or eight times the longest step seen if that is more (at most 120 seconds "
            "more than that step)"
        ),
    )
    start_timeout_s: float = Field(
        default=600.0,
        ge=0,
        description=(
            "seconds without progress (a tensor loaded, a program compiled) after which the first "
            "start of the core process is given up, with status 1; later ones are held to what the "
            "first one took; 0: no limit"
        ),
    )
    restart: bool = Field(
        default=True, description="start a new core process when the old one dies"
    )
    on_core_death: Literal["resume", "fail"] = Field(
        default="resume",
        description=(
            "what becomes of open requests when the core process dies: resume goes on with them in "
            "the new one, from the tokens they have; fail ends them with an error"
        ),
    )
    max_restarts: int = Field(
        default=5,
        ge=0,
        description=(
            "restarts within ten minutes before giving up; a core that has served for a minute "
            "starts the count anew"
        ),
    )

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
        """Where files and batches of clients are kept."""
        return Path(self.data_dir).expanduser() if self.data_dir else cache_dir() / "data"

    @property
    def open_to_others(self) -> bool:
        """True when other machines can reach the endpoint."""
        return self.host not in _LOOPBACK

    @property
    def has_keys(self) -> bool:
        """True when nobody gets in without a key."""
        return bool(self.api_key_file or self.api_keys or self.admin_key_file or self.admin_keys)

    @property
    def answered_hosts(self) -> tuple[str, ...] | None:
        """Host names that are answered, lower case, as a Host header has them; None: any."""
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
            known = origin in ("*", "null") or _WEB_ORIGIN.fullmatch(origin)
            if not known and not _APP_ORIGIN.fullmatch(origin):
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
    """Everything that decides how an engine runs and is served."""

    model: _ModelSection = _ModelSection()
    engine: EngineSection = EngineSection()
    sampling: SamplingSection = SamplingSection()
    server: ServerSection = ServerSection()


def cache_dir() -> Path:
    """The user's cache folder for models and compiled programs: $JITNEY_CACHE, or jitney/ in
    $XDG_CACHE_HOME.
    """
    named = os.environ.get("JITNEY_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jitney"


def compilation_cache_dir() -> Path:
    """Where compiled programs are kept between starts."""
    return cache_dir() / "xla"
