"""Peak rates of accelerators, as published by their makers."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from jitney.engine.common.errors import ConfigError

_GB, _TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator chip."""

    name: str
    #: Memory, bytes.
    memory: float
    #: Memory bandwidth, bytes/s.
    bandwidth: float
    #: Number format -> dense operations/s.
    flops: MappingProxyType[str, float]
    #: Bandwidth to the other chips of its group, one way, bytes/s.
    link: float

    @classmethod
    def named(cls, name: str) -> Accelerator:
        """The accelerator of that name. Raises ConfigError with the known names."""
        if name.lower() not in DEVICES:
            raise ConfigError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
        return DEVICES[name.lower()]

    @property
    def rounds_fp8(self) -> bool:
        """Whether our kernels multiply fp8 rows on it: on GPUs with fp8 units, not on TPUs."""
        return "fp8" in self.flops and not self.name.startswith("v")

    def peak(self, kind: str) -> float:
        """Operations/s in a format; bfloat16's rate if the chip has no unit for the format."""
        return self.flops.get(kind, self.flops["bf16"])


def _chip(
    name: str, memory_gb: float, bandwidth_gb: float, link_gb: float, **tera: float
) -> Accelerator:
    flops = {kind: value * _TERA for kind, value in tera.items()}
    return Accelerator(
        name, memory_gb * _GB, bandwidth_gb * _GB, MappingProxyType(flops), link_gb * _GB
    )


#: NVIDIA: the products' data sheets, tensor core rates without sparsity (half of those printed with
#: it); link: NVLink or, for the L4, PCIe 4 x16, one way. TPU: the Cloud TPU documentation's system
#: architecture pages (v5e, v6e, tpu7x); link: half of the bidirectional interconnect bandwidth of a
#: chip. A v7x chip shows itself as two devices.
DEVICES = {
    chip.name: chip
    for chip in (
        _chip("l4", 24, 300, 32, bf16=121, fp8=242.5, int8=242.5),
        _chip("a100-40", 40, 1555, 300, bf16=312, int8=624),
        _chip("a100-80", 80, 2039, 300, bf16=312, int8=624),
        _chip("h100", 80, 3350, 450, bf16=989.5, fp8=1979, int8=1979),
        _chip("h200", 141, 4800, 450, bf16=989.5, fp8=1979, int8=1979),
        _chip("v5e", 16, 819, 200, bf16=197, int8=393),
        _chip("v6e", 32, 1640, 400, bf16=918, int8=1836),
        _chip("v7x", 192, 7380, 600, bf16=2307, fp8=4614),
    )
}
