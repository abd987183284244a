"""Describes the storage of a model's weights, in words and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import jax
from flax import nnx

from jitney.engine.common.step_cost import StepCost
from jitney.engine.core.models.layers import Linear
from jitney.engine.core.models.mixture import ExpertLinear
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.safetensors import SafetensorsFolder
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.checkpoints.step_costs import step_cost


def describe_weights(model: Model, source: ModelSource | None = None) -> str:
    """The storage of matrices: schemes or dtypes with counts, and GGUF blocks behind floats."""
    if source is not None and not source.has_weights:
        return f"random, {describe_weights(model)}"
    kinds = Counter(map(_kind, model.linears()))
    if len(kinds) > 1:
        return ", ".join(f"{kind} x {count}" for kind, count in kinds.most_common())
    (kind,) = kinds
    made = {"float32": "not rounded, from", "bfloat16": "rounded from"}.get(kind)
    stored = _stored_blocks(source)
    if stored and made:
        return f"{kind}, {made} {stored}"
    return kind


def describe_step(model: Model, config: ModelConfig, kv_bytes: float) -> StepCost:
    """The cost of a decoder's steps on all devices. config: of the whole model. kv_bytes: see
    `step_cost`.
    """
    linears = list(model.linears())
    of_experts = _stored_bytes(one for one in linears if isinstance(one, ExpertLinear))
    stored = _stored_bytes(linears) - of_experts
    table = config.vocab_size * config.hidden_size
    empty = step_cost(config, weight_bytes=0.0, head_bytes=0.0, kv_bytes=0.0)
    numbers = empty.layer_weights
    expert_bytes = None
    if of_experts:
        numbers = empty.shared_weights
        expert_bytes = of_experts / (empty.n_experts * empty.expert_weights)
    if config.tie_embeddings:
        head_bytes = table * model.dtype.itemsize
    else:
        numbers += table  # the head is a matrix like any other
        head_bytes = table * stored / numbers
    return step_cost(
        config,
        weight_bytes=stored / numbers,
        head_bytes=head_bytes,
        kv_bytes=kv_bytes,
        expert_bytes=expert_bytes,
    )


def _stored_bytes(linears: Iterable[Linear]) -> int:
    """Bytes of matrices with their scales, without biases."""
    return sum(array.nbytes for linear in linears for array in linear.packed if array is not None)


def count_parameters(model: Model) -> int:
    """Numbers that the model's weights stand for, without the scales of quantised matrices."""
    count = sum(array.size for array in jax.tree.leaves(nnx.state(model)))
    for linear in model.linears():
        packed = linear.packed
        if packed.in_four_bits:
            count += packed.kernel.size
        count -= sum(array.size for array in packed[1:] if array is not None)
    return count


def _kind(linear: Linear) -> str:
    packed = linear.packed
    if packed.scale is None:
        return str(packed.kernel.dtype)
    return packed.scheme


def _stored_blocks(source: ModelSource | None) -> str:
    """The commonest block format of a GGUF file's matrices, such as Q4_1; "" for floats."""
    if source is None or source.kind != "gguf":
        return ""
    from jitney.engine.core.weights.checkpoints.gguf import GGUFFile

    tensors = GGUFFile(source.path).tensors.values()
    kinds = Counter(tensor.kind_name for tensor in tensors if len(tensor.shape) > 1)
    name = max(kinds, key=kinds.__getitem__, default="")
    return "" if name in SafetensorsFolder.types else name
