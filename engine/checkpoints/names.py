"""Which tensors of a checkpoint make up each of ours; jax-free.

A checkpoint stores the projections one by one as [O, I]; ours are fused and stored as [I, O]
(`jitney.engine.models`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jitney.engine.checkpoints.model_config import ModelConfig
from jitney.engine.errors import ModelError

#: How many tensors of each fault are named before the rest are only counted.
NAMED_AT_MOST = 10


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a checkpoint; shape row-major, as stored."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """One of our tensors: its pieces stacked along their first axis, then transposed if
    `transpose`.

    path: attribute names and layer numbers from the model down, as nnx's flat state names it.
    """

    path: tuple[str | int, ...]
    pieces: tuple[Piece, ...]
    transpose: bool


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names one file format uses. layer: with `{i}`; the others relative to it, without
    `.weight` or `.bias`.
    """

    embed: str
    norm: str
    lm_head: str
    layer: str
    attention_norm: str
    mlp_norm: str
    q: str
    k: str
    v: str
    o: str
    q_norm: str
    k_norm: str
    gate: str
    up: str
    down: str
    ignored: tuple[str, ...]  # endings of tensors that hold nothing we need

    def at(self, layer: int, name: str) -> str:
        return self.layer.format(i=layer) + name


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


def targets(config: ModelConfig, names: Dialect) -> Iterator[Target]:
    """Every tensor of the model, and what it is made of."""
    vocab, size = config.vocab_size, config.hidden_size
    yield Target(("embed",), (Piece(f"{names.embed}.weight", (vocab, size)),), False)
    yield vector(("norm", "weight"), names.norm, size)
    if not config.tie_embeddings:
        yield Target(
            ("lm_head", "kernel"), (Piece(f"{names.lm_head}.weight", (vocab, size)),), True
        )
    for layer in range(config.n_layers):
        yield from layer_targets(config, names, layer)


def layer_targets(config: ModelConfig, names: Dialect, layer: int) -> Iterator[Target]:
    """The tensors of one layer."""
    size, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.n_heads * dim, config.n_kv_heads * dim
    at = ("layers", layer)

    def linear(
        path: tuple[str | int, ...], columns: int, bias: bool, *parts: tuple[str, int]
    ) -> Iterator[Target]:
        full = [(names.at(layer, name), rows) for name, rows in parts]
        yield Target(
            (*path, "kernel"),
            tuple(Piece(f"{name}.weight", (rows, columns)) for name, rows in full),
            True,
        )
        if bias:
            yield Target(
                (*path, "bias"), tuple(Piece(f"{name}.bias", (rows,)) for name, rows in full), False
            )

    yield vector((*at, "attention_norm", "weight"), names.at(layer, names.attention_norm), size)
    yield vector((*at, "mlp_norm", "weight"), names.at(layer, names.mlp_norm), size)
    yield from linear(
        (*at, "attention", "qkv"),
        size,
        config.qkv_bias,
        (names.q, q_size),
        (names.k, kv_size),
        (names.v, kv_size),
    )
    yield from linear((*at, "attention", "o"), q_size, config.o_bias, (names.o, size))
    yield from linear(
        (*at, "mlp", "gate_up"), size, config.mlp_bias, (names.gate, inner), (names.up, inner)
    )
    yield from linear((*at, "mlp", "down"), inner, config.mlp_bias, (names.down, size))
    if config.qk_norm:
        yield vector((*at, "attention", "q_norm", "weight"), names.at(layer, names.q_norm), dim)
        yield vector((*at, "attention", "k_norm", "weight"), names.at(layer, names.k_norm), dim)


def vector(path: tuple[str | int, ...], name: str, size: int) -> Target:
    """A weight of one axis that is a tensor of its own (the norms)."""
    return Target(path, (Piece(f"{name}.weight", (size,)),), False)


def check(
    wanted: Iterable[Target],
    shapes: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    names: Dialect,
) -> None:
    """Raise one ModelError that names every missing, unexpected and misshapen tensor of a
    checkpoint.

    shapes: of all tensors the checkpoint holds. A tied model may carry its redundant output head.
    """
    pieces = {piece.name: piece.shape for target in wanted for piece in target.pieces}
    allowed = (*names.ignored, *([f"{names.lm_head}.weight"] if config.tie_embeddings else []))
    missing = [name for name in pieces if name not in shapes]
    unexpected = [name for name in shapes if name not in pieces and not name.endswith(allowed)]
    misshapen = [
        f"{name} {list(shapes[name])} instead of {list(shape)}"
        for name, shape in pieces.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    faults = [
        f"{len(found)} {kind}: {listed(found)}"
        for kind, found in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshapen", misshapen),
        )
        if found
    ]
    if faults:
        raise ModelError("the tensors do not fit the model's configuration; " + "; ".join(faults))


def listed(found: list[str]) -> str:
    """The first few, and how many more."""
    more = len(found) - NAMED_AT_MOST
    return ", ".join(name[:100] for name in found[:NAMED_AT_MOST]) + (
        f" and {more} more" if more > 0 else ""
    )
