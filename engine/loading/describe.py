"""How a model's weights are stored, in words."""

from __future__ import annotations

from collections import Counter

from jitney.engine.checkpoints.gguf import GGUFFile
from jitney.engine.checkpoints.sources import ModelSource
from jitney.engine.models.layers import Linear
from jitney.engine.models.protocol import Model


def describe_weights(model: Model, source: ModelSource | None = None) -> str:
    """How the matrices are stored: a scheme, or dtype, or several of them with their counts. Where
    floats were made of a GGUF file's blocks it says of which: in float32 they are exact, which is
    another model than the same rounded."""
    kinds = Counter(map(_kind, model.linears()))
    if len(kinds) > 1:
        return ", ".join(f"{kind} x {count}" for kind, count in kinds.most_common())
    (kind,) = kinds
    stored = _stored_blocks(source)
    if stored and kind == "float32":
        return f"float32, not rounded, from {stored}"
    if stored and kind == "bfloat16":
        return f"bfloat16, rounded from {stored}"
    return kind


def _kind(linear: Linear) -> str:
    packed = linear.packed
    if packed.scale is None:
        return str(packed.kernel.dtype)
    return packed.scheme


def _stored_blocks(source: ModelSource | None) -> str:
    """The commonest block format of a GGUF file's matrices, such as Q4_1; empty where they are
    floats.
    """
    if source is None or source.kind != "gguf":
        return ""
    from gguf import GGMLQuantizationType

    tensors = GGUFFile(source.path).tensors.values()
    kinds = Counter(tensor.kind for tensor in tensors if len(tensor.shape) == 2)
    if not kinds:
        return ""
    name = GGMLQuantizationType(kinds.most_common(1)[0][0]).name
    if name in ("F32", "F16", "BF16", "F64"):
        return ""
    return name
