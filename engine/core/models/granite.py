"""Granite 3 and 4: Llama's layers with four factors, on embeddings, on the outputs of a layer's
halves, on attention scores and on logits; Granite 4 may have layers of Mamba-2, and mixtures.
"""

from __future__ import annotations

from dataclasses import replace

from jax import Array

from jitney.engine.core.models.layers import RowFacts, scaled
from jitney.engine.core.models.llama import Llama
from jitney.engine.core.models.mamba import Mamba
from jitney.engine.core.models.mixture import MixtureBlock
from jitney.engine.core.models.rope import Rope
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import GGUF, HF, Dialect, FileFormat
from jitney.kernels.interface import AttentionMeta, Kernels
from jitney.kernels.partial_sums import whole

_HYBRID = replace(
    HF,
    gate_up="shared_mlp.input_linear",
    down="shared_mlp.output_linear",
    router="block_sparse_moe.router.layer",
    expert_gate="block_sparse_moe.experts.{e}.gate_proj",
    expert_up="block_sparse_moe.experts.{e}.up_proj",
    expert_down="block_sparse_moe.experts.{e}.down_proj",
    shared_gate_up="shared_mlp.input_linear",
    shared_down="shared_mlp.output_linear",
)


class _GraniteBlock(MixtureBlock):
    """One layer: the outputs of both halves are multiplied by a factor before they are added."""

    recurrent_class = Mamba

    def attended(
        self, x: Array, added: Array, rope: Rope, kv: Array, meta: AttentionMeta, kernels: Kernels
    ) -> tuple[Array, Array, Array]:
        x, o, kv = super().attended(x, added, rope, kv, meta, kernels)
        return x, scaled(whole(o), self.residual_factor), kv

    def fed_forward(self, normed: Array, kernels: Kernels, rows: RowFacts) -> Array:
        answers = whole(super().fed_forward(normed, kernels, rows))
        return scaled(answers, self.residual_factor)


class Granite(Llama):
    block = _GraniteBlock
    gguf = replace(GGUF, paired_rows=True)

    def embedded(self, tokens: Array) -> Array:
        return scaled(super().embedded(tokens), self.config.embed_factor)

    @classmethod
    def dialect(cls, config: ModelConfig, file_format: FileFormat) -> Dialect:
        if config.architecture == "GraniteMoeHybridForCausalLM" and file_format == "hf":
            return _HYBRID
        return super().dialect(config, file_format)
