"""The interface of a model to the rest of the engine.

Loading, sharding, the proof of kernels, calibration and the step use only these members of a model.
Most families are a few overrides of `jitney.engine.core.models.llama.Llama`; any other model must
be an `nnx.Module` with these members.

Weights are addressed by their path in the module's flat state. Two parts of a path have a meaning
elsewhere: `jitney.engine.core.models.sharding` splits the outputs of modules named qkv, gate_up and
lm_head, the weights of norms named wide_q_norm and wide_k_norm, the inputs of modules named o and
down, and the rows of `embed`; and the last part of a `Linear`'s matrix is `kernel`. Every other
weight is whole on each device.

Axes: T tokens, E embed, R rows that need logits, V vocabulary, L layers, N pages, K KV heads, D
head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jitney.engine.core.models.hidden import Hidden
from jitney.engine.core.models.layers import Linear
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import FileFormat, WeightMap
from jitney.kernels.interface import AttentionMeta, Kernels


class Model(Protocol):
    """A model's weights and the functions that use them; a pytree (`nnx.Module`). An encoder gets
    whole texts and no pools, and its logits are those of its own head (`ModelConfig.encoder`).
    """

    #: The configuration of one device's share; its `windows` are how far each layer sees.
    config: ModelConfig

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        """Make random weights in `dtype`, for the share of one of `config.shards` devices."""

    def __call__(
        self, tokens: Array, kv: list[Array], meta: AttentionMeta, kernels: Kernels
    ) -> tuple[Hidden, list[Array]]:
        """Run the layers: tokens int32 [T], kv L times [N, page, 2K, D] (None for layers without a
        pool) -> (rows after the last attention, the pools with the step's keys and values).
        """
        ...

    def logits(self, hidden: Hidden, kernels: Kernels) -> Array:
        """Logits of R rows, float32 [R, V], of the device's own share of the vocabulary."""
        ...

    def normed(self, hidden: Hidden, kernels: Kernels) -> Array:
        """R rows -> [R, E] after the final norm, as the output head reads them."""
        ...

    def linears(self) -> Iterator[Linear]:
        """Every matrix that may be quantised, in one order."""
        ...

    def pack(self, kernels: Kernels) -> None:
        """Pack the matrices in the layout that the kernel set multiplies fastest; done last."""
        ...

    def pack_shares(self, kernels: Kernels, mesh: Mesh) -> None:
        """Pack a model that is split over the devices of a mesh."""
        ...

    def set_kv_scales(self, scales: list[Array]) -> None:
        """Give each layer the factors of its quantised pool, float32 [2K]."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """The dtype of activations, and of weights that are not quantised."""
        ...

    def hidden_dtype(self, kernels: Kernels) -> np.dtype:
        """Dtype of `Hidden.states`."""
        ...

    @classmethod
    def weight_map(cls, config: ModelConfig, file_format: FileFormat) -> WeightMap:
        """Which tensors of a checkpoint of the whole model make up each weight."""
        ...
