"""Whose kernels should attend to prompts on the device that was measured: an entry for the table
`kernels/prompt_choices.json`. Knows no jax.
"""

from __future__ import annotations

from collections.abc import Sequence

from jitney.engine.bench.device.rows import Row
from jitney.engine.bench.device.run import DeviceResults
from jitney.engine.simulation.roofline import SHAPES
from jitney.kernels.prompt_choices import SERVING, PromptChoice

#: Kernels that are measured beside those that can serve.
_OTHERS = ("cuDNN",)
#: Share of our time that FlashInfer may take at most to be chosen: its kernels are compiled by the
#: first start, for minutes, and an even race is not worth that.
_WORTH = 0.95
_PACKAGES = ("jitney", "jax", "triton", "flashinfer-python")


def choose_prompts(results: DeviceResults) -> PromptChoice | None:
    """The entry; None until prompts of the same sizes were measured by every set that can serve, on
    an NVIDIA GPU.
    """
    about = results.about
    if about is None or not about.sm or not results.real:
        return None
    times = {name: _times_of(results.rows, name) for name in (*SERVING, *_OTHERS)}
    cases = set.intersection(*(set(times[name]) for name in SERVING))
    if not cases:
        return None
    seconds = {
        name: round(sum(found[case] for case in cases), 9)
        for name, found in times.items()
        if cases <= set(found)
    }
    ours, theirs = SERVING
    return {
        "sm": about.sm,
        "head_dim": SHAPES[results.shape].head_dim,
        "by": theirs if seconds[theirs] < _WORTH * seconds[ours] else ours,
        "seconds": seconds,
        "rows": sorted(int(case.split()[0].replace(",", "")) for case in cases),
        "device": about.device,
        "versions": {name: about.versions[name] for name in _PACKAGES if name in about.versions},
    }


def _times_of(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Seconds of each case of prompts by these kernels, of those that gave right answers."""
    found = {}
    for row in rows:
        by = row.by.partition(" ")[0]  # without the instructions: "flashinfer (fa3)"
        if (row.name, by) == ("prompt attention", name) and row.seconds is not None:
            found[row.case] = row.seconds
    return found
