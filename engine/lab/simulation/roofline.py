"""Step times from first principles: bytes over bandwidth or operations over peak, whichever takes
longer.

The roofline of Williams, Waterman and Patterson (2009) for one step of a decoder: weights and KV
are read once, KV of the step's rows is written; matrix products cost two operations per weight and
row, attention four per head, key and head dimension. What no chip reaches is taken off by two
stated efficiencies, and each step pays a fixed overhead.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.step_cost import StepCost, StepRows
from jitney.engine.core import (
    Bucket,
    ExpertsConfig,
    ModelConfig,
    StepWork,
    read_hf_config,
)
from jitney.engine.lab.simulation.devices import Accelerator
from jitney.engine.lab.simulation.step_table import HostTimes

#: Bytes per number; int4 with a 2-byte scale and a 1-byte zero point for every 128 weights, mxfp4,
#: which is of experts alone, with a 1-byte scale for every 32.
_BYTES = {
    "f32": 4.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5 + 3 / 128,
    "mxfp4": 0.5 + 1 / 32,
}
#: Which unit multiplies weights of a format, where not bfloat16's: narrow weights are widened.
_UNITS = {"f32": "f32"}
#: The host of a GPU or TPU machine: the project's budget of 0.3 ms at 64 seats and 1 ms at 256,
#: mostly per row.
_ASSUMED_HOST = HostTimes(before=6e-5, before_per_row=2.2e-6, after=2e-5, after_per_row=1.4e-6)


def _llama(
    n_layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    inner: int,
    vocab: int,
    context: int,
    architecture: str = "LlamaForCausalLM",
    tied: bool = False,
) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        windows=(0,) * n_layers,
        context_length=context,
        tie_embeddings=tied,
        qk_norm=architecture.startswith("Qwen3"),
    )


def _gpt_oss(n_layers: int, n_experts: int) -> ModelConfig:
    sizes = {
        "num_hidden_layers": n_layers,
        "num_local_experts": n_experts,
        "num_attention_heads": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "vocab_size": 201088,
    }
    return read_hf_config({"architectures": ["GptOssForCausalLM"], **sizes})


def _qwen3_5(
    n_layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int, **more: int
) -> ModelConfig:
    """more: of the feed-forward."""
    sizes = {
        "num_hidden_layers": n_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "linear_num_value_heads": value_heads,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
    }
    kind = "Qwen3_5" if "intermediate_size" in more else "Qwen3_5Moe"
    return read_hf_config({"architectures": [f"{kind}ForCausalLM"], **sizes, **more})


def _nemotron_3_nano() -> ModelConfig:
    sizes = {
        "hybrid_override_pattern": "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*E" + "ME" * 4,
        "hidden_size": 2688,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "intermediate_size": 1856,
        "mamba_num_heads": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "vocab_size": 131072,
        "max_position_embeddings": 262144,
    }
    return read_hf_config({"architectures": ["NemotronHForCausalLM"], **sizes})


def _granite_4_h_small() -> ModelConfig:
    attending = (5, 15, 25, 35)
    sizes = {
        "num_hidden_layers": 40,
        "layer_types": ["attention" if layer in attending else "mamba" for layer in range(40)],
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "intermediate_size": 768,
        "shared_intermediate_size": 1536,
        "mamba_d_state": 128,
        "vocab_size": 100352,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }
    return read_hf_config({"architectures": ["GraniteMoeHybridForCausalLM"], **sizes})


def _lfm2_8b_a1b() -> ModelConfig:
    sizes = {
        "num_hidden_layers": 24,
        "full_attn_idxs": [2, 6, 10, 14, 18, 21],
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "vocab_size": 65536,
    }
    return read_hf_config({"architectures": ["Lfm2MoeForCausalLM"], **sizes})


def _latent(kind: str, **sizes: Any) -> ModelConfig:
    """sizes: where they differ from what transformers assumes."""
    return read_hf_config({"architectures": [f"{kind}ForCausalLM"], **sizes})


#: DeepSeek-V2-Lite's sizes.
_V2_LITE: JsonDict = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "max_position_embeddings": 163840,
}
#: GLM-4.7-Flash's.
_GLM_FLASH: JsonDict = {
    "vocab_size": 154880,
    "hidden_size": 2048,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "intermediate_size": 10240,
}
#: Mistral Small 4's.
_MISTRAL_4: JsonDict = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
}


def _gemma4(
    n_layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    inner: int,
    **more: int | bool | list[str],
) -> ModelConfig:
    """more: keys of config.json; of the classes of Gemma 4 the one that has layer inputs, or a
    larger context.
    """
    sizes: dict[str, object] = {
        "num_hidden_layers": n_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": 262144,
        "final_logit_softcapping": 30.0,
    }
    if "num_kv_shared_layers" not in more:
        sizes |= {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "max_position_embeddings": 262144,
        }
    return read_hf_config({"architectures": ["Gemma4ForCausalLM"], **sizes, **more})


#: Every fifth layer of Gemma 4 E2B sees all; of the others every sixth, which is usual.
_E2B_LAYERS = [*["sliding_attention"] * 4, "full_attention"] * 7
#: Shapes by name, from the models' published config.json, so that planning needs no download.
SHAPES = {
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 64, 8192, 128256, 131072, tied=True),
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 128, 14336, 128256, 131072),
    "llama-3.1-70b": _llama(80, 8192, 64, 8, 128, 28672, 128256, 131072),
    "qwen3-32b": _llama(64, 5120, 64, 8, 128, 25600, 151936, 40960, "Qwen3ForCausalLM"),
    "qwen3-8b": _llama(36, 4096, 32, 8, 128, 12288, 151936, 40960, "Qwen3ForCausalLM"),
    "qwen3-30b-a3b": replace(
        _llama(48, 2048, 32, 4, 128, 768, 151936, 40960, "Qwen3MoeForCausalLM"),
        experts=ExpertsConfig(128, 8, renormalised=True),
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "qwen3.5-27b": _qwen3_5(64, 5120, 24, 4, 48, intermediate_size=17408),
    "qwen3.5-35b-a3b": _qwen3_5(40, 2048, 16, 2, 32, num_experts=256, num_experts_per_tok=8),
    "nemotron-3-nano-30b-a3b": _nemotron_3_nano(),
    "granite-4.0-h-small": _granite_4_h_small(),
    "lfm2-8b-a1b": _lfm2_8b_a1b(),
    "deepseek-v2-lite": _latent("DeepseekV2", **_V2_LITE),
    "glm-4.7-flash": _latent("Glm4MoeLite", **_GLM_FLASH),
    "mistral-small-4": _latent("Mistral4", **_MISTRAL_4),
    "gemma-4-e2b": _gemma4(
        35,
        1536,
        8,
        1,
        6144,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
        layer_types=_E2B_LAYERS,
    ),
    "gemma-4-e4b": _gemma4(42, 2560, 8, 2, 10240, num_kv_shared_layers=18),
    "gemma-4-12b": _gemma4(48, 3840, 16, 8, 15360, num_global_key_value_heads=1),
    "gemma-4-26b-a4b": _gemma4(
        30,
        2816,
        16,
        8,
        2112,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "gemma-4-31b": _gemma4(60, 5376, 32, 16, 21504, num_global_key_value_heads=4),
    "mixtral-8x7b": replace(
        _llama(32, 4096, 32, 8, 128, 14336, 32000, 32768, "MixtralForCausalLM"),
        experts=ExpertsConfig(8, 2, renormalised=True),
    ),
}


def _find_shape(model: str) -> ModelConfig:
    """The shape of a decoder: of a built-in name, a config.json or whatever `--model` takes; its
    weights are not needed, but a repository id is fetched. Raises ModelError.
    """
    shape = _read_shape(model)
    if shape.encoder is not None:
        raise ModelError(
            f"{model} is an encoder ({shape.architecture}): plans and simulations are of models "
            "that write text"
        )
    return shape


def _read_shape(model: str) -> ModelConfig:
    if model.lower() in SHAPES:
        return SHAPES[model.lower()]
    path = Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json":
        return read_hf_config(_read_config(path))
    from jitney.engine.core import ModelSource

    try:
        return ModelSource.resolve(model).config
    except ModelError as error:
        raise ModelError(f"{error}; or a built-in shape: {', '.join(SHAPES)}") from None


def _read_config(path: Path) -> Mapping[str, object]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(read, dict):
        raise ModelError(f"{path}: must hold an object")
    return read


#: Assumptions that are shares of what there is.
_SHARES = ("bandwidth", "flops", "memory")


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The roofline's assumptions."""

    #: Shares of the published peaks that are reached.
    bandwidth: float = 0.8
    flops: float = 0.6
    #: Fixed cost of a step.
    overhead_s: float = 3e-4
    #: Latency of one collective between chips.
    hop_s: float = 1e-5
    #: Share of the memory that may be used.
    memory: float = 0.92

    def __post_init__(self) -> None:
        for name in _SHARES:
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"the {name} efficiency must be more than 0 and at most 1")
        if min(self.overhead_s, self.hop_s) < 0:
            raise ConfigError("the overhead of a step must not be negative")


