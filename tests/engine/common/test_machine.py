"""What a processor is called."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from jitney.engine.common import machine
from jitney.engine.common.machine import (
    _fields_of,
    _name_in,
    bfloat16_features,
    cpu_name,
    processor_name,
)

BARE = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 26
model\t\t: 2
model name\t: AMD EPYC

processor\t: 1
cpu family\t: 99
"""


def test_a_name_without_a_number_gets_its_family_and_model():
    assert _name_in(_fields_of(BARE)) == "AMD EPYC (family 26, model 2)"


def test_a_full_name_stays_as_it_is():
    fields = _fields_of(
        "cpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R)  Platinum 8481C CPU\n"
    )
    assert _name_in(fields) == "Intel(R) Xeon(R) Platinum 8481C CPU"


def test_arm_is_told_by_its_codes():
    fields = _fields_of("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n")
    assert _name_in(fields) == f"{platform.machine()} (implementer 0x41, part 0xd40)"
    assert _name_in({}) == ""


def test_this_machine_has_a_name_and_cores():
    assert cpu_name().startswith(processor_name() + ", ") and cpu_name().endswith(("core", "cores"))


@pytest.mark.parametrize(
    ("line", "multiply"),
    [
        ("flags\t\t: fpu avx512_bf16 avx512f amx_bf16", ["avx512_bf16", "amx_bf16"]),
        ("flags\t\t: fpu avx2", []),
        ("Features\t: fp asimd i8mm bf16", ["bf16"]),
        ("Features\t: fp asimd", []),
    ],
)
def test_arm_lists_its_instruction_sets_too(
    line: str, multiply: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\n\nprocessor\t: 1\n{line}\n")
    monkeypatch.setattr(machine, "_CPUINFO", cpuinfo)
    assert bfloat16_features() == multiply
