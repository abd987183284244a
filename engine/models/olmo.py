"""OLMo 2 (arXiv 2501.00656): what differs from Llama's layers.

Attention and MLP read rows as they are, and what they give is normed before it is added. Queries,
and keys, are normed over all heads at once, before they are parted into heads.
"""

from __future__ import annotations

from dataclasses import replace

from flax import nnx
from jax.typing import DTypeLike

from jitney.engine.checkpoints.model_config import ModelConfig
from jitney.engine.checkpoints.names import HF, Dialect, FileFormat
from jitney.engine.models.attention import WideNormAttention
from jitney.engine.models.layers import NoNorm
from jitney.engine.models.llama import Llama, PostNormBlock

_HF = replace(
    HF,
    attention_norm="",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_post_norm="post_feedforward_layernorm",
)


class _OlmoBlock(PostNormBlock):
    """One layer: attention and MLP, each normed behind, then added."""

    attention_class = WideNormAttention

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.attention_norm = NoNorm()
        self.mlp_norm = NoNorm()


class Olmo(Llama):
    """See `Llama`."""

    block = _OlmoBlock

    @classmethod
    def dialect(cls, config: ModelConfig, file_format: FileFormat) -> Dialect:
        """The names of Hugging Face's folders; GGUF files of OLMo 2 are not read."""
        return _HF
