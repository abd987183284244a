"""What a model is, read from `config.json` or from GGUF metadata; plain data, jax-free.

Everything here comes from untrusted files: each number is checked for type and range before
anything is sized by it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from jitney.engine.checkpoints.quantization_config import read_packing
from jitney.engine.errors import ConfigError, ModelError

log = logging.getLogger(__name__)

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]

#: Class names in `config.json` -> our name of the architecture. GGUF files use the short names
#: themselves.
HF_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

#: What transformers assumes when `config.json` leaves a key out.
HF_DEFAULTS: dict[Architecture, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}

#: No model comes near these; a file that does is broken or hostile.
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 26


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the rotary frequencies of a long-context model differ from the plain ones.

    linear: all divided by `factor`. llama3: low frequencies divided, high kept, smooth between
    (Llama 3.1). yarn: blend by rotations per context, cos and sin times `attention_factor` (arXiv
    2309.00071). factors: frequency j divided by factors[j] (GGUF's `rope_freqs.weight`), D // 2
    numbers.
    """

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-family decoder.

    windows[l]: how many positions layer l sees, its own included; 0 is all of them. context_length:
    the most tokens of prompt and output together. eos_ids: every token that ends a generation, from
    all files that name one. shards: among how many devices the model is split; heads and
    intermediate_size are then one device's (see `local`).
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    windows: tuple[int, ...]
    context_length: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    shards: int = 1

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ModelError(
                f"{self.n_heads} query heads cannot share {self.n_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for rotary positions, found {self.head_dim}")
        for token in (*self.eos_ids, *([] if self.bos_id is None else [self.bos_id])):
            if not 0 <= token < self.vocab_size:
                raise ModelError(
                    f"special token id {token} lies outside the vocabulary of {self.vocab_size}"
                )

    @property
    def window(self) -> int:
        """Positions that any layer sees at most, its own included; 0 where some layer sees all."""
        return max(self.windows) if all(self.windows) else 0

    @property
    def qkv_size(self) -> int:
        """Columns of the fused query, key and value projection: (H + 2K) * D."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    @property
    def vocab_share(self) -> int:
        """Rows of the embedding, and columns of the output head, that one device holds."""
        return self.vocab_size // self.shards

    def local(self, shards: int) -> ModelConfig:
        """What one of `shards` devices computes: its share of heads, feed-forward and vocabulary.

        Devices beyond the KV heads share them. Raises ConfigError naming what cannot be divided.
        """
        if shards < 1:
            raise ConfigError(f"a model cannot be divided over {shards} devices")
        sizes = {
            "query heads": self.n_heads,
            "feed-forward columns": self.intermediate_size,
            "vocabulary entries": self.vocab_size,
        }
        if self.n_kv_heads % shards and shards % self.n_kv_heads:
            sizes = {"key-value heads": self.n_kv_heads}
        uneven = [f"{size} {name}" for name, size in sizes.items() if size % shards]
        if uneven:
            raise ConfigError(
                f"tensor_parallel {shards} does not divide the model's {' and '.join(uneven)}"
            )
        return replace(
            self,
            n_heads=self.n_heads // shards,
            n_kv_heads=max(1, self.n_kv_heads // shards),
            intermediate_size=self.intermediate_size // shards,
            shards=shards,
        )

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Read the contents of `config.json` (and of `generation_config.json`, which may name more
        end tokens).

        Nothing the file names is ever imported. Raises ModelError for an architecture, activation,
        quantisation or rope scaling that is not supported, and for numbers that are missing or out
        of range.
        """
        return from_hf(config, generation or {})

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        rope_factors: tuple[float, ...] = (),
    ) -> ModelConfig:
        """Read GGUF key-values; shapes (row-major, as numpy sees them) tell which optional tensors
        exist.

        rope_factors: contents of `rope_freqs.weight` if the file has it. Raises ModelError as
        `from_hf` does.
        """
        return from_gguf(metadata, shapes, rope_factors)