_USUAL = Assumptions()


@dataclass(frozen=True)
class ModelCost:
    """Bytes and operations of a model in a number format. weights, kv: keys of BYTES. The
    embedding, and a head tied to it, stay bfloat16 (float32 if the weights are) when matrices are
    quantised. What is worked out once is kept: a simulation asks for it in every step."""

    config: ModelConfig
    weights: str = "bf16"
    kv: str = "bf16"

    def __post_init__(self) -> None:
        for name in (self.weights, self.kv):
            if name not in _BYTES:
                raise ConfigError(f"unknown number format {name!r}; known: {', '.join(_BYTES)}")
        if self.weights == "mxfp4" and self.config.experts is None:
            raise ConfigError("weights mxfp4 are of experts, and this model has none")
        if self.config.latent is not None and _BYTES[self.kv] < _BYTES["bf16"]:
            raise ConfigError(
                f"KV {self.kv}: the pool of latent attention has the model's dtype; leave it out"
            )

    @property
    def narrow(self) -> list[str]:
        """Weights and KV with fewer bits than bfloat16, in words."""
        formats = {"weights": self.weights, "KV": self.kv}
        return [f"{kind} {name}" for name, kind in formats.items() if _BYTES[kind] < _BYTES["bf16"]]

    @cached_property
    def step(self) -> StepCost:
        """Cost of each step."""
        return self.config.step_cost(
            weight_bytes=self._shared_bytes,
            head_bytes=self.head_bytes,
            kv_bytes=self._read_kv_bytes,
            expert_bytes=_BYTES[self.weights],
        )

    @property
    def _shared_bytes(self) -> float:
        """Of one number of matrices that are no expert's."""
        return _BYTES["bf16" if self.weights == "mxfp4" else self.weights]

    @cached_property
    def layer_weights(self) -> int:
        """Numbers in the matrices of all layers."""
        return self.step.layer_weights

    @cached_property
    def table_weights(self) -> int:
        """Numbers in the output head, and as many in the embedding."""
        return self.config.vocab_size * self.config.hidden_size

    @property
    def parameters(self) -> int:
        tables = 1 if self.config.tie_embeddings else 2
        return self.layer_weights + tables * self.table_weights + self.layer_input_weights

    @property
    def layer_input_weights(self) -> int:
        """Numbers in the table of what each layer has of a token (`ModelConfig.layer_input_size`),
        of which a step reads its rows' alone.
        """
        c = self.config
        return c.vocab_size * c.n_layers * c.layer_input_size

    @cached_property
    def table_bytes(self) -> float:
        """Bytes of the embedding."""
        return self.table_weights * max(self._shared_bytes, _BYTES["bf16"])

    @cached_property
    def head_bytes(self) -> float:
        """Bytes of the output head: the embedding once more, or a matrix like any
        other.
        """
        if self.config.tie_embeddings:
            return self.table_bytes
        return self.table_weights * self._shared_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes held on the device."""
        shared = self.step.shared_weights
        held = shared * self._shared_bytes + (self.layer_weights - shared) * _BYTES[self.weights]
        held += self.table_bytes
        held += self.layer_input_weights * max(self._shared_bytes, _BYTES["bf16"])
        if not self.config.tie_embeddings:
            held += self.head_bytes
        return held

    @cached_property
    def kv_bytes(self) -> float:
        """Bytes of keys and values per position, all layers."""
        return sum(self.config.kv_numbers) * _BYTES[self.kv]

    @property
    def _read_kv_bytes(self) -> float:
        """The same as layers read them, of which several may read one layer's."""
        return sum(width * count for (width, _), count in self.kv_reads.items()) * _BYTES[self.kv]

    @cached_property
    def kv_reads(self) -> Counter[tuple[int, int]]:
        """How many layers read so many numbers of a position, of so many KV heads."""
        c = self.config
        return Counter(
            (c.kv_width(layer), c.of_layer(layer).n_kv_heads) for layer in c.attending_layers
        )

    def read_bytes(self, rows: int, work: StepWork) -> tuple[float, float]:
        """(weights and state, KV read and written) in a step: see `StepCost`."""
        weights, kv = self.step.read_bytes(rows, _rows_of(work))
        return float(weights), float(kv)

    def operations(self, rows: int, logit_rows: int, work: StepWork) -> tuple[float, float]:
        """(in the layers' products, in output head and attention) of a step: see `StepCost`."""
        layers, rest = self.step.operations(rows, logit_rows, _rows_of(work))
        return float(layers), float(rest)


