"""The mapping from the tensors of a checkpoint to the model's weights; jax-free.

Checkpoints store each projection as [O, I]; ours are fused and stored as [I, O].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from jitney.engine.common.errors import ModelError
from jitney.engine.core.weights.checkpoints.layer_configs import (
    DeltaNetConfig,
    Eagle3Config,
    ExpertsConfig,
    LatentConfig,
    MambaConfig,
    ShortConvConfig,
)
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig

type FileFormat = Literal["hf", "gguf"]
#: Attribute names and layer numbers from the model down, as nnx's flat state has them.
type Path = tuple[str | int, ...]

#: The embedding and the output head.
_TABLES = ("embed", "lm_head")
#: Matrices of a feed-forward.
_GATED = ("gate", "up", "down")
#: Most tensors of each fault that are named; the rest are counted.
_NAMED_AT_MOST = 10


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a checkpoint."""

    name: str
    #: Row-major, as stored.
    shape: tuple[int, ...]
    #: Number of heads that its first rows belong to.
    heads: int = 0
    #: Order of each head's rows: the stored row for each position; empty: as stored.
    head_order: tuple[int, ...] = ()
    #: Stored rows per head, if head_order uses only some; 0: it uses all.
    head_rows: int = 0
    #: The stored column for each position; empty: as stored.
    column_order: tuple[int, ...] = ()

    @property
    def order(self) -> np.ndarray | None:
        """The stored row for each position, [rows]; None: as stored."""
        if not self.head_order or not self.heads:
            return None
        if self.head_rows:
            starts = self.head_rows * np.arange(self.heads)[:, None]
            return (starts + np.array(self.head_order)).ravel()
        order = np.arange(self.shape[0])
        size = len(self.head_order)
        for first in range(0, self.heads * size, size):
            order[first : first + size] = first + np.array(self.head_order)
        return order