class Fields:
    """Checked access to untrusted key-values; `where` names the file in errors."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self.where = where

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or not low <= value <= high:
            self.reject(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            self.reject(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            self.reject(key, value, "true or false")
        return value

    def reject(self, key: str, value: Any, wanted: str) -> None:
        raise ModelError(f"{self.where}: {key} must be {wanted}, found {str(value)[:60]!r}")


def known_architecture(names: Any) -> Architecture:
    """The first supported class name in `architectures`; ModelError listing the known ones
    otherwise.
    """
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in HF_ARCHITECTURES:
            return HF_ARCHITECTURES[name]
    raise ModelError(
        f"config.json: unknown architecture {repr(names)[:100]}; known: "
        f"{', '.join(HF_ARCHITECTURES)}"
    )


def from_hf(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """See ModelConfig.from_hf."""
    architecture = known_architecture(config.get("architectures"))
    refuse_unsupported(config)
    # A key set to null is not a missing key: Mistral's `sliding_window: null` means none, its
    # absence means 4096.
    fields = Fields(HF_DEFAULTS[architecture] | dict(config), "config.json")
    heads = fields.integer("num_attention_heads", 1, MAX_WIDTH)
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    context = fields.integer("max_position_embeddings", 1, MAX_CONTEXT)
    theta, scaling = hf_rope(fields, context)
    biased = fields.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 2, MAX_VOCAB),
        hidden_size=hidden,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=fields.integer("num_key_value_heads", 1, heads, default=heads),
        head_dim=fields.integer("head_dim", 2, MAX_WIDTH, default=hidden // heads),
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        windows=hf_windows(architecture, fields, layers),
        context_length=extended_context(context, scaling),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=biased or architecture == "qwen2",
        o_bias=biased and architecture in ("llama", "qwen3"),
        mlp_bias=architecture == "llama" and fields.flag("mlp_bias"),
        qk_norm=architecture == "qwen3",
        bos_id=next(iter(token_ids(fields, "bos_token_id")), None),
        eos_ids=unique(
            token_ids(fields, "eos_token_id"),
            token_ids(Fields(generation, "generation_config.json"), "eos_token_id"),
        ),
    )


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise for settings that would change the answer in a way this engine does not compute."""
    if "auto_map" in config:
        log.warning(
            "config.json names custom code (auto_map); it is not run, the known architecture is "
            "used instead"
        )
    read_packing(config.get("quantization_config"))
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(
            f"config.json: hidden_act {str(config['hidden_act'])[:40]!r} is not supported, only "
            "silu"
        )
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported")


