"""Prediction heads: a layer after a model's last one that predicts one more token (multi-token
prediction, arXiv 2412.19437, section 2.2; DeepSeek-V3's and GLM's files call it nextn).

Its row j reads the model's hidden state j after the final norm and token j + 1, and predicts token
j + 2. It uses the model's embedding and output head.

Axes: T rows, E embed, N pages.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jitney.engine.core.models.hidden import Hidden
from jitney.engine.core.models.layers import Layer, Linear, RMSNorm
from jitney.engine.core.models.llama import Llama
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import FileFormat, WeightMap
from jitney.kernels.interface import AttentionMeta, Kernels


class PredictionHead(Llama):
    """One block, a final norm, and the matrix joint [2E, E] before the block, which reads a normed
    embedding and a normed hidden state. As a base class it comes before the family's class, which
    has the block.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        size = config.hidden_size
        self.config = config
        self._dtype = np.dtype(dtype)
        self.embedding_norm = RMSNorm.of(size, config, dtype)
        self.hidden_norm = RMSNorm.of(size, config, dtype)
        self.joint = Linear(2 * size, size, bias=False, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([self.block(config, 0, dtype=dtype, rngs=rngs)])
        self.norm = RMSNorm.of(size, config, dtype)
        self.lm_head = None

    @property
    def reads_normed(self) -> bool:
        """Whether it reads the model's hidden states after the final norm; else `Hidden.noted`."""
        return True

    def embedded_for(self, tokens: Array, model: Llama) -> Array:
        """Embeddings of tokens int32 [T] -> [T, E]. model: the model for which it drafts."""
        return model.embedded(tokens)

    def joined(self, read: Array, kernels: Kernels) -> Array:
        """`Hidden.for_head` of T rows of the model -> the states [T, E] that `predict` takes."""
        return read

    def predict(
        self, embedded: Array, states: Array, kv: list[Array], meta: AttentionMeta, kernels: Kernels
    ) -> tuple[Hidden, list[Array]]:
        """Run the block. embedded [T, E]: embeddings of the next tokens. states [T, E]: from
        `joined` or `drafted`. -> (rows after the attention, for `drafted`; kv).
        """
        read = [self.embedding_norm(embedded, kernels), self.hidden_norm(states, kernels)]
        x = self.joint(jnp.concatenate(read, axis=1), kernels)
        return self.through_layers(x, kv, [meta], kernels)

    def drafted(self, hidden: Hidden, model: Llama, kernels: Kernels) -> tuple[Array, Array]:
        """R rows -> (the states [R, E] for the next draft, the logits of this draft float32
        [R, D]).
        """
        normed = self.normed(hidden, kernels)
        return normed, model.projected(normed, kernels)

    def token_ids(self, columns: Array) -> Array:
        """Columns of these logits, int32 [R], -1 for none -> token ids of the model."""
        return columns

    def pack(self, kernels: Kernels) -> None:
        """Pack the matrices; the embedding is the model's."""
        Layer.pack(self, kernels)

    def pack_shares(self, kernels: Kernels, mesh: Mesh) -> None:
        """As `pack`, of a head that is split over devices."""
        Layer.pack_shares(self, kernels, mesh)

    @property
    def dtype(self) -> np.dtype:
        return self._dtype

    @classmethod
    def weight_map(cls, config: ModelConfig, file_format: FileFormat) -> WeightMap:
        return WeightMap.of_prediction_head(config, cls.dialect(config, file_format))
