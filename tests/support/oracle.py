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
from jitney.kernels.select import select

VOCAB = 512


def dense(q, k, v, kv, meta, *, scale, window=0, softcap=0.0, value_dim=0):
    """Causal attention within one sequence; q [T, H, D]."""
    if v is None:  # of latents
        v = k[..., :value_dim]
    group = q.shape[1] // k.shape[1]
    scores = jnp.einsum("thd,shd->hts", q, jnp.repeat(k, group, 1)) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    at = meta.positions
    seen = at[None, :] <= at[:, None]
    if window:
        seen &= at[None, :] > at[:, None] - window
    p = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hts,shd->thd", p, jnp.repeat(v, group, 1)), kv


DENSE = replace(select("cpu", "reference"), name="dense", paged_attention=dense)


def nothing_kept(config: ModelConfig, seqs: int) -> list[Any]:
    """What layers find of the steps before the first one: no pages, which `DENSE` does not read,
    and empty seats.
    """
    seats: Any = None
    if config.recurrent is not None:
        seats = DeltaState.empty(config.recurrent.state_shapes(seqs))
    return config.by_layer(lambda _: jnp.zeros(0), seats)


@jax.jit
def _whole_hidden(model: Model, tokens: jax.Array) -> Hidden:
    """tokens int32 [T] -> T rows behind the last attention."""
    positions = jnp.arange(tokens.shape[0])
    none = jnp.zeros(0, jnp.int32)
    counts = jnp.array([0, 1, tokens.shape[0]], jnp.int32)
    ends = jnp.array([0, tokens.shape[0]], jnp.int32)
    state = StateSlots.in_place(jnp.zeros(1, jnp.int32))
    meta = AttentionMeta(none, ends, none, none, positions, counts, state=state)
    hidden, _ = model(tokens, nothing_kept(model.config, 1), meta, DENSE)
    return hidden


@jax.jit
def whole_logits(model: Model, tokens: jax.Array) -> jax.Array:
    """tokens int32 [T] -> float32 [T, V]."""
    return model.logits(_whole_hidden(model, tokens), DENSE)


def _padded(tokens: list[int]) -> np.ndarray:
    """To a multiple of 64, so that few shapes compile."""
    padded = np.zeros(-(-len(tokens) // 64) * 64, np.int32)
    padded[: len(tokens)] = tokens
    return padded


def oracle_logprobs(model: Model, tokens: list[int]) -> np.ndarray:
    """Log-probabilities of the next token at every position, [T, V]."""
    logits = whole_logits(model, _padded(tokens))
    return np.asarray(jax.nn.log_softmax(logits))[: len(tokens)]


def prompt(i: int, length: int) -> list[int]:
    return np.random.default_rng(i).integers(0, 256, length).tolist()


@jax.jit
def _fed(model: Model, hidden: Hidden) -> jax.Array:
    """Rows behind the last attention -> [T, E] before the final norm."""
    last, x = cast(Llama, model).layers[-1], hidden.states
    return x + last.fed_forward(last.mlp_norm(x, DENSE), DENSE, RowFacts())


def naive_normed(model: Model, tokens: list[int]) -> np.ndarray:
    """Hidden states of every position behind the final norm, float32 [T, E]."""
    x = np.asarray(_fed(model, _whole_hidden(model, _padded(tokens))), np.float64)[: len(tokens)]
    root = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + model.config.rms_eps)
    weight = np.asarray(cast(Llama, model).norm.weight[...], np.float64)
    return (x / root * weight).astype(np.float32)
