"""EAGLE-3 heads (arXiv 2503.01840): one layer trained to draft for a model that is not changed.

Row j reads the inputs of three of the model's layers at row j, joined by a matrix, and token j + 1.
Further drafts read the head's own state instead of the joined inputs. It drafts from a vocabulary
of its own, which is a part of the model's.

Axes: T rows, R rows that draft, E embed, N pages.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jitney.engine.core.models.hidden import Hidden
from jitney.engine.core.models.layers import Linear, RMSNorm, normal
from jitney.engine.core.models.llama import Llama
from jitney.engine.core.models.prediction import PredictionHead
from jitney.engine.core.models.rope import Rope
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import FileFormat, WeightMap
from jitney.kernels.interface import AttentionMeta, Kernels


class Eagle3Head(PredictionHead):
    """One block, whose attention reads rows of size 2E, with joint [3E, E] before it, and norm and
    lm_head [E, D] after it; D is the size of the head's vocabulary. offsets int32 [D]: added to a
    token id of the head to get the model's token id; None: the ids are equal.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        own, size = config.eagle3, config.hidden_size
        assert own is not None
        self.config = config
        self._dtype = np.dtype(dtype)
        self.joint = Linear(own.read_size, size, bias=False, dtype=dtype, rngs=rngs)
        self.hidden_norm = RMSNorm.of(size, config, dtype)
        self.layers = nnx.List([self.block(config, 0, dtype=dtype, rngs=rngs)])
        self.norm = RMSNorm.of(size, config, dtype)
        columns = own.vocab_size // config.shards
        self.lm_head = Linear(size, columns, bias=False, dtype=dtype, rngs=rngs)
        if own.embeds:
            self.embed = nnx.Param(normal(rngs, (config.vocab_share, size), 1.0, dtype))
        else:
            self.embed = None
        if own.vocab_size < config.vocab_size:
            self.offsets = nnx.Param(jnp.zeros((own.vocab_size,), jnp.int32))
        else:
            self.offsets = None

    @property
    def reads_normed(self) -> bool:
        return False

    def embedded_for(self, tokens: Array, model: Llama) -> Array:
        return model.embedded(tokens) if self.embed is None else self.embedded(tokens)

    def joined(self, read: Array, kernels: Kernels) -> Array:
        return self.joint(read, kernels)

    def predict(
        self, embedded: Array, states: Array, kv: list[Array], meta: AttentionMeta, kernels: Kernels
    ) -> tuple[Hidden, list[Array]]:
        layer, own = self.layers[0], self.config.eagle3
        assert own is not None
        (rope,) = Rope.of_layers(meta.positions, self.config)
        normed = self.hidden_norm(states, kernels)
        read = jnp.concatenate([layer.attention_norm(embedded, kernels), normed], axis=1)
        o, pool = layer.attention(read, rope, kv[0], meta, kernels)
        x = normed if own.adds_to_normed else states
        if kernels.float32_residual:
            x = x.astype(jnp.float32)
        return Hidden(x + o), [pool]

    def drafted(self, hidden: Hidden, model: Llama, kernels: Kernels) -> tuple[Array, Array]:
        """See `PredictionHead.drafted`; the next draft reads the state before the norm."""
        x, normed = self.ended(hidden, kernels)
        return x.astype(self.dtype), self.projected(normed, kernels)

    def token_ids(self, columns: Array) -> Array:
        if self.offsets is None:
            return columns
        tokens = columns + self.offsets[...].at[columns].get(mode="clip")
        return jnp.where(columns < 0, columns, jnp.clip(tokens, 0, self.config.vocab_size - 1))

    @classmethod
    def weight_map(cls, config: ModelConfig, file_format: FileFormat) -> WeightMap:
        assert config.eagle3 is not None
        return WeightMap.of_eagle3(config, config.eagle3)
