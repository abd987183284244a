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

    def predict(
        self, embedded: Array, states: Array, kv: list[Array], meta: AttentionMeta, kernels: Kernels
    ) -> tuple[Hidden, list[Array]]:
        """embedded, states [T, E]: of the next tokens, and hidden states behind a final norm ->
        (rows behind the attention, for `normed`; kv).
        """
        read = [self.embedding_norm(embedded, kernels), self.hidden_norm(states, kernels)]
        x = self.joint(jnp.concatenate(read, axis=1), kernels)
        return self.through_layers(x, kv, [meta], kernels)

    def linears(self) -> Iterator[Linear]:
        """See `Llama.linears`."""
        yield self.joint
        yield from super().linears()

    def pack(self, kernels: Kernels) -> None:
        """See `Llama.pack`."""
        self.joint.pack(kernels)
        super().pack(kernels)

    @property
    def dtype(self) -> np.dtype:
        """See `Llama.dtype`."""
        return self._dtype

    @classmethod
    def weight_map(cls, config: ModelConfig, file_format: FileFormat) -> WeightMap:
        """See `Llama.weight_map`."""
        return WeightMap.of_prediction_head(config, cls.dialect(config, file_format))