def head_order(config: ModelConfig, layer: int, *, paired: bool) -> tuple[int, ...]:
    """The stored row for each row of a query or key head, so that pairs (j, j + D/2) are rotated;
    empty: as stored.

    Hugging Face pairs (j, j + R/2) of the R rows that are rotated; paired: (2j, 2j + 1), as in
    llama.cpp's files of Llama. The others are pairs, too, whose angle is 0.
    """
    own = config.of_layer(layer)
    dim, rope = own.rope_dim, config.rope(layer)
    rotated = dim if rope is None else rope.dims or dim
    if paired:
        first, second = range(0, rotated, 2), range(1, rotated, 2)
    else:
        first, second = range(rotated // 2), range(rotated // 2, rotated)
    rest = (dim - rotated) // 2
    order = [
        *first,
        *range(rotated, rotated + rest),
        *second,
        *range(rotated + rest, dim),
    ]
    return () if order == list(range(dim)) else tuple(order)


@dataclass(frozen=True, slots=True)
class Target:
    """A weight of the model, and the tensors that it is made of."""

    path: Path
    #: Stacked along their first axis.
    pieces: tuple[Piece, ...]
    #: Then [O, I] becomes [I, O].
    transpose: bool = False
    #: Then added to every number.
    offset: float = 0.0

    @classmethod
    def of(cls, path: Path, name: str, *shape: int, transpose: bool = False) -> Target:
        """A weight that one tensor is, as stored but for `transpose`."""
        return cls(path, (Piece(name, shape),), transpose)


@dataclass(frozen=True, slots=True)
class WeightMap:
    """All weights of a model, and the tensors that they are made of."""

    targets: tuple[Target, ...]
    #: Suffixes and prefix of tensors that are not needed.
    ignored: tuple[str, ...]
    ignored_layer: str = ""
    #: Prefix of these tensors, if they are only a part of the checkpoint.
    part: str = ""

    @classmethod
    def of(cls, config: ModelConfig, names: Dialect) -> WeightMap:
        """Every weight of a `Llama` or its subclasses. A tied model may carry a redundant output
        head.
        """
        vocab, size = config.vocab_size, config.hidden_size
        embed = Target.of(("embed",), f"{names.embed}.weight", vocab, size)
        targets = [embed, _norm(("norm", "weight"), names.norm, size, names)]
        ignored = names.ignored
        head = Piece(f"{names.lm_head}.weight", (vocab, size))
        if config.tie_embeddings:
            ignored = (*ignored, head.name)
        else:
            targets.append(Target(("lm_head", "kernel"), (head,), transpose=True))
        for layer in range(config.n_layers):
            targets += _layer_norms(config, names, layer)
            if config.latent is not None:
                targets += _latent_weights(config, config.latent, names, layer)
            elif layer in config.attending_layers:
                targets += _attention_matrices(config, names, layer)
            elif isinstance(own := config.recurrent, DeltaNetConfig):
                targets += _delta_net_weights(size, own, names, layer)
            elif isinstance(own, ShortConvConfig):
                targets += _short_conv_weights(size, own, names, layer)
            elif isinstance(own, MambaConfig):
                targets += _mamba_weights(size, own, names, names.prefix(config, layer), layer)
            if layer in config.bare_layers:
                continue
            if config.experts is None or layer in config.experts.dense_layers:
                targets += _mlp_matrices(config, names, layer)
            else:
                targets += _expert_matrices(config, config.experts, names, layer)
        stored = 1 + max(map(max, config.stored_halves), default=config.n_layers - 1)
        behind = "" if names.reads_layers_behind else names.layer.format(i=stored)
        return cls(tuple(targets), ignored, behind)

    @classmethod
    def of_prediction_head(cls, config: ModelConfig, names: Dialect) -> WeightMap:
        """Every weight of `ModelConfig.prediction_head`. The embedding and the output head are the
        model's, of which files may have copies.
        """
        own, size = names.head.at(config.stored_halves[0][0]), config.hidden_size
        whole = cls.of(config, replace(names, layer=own.layer, norm=own.norm))
        targets = [
            *[target for target in whole.targets if target.path[0] not in _TABLES],
            _norm(("embedding_norm", "weight"), own.embedding_norm, size, names),
            _norm(("hidden_norm", "weight"), own.hidden_norm, size, names),
            *_linear(("joint",), 2 * size, False, [Piece(own.joint, (size,))]),
        ]
        return cls(tuple(targets), (*names.ignored, *_COPIES), part=own.part)

    @classmethod
    def of_eagle3(cls, config: ModelConfig, own: Eagle3Config) -> WeightMap:
        """Every weight of an EAGLE-3 head; config: of its one layer."""
        size = config.hidden_size
        names = replace(HF, layer=own.prefix)
        targets = [
            *[one for one in cls.of(config, names).targets if one.path[0] not in _TABLES],
            _norm(("hidden_norm", "weight"), f"{own.prefix}hidden_norm", size, names),
            *_linear(("joint",), own.read_size, False, [Piece("fc", (size,))]),
            *_linear(("lm_head",), size, False, [Piece("lm_head", (own.vocab_size,))]),
        ]
        if own.embeds:
            targets.append(Target.of(("embed",), f"{HF.embed}.weight", config.vocab_size, size))
        if own.vocab_size < config.vocab_size:
            targets.append(Target.of(("offsets",), "d2t", own.vocab_size))
        return cls(tuple(targets), (*HF.ignored, *_OF_TARGET))

    @property
    def pieces(self) -> dict[str, Piece]:
        """All pieces by name."""
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
            is_behind = self.ignored_layer and name.startswith(self.ignored_layer)
            if name not in pieces and not is_behind and not name.endswith(self.ignored):
                faults["unexpected"].append(name)
        reasons = [
            f"{len(names)} {kind}: {_listed(names)}" for kind, names in faults.items() if names
        ]
        if reasons:
            raise ModelError(
                f"the tensors do not fit the model's configuration; {'; '.join(reasons)}"
            )


class HeadNames(NamedTuple):
    """Names of a layer that predicts one token more, with `{i}` for its number."""

    #: Prefix of all its tensors, and of those that any layer has.
    part: str = "model.layers.{i}."
    layer: str = "model.layers.{i}."
    #: The norm after the layer, the matrix before it, and the norms of that matrix's inputs.
    norm: str = "model.layers.{i}.shared_head.norm"
    joint: str = "model.layers.{i}.eh_proj"
    embedding_norm: str = "model.layers.{i}.enorm"
    hidden_norm: str = "model.layers.{i}.hnorm"

    def at(self, number: int) -> HeadNames:
        """The names for the layer with this number."""
        return HeadNames(*[name.format(i=number) for name in self])


_HEAD = HeadNames()
#: Suffixes of copies of the embedding and the output head among such a layer's tensors.
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
#: Suffixes of redundant tensors of an EAGLE-3 head: the tokens that it can draft, which d2t has
#: too, and copies of the model's.
_OF_TARGET = ("d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names that a file format uses, without `.weight` or `.bias`; the defaults are those of
    most Hugging Face folders.
    """

    #: The embedding, the norm after the last layer, and the output head.
    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    #: With `{i}`; the names from here on follow it.
    layer: str = "model.layers.{i}."
    #: Before attention and MLP; empty where there are none.
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    #: Projections of attention: queries, keys, values, output.
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    #: Of each query and key head, or of all at once, before they are rotated; empty where such
    #: norms have no weights.
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    #: Of the MLP; without gates the first is empty.
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    #: See `WeightMap`.
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    #: Queries, keys and values in one matrix, and gate and up; empty: they are apart.
    qkv: str = ""
    gate_up: str = ""
    #: Gates of what attention gives, where `ModelConfig.gates_apart`.
    attention_gate: str = ""
    #: Of a delta net: queries, keys, values and gates in one matrix, and both rates in another, of
    #: one key head after the other; empty: they are apart.
    delta_qkvz: str = ""
    delta_rates: str = ""
    #: What the names of a Mamba layer begin with.
    mamba: str = "mamba."
    #: Norms of the outputs of attention and MLP; empty: there are none.
    attention_post_norm: str = ""
    mlp_post_norm: str = ""
    #: The sinks of the heads; a complete tensor name.
    sinks: str = ""
    #: Of a mixture: the matrix that chooses, and those of one expert, with `{e}`.
    router: str = "mlp.gate"
    expert_gate: str = "mlp.experts.{e}.gate_proj"
    expert_up: str = "mlp.experts.{e}.up_proj"
    expert_down: str = "mlp.experts.{e}.down_proj"
    #: The expert that all rows go through; its gate is `{shared}_gate`. Its matrices, if they have
    #: names of their own: gate and up in one, and the one behind.
    shared: str = "mlp.shared_expert"
    shared_gate_up: str = ""
    shared_down: str = ""
    #: The biases of experts for the choice; a complete tensor name.
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    #: Number to add to the stored weights of norms.
    norm_offset: float = 0.0
    #: Rotated rows of queries and keys are pairs (2j, 2j + 1), see `head_order`.
    paired_rows: bool = False
    #: Whether a layer after the last one is an error instead of a multi-token prediction layer.
    reads_layers_behind: bool = True
    head: HeadNames = _HEAD
    #: What is called otherwise than in Hugging Face's folders of layers that only some models have:
    #: names there, behind the layer's -> these.
    others: Mapping[str, str] = field(default_factory=dict)
    #: Whether value heads of a delta net are stored in turns: the first one of every key head, then
    #: the second ones.
    tiled_values: bool = False

    def named(self, name: str) -> str:
        """The format's name of a part of a layer, from that in Hugging Face's folders."""
        return self.others.get(name, name)

    def prefix(self, config: ModelConfig, layer: int, half: int = 0) -> str:
        """The beginning of names of a layer's first half (0) or its second (1)."""
        number = config.stored_halves[layer][half] if config.stored_halves else layer
        return self.layer.format(i=number)


#: Beginnings of names in the saved base model of a family, whose names lack the prefix `model.`.
_BASE_NAMES = (
    "embed_tokens.",
    "embed_tokens_per_layer.",
    "embedding_norm.",
    "embeddings.weight",
    "layers.",
    "norm.",
    "norm_f.",
    "per_layer_model_projection.",
    "per_layer_projection_norm.",
)
#: Beginnings of names of the text model in models that also see or hear, and what they are alone.
_WRAPPED_NAMES = {
    "backbone.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.": "model.",
}
#: Beginnings of names of what these models see and hear with, and of layers that predict several
#: tokens (mtp), without a prefix `model.`.
_UNREAD = (
    "audio_tower.",
    "embed_audio.",
    "embed_vision.",
    "mtp.",
    "multi_modal_projector.",
    "vision_adapter.",
    "vision_embedder.",
    "vision_projection.",
    "vision_tower.",
    "visual.",
)


def long_name(name: str) -> str:
    """The name of a tensor or module in the text model with its head, also if a base model was
    saved, or a model that also sees or hears.
    """
    if name.startswith(_BASE_NAMES):
        return f"model.{name}"
    for prefix, alone in _WRAPPED_NAMES.items():
        if name.startswith(prefix):
            return alone + name.removeprefix(prefix)
    return name


def is_read(name: str, part: str = "") -> bool:
    """Whether a tensor is of the text model; or, if a part is given, of what begins so."""
    if part:
        return long_name(name).startswith(part)
    return not name.removeprefix("model.").startswith(_UNREAD)


HF = Dialect()
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
    router="ffn_gate_inp",
    expert_gate="ffn_gate_exps.{e}",
    expert_up="ffn_up_exps.{e}",
    expert_down="ffn_down_exps.{e}",
    choice_bias="exp_probs_b.bias",
    others={
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
        "conv.in_proj": "shortconv.in_proj",
        "conv.conv": "shortconv.conv",
        "conv.out_proj": "shortconv.out_proj",
        "mamba.in_proj": "ssm_in",
        "mamba.conv1d": "ssm_conv1d",
        "mamba.A_log": "ssm_a",
        "mamba.dt_bias": "ssm_dt.bias",
        "mamba.D": "ssm_d",
        "mamba.norm": "ssm_norm",
        "mamba.out_proj": "ssm_out",
        "self_attn.q_proj": "attn_q",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
        "self_attn.o_proj": "attn_output",
    },
    ignored=(
        "rope_freqs.weight",
        "rope_factors_long.weight",
        "rope_factors_short.weight",
        "attn_rot_embd",
    ),
)


def _norm(
    path: Path,
    name: str,
    size: int,
    names: Dialect,
    heads: int = 0,
    order: tuple[int, ...] = (),
) -> Target:
    """heads, order: see `Piece`."""
    piece = Piece(f"{name}.weight", (size,), heads, order)
    return Target(path, (piece,), offset=names.norm_offset)


def _layer_norms(config: ModelConfig, names: Dialect, layer: int) -> Iterator[Target]:
    own = config.of_layer(layer)
    size, dim = config.hidden_size, own.head_dim
    norms = [
        ("attention_norm", names.attention_norm, size),
        ("attention_post_norm", names.attention_post_norm, size),
        ("mlp_norm", names.mlp_norm, size),
        ("mlp_post_norm", names.mlp_post_norm, size),
    ]
    of_heads: list[tuple[str, str, int]] = []
    if config.qk_norm and names.q_norm and layer in config.attending_layers:
        of_heads.append(("q_norm", names.q_norm, 1))
    if config.qk_norm and names.k_norm and layer in config.pool_layers:
        of_heads.append(("k_norm", names.k_norm, 1))
    if config.wide_qk_norm:
        of_heads.append(("wide_q_norm", names.q_norm, config.n_heads))
        of_heads.append(("wide_k_norm", names.k_norm, config.n_kv_heads))
    prefix = names.prefix(config, layer)
    for part, name, length in norms:
        is_second = part.startswith("mlp")
        if name and not (is_second and layer in config.bare_layers):
            whole = names.prefix(config, layer, is_second) + name
            yield _norm(("layers", layer, part, "weight"), whole, length, names)
    order = head_order(config, layer, paired=names.paired_rows)
    for part, name, heads in of_heads:
        path = ("layers", layer, "attention", part, "weight")
        yield _norm(path, prefix + name, heads * dim, names, heads, order)


def _attention_matrices(config: ModelConfig, names: Dialect, layer: int) -> Iterator[Target]:
    """The matrices of one layer's attention, and their biases."""
    own = config.of_layer(layer)
    size, inputs, dim = own.hidden_size, own.attention_inputs, own.head_dim
    heads, kv_heads = own.n_heads, own.n_kv_heads
    prefix = names.prefix(config, layer)
    order = head_order(config, layer, paired=names.paired_rows)
    if names.qkv:
        qkv = [Piece(prefix + names.qkv, (config.qkv_size,), heads + kv_heads, order)]
    else:
        queries = [Piece(prefix + names.q, (heads * dim,), heads, order)]
        if config.gates_apart:
            queries.append(Piece(prefix + names.attention_gate, (heads * dim,)))
        elif config.attention_gate:  # each head's gate stands behind its query
            order_of_pairs = (*order, *range(dim, 2 * dim)) if order else ()
            queries = [Piece(prefix + names.q, (2 * heads * dim,), heads, order_of_pairs)]
        keys = Piece(prefix + names.k, (kv_heads * dim,), kv_heads, order)
        values = Piece(prefix + names.v, (kv_heads * dim,))
        qkv = [*queries, *(keys, values)[: own.kv_projections]]
    path = ("layers", layer, "attention")
    yield from _linear((*path, "qkv"), inputs, config.qkv_bias, qkv)
    yield from _linear((*path, "o"), heads * dim, config.o_bias, [Piece(prefix + names.o, (size,))])
    if config.attention_sinks:
        yield Target.of((*path, "sinks"), prefix + names.sinks, heads)


def _latent_weights(
    config: ModelConfig, own: LatentConfig, names: Dialect, layer: int
) -> Iterator[Target]:
    """Weights of latent attention; rotated rows are reordered to pairs (j, j + P/2)."""
    size, heads = config.hidden_size, config.n_heads

    def named(name: str) -> str:
        return names.prefix(config, layer) + names.named(f"self_attn.{name}")

    path = ("layers", layer, "attention")
    turned = head_order(config, layer, paired=names.paired_rows) or range(own.rotated_dim)
    queries = (*range(own.plain_dim), *(own.plain_dim + row for row in turned))
    order = (*range(own.rank), *(own.rank + row for row in turned))
    opening = [Piece(named("kv_a_proj_with_mqa"), (own.rank + own.rotated_dim,), 1, order)]
    if own.query_rank:
        opening = [Piece(named("q_a_proj"), (own.query_rank,)), *opening]
        rows = [Piece(named("q_b_proj"), (heads * own.query_dim,), heads, queries)]
        yield from _linear((*path, "q_b"), own.query_rank, False, rows)
        yield _norm((*path, "query_norm", "weight"), named("q_a_layernorm"), own.query_rank, names)
    else:
        opening = [Piece(named("q_proj"), (heads * own.query_dim,), heads, queries), *opening]
    yield from _linear((*path, "qkv"), size, False, opening)
    yield _norm((*path, "latent_norm", "weight"), named("kv_a_layernorm"), own.rank, names)
    of_head = own.plain_dim + own.value_dim
    stored = f"{named('kv_b_proj')}.weight", (heads * of_head, own.rank), heads
    keys, values = range(own.plain_dim), range(own.plain_dim, of_head)
    yield Target((*path, "to_latent", "weight"), (Piece(*stored, tuple(keys), of_head),))
    yield Target((*path, "from_latent", "weight"), (Piece(*stored, tuple(values), of_head),))
    closing = [Piece(named("o_proj"), (size,))]
    yield from _linear((*path, "o"), heads * own.value_dim, False, closing)


def _delta_net_weights(
    size: int, own: DeltaNetConfig, names: Dialect, layer: int
) -> Iterator[Target]:
    """Weights of a delta-net layer without norms and feed-forward; size: E."""
    of_layer = names.layer.format(i=layer)

    def named(name: str) -> str:
        return of_layer + names.named(f"linear_attn.{name}")

    path, heads = ("layers", layer, "attention"), own.value_heads
    keys = own.channels - own.values
    of_values = _by_key_head(own, own.value_dim) if names.tiled_values else ()
    of_heads = _by_key_head(own, 1) if names.tiled_values else ()
    of_channels = (*range(keys), *(keys + row for row in of_values)) if of_values else ()
    if names.delta_qkvz:
        values = heads // own.key_heads * own.value_dim
        order = _gathered(own.key_heads, (own.key_dim, own.key_dim, values, values))
        opening = [Piece(of_layer + names.delta_qkvz, (own.channels + own.values,), 1, order)]
    else:
        opening = [
            Piece(named("in_proj_qkv"), (own.channels,), 1, of_channels),
            Piece(named("in_proj_z"), (own.values,), 1, of_values),
        ]
    if names.delta_rates:
        shared = heads // own.key_heads
        order = _gathered(own.key_heads, (shared, shared))
        rates = [Piece(f"{of_layer}{names.delta_rates}.weight", (2 * heads, size), 1, order)]
    else:
        stored = [f"{named(f'in_proj_{one}')}.weight" for one in "ba"]
        rates = [Piece(name, (heads, size), 1, of_heads) for name in stored]
    yield from _linear((*path, "qkv"), size, False, opening)
    yield Target((*path, "rates"), tuple(rates), transpose=True)
    shape = own.channels, 1, own.taps
    taps = Piece(f"{named('conv1d')}.weight", shape, 1, of_channels)
    yield Target((*path, "taps"), (taps,), transpose=True)
    yield Target((*path, "log_decay"), (Piece(named("A_log"), (heads,), 1, of_heads),))
    yield Target((*path, "rate_bias"), (Piece(named("dt_bias"), (heads,), 1, of_heads),))
    yield Target.of((*path, "norm"), f"{named('norm')}.weight", own.value_dim)
    closing = [Piece(named("out_proj"), (size,), column_order=of_values)]
    yield from _linear((*path, "o"), own.values, False, closing)


def _by_key_head(own: DeltaNetConfig, size: int) -> tuple[int, ...]:
    """The stored row for each position that groups value heads (each of `size` rows) by key head;
    stored are the first value heads of all key heads, then the second ones. Empty: as stored.
    """
    if own.value_heads == own.key_heads:
        return ()
    heads = np.arange(own.value_heads).reshape(-1, own.key_heads).T.reshape(-1, 1)
    return tuple((heads * size + np.arange(size)).ravel().tolist())


def _short_conv_weights(
    size: int, own: ShortConvConfig, names: Dialect, layer: int
) -> Iterator[Target]:
    """As `_delta_net_weights`."""
    path = ("layers", layer, "attention")
    opening, taps, closing = [
        names.layer.format(i=layer) + names.named(f"conv.{name}")
        for name in ("in_proj", "conv", "out_proj")
    ]
    yield from _linear((*path, "qkv"), size, False, [Piece(opening, (3 * own.channels,))])
    shape = own.channels, 1, own.taps
    yield Target.of((*path, "taps"), f"{taps}.weight", *shape, transpose=True)
    yield from _linear((*path, "o"), own.channels, False, [Piece(closing, (size,))])


def _mamba_weights(
    size: int, own: MambaConfig, names: Dialect, prefix: str, layer: int
) -> Iterator[Target]:
    """As `_delta_net_weights`; prefix: of the names of this layer's."""
    path, heads = ("layers", layer, "attention"), own.heads

    def named(name: str) -> str:
        return prefix + names.named(names.mamba + name)

    columns = own.channels + own.values + heads
    yield from _linear((*path, "qkv"), size, False, [Piece(named("in_proj"), (columns,))])
    shape = own.channels, 1, own.taps
    yield Target.of((*path, "taps"), f"{named('conv1d')}.weight", *shape, transpose=True)
    if own.conv_bias:
        yield Target.of((*path, "taps_bias"), f"{named('conv1d')}.bias", own.channels)
    for name, stored in (("log_decay", "A_log"), ("rate_bias", "dt_bias"), ("skip", "D")):
        yield Target.of((*path, name), named(stored), heads)
    yield Target.of((*path, "value_norm"), f"{named('norm')}.weight", own.values)
    yield from _linear((*path, "o"), own.values, False, [Piece(named("out_proj"), (size,))])


def _gathered(heads: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The stored row for each position that joins each part's rows of all heads; stored are the
    heads one after the other, each with parts of these sizes.
    """
    rows = np.arange(heads * sum(sizes)).reshape(heads, -1)
    parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    return tuple(np.concatenate([part.ravel() for part in parts]).tolist())


def _mlp_matrices(config: ModelConfig, names: Dialect, layer: int) -> Iterator[Target]:
    """Matrices of a layer's feed-forward. A dense layer among layers with experts stores it under
    the names of a shared expert.
    """
    size, inner = config.hidden_size, config.of_layer(layer).intermediate_size
    prefix = names.prefix(config, layer, 1)
    path: Path = ("layers", layer, "mlp")
    if config.experts is not None:
        path = (*path, "shared")
    gate_up = _opening(prefix, names.gate_up, (names.gate, names.up), inner)
    yield from _linear((*path, "gate_up"), size, config.mlp_bias, gate_up)
    yield from _linear(
        (*path, "down"), inner, config.mlp_bias, [Piece(prefix + names.down, (size,))]
    )


def _opening(prefix: str, fused: str, apart: tuple[str, str], inner: int) -> list[Piece]:
    """Rows that open a feed-forward of `inner` columns: gates and ups, or ups alone."""
    if fused:
        return [Piece(prefix + fused, (2 * inner,))]
    return [Piece(prefix + name, (inner,)) for name in apart if name]


def _expert_matrices(
    config: ModelConfig, experts: ExpertsConfig, names: Dialect, layer: int
) -> Iterator[Target]:
    """Matrices of a mixture: the router, and those of all experts, stacked."""
    size, inner, n_experts = config.hidden_size, config.intermediate_size, experts.n_experts
    prefix, path = names.prefix(config, layer, 1), ("layers", layer, "mlp")
    router = [Piece(f"{prefix}{names.router}.weight", (n_experts, size))]
    if experts.router_columns > n_experts:
        gate = prefix + names.named(f"{names.shared}_gate")
        router.append(Piece(f"{gate}.weight", (1, size)))
    if experts.shared_size:
        own = experts.shared_size
        gate, up, last = [names.named(f"{names.shared}.{one}_proj") for one in _GATED]
        apart = gate if config.is_gated else "", up
        opening = _opening(prefix, names.shared_gate_up, apart, own)
        yield from _linear((*path, "shared", "gate_up"), size, False, opening)
        closing = [Piece(prefix + (names.shared_down or last), (size,))]
        yield from _linear((*path, "shared", "down"), own, False, closing)
    yield Target((*path, "router"), tuple(router), transpose=True)
    if config.mlp_bias:
        yield Target.of((*path, "router_bias"), f"{prefix}{names.router}.bias", n_experts)
    if experts.choice_bias:
        yield Target.of((*path, "choice_bias"), prefix + names.choice_bias, n_experts)
    gate_up: list[Piece] = []
    down: list[Piece] = []
    for expert in range(n_experts):
        apart = names.expert_gate.format(e=expert), names.expert_up.format(e=expert)
        gate_up += _opening(prefix, "", apart, inner)
        down.append(Piece(prefix + names.expert_down.format(e=expert), (size,)))
    yield from _linear((*path, "gate_up"), size, config.mlp_bias, gate_up)
    yield from _linear((*path, "down"), inner, config.mlp_bias, down)


def _linear(path: Path, columns: int, bias: bool, parts: list[Piece]) -> Iterator[Target]:
    """A fused matrix, and its bias if it has one. parts: for each stored matrix its outputs, [O],
    under its name without `.weight`.
    """
    pieces = [
        replace(part, name=f"{part.name}.weight", shape=(*part.shape, columns)) for part in parts
    ]
    yield Target((*path, "kernel"), tuple(pieces), transpose=True)
    if bias:
        pieces = [replace(part, name=f"{part.name}.bias") for part in parts]
        yield Target((*path, "bias"), tuple(pieces))


def _listed(names: list[str]) -> str:
    """The first few, and how many more."""
    text = ", ".join(name[:100] for name in names[:_NAMED_AT_MOST])
    more = len(names) - _NAMED_AT_MOST
    if more > 0:
        text += f" and {more} more"
    return text
