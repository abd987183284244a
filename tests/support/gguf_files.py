"""Helpers for tests of .gguf files that do not depend on the tensors."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf

from jitney.engine.core.weights.checkpoints.model_config import ModelConfig


def open_writer(
    path: Path,
    arch: str,
    *,
    layers: int,
    size: int,
    inner: int,
    heads: int,
    kv_heads: int,
    context: int = 64,
) -> gguf.GGUFWriter:
    """A writer with the hyperparameters written; add tensors, then call `close`."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(2)
    return writer


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(config: ModelConfig) -> dict[str, Any]:
    """Fields of the configuration with numbers rounded to float32, as in files."""

    def narrow(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.5g}")
        if isinstance(value, dict):
            return {key: narrow(own) for key, own in value.items()}
        if isinstance(value, (list, tuple)):
            return [narrow(own) for own in value]
        return value

    return narrow(asdict(config))
