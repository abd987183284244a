"""Hugging Face folders whose matrices are quantised: GPTQ, AWQ, compressed-tensors, fp8 (see
`models.packing`).

A matrix is stored as several tensors; here it goes by the name it would have unquantised,
`...weight`, and its shape.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jitney.engine.checkpoints.quantization_config import Packing
from jitney.engine.checkpoints.safetensors import DTYPES, SafetensorsFolder
from jitney.engine.errors import ModelError
from jitney.engine.loading import repack
from jitney.engine.models.quantization import Packed, widened
from jitney.kernels.int4 import GROUP_SIZES

#: Endings of the tensors that hold a matrix, by method; the axes of its 4-bit words: (outputs,
#: inputs) and which of them counts words of eight.
CODES = {"gptq": ".qweight", "awq": ".qweight", "compressed-tensors": ".weight_packed"}
#: Endings of what goes with it, and of what only matters to activations and KV in 8 bits.
PARTS = (
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".weight_packed",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_scale",
    ".weight_scale_inv",
    ".input_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".q_scale",
    ".prob_scale",
)
#: Names of the scales of fp8 keys ("k") and values ("v") within a layer, by various tools.
KV_SCALES = (
    "self_attn.{}_scale",
    "self_attn.attn.{}_scale",
    "self_attn.{}_proj.{}_scale",
    "self_attn.{}_proj.output_scale",
    "self_attn.kv_scale",
)
FP8_LIMIT = 448.0
#: Types of numbers with a scale of their own.
EIGHT_BITS = ("F8_E4M3", "I8")


class QuantisedFolder(SafetensorsFolder):
    """`SafetensorsFolder` of unquantised names; `packed(name)` is the matrix as it is stored,
    `read(name)` its floats.

    Raises ModelError as that does, and when parts of a matrix are missing or do not fit each other.
    """

    types = (*DTYPES, *EIGHT_BITS, "I32", "I64")

    def __init__(self, folder: str | Path, packing: Packing, wanted: Container[str]):
        """wanted: names of the model's tensors. GPTQ's tools store a bias of zeros for layers that
        have none.
        """
        super().__init__(folder)
        self.packing = packing
        self.stored = self.shapes
        self.shapes = {
            name: shape
            for name, shape in self.stored.items()
            if not name.endswith(PARTS) and (name in wanted or not self.is_zero_bias(name))
        }
        self.shapes |= dict(self.matrices())

    def is_zero_bias(self, name: str) -> bool:
        return name.endswith(".bias") and not super().read(name).any()

    def matrices(self) -> Any:
        """(name, shape [O, I]) of each matrix in words."""
        ending = CODES.get(self.packing.method)
        for name, shape in self.stored.items():
            if ending and name.endswith(ending):
                if len(shape) != 2:
                    raise ModelError(f"{name[:100]} has {len(shape)} axes instead of 2")
                a, b = shape
                outs_ins = {"gptq": (b, 8 * a), "awq": (8 * b, a)}.get(
                    self.packing.method, (a, 8 * b)
                )
                yield f"{name.removesuffix(ending)}.weight", outs_ins

    def packed(self, name: str) -> Packed | None:
        """A matrix as it is stored, on the default device; None for floats and for scales of
        blocks.
        """
        base = name.removesuffix(".weight")
        if self.kinds.get(name) in EIGHT_BITS:
            return None if f"{base}.weight_scale_inv" in self.stored else self.eight_bits(base)
        if name in self.stored or not name.endswith(".weight"):
            return None
        match self.packing.method:
            case "gptq":
                parts = self.parts(base, ".qweight", ".qzeros", ".scales")
                self.check_order(f"{base}.g_idx", len(parts[-1]))
                packed = repack.gptq(*parts, self.packing.zero_offset)
            case "awq":
                packed = repack.awq(*self.parts(base, ".qweight", ".qzeros", ".scales"))
            case _:
                packed = self.packed_rows(base)
        return packed

    def read(self, name: str) -> np.ndarray:
        """One tensor as floats, row-major; see `SafetensorsFolder.read`."""
        packed = self.packed(name)
        if packed is not None:
            return np.asarray(widened(packed)).T
        if self.kinds.get(name) in EIGHT_BITS:
            return self.block_scaled(name)
        return super().read(name)

    def eight_bits(self, base: str) -> Packed:
        """int8 or fp8 with a scale for the matrix or each output."""
        weights, scale = (
            super(QuantisedFolder, self).read(part)
            for part in self.present(base, ".weight", ".weight_scale")
        )
        if scale.size not in (1, len(weights)):
            raise ModelError(
                f"{base[:100]}.weight_scale {list(scale.shape)} is neither one number nor one for "
                "each of "
                f"{len(weights)} outputs"
            )
        return repack.eight_bits(jnp.asarray(weights), jnp.asarray(scale))

    def block_scaled(self, name: str) -> np.ndarray:
        """fp8 with a scale for each block of outputs and inputs, as float32."""
        weights, scale = (
            super(QuantisedFolder, self).read(part) for part in (name, f"{name}_scale_inv")
        )
        if scale.ndim != 2 or 0 in scale.shape:
            raise ModelError(f"{name[:100]}_scale_inv has {scale.ndim} axes instead of 2")
        blocks = [-(-size // count) for size, count in zip(weights.shape, scale.shape, strict=True)]
        blocks = [
            1 << (size - 1).bit_length() for size in blocks
        ]  # the last block of an axis may be cut short
        wide = (
            scale.astype(np.float32)
            .repeat(blocks[0], 0)
            .repeat(blocks[1], 1)[: len(weights), : weights.shape[1]]
        )
        if wide.shape != weights.shape:
            raise ModelError(
                f"{name[:100]}_scale_inv {list(scale.shape)} does not fit {list(weights.shape)}"
            )
        return weights.astype(np.float32) * wide

    def packed_rows(self, base: str) -> Packed:
        """compressed-tensors' words."""
        zeros = [".weight_zero_point"] if f"{base}.weight_zero_point" in self.stored else []
        words, scales, *zero_words = self.parts(base, ".weight_packed", ".weight_scale", *zeros)
        return repack.packed_rows(words, zero_words[0] if zeros else None, scales)

    def parts(self, base: str, *endings: str) -> list[Any]:
        """The tensors of a matrix in words, checked against each other."""
        names = self.present(base, *endings)
        outs, ins = self.shapes[f"{base}.weight"]
        by_rows = self.packing.method == "compressed-tensors"
        shapes = {name.rpartition(".")[2]: self.stored[name] for name in names}
        scales = shapes["weight_scale" if by_rows else "scales"]
        groups = scales[-1 if by_rows else 0] if len(scales) == 2 else 0
        zeros = (outs // 8, groups) if by_rows else (groups, outs // 8)
        fits = (
            groups
            and ins % groups == 0
            and (groups == 1 or ins // groups in GROUP_SIZES)
            and outs % 8 == 0
            and scales == ((outs, groups) if by_rows else (groups, outs))
            and all(shapes.get(name, zeros) == zeros for name in ("qzeros", "weight_zero_point"))
        )
        if not fits or (groups == 1 and ins not in GROUP_SIZES and ins % repack.WHOLE_GROUP):
            raise ModelError(
                f"{base[:100]}: its quantised parts do not fit each other, or are not in groups of "
                f"{', '.join(map(str, GROUP_SIZES))} inputs: {shapes}"
            )
        return [jnp.asarray(super(QuantisedFolder, self).read(name)) for name in names]

    def present(self, base: str, *endings: str) -> list[str]:
        """Names of a matrix's tensors; ModelError for one that is missing."""
        names = [base + ending for ending in endings]
        missing = [name for name in names if name not in self.stored]
        if missing:
            raise ModelError(f"the quantised matrix {base[:100]} lacks {', '.join(missing)}")
        return names

    def kv_limits(self, layer: int) -> tuple[float, float] | None:
        """Largest magnitudes of a layer's keys and values by the scales that the checkpoint has for
        them, if any.
        """
        found = [
            next(
                (
                    scale
                    for scale in (
                        self.number(f"model.layers.{layer}.{name.format(part, part)}")
                        for name in KV_SCALES
                    )
                    if scale > 0
                ),
                0.0,
            )
            for part in "kv"
        ]
        return (FP8_LIMIT * found[0], FP8_LIMIT * found[1]) if all(found) else None

    def number(self, name: str) -> float:
        """A tensor of one number; 0 if there is none."""
        value = super().read(name) if name in self.stored else np.zeros(0)
        return float(value.ravel()[0]) if value.size == 1 else 0.0

    def check_order(self, name: str, groups: int) -> None:
        """ModelError for GPTQ's activation order, unless it is the order of the inputs."""
        index = super().read(name) if name in self.stored else np.zeros(0)
        if len(index) and not np.array_equal(
            index, np.arange(len(index)) // -(-len(index) // groups)
        ):
            raise ModelError(
                f"{name[:100]} reorders inputs by activation (desc_act), which is not read: use a "
                "version "
                "of the model quantised without it"
            )
