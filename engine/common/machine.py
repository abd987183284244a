"""This machine: its processor's name, to print beside measurements, free memory and open files."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
#: Instruction sets that multiply bfloat16: of x86, then Arm's.
_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")
#: Timeout of sysctl on macOS.
_SYSCTL_S = 5.0
#: Bytes assumed to be free if the system does not report it (not Linux).
_UNKNOWN = 4 << 30
#: Upper bound of the limit: some systems allow a billion, and some programs iterate over all.
_ENOUGH = 1 << 20


@cache
def cpu_name() -> str:
    """Processor and usable cores, such as "AMD EPYC (family 26, model 2), 2 cores"."""
    cores = len(own_processors())
    return f"{processor_name()}, {cores} core{'' if cores == 1 else 's'}"


def cpu_features() -> str:
    """Instruction sets of the processor, as /proc/cpuinfo lists them; "" on other systems."""
    if not _CPUINFO.exists():
        return ""
    fields = _fields_of(_CPUINFO.read_text(errors="replace"))
    return fields.get("flags", fields.get("Features", ""))


def bfloat16_features() -> list[str]:
    """Those of the processor's instruction sets that multiply bfloat16."""
    here = cpu_features().split()
    return [name for name in _BFLOAT16 if name in here]


def processor_name() -> str:
    """The processor's name from the system, else its architecture's."""
    if _CPUINFO.exists():
        name = _name_in(_fields_of(_CPUINFO.read_text(errors="replace")))
        if name:
            return name
    elif platform.system() == "Darwin":
        name = _apple_name()
        if name:
            return name
    return platform.processor() or platform.machine() or "unknown processor"


def _fields_of(cpuinfo: str) -> dict[str, str]:
    """The fields of the first processor in the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if not colon and fields:
            break
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _name_in(fields: Mapping[str, str]) -> str:
    """The processor's name in fields of /proc/cpuinfo; "" if absent. Family and model are added to
    a name without a number (virtual machines); ARM has only codes of implementer and part.
    """
    name = " ".join(fields.get("model name", "").split())
    if name:
        bare = not any(character.isdigit() for character in name)
        if bare and "cpu family" in fields and "model" in fields:
            return f"{name} (family {fields['cpu family']}, model {fields['model']})"
        return name
    if "CPU implementer" in fields and "CPU part" in fields:
        codes = f"implementer {fields['CPU implementer']}, part {fields['CPU part']}"
        return f"{platform.machine()} ({codes})"
    return ""


def _apple_name() -> str:
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_SYSCTL_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def available_host_bytes() -> int:
    """Free memory of this machine in bytes: MemAvailable of /proc/meminfo."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return _UNKNOWN
    match = re.search(r"MemAvailable:\s+(\d+) kB", text)
    if match is None:
        return _UNKNOWN
    return int(match[1]) * 1024


def descriptor_limit() -> int:
    """Files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> int:
    """Raise the limit to the allowed maximum and return it. Safe, as nothing here uses select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < raised:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return descriptor_limit()


def own_processors() -> Sequence[int]:
    """Numbers of the processors on which this process may run now."""
    if not hasattr(os, "sched_getaffinity"):
        return range(os.cpu_count() or 1)
    return sorted(os.sched_getaffinity(0))