def _rows_of(work: StepWork) -> StepRows:
    return StepRows(work.decode, work.prompt, work.keys, work.pairs)


@dataclass(frozen=True, slots=True)
class Roofline:
    """`engine.lab.simulation.step_table.StepTimes` of a model on `count` chips, split by tensor
    parallelism.

    Weights and heads are divided evenly; KV heads at most as often as there are any, then they are
    replicated. Each layer ends in two all-reduces of [rows, E] bfloat16, by rings: 2 (n - 1) / n of
    the bytes over the link, and a hop. Queries and keys that are normed over all heads wait for a
    third one, of two numbers a row: a hop.
    """

    cost: ModelCost
    #: One of the chips.
    device: Accelerator
    count: int = 1
    assumed: Assumptions = _USUAL
    #: What the host takes around each step.
    host: HostTimes = _ASSUMED_HOST
    #: See `step_table.StepTable`.
    noise: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def named(
        cls,
        model: str,
        device: str,
        *,
        weights: str = "bf16",
        kv: str = "bf16",
        count: int = 1,
        assumed: Assumptions = _USUAL,
    ) -> Roofline:
        """The roofline of a model (a built-in shape, a config.json or what `--model` takes) on
        chips of that name. Raises ModelError and ConfigError.
        """
        cost = ModelCost(_find_shape(model), weights, kv)
        return cls(cost, Accelerator.named(device), count, assumed)

    @property
    def source(self) -> str:
        """The origin of the times, in words."""
        chips = f"{self.count} x {self.device.name}"
        return f"roofline of {chips}, {self.cost.weights} weights, {self.cost.kv} KV"

    def seconds(self, bucket: Bucket, work: StepWork) -> float:
        """Expected device seconds of a step."""
        return (
            max(self.memory_seconds(bucket, work), self.compute_seconds(bucket, work))
            + self.link_seconds(bucket.tokens)
            + self.assumed.overhead_s
        )

    def memory_seconds(self, bucket: Bucket, work: StepWork) -> float:
        """Time to read weights, KV and recurrent state once."""
        weights, kv = self.cost.read_bytes(bucket.tokens, work)
        per_chip = weights / self.count + kv / self.kv_split
        return per_chip / (self.device.bandwidth * self.assumed.bandwidth)

    def compute_seconds(self, bucket: Bucket, work: StepWork) -> float:
        """Time of the arithmetic; attention runs in bfloat16 whatever the weights' format."""
        layers, rest = self.cost.operations(bucket.tokens, bucket.seats, work)
        unit = self._unit
        plain = self.device.peak("f32" if unit == "f32" else "bf16")
        return (layers / self.device.peak(unit) + rest / plain) / (self.count * self.assumed.flops)

    @property
    def multiplies_fp8(self) -> bool:
        """Whether the layers' products are counted in fp8: on GPUs with units for it, but not those
        of a mixture, whose experts are widened.
        """
        dense = self.cost.config.experts is None
        return self.cost.weights == "fp8" and self.device.rounds_fp8 and dense

    @property
    def _unit(self) -> str:
        """The unit that multiplies the layers' weights."""
        if self.multiplies_fp8:
            return "fp8"
        return _UNITS.get(self.cost.weights, "bf16")

    def link_seconds(self, rows: int) -> float:
        """Time of the all-reduces between chips."""
        if self.count == 1:
            return 0.0
        config = self.cost.config
        volume = 2 * (self.count - 1) / self.count * rows * config.hidden_size * _BYTES["bf16"]
        return config.n_layers * (self.hops * self.assumed.hop_s + 2 * volume / self.device.link)

    @property
    def hops(self) -> int:
        """All-reduces of a layer that a step waits for."""
        return 3 if self.cost.config.wide_qk_norm else 2

    def check_split(self) -> None:
        """Raise ConfigError unless the engine can divide the model over the chips."""
        self.cost.config.local(self.count)

    @property
    def kv_split(self) -> float:
        """Among how many chips the KV is divided; a mean where layers have different heads."""
        reads = [(width * n, heads) for (width, heads), n in self.cost.kv_reads.items()]
        own = sum(width / min(self.count, heads) for width, heads in reads)
        return sum(width for width, _ in reads) / own

    def _own_kv_width(self, layer: int) -> float:
        """Numbers of a position's keys and values of a layer on one chip."""
        config = self.cost.config
        return config.kv_width(layer) / min(self.count, config.of_layer(layer).n_kv_heads)

    def page_bytes(self, page_size: int) -> tuple[float, ...]:
        """Of a page of each cache group, in all its layers, on one chip."""
        number = page_size * _BYTES[self.cost.kv]
        groups = self.cost.config.cache_groups
        return tuple([number * sum(map(self._own_kv_width, group.layers)) for group in groups])

    @property
    def slot_bytes(self) -> float:
        """Bytes of a slot of recurrent layers' state on one chip."""
        return self.cost.config.slot_bytes / self.count

    @property
    def kv_room(self) -> float:
        """Bytes left for KV and for what recurrent layers keep on one chip, beside the weights."""
        return self.device.memory * self.assumed.memory - self.cost.weight_bytes / self.count
