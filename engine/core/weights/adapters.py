"""Low-rank adapters into a model that is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jitney.engine.common.errors import ModelError
from jitney.engine.core.models.adapters import Adapters
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.registry import model_class
from jitney.engine.core.models.sharding import Shares
from jitney.engine.core.weights.checkpoints.adapter import Adapter
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import Path, Piece, Target
from jitney.engine.core.weights.load import linear_at

_log = logging.getLogger("jitney.core")

#: Columns of all adapters together are a multiple of this, as products like them.
_COLUMNS = 16
#: The owner of columns that are nobody's.
_NOBODY = -1
_NAMED_AT_MOST = 5


def load_adapters(
    model: Model,
    config: ModelConfig,
    folders: Mapping[str, str],
    dtype: DTypeLike,
    mesh: Mesh | None = None,
) -> None:
    """Give the model the adapters in these folders, by name; the first is number 1.

    config: of the whole model. dtype: of the products. mesh: the devices the model is split over.
    Raises ModelError, naming the adapter, for one that is unsound or does not fit.
    """
    adapters = [Adapter.read(name, folder) for name, folder in folders.items()]
    shares = None if mesh is None else Shares(config, mesh)
    weights = model_class(config.architecture).weight_map(config, "hf")
    matrices = [target for target in weights.targets if _can_change(target, config)]
    _check_modules(adapters, matrices)
    for target in matrices:
        columns = list(_columns_of(target, adapters))
        if columns:
            path = (*target.path[:-1], "adapters")
            linear = linear_at(model, target.path)
            linear.adapt(_side_by_side(path, columns, dtype, shares))
    _log.info("adapters: %s", ", ".join(folders))


def _can_change(target: Target, config: ModelConfig) -> bool:
    """Whether adapters may change a weight: matrices of layers, but not of experts or the head."""
    if config.experts is not None and "mlp" in target.path:
        return False
    return target.path[-1] == "kernel" and target.path[0] == "layers"


def _check_modules(adapters: Sequence[Adapter], matrices: Sequence[Target]) -> None:
    """Raise ModelError for an adapter of modules that the model lacks or no adapter can change."""
    known = {_module_of(piece) for target in matrices for piece in target.pieces}
    for adapter in adapters:
        others = sorted(adapter.modules.keys() - known)
        if others:
            more = f" and {len(others) - _NAMED_AT_MOST} more" * (len(others) > _NAMED_AT_MOST)
            raise ModelError(
                f"adapter {adapter.name} changes {', '.join(others[:_NAMED_AT_MOST])}{more}; only "
                "the linear layers of this model's attention and MLP can be changed"
            )


def _module_of(piece: Piece) -> str:
    return piece.name.removesuffix(".weight")


def _columns_of(
    target: Target, adapters: Sequence[Adapter]
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """For each adapted piece of a matrix: adapter number, a [I, R], and b [R, O], 0 elsewhere."""
    outputs = sum(piece.shape[0] for piece in target.pieces)
    for number, adapter in enumerate(adapters, 1):
        first = 0
        for piece in target.pieces:
            rows, inputs = piece.shape
            if _module_of(piece) in adapter.modules:
                a, own = adapter.halves(_module_of(piece), rows, inputs)
                b = np.zeros((own.shape[0], outputs), np.float32)
                b[:, first : first + rows] = own
                yield number, a, b
            first += rows


def _side_by_side(
    path: Path,
    columns: Sequence[tuple[int, np.ndarray, np.ndarray]],
    dtype: DTypeLike,
    shares: Shares | None,
) -> Adapters:
    """path: of the `Adapters` in the model."""
    owners = [number for number, a, _ in columns for _ in range(a.shape[1])]
    a = np.concatenate([a for _, a, _ in columns], axis=1)
    b = np.concatenate([b for _, _, b in columns])
    missing = -len(owners) % _COLUMNS
    a = np.pad(a, ((0, 0), (0, missing)))
    b = np.pad(b, ((0, missing), (0, 0)))

    def placed(name: str, array: np.ndarray) -> Array:
        rounded = jnp.asarray(array, dtype)
        return rounded if shares is None else shares.place((*path, name), rounded)

    return Adapters(placed("a", a), placed("b", b), (*owners, *[_NOBODY] * missing))
