"""BERT (arXiv 1810.04805) and XLM-RoBERTa (arXiv 1911.02116): encoders, which make vectors of texts
and score pairs of texts.

Every row attends to all rows of its own text, before and after it, so a step computes whole texts
and stores nothing: there are no pools. Positions are learnt. Norms are applied to the outputs of a
layer's halves, and have a mean and a bias.

Requests have only token ids, so a BERT that scores pairs finds the second segment (token type 1) by
itself: the tokens after a text's first separator. A separator inside a query therefore begins the
second segment too early; transformers gets its beginning from the tokenizer. XLM-RoBERTa has one
segment.

Axes: T rows of a step, S texts, E embed, H heads, D head dim, F feed-forward, N blocks of a step,
B rows of a block, G blocks whose attention is computed at once, C keys of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jitney.engine.core.models.hidden import Hidden
from jitney.engine.core.models.layers import Layer, Linear, normal
from jitney.engine.core.weights.checkpoints.layer_configs import EncoderConfig
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import FileFormat, Path, Piece, Target, WeightMap
from jitney.kernels.interface import AttentionMeta, Kernels

#: The values of B, the largest G, and C.
_BLOCK_ROWS, _MOST_BLOCKS, _CHUNK_KEYS = 32, 16, 128
#: Score of a masked key; finite, so that a row without keys gives 0 and not NaN.
_HIDDEN_SCORE = -1e30
#: Activations of encoders, by transformers' names.
_ACTIVATIONS = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
#: Architecture -> (prefix of its tensors, its head's two matrices, which the first token's row is
#: multiplied by before and after tanh; empty without a head).
_TENSORS: dict[str, tuple[str, tuple[str, ...]]] = {
    "BertModel": ("", ()),
    "BertForSequenceClassification": ("bert.", ("bert.pooler.dense", "classifier")),
    "XLMRobertaModel": ("", ()),
    "XLMRobertaForSequenceClassification": (
        "roberta.",
        ("classifier.dense", "classifier.out_proj"),
    ),
}
#: Suffixes of unused tensors: position numbers from 0 on, which older files store, and the pooler
#: of models that are trained to make vectors without it.
_UNUSED = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")


class _Blocks(NamedTuple):
    """The rows of a step in blocks of a single text each, so that a text's rows read the same keys
    in the same chunks, whatever other texts the step has. int32.
    """

    rows: Array  # [N, B] the step's row at each place
    first: Array  # [N] the first row of the block's text
    end: Array  # [N] the row after the text's last one
    count: Array  # [] number of blocks that hold rows, the first ones
    place: Array  # [T] index of each row among the N * B places

    @classmethod
    def of(cls, cu_q: Array, texts: Array, group: int) -> _Blocks:
        """cu_q int32 [S + 1]; texts int32 [T]: the text of each row; group: G."""
        n_texts, n_rows = cu_q.shape[0] - 1, texts.shape[0]
        blocks = -(-(cu_q[1:] - cu_q[:-1]) // _BLOCK_ROWS)
        ends = jnp.cumsum(blocks)
        begins = ends - blocks
        most = n_rows // _BLOCK_ROWS + n_texts
        numbers = jnp.arange(-(-most // group) * group)
        owners = jnp.minimum(jnp.searchsorted(ends, numbers, side="right"), n_texts - 1)
        starts = cu_q[owners] + (numbers - begins[owners]) * _BLOCK_ROWS
        place = begins[texts] * _BLOCK_ROWS + jnp.arange(n_rows) - cu_q[texts]
        return cls(
            rows=starts[:, None] + jnp.arange(_BLOCK_ROWS),
            first=cu_q[owners],
            end=cu_q[owners + 1],
            count=ends[-1],
            place=jnp.minimum(place, numbers.shape[0] * _BLOCK_ROWS - 1),
        )


def _attend(q: Array, k: Array, v: Array, blocks: _Blocks, group: int) -> Array:
    """Attention of each row to all rows of its text: q, k and v [T, H, D] -> [T, H, D] in q's
    dtype, scores and sums in float32. group: G.

    Softmax over chunks of keys (Milakov and Gimelshein, arXiv 1805.02867), as many as the longest
    text of a group needs, so a step's cost depends on its texts and not on its padding.
    """
    # A masked key still adds 0 * v, and 0 * NaN would spread one text's NaN to others.
    v = jnp.where(jnp.isfinite(v), v, 0)
    places = blocks.rows.shape[0] * _BLOCK_ROWS
    o = jnp.zeros((places, *q.shape[1:]), q.dtype)

    def attend_group(number: Array, o: Array) -> Array:
        def own(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, number * group, group)

        queries = jnp.take(q, own(blocks.rows), axis=0, mode="clip")
        done = _attend_group(queries, k, v, own(blocks.first), own(blocks.end))
        done = done.reshape(group * _BLOCK_ROWS, *q.shape[1:]).astype(q.dtype)
        return jax.lax.dynamic_update_slice_in_dim(o, done, number * group * _BLOCK_ROWS, axis=0)

    groups = -(-blocks.count // group)
    o = jax.lax.fori_loop(0, groups, attend_group, o)
    return o[blocks.place]


def _attend_group(queries: Array, k: Array, v: Array, first: Array, end: Array) -> Array:
    """Attention of G blocks: queries [G, B, H, D], k and v [T, H, D], first and end int32 [G] ->
    float32 [G, B, H, D].
    """
    n_blocks, n_rows, n_heads, dim = queries.shape
    scale = dim**-0.5
    wide = jnp.float32

    def take_chunk(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, summed = carry
        keys = first[:, None] + number * _CHUNK_KEYS + jnp.arange(_CHUNK_KEYS)
        there = (keys < end[:, None])[:, None, None]
        k_chunk = jnp.take(k, keys, axis=0, mode="clip")
        v_chunk = jnp.take(v, keys, axis=0, mode="clip")
        scores = jnp.einsum("gbhd,gchd->ghbc", queries, k_chunk, preferred_element_type=wide)
        scores = jnp.where(there, scores * scale, _HIDDEN_SCORE)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.where(there, jnp.exp(scores - new_top[..., None]), 0.0)
        decay = jnp.exp(top - new_top)
        total = total * decay + weights.sum(axis=-1)
        added = jnp.einsum(
            "ghbc,gchd->ghbd", weights.astype(v.dtype), v_chunk, preferred_element_type=wide
        )
        return new_top, total, summed * decay[..., None] + added

    rows = n_blocks, n_heads, n_rows
    begin = (
        jnp.full(rows, _HIDDEN_SCORE, wide),
        jnp.zeros(rows, wide),
        jnp.zeros((*rows, dim), wide),
    )
    chunks = jnp.max(-(-(end - first) // _CHUNK_KEYS))
    _, total, summed = jax.lax.fori_loop(0, chunks, take_chunk, begin)
    return (summed / jnp.maximum(total, 1e-30)[..., None]).swapaxes(1, 2)


class _LayerNorm(nnx.Module):
    """weight and bias [E]; (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        self.bias = nnx.Param(jnp.zeros((config.hidden_size,), dtype))
        self.eps = config.rms_eps

    def __call__(self, x: Array, dtype: DTypeLike) -> Array:
        """x float32 [T, E] -> [T, E] in `dtype`, computed in float32."""
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        wide = jnp.float32
        return (x * self.weight[...].astype(wide) + self.bias[...].astype(wide)).astype(dtype)


class _Block(Layer):
    """One layer: attention and MLP, each followed by a residual sum and a norm. Sums stay in
    float32 until they are normed.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        size, inner = config.hidden_size, config.intermediate_size
        self.head_dim = config.head_dim
        self.activation = config.activation
        make = partial(Linear, bias=True, dtype=dtype, rngs=rngs)
        self.qkv, self.o = make(size, config.qkv_size), make(size, size)
        self.attention_norm = _LayerNorm(config, dtype)
        self.up, self.down = make(size, inner), make(inner, size)
        self.mlp_norm = _LayerNorm(config, dtype)

    def __call__(self, x: Array, blocks: _Blocks, kernels: Kernels, group: int) -> Array:
        """x [T, E] -> [T, E]; group: G."""
        heads = self.qkv(x, kernels).reshape(x.shape[0], -1, self.head_dim)
        q, k, v = jnp.split(heads, 3, axis=1)
        o = _attend(q, k, v, blocks, group).reshape(x.shape)
        x = self._added(x, self.o(o, kernels, jnp.float32), self.attention_norm)
        inner = _ACTIVATIONS[self.activation](self.up(x, kernels, jnp.float32)).astype(x.dtype)
        return self._added(x, self.down(inner, kernels, jnp.float32), self.mlp_norm)

    @staticmethod
    def _added(x: Array, added: Array, norm: _LayerNorm) -> Array:
        return norm(x.astype(jnp.float32) + added, x.dtype)


@partial(jax.jit, static_argnames=("graph", "kernels", "group"))
def _run_block(
    graph: nnx.GraphDef[_Block],
    weights: Any,
    x: Array,
    blocks: _Blocks,
    count: Array,
    *,
    kernels: Kernels,
    group: int,
) -> Array:
    """One layer as a function of its weights, traced once for all layers. count: rows of the step
    that are not padding.
    """
    return nnx.merge(graph, weights)(x, blocks, kernels.of_rows(count), group)


class _ScoreHead(nnx.Module):
    """dense [E, E] and out [E, 1] with their biases. It is computed in float32, because scores are
    compared, and there is only one row per text.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        size = config.hidden_size
        self.dense = nnx.Param(normal(rngs, (size, size), size**-0.5, dtype))
        self.dense_bias = nnx.Param(jnp.zeros((size,), dtype))
        self.out = nnx.Param(normal(rngs, (size, 1), size**-0.5, dtype))
        self.out_bias = nnx.Param(jnp.zeros((1,), dtype))

    def __call__(self, x: Array) -> Array:
        """First tokens' rows [R, E] -> float32 [R, 1]."""
        x = jnp.tanh(_product(x, self.dense, self.dense_bias))
        return _product(x, self.out, self.out_bias)


def _product(x: Array, weight: nnx.Param, bias: nnx.Param) -> Array:
    wide, exact = jnp.float32, jax.lax.Precision.HIGHEST
    y = jnp.matmul(x.astype(wide), weight[...].astype(wide), precision=exact)
    return y + bias[...].astype(wide)


class Bert(Layer):
    """embed [V, E], positions [P, E], segments [token types, E], a norm, L blocks, and the head of
    a model that scores. See `jitney.engine.core.models.protocol`.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        encoder, size = _encoder_of(config), config.hidden_size
        places = config.context_length + encoder.first_position
        self.config = config
        self.embed = nnx.Param(normal(rngs, (config.vocab_size, size), 1.0, dtype))
        self.positions = nnx.Param(normal(rngs, (places, size), 1.0, dtype))
        self.segments = nnx.Param(normal(rngs, (encoder.token_types, size), 1.0, dtype))
        self.norm = _LayerNorm(config, dtype)
        self.layers = nnx.List(
            [_Block(config, dtype=dtype, rngs=rngs) for _ in range(config.n_layers)]
        )
        if encoder.pooling == "classify":
            self.head = _ScoreHead(config, dtype=dtype, rngs=rngs)
        else:
            self.head = None

    def __call__(
        self, tokens: Array, kv: list[Array], meta: AttentionMeta, kernels: Kernels
    ) -> tuple[Hidden, list[Array]]:
        """tokens int32 [T] of whole texts, kv (empty) -> (rows after the last layer, kv)."""
        n_texts, n_rows = meta.cu_q.shape[0] - 1, tokens.shape[0]
        owners = jnp.searchsorted(meta.cu_q[1:], jnp.arange(n_rows), side="right")
        texts = jnp.minimum(owners, n_texts - 1)  # rows that pad the step belong to no text
        group = min(max(n_rows // _BLOCK_ROWS, 1), _MOST_BLOCKS)
        blocks = _Blocks.of(meta.cu_q, texts, group)
        x = self._embedded(tokens, meta.positions, meta.cu_q[texts])
        for block in self.layers:
            graph, weights = nnx.split(block)
            x = _run_block(graph, weights, x, blocks, meta.counts[2], kernels=kernels, group=group)
        return Hidden(x), kv

    def _embedded(self, tokens: Array, positions: Array, first_rows: Array) -> Array:
        """tokens, positions and the first row of each one's text, int32 [T] -> [T, E]."""
        encoder = _encoder_of(self.config)
        segments = jnp.zeros_like(tokens)
        if encoder.separator_id is not None:
            separators = (tokens == encoder.separator_id).astype(jnp.int32)
            before = jnp.cumsum(separators) - separators
            segments = (before > before[first_rows]).astype(jnp.int32)
        rows = _rows_of(self.embed, tokens)
        rows += _rows_of(self.positions, positions + encoder.first_position)
        rows += _rows_of(self.segments, segments)
        return self.norm(rows, self.dtype)

    def logits(self, hidden: Hidden, kernels: Kernels) -> Array:
        """First tokens' rows, R of them -> float32 [R, 1], the score of each pair."""
        assert self.head is not None  # `EncoderConfig.pooling` says which models have one
        return self.head(hidden.states)

    def normed(self, hidden: Hidden, kernels: Kernels) -> Array:
        """R rows -> [R, E], unchanged, since each layer ends with a norm."""
        return hidden.states

    def set_kv_scales(self, scales: list[Array]) -> None:
        """Check that there are no factors: an encoder has no pools."""
        assert not scales

    @property
    def dtype(self) -> np.dtype:
        """The dtype of activations and weights."""
        return self.embed[...].dtype

    def hidden_dtype(self, kernels: Kernels) -> np.dtype:
        """Dtype of `Hidden.states`."""
        return self.dtype

    @classmethod
    def weight_map(cls, config: ModelConfig, file_format: FileFormat) -> WeightMap:
        """The tensors of a folder from which each weight is made; GGUF files are not supported."""
        prefix, head = _TENSORS[config.architecture]
        targets = [*_embedding_targets(config, prefix + "embeddings.")]
        for layer in range(config.n_layers):
            targets += _layer_targets(config, layer, f"{prefix}encoder.layer.{layer}.")
        for name, tensor, outputs in zip(
            ("dense", "out"), head, (config.hidden_size, 1), strict=False
        ):
            shape = outputs, config.hidden_size
            weight = Target.of(("head", name), f"{tensor}.weight", *shape, transpose=True)
            targets += weight, Target.of(("head", f"{name}_bias"), f"{tensor}.bias", outputs)
        return WeightMap(tuple(targets), _UNUSED)


def _rows_of(table: nnx.Param, numbers: Array) -> Array:
    """Rows of a table [N, E] by their numbers [T] -> float32 [T, E]."""
    return jnp.take(table[...], numbers, axis=0, mode="clip").astype(jnp.float32)


def _encoder_of(config: ModelConfig) -> EncoderConfig:
    assert config.encoder is not None  # of every architecture in `_TENSORS`
    return config.encoder


def _embedding_targets(config: ModelConfig, prefix: str) -> Iterator[Target]:
    encoder = _encoder_of(config)
    tables = {
        "embed": ("word", config.vocab_size),
        "positions": ("position", config.context_length + encoder.first_position),
        "segments": ("token_type", encoder.token_types),
    }
    for name, (kind, rows) in tables.items():
        yield Target.of((name,), f"{prefix}{kind}_embeddings.weight", rows, config.hidden_size)
    yield from _norm_targets(("norm",), f"{prefix}LayerNorm", config)


def _norm_targets(path: Path, name: str, config: ModelConfig) -> Iterator[Target]:
    for part in ("weight", "bias"):
        yield Target.of((*path, part), f"{name}.{part}", config.hidden_size)


def _layer_targets(config: ModelConfig, layer: int, prefix: str) -> Iterator[Target]:
    size, inner = config.hidden_size, config.intermediate_size
    attention = [f"attention.self.{name}" for name in ("query", "key", "value")]
    matrices: dict[str, tuple[list[str], tuple[int, int]]] = {
        "qkv": (attention, (size, size)),
        "o": (["attention.output.dense"], (size, size)),
        "up": (["intermediate.dense"], (inner, size)),
        "down": (["output.dense"], (size, inner)),
    }
    for name, (tensors, shape) in matrices.items():
        path = ("layers", layer, name)
        weights = [Piece(f"{prefix}{tensor}.weight", shape) for tensor in tensors]
        biases = [Piece(f"{prefix}{tensor}.bias", shape[:1]) for tensor in tensors]
        yield Target((*path, "kernel"), tuple(weights), transpose=True)
        yield Target((*path, "bias"), tuple(biases))
    for name, tensor in (("attention_norm", "attention.output"), ("mlp_norm", "output")):
        yield from _norm_targets(("layers", layer, name), f"{prefix}{tensor}.LayerNorm", config)
