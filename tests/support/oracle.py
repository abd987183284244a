"""A naive forward pass over whole sequences: attention written out, no pages, no batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jitney.engine.core.models.hidden import Hidden
from jitney.engine.core.models.layers import RowFacts
from jitney.engine.core.models.llama import Llama
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.kernels.delta_net import DeltaState, StateSlots
from jitney.kernels.interface import AttentionMeta
from jitney.kernels.partial_sums import whole
from jitney.kernels.select import select

VOCAB = 512


def dense_attention(q, k, v, kv, meta, **options):
    """Attention over the rows of this step alone; their keys and values stand for the pool."""
    return dense_attend(q, (k, v), meta, **options), (k, v)


def dense_attend(q, kv, meta, *, scale, window=0, softcap=0.0, sinks=None, value_dim=0):
    """Attention over the rows of this step, masked by sequence, position and window."""
    k, v = kv
    if value_dim:
        v = k[..., :value_dim]
    rows = jnp.arange(q.shape[0])
    sequence = jnp.searchsorted(meta.cu_q[1:], rows, side="right")
    age = meta.positions[:, None] - meta.positions[None, :]
    seen = (
        (sequence[:, None] == sequence[None, :]) & (age >= 0) & ((age < window) if window else True)
    )
    group = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen, scores, -1e30)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        shape = (*scores.shape[:2], 1)
        column = jnp.broadcast_to(sinks[:, None, None], shape)
        weights = jax.nn.softmax(jnp.concatenate([scores, column], -1), axis=-1)[..., :-1]
    return jnp.einsum("hqk,khd->qhd", weights, v.astype(jnp.float32)).astype(q.dtype)


DENSE = replace(
    select("cpu", "reference"),
    name="dense",
    paged_attention=dense_attention,
    attend=dense_attend,
)


def nothing_kept(config: ModelConfig, seqs: int) -> list[Any]:
    """The state of layers before the first step: no pages, which `DENSE` does not read, and empty
    slots.
    """
    seats: Any = None
    if config.recurrent is not None:
        seats = DeltaState.empty(config.recurrent.state_shapes(seqs))
    return [
        jnp.zeros(0) if layer in config.pool_layers else seats for layer in range(config.n_layers)
    ]


@jax.jit
def _whole_hidden(model: Model, tokens: jax.Array, adapted: jax.Array | None = None) -> Hidden:
    """tokens, adapted int32 [T] -> T rows after the last attention."""
    positions = jnp.arange(tokens.shape[0])
    none = jnp.zeros(0, jnp.int32)
    counts = jnp.array([0, 1, tokens.shape[0]], jnp.int32)
    ends = jnp.array([0, tokens.shape[0]], jnp.int32)
    state = StateSlots.in_place(jnp.zeros(1, jnp.int32))
    meta = AttentionMeta(none, ends, none, none, positions, counts, adapted, state=state)
    hidden, _ = model(tokens, nothing_kept(model.config, 1), meta, DENSE)
    return hidden


@jax.jit
def whole_logits(model: Model, tokens: jax.Array, adapted: jax.Array | None = None) -> jax.Array:
    """tokens, adapted int32 [T] -> float32 [T, V]."""
    return model.logits(_whole_hidden(model, tokens, adapted), DENSE)


def _padded(tokens: list[int]) -> np.ndarray:
    """The tokens padded to a multiple of 64, so that few shapes compile."""
    padded = np.zeros(-(-len(tokens) // 64) * 64, np.int32)
    padded[: len(tokens)] = tokens
    return padded


def oracle_logprobs(model: Model, tokens: list[int], adapter: int = 0) -> np.ndarray:
    """Log-probabilities of the next token at every position, [T, V]. adapter: number of the model's
    adapter; 0: none.
    """
    padded = _padded(tokens)
    logits = whole_logits(
        model, padded, np.full(len(padded), adapter, np.int32) if adapter else None
    )
    return np.asarray(jax.nn.log_softmax(logits))[: len(tokens)]


def prompt(i: int, length: int) -> list[int]:
    return np.random.default_rng(i).integers(0, 256, length).tolist()


@jax.jit
def _fed(model: Model, hidden: Hidden) -> jax.Array:
    """Rows after the last attention -> [T, E] before the final norm."""
    last, x = cast(Llama, model).layers[-1], hidden.states
    return x + whole(last.fed_forward(last.mlp_norm(x, DENSE), DENSE, RowFacts()))


def naive_normed(model: Model, tokens: list[int]) -> np.ndarray:
    """Hidden states of every position after the final norm, float32 [T, E]."""
    x = np.asarray(_fed(model, _whole_hidden(model, _padded(tokens))), np.float64)[: len(tokens)]
    root = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + model.config.rms_eps)
    weight = np.asarray(cast(Llama, model).norm.weight[...], np.float64)
    return (x / root * weight).astype(np.float32)
