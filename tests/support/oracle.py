"""A naive forward pass over whole sequences: attention written out, no pages, no batch."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jitney.engine.models.protocol import Model
from jitney.kernels.interface import AttentionMeta
from jitney.kernels.select import select

VOCAB = 512


def dense(q, k, v, kv, meta, *, scale, window=0, softcap=0.0):
    """Causal attention within one sequence; q [T, H, D]."""
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


@jax.jit
def whole_logits(model: Model, tokens: jax.Array) -> jax.Array:
    """tokens int32 [T] -> float32 [T, V]."""
    positions = jnp.arange(tokens.shape[0])
    none = jnp.zeros(0, jnp.int32)
    meta = AttentionMeta(none, none, none, none, positions, none)
    hidden, _ = model(tokens, [jnp.zeros(0)] * model.config.n_layers, meta, DENSE)
    return model.logits(hidden, DENSE)


def oracle_logprobs(model: Model, tokens: list[int]) -> np.ndarray:
    """Log-probabilities of the next token at every position, [T, V]; padded so that few shapes
    compile.
    """
    padded = np.zeros(-(-len(tokens) // 64) * 64, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(jax.nn.log_softmax(whole_logits(model, padded)))[: len(tokens)]


def prompt(i: int, length: int) -> list[int]:
    return np.random.default_rng(i).integers(0, 256, length).tolist()
