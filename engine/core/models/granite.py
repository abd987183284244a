"""Granite 3 and 4 without experts and recurrent layers: Llama's layers with four factors, of the
embeddings, of what a layer adds, of attention scores and of logits.
"""

from __future__ import annotations

from dataclasses import replace

from jax import Array

from jitney.engine.core.models.hidden import Hidden
from jitney.engine.core.models.layers import RowFacts, scaled
from jitney.engine.core.models.llama import Block, Llama
from jitney.engine.core.models.rope import Rope
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import GGUF, HF, Dialect, FileFormat
from jitney.kernels.interface import AttentionMeta, Kernels

_HYBRID = replace(
    HF,
    gate_up="shared_mlp.input_linear",
    down="shared_mlp.output_linear",
)
_GGUF = replace(GGUF, paired_rows=True)


class _GraniteBlock(Block):
    """One layer: what attention and MLP give is multiplied before it is added."""

    def attended(
        self, x: Array, added: Array, rope: Rope, kv: Array, meta: AttentionMeta, kernels: Kernels
    ) -> tuple[Array, Array, Array]:
        """See `Block.attended`."""
        x, o, kv = super().attended(x, added, rope, kv, meta, kernels)
        return x, scaled(o, self.residual_factor), kv

    def fed_forward(self, normed: Array, kernels: Kernels, rows: RowFacts) -> Array:
        """See `Block.fed_forward`."""
        return scaled(super().fed_forward(normed, kernels, rows), self.residual_factor)


class Granite(Llama):
    """See `Llama`."""

    block = _GraniteBlock

    def embedded(self, tokens: Array) -> Array:
        """See `Llama.embedded`."""
        return scaled(super().embedded(tokens), self.config.embed_factor)

    def logits(self, hidden: Hidden, kernels: Kernels) -> Array:
        """See `Llama.logits`."""
        return super().logits(hidden, kernels) * self.config.logit_factor

    @classmethod
    def dialect(cls, config: ModelConfig, file_format: FileFormat) -> Dialect:
        """See `Llama.dialect`."""
        if file_format == "gguf":
            return _GGUF
        return _HYBRID if config.architecture == "GraniteMoeHybridForCausalLM" else HF
