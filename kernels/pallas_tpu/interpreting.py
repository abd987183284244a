"""Where the kernels run: on a TPU, or interpreted where there is none."""

from __future__ import annotations

from jax.experimental.pallas import tpu as pltpu

#: False: compiled for a TPU. True: interpreted, or so with these parameters (races, uninitialised
#: memory).
type Interpret = bool | pltpu.InterpretParams