def hf_rope(fields: Fields, context: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`
    (before).
    """
    settings = fields.get("rope_parameters", fields.get("rope_scaling", {}))
    if not isinstance(settings, dict) or any(
        isinstance(value, dict) for value in settings.values()
    ):
        fields.reject("rope_parameters", settings, "one flat table for all layers")
    rope = Fields(
        {"rope_theta": fields.get("rope_theta"), **settings}, "config.json: rope_parameters"
    )
    theta = rope.number("rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    original = rope.integer("original_max_position_embeddings", 1, MAX_CONTEXT, default=context)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported")
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, RopeScaling("linear", rope.number("factor"))
        case "llama3":
            return theta, RopeScaling(
                "llama3",
                rope.number("factor"),
                original,
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
            )
        case "yarn":
            return theta, hf_yarn(rope, original)
    raise ModelError(
        f"config.json: rope scaling {str(kind)[:40]!r} is not supported; "
        "known: default, linear, llama3, yarn"
    )


def hf_yarn(rope: Fields, original: int) -> RopeScaling:
    """YaRN; the temperature on cos and sin is 0.1 ln(factor) + 1 unless the file says otherwise."""
    factor = rope.number("factor")
    attention = yarn_temperature(factor, 1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        attention = yarn_temperature(factor, rope.number("mscale")) / yarn_temperature(
            factor, rope.number("mscale_all_dim")
        )
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", attention),
    )


def yarn_temperature(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def extended_context(context: int, scaling: RopeScaling | None) -> int:
    """YaRN configs commonly keep the trained length in max_position_embeddings; what they serve is
    factor times it.
    """
    if scaling is None or scaling.kind != "yarn":
        return context
    return min(max(context, int(scaling.original_context * scaling.factor)), MAX_CONTEXT)


def hf_windows(architecture: Architecture, fields: Fields, layers: int) -> tuple[int, ...]:
    """Window of each layer; Qwen needs `use_sliding_window`, and only from layer
    `max_window_layers` on.
    """
    window = (
        0
        if fields.values.get("sliding_window") is None
        else fields.integer("sliding_window", 1, MAX_CONTEXT)
    )
    if architecture == "llama":
        return (0,) * layers
    if architecture == "mistral":
        return (window,) * layers
    window = window if fields.flag("use_sliding_window") else 0
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 0, MAX_LAYERS, default=28)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in ("full_attention", "sliding_attention") for kind in kinds)
    ):
        fields.reject("layer_types", kinds, f"{layers} times full_attention or sliding_attention")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    """A token id or a list of them, as a tuple; empty when absent."""
    value = fields.get(key, [])
    ids = value if isinstance(value, list) else [value]
    if any(type(token) is not int for token in ids):
        fields.reject(key, value, "a token id or a list of them")
    return tuple(ids)


def unique(*groups: tuple[int, ...]) -> tuple[int, ...]:
    """All ids of the groups once, in the order first seen."""
    return tuple(dict.fromkeys(token for group in groups for token in group))


def from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: tuple[float, ...],
) -> ModelConfig:
    """See ModelConfig.from_gguf."""
    name = metadata.get("general.architecture")
    known = ("llama", "qwen2", "qwen3")  # Mistral's GGUF files say "llama"
    if name not in known:
        raise ModelError(
            f"GGUF: unknown architecture {str(name)[:40]!r}; known: {', '.join(known)}"
        )
    prefix = f"{name}."
    fields = Fields(
        {
            key.removeprefix(prefix): value
            for key, value in metadata.items()
            if key.startswith(prefix)
        },
        f"GGUF {name}",
    )
    if fields.get("expert_count", 0):
        raise ModelError("GGUF: mixture-of-experts models are not supported")
    heads = fields.integer("attention.head_count", 1, MAX_WIDTH)
    hidden = fields.integer("embedding_length", 1, MAX_WIDTH)
    layers = fields.integer("block_count", 1, MAX_LAYERS)
    head_dim = fields.integer("attention.key_length", 2, MAX_WIDTH, default=hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise ModelError(
                f"GGUF {name}: {key} {str(fields.get(key))[:20]} must equal the head size "
                f"{head_dim}"
            )
    context = fields.integer("context_length", 1, MAX_CONTEXT)
    scaling = gguf_rope(fields, context, head_dim, rope_factors)
    vocab = Fields({"rows": shapes.get("token_embd.weight", (None,))[0]}, "GGUF token_embd.weight")
    window = fields.integer("attention.sliding_window", 0, MAX_CONTEXT, default=0)
    return ModelConfig(
        architecture=name,
        vocab_size=vocab.integer("rows", 2, MAX_VOCAB),
        hidden_size=hidden,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=fields.integer("attention.head_count_kv", 1, heads, default=heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length", 1, MAX_WIDTH),
        windows=(window,) * layers,
        context_length=extended_context(context, scaling),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        rms_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-6),
        tie_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        bos_id=next(iter(token_ids(Fields(metadata, "GGUF"), "tokenizer.ggml.bos_token_id")), None),
        eos_ids=unique(
            *(
                token_ids(Fields(metadata, "GGUF"), f"tokenizer.ggml.{key}_token_id")
                for key in ("eos", "eot", "eom")
            )
        ),
    )


def gguf_rope(
    fields: Fields, context: int, head_dim: int, factors: tuple[float, ...]
) -> RopeScaling | None:
    """Scaling by key-values, or by the tensor of divisors that Llama 3.1 files carry instead."""
    if factors:
        if len(factors) != head_dim // 2 or not all(
            math.isfinite(value) and value > 0 for value in factors
        ):
            raise ModelError(f"GGUF: rope_freqs.weight must hold {head_dim // 2} positive numbers")
        return RopeScaling("factors", factors=factors)
    kind = fields.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = fields.number("rope.scaling.factor")
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind != "yarn":
        raise ModelError(
            f"GGUF: rope scaling {str(kind)[:40]!r} is not supported; known: none, linear, yarn"
        )
    for key in ("yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor"):
        if fields.get(f"rope.scaling.{key}") is not None:
            raise ModelError(f"GGUF: rope.scaling.{key} is not supported")
    original = fields.integer(
        "rope.scaling.original_context_length", 1, MAX_CONTEXT, default=context
    )
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0)
        * yarn_temperature(factor, 1.0),
    )


#: The smallest model of each architecture that still has more than one of everything.
TINY = ModelConfig(
    architecture="llama",
    vocab_size=512,
    hidden_size=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    windows=(0, 0),
    context_length=2048,
    bos_id=257,
    eos_ids=(259,),
)


def tiny_config(architecture: str = "llama") -> ModelConfig:
    """The configuration behind `tiny-random[:architecture]`: L 2, E 64, H 4, K 2, D 16, F 128, V
    512, untied.

    Raises ModelError for an unknown architecture.
    """
    match architecture:
        case "llama":
            return TINY
        case "mistral":
            return replace(TINY, architecture="mistral", windows=(32, 32))
        case "qwen2":
            return replace(TINY, architecture="qwen2", qkv_bias=True)
        case "qwen3":
            return replace(TINY, architecture="qwen3", qk_norm=True)
    raise ModelError(
        f"tiny-random has no architecture {architecture!r}; known: {', '.join(HF_DEFAULTS)}"
    )
