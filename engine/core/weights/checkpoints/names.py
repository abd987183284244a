"""Which tensors of a checkpoint make up each of our weights; jax-free.

Checkpoints store each projection as [O, I]; ours are fused and stored as [I, O].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jitney.engine.common.errors import ModelError
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig

type FileFormat = Literal["hf", "gguf"]
#: Attribute names and layer numbers from the model down, as nnx's flat state has them.
type Path = tuple[str | int, ...]

#: How many tensors of each fault are named before the rest are only counted.
_NAMED_AT_MOST = 10


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a checkpoint."""

    name: str
    #: Row-major, as stored.
    shape: tuple[int, ...]
    #: Its rows are so many parts, and of each part every second row belongs to its first half;
    #: 0: they are in our order.
    paired_parts: int = 0

    @property
    def order(self) -> np.ndarray | None:
        """Which stored row stands where, [rows]; None: as stored.

        llama.cpp pairs rotated rows (2j, 2j + 1) of a query or key head, gpt-oss gates and ups;
        ours stand at (j, j + D/2).
        """
        if not self.paired_parts:
            return None
        pairs = np.arange(self.shape[0]).reshape(self.paired_parts, -1, 2)
        return pairs.swapaxes(1, 2).ravel()


@dataclass(frozen=True, slots=True)
class Target:
    """One of our weights, and what it is made of."""

    path: Path
    #: Stacked along their first axis.
    pieces: tuple[Piece, ...]
    #: Then [O, I] becomes [I, O].
    transpose: bool = False
    #: Then added to every number.
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightMap:
    """All weights of a model, and what they are made of."""

    targets: tuple[Target, ...]
    #: Endings of tensors of the checkpoint that hold nothing we need.
    ignored: tuple[str, ...]

    @classmethod
    def of(cls, config: ModelConfig, names: Dialect) -> WeightMap:
        """Every weight of a `Llama` or its subclasses. A tied model may carry a redundant output
        head.
        """
        vocab, size = config.vocab_size, config.hidden_size
        embed = Target(("embed",), (Piece(f"{names.embed}.weight", (vocab, size)),))
        targets = [embed, _norm(("norm", "weight"), names.norm, size, names)]
        ignored = names.ignored
        head = Piece(f"{names.lm_head}.weight", (vocab, size))
        if config.tie_embeddings:
            ignored = (*ignored, head.name)
        else:
            targets.append(Target(("lm_head", "kernel"), (head,), transpose=True))
        for layer in range(config.n_layers):
            targets += _layer_norms(config, names, layer)
            targets += _attention_matrices(config, names, layer)
            if config.experts is None:
                targets += _mlp_matrices(config, names, layer)
            else:
                targets += _expert_matrices(config, config.experts.n_experts, names, layer)
        return cls(tuple(targets), ignored)

    @property
    def pieces(self) -> dict[str, Piece]:
        """By name."""
        return {piece.name: piece for target in self.targets for piece in target.pieces}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise one ModelError naming all missing, unexpected and misshapen tensors of a
        checkpoint.
        """
        pieces = self.pieces
        faults: dict[str, list[str]] = {"missing": [], "unexpected": [], "misshapen": []}
        for name, piece in pieces.items():
            if name not in shapes:
                faults["missing"].append(name)
            elif tuple(shapes[name]) != piece.shape:
                shape = f"{name} {list(shapes[name])} instead of {list(piece.shape)}"
                faults["misshapen"].append(shape)
        for name in shapes:
            if name not in pieces and not name.endswith(self.ignored):
                faults["unexpected"].append(name)
        found = []
        for kind, names in faults.items():
            if names:
                found.append(f"{len(names)} {kind}: {_listed(names)}")
        if found:
            reasons = "; ".join(found)
            raise ModelError(f"the tensors do not fit the model's configuration; {reasons}")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names that a file format uses, without `.weight` or `.bias`."""

    #: The embedding, the norm behind the last layer, and the output head.
    embed: str
    norm: str
    lm_head: str
    #: With `{i}`; the names from here on follow it.
    layer: str
    #: Before attention and MLP; empty where there are none.
    attention_norm: str
    mlp_norm: str
    #: Projections of attention: queries, keys, values, and the one behind it.
    q: str
    k: str
    v: str
    o: str
    #: Of each query and key head, or of all at once, before they are rotated.
    q_norm: str
    k_norm: str
    #: Of the MLP.
    gate: str
    up: str
    down: str
    #: See `WeightMap`.
    ignored: tuple[str, ...]
    #: Norms of what attention and MLP give; empty where there are none.
    attention_post_norm: str = ""
    mlp_post_norm: str = ""
    #: The score of each head that has no key; a tensor's whole name.
    sinks: str = ""
    #: Of a mixture: the matrix that chooses, and those of one expert, with `{e}`: gates and ups, or
    #: one matrix of both, row by row in turns.
    router: str = ""
    expert_gate: str = ""
    expert_up: str = ""
    expert_gate_up: str = ""
    expert_down: str = ""
    #: What the stored weights of norms lack.
    norm_offset: float = 0.0
    #: Rows of queries and keys are in llama.cpp's order.
    paired_rows: bool = False


#: Beginnings of names in the saved base model of a family, whose names lack the prefix `model.`.
_BASE_NAMES = ("embed_tokens.", "layers.", "norm.")


def long_name(name: str) -> str:
    """The name of a tensor or module in the model with its head, also if a base model was saved."""
    return f"model.{name}" if name.startswith(_BASE_NAMES) else name


