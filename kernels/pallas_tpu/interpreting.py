"""The `interpret` option of the Pallas kernels."""

from __future__ import annotations

from jax.experimental.pallas import tpu as pltpu

#: False: compiled for a TPU. True or parameters (races, uninitialised memory): interpreted.
type Interpret = bool | pltpu.InterpretParams
