"""The layer behind a model's last that predicts one token more (multi-token prediction, arXiv
2412.19437, section 2.2; DeepSeek-V3's and GLM's files call it nextn).

Its row j reads the model's hidden state j behind the final norm and token j + 1, and predicts token
j + 2. Embedding and output head are the model's.

Axes: T rows, E embed, N pages.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jitney.engine.core.models.hidden import Hidden
from jitney.engine.core.models.layers import Linear, RMSNorm
from jitney.engine.core.models.llama import Llama
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import FileFormat, WeightMap
from jitney.kernels.interface import AttentionMeta, Kernels


class PredictionHead(Llama):
    """One block, a final norm, and joint [2E, E] before it, which reads an embedding and a hidden
    state, each normed. It comes before the family's class, which has the block.
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
        """It reads the model's hidden states behind the final norm; else `Hidden.noted`."""
        return True

    def embedded_for(self, tokens: Array, model: Llama) -> Array:
        """tokens int32 [T] -> [T, E]; model: the one that it drafts for."""
        return model.embedded(tokens)

    def joined(self, read: Array, kernels: Kernels) -> Array:
        """`Hidden.for_head` of T rows of the model -> the states [T, E] that `predict` takes."""
        return read

    def predict(
        self, embedded: Array, states: Array, kv: list[Array], meta: AttentionMeta, kernels: Kernels
    ) -> tuple[Hidden, list[Array]]:
        """embedded, states [T, E]: of the next tokens, and of `joined` or `drafted` -> (rows behind
        the attention, for `drafted`; kv).
        """
        read = [self.embedding_norm(embedded, kernels), self.hidden_norm(states, kernels)]
        x = self.joint(jnp.concatenate(read, axis=1), kernels)
        return self.through_layers(x, kv, [meta], kernels)

    def drafted(self, hidden: Hidden, model: Llama, kernels: Kernels) -> tuple[Array, Array]:
        """R rows -> (the states [R, E] from which it goes on, logits of what it drafts, float32
        [R, D]).
        """
        normed = self.normed(hidden, kernels)
        return normed, model.projected(normed, kernels)

    def token_ids(self, columns: Array) -> Array:
        """Columns of those logits, int32 [R], -1 for none -> tokens of the model."""
        return columns

    def linears(self) -> Iterator[Linear]:
        """See `Llama.linears`."""
        yield self.joint
        yield from super().linears()

    def pack(self, kernels: Kernels) -> None:
        """See `Llama.pack`."""
        for linear in (self.joint, self.lm_head):
            if linear is not None:
                linear.pack(kernels)
        for block in self.layers:
            block.pack(kernels)

    def pack_shares(self, kernels: Kernels, mesh: Mesh) -> None:
        """See `Llama.pack_shares`; the embedding is the model's."""
        for linear in self.linears():
            linear.pack_shares(kernels, mesh)

    @property
    def dtype(self) -> np.dtype:
        """See `Llama.dtype`."""
        return self._dtype

    @classmethod
    def weight_map(cls, config: ModelConfig, file_format: FileFormat) -> WeightMap:
        """See `Llama.weight_map`."""
        return WeightMap.of_prediction_head(config, cls.dialect(config, file_format))