HF = Dialect(
    embed="model.embed_tokens",
    norm="model.norm",
    lm_head="lm_head",
    layer="model.layers.{i}.",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    o="self_attn.o_proj",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    ignored=("rotary_emb.inv_freq",),
)

GGUF = Dialect(
    embed="token_embd",
    norm="output_norm",
    lm_head="output",
    layer="blk.{i}.",
    attention_norm="attn_norm",
    mlp_norm="ffn_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    o="attn_output",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    ignored=("rope_freqs.weight", "attn_rot_embd"),
)


def _norm(path: Path, name: str, size: int, names: Dialect) -> Target:
    return Target(path, (Piece(f"{name}.weight", (size,)),), offset=names.norm_offset)


def _layer_norms(config: ModelConfig, names: Dialect, layer: int) -> Iterator[Target]:
    size, dim = config.hidden_size, config.head_dim
    norms: list[tuple[Path, str, int]] = [
        (("attention_norm",), names.attention_norm, size),
        (("attention_post_norm",), names.attention_post_norm, size),
        (("mlp_norm",), names.mlp_norm, size),
        (("mlp_post_norm",), names.mlp_post_norm, size),
    ]
    if config.qk_norm:
        norms.append((("attention", "q_norm"), names.q_norm, dim))
        norms.append((("attention", "k_norm"), names.k_norm, dim))
    if config.wide_qk_norm:
        norms.append((("attention", "wide_q_norm"), names.q_norm, config.n_heads * dim))
        norms.append((("attention", "wide_k_norm"), names.k_norm, config.n_kv_heads * dim))
    prefix = names.layer.format(i=layer)
    for path, name, length in norms:
        if name:
            yield _norm(("layers", layer, *path, "weight"), prefix + name, length, names)


def _attention_matrices(config: ModelConfig, names: Dialect, layer: int) -> Iterator[Target]:
    """The matrices of one layer's attention, and their biases."""
    size, dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.n_heads * dim, config.n_kv_heads * dim
    q_pairs, k_pairs = 0, 0
    if names.paired_rows:
        q_pairs, k_pairs = config.n_heads, config.n_kv_heads
    prefix = names.layer.format(i=layer)

    def rows(name: str, count: int, pairs: int = 0) -> tuple[str, int, int]:
        return prefix + name, count, pairs

    path = ("layers", layer, "attention")
    qkv = [rows(names.q, q_size, q_pairs), rows(names.k, kv_size, k_pairs), rows(names.v, kv_size)]
    yield from _linear((*path, "qkv"), size, config.qkv_bias, qkv)
    yield from _linear((*path, "o"), q_size, config.o_bias, [rows(names.o, size)])
    if config.attention_sinks:
        yield Target((*path, "sinks"), (Piece(prefix + names.sinks, (config.n_heads,)),))


def _mlp_matrices(config: ModelConfig, names: Dialect, layer: int) -> Iterator[Target]:
    """Those of its feed-forward."""
    size, inner = config.hidden_size, config.intermediate_size
    prefix, path = names.layer.format(i=layer), ("layers", layer, "mlp")
    gate_up = [(prefix + name, inner, 0) for name in (names.gate, names.up)]
    yield from _linear((*path, "gate_up"), size, config.mlp_bias, gate_up)
    yield from _linear((*path, "down"), inner, config.mlp_bias, [(prefix + names.down, size, 0)])


def _expert_matrices(
    config: ModelConfig, n_experts: int, names: Dialect, layer: int
) -> Iterator[Target]:
    """Those of a mixture: the router, and all experts' side by side."""
    size, inner = config.hidden_size, config.intermediate_size
    prefix, path = names.layer.format(i=layer), ("layers", layer, "mlp")
    router = Piece(f"{prefix}{names.router}.weight", (n_experts, size))
    yield Target((*path, "router"), (router,), transpose=True)
    if config.mlp_bias:
        bias = Piece(f"{prefix}{names.router}.bias", (n_experts,))
        yield Target((*path, "router_bias"), (bias,))
    gate_up: list[tuple[str, int, int]] = []
    down: list[tuple[str, int, int]] = []
    for expert in range(n_experts):
        if names.expert_gate_up:
            gate_up.append((prefix + names.expert_gate_up.format(e=expert), 2 * inner, 1))
        else:
            gate_up.append((prefix + names.expert_gate.format(e=expert), inner, 0))
            gate_up.append((prefix + names.expert_up.format(e=expert), inner, 0))
        down.append((prefix + names.expert_down.format(e=expert), size, 0))
    yield from _linear((*path, "gate_up"), size, config.mlp_bias, gate_up)
    yield from _linear((*path, "down"), inner, config.mlp_bias, down)


def _linear(
    path: Path, columns: int, bias: bool, parts: list[tuple[str, int, int]]
) -> Iterator[Target]:
    """A fused matrix of parts (name, rows, paired parts), and its bias if it has one."""
    pieces = [Piece(f"{name}.weight", (rows, columns), pairs) for name, rows, pairs in parts]
    yield Target((*path, "kernel"), tuple(pieces), transpose=True)
    if bias:
        pieces = [Piece(f"{name}.bias", (rows,), pairs) for name, rows, pairs in parts]
        yield Target((*path, "bias"), tuple(pieces))


def _listed(names: list[str]) -> str:
    """The first few, and how many more."""
    text = ", ".join(name[:100] for name in names[:_NAMED_AT_MOST])
    more = len(names) - _NAMED_AT_MOST
    if more > 0:
        text += f" and {more} more"
    return text
