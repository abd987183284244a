"""Puts low-rank adapters into a loaded model, and into columns freed by removed adapters."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
from jitney.engine.core.weights.checkpoints.adapter import Adapter, stamp_of
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import Path, Piece, Target
from jitney.engine.core.weights.load import linear_at
from jitney.kernels.interface import Kernels

_log = logging.getLogger("jitney.core")

#: The columns of all adapters together are padded to a multiple of this, for fast products.
_COLUMNS = 16
#: Owner of free columns.
_NOBODY = -1
_NAMED_AT_MOST = 5


class _Halves(NamedTuple):
    """The adapters of one matrix on the host, see `Adapters`. Arrays are never modified, since a
    device may share their memory.
    """

    a: np.ndarray
    b: np.ndarray
    owners: np.ndarray


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter whose files were read. number: selects it in rows."""

    name: str
    number: int
    #: Stamp of the files at the time of reading, see `stamp_of`.
    stamp: tuple[int, ...]
    #: Columns that it needs, by the matrix.
    widths: dict[Path, int]


@dataclass(frozen=True, slots=True)
class AdapterColumns:
    """An adapter with its numbers: a [I, R] and b [R, O] of each matrix that it changes."""

    adapter: LoadedAdapter
    columns: dict[Path, tuple[np.ndarray, np.ndarray]]


class AdapterBank:
    """The assignment of columns of a model's matrices to adapters.

    config: of the whole model. dtype: of what is multiplied. mesh: the devices that the model is
    split over, if it is. room: ranks that are kept free at the start.
    """

    def __init__(
        self, config: ModelConfig, dtype: DTypeLike, mesh: Mesh | None = None, room: int = 0
    ):
        self.room = room
        self._dtype = jnp.dtype(dtype)
        self._shares = None if mesh is None else Shares(config, mesh)
        weights = model_class(config.architecture).weight_map(config, "hf")
        self._targets = [target for target in weights.targets if _can_change(target, config)]
        self._halves: dict[Path, _Halves] = {}

    def read(self, name: str, folder: str, number: int) -> AdapterColumns:
        """The adapter in a folder. Raises ModelError, naming it, for one that is not sound or does
        not fit the model.
        """
        stamp = stamp_of(folder)  # before reading, so that a change meanwhile is found later
        adapter = Adapter.read(name, folder)
        _check_modules(adapter, self._targets)
        columns = {
            target.path: _side_by_side(pieces, self._dtype)
            for target in self._targets
            if (pieces := list(_columns_of(target, adapter)))
        }
        widths = {path: a.shape[1] for path, (a, _) in columns.items()}
        return AdapterColumns(LoadedAdapter(name, number, stamp, widths), columns)

    def put_into(self, model: Model, adapters: Sequence[AdapterColumns]) -> None:
        """Put adapters into a model, with room for later ones."""
        for target in self._targets:
            path = target.path
            width = sum(one.adapter.widths.get(path, 0) for one in adapters)
            width += self.room * len(target.pieces)
            if not width:
                continue
            width += -width % _COLUMNS
            inputs, outputs = target.pieces[0].shape[1], _outputs(target)
            halves = _Halves(
                np.zeros((inputs, width), self._dtype),
                np.zeros((width, outputs), self._dtype),
                np.full(width, _NOBODY, np.int32),
            )
            for one in adapters:
                if path in one.columns:
                    halves = _with_columns(halves, one.adapter.number, *one.columns[path])
            self._halves[path] = halves
            linear_at(model, path).adapt(self._placed(path, halves))

    def check_room(self, adapters: Collection[LoadedAdapter]) -> None:
        """Raise ModelError, naming an adapter, unless there is room for all of these together."""
        used: dict[Path, int] = {}
        for adapter in adapters:
            for path, width in adapter.widths.items():
                most = len(self._halves[path].owners) if path in self._halves else 0
                used[path] = used.get(path, 0) + width
                if used[path] > most:
                    raise ModelError(
                        f"adapter {adapter.name} does not fit beside the others: "
                        f"{'.'.join(map(str, path[:-1]))} has {most} columns for adapters, "
                        f"{used[path] - most} too few. A start makes room for the adapters that "
                        f"are configured then, and for adapter_room ({self.room}) ranks more"
                    )

    def has_room(self, adapter: LoadedAdapter) -> bool:
        """Whether there are free columns for the adapter."""
        return all(
            np.count_nonzero(self._halves[path].owners == _NOBODY) >= width
            for path, width in adapter.widths.items()
        )

    def free(self, number: int) -> None:
        """Free the columns of an adapter that no row uses any more."""
        for path, halves in self._halves.items():
            owners = np.where(halves.owners == number, _NOBODY, halves.owners)
            self._halves[path] = halves._replace(owners=owners)

    def install(
        self, new: AdapterColumns, layouts: Sequence[Kernels | None]
    ) -> list[dict[Path, Array]]:
        """Give an adapter columns that are free. -> for each of these layouts, the arrays that
        change, by their path in the model. layouts: kernel sets that lay matrices out; None: they
        stay as they come.
        """
        changed: list[dict[Path, Array]] = [{} for _ in layouts]
        for path, (a, b) in new.columns.items():
            halves = _with_columns(self._halves[path], new.adapter.number, a, b)
            self._halves[path] = halves
            for arrays, kernels in zip(changed, layouts, strict=True):
                adapters = self._placed(path, halves)
                if kernels is not None:
                    adapters.pack(kernels)
                own = (*path[:-1], "adapters")
                arrays[*own, "a"] = adapters.a[...]
                arrays[*own, "b"] = adapters.b[...]
                arrays[*own, "owners"] = adapters.owners[...]
        return changed

    def _placed(self, path: Path, halves: _Halves) -> Adapters:
        """Copy to the device, or to those of the mesh. path: of the matrix."""
        own = (*path[:-1], "adapters")

        def placed(name: str, array: np.ndarray) -> Array:
            if self._shares is None:
                return jnp.asarray(array)
            return self._shares.place((*own, name), array)

        named = halves._asdict().items()
        return Adapters(**{name: placed(name, array) for name, array in named})


def load_adapters(
    model: Model,
    config: ModelConfig,
    folders: Mapping[str, str],
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    *,
    room: int = 0,
    numbers: Mapping[str, int] | None = None,
) -> tuple[AdapterBank, list[LoadedAdapter]]:
    """Have the model changed by the adapters in these folders, by name.

    numbers: select them in rows; None: from 1, in order. The rest is as for
    `AdapterBank`. Raises ModelError, naming the adapter, for one that is not sound or does not fit.
    """
    bank = AdapterBank(config, dtype, mesh, room)
    numbers = numbers or {name: number for number, name in enumerate(folders, 1)}
    adapters = [bank.read(name, folder, numbers[name]) for name, folder in folders.items()]
    bank.put_into(model, adapters)
    _log.info("adapters: %s", ", ".join(folders) or "none yet")
    return bank, [one.adapter for one in adapters]


def _can_change(target: Target, config: ModelConfig) -> bool:
    """Whether adapters may change a weight: matrices of layers, but not of experts or the head."""
    if config.experts is not None and "mlp" in target.path:
        return target.path[1] in config.experts.dense_layers
    return target.path[-1] == "kernel" and target.path[0] == "layers"


def _check_modules(adapter: Adapter, matrices: Sequence[Target]) -> None:
    """Raises ModelError for an adapter that changes what the model does not have, or what no
    adapter can change here.
    """
    modules = {_module_of(piece) for target in matrices for piece in target.pieces}
    others = sorted(adapter.modules.keys() - modules)
    if others:
        more = f" and {len(others) - _NAMED_AT_MOST} more" * (len(others) > _NAMED_AT_MOST)
        raise ModelError(
            f"adapter {adapter.name} changes {', '.join(others[:_NAMED_AT_MOST])}{more}; only "
            "the linear layers of this model's attention and MLP can be changed"
        )


def _module_of(piece: Piece) -> str:
    return piece.name.removesuffix(".weight")


def _outputs(target: Target) -> int:
    return sum(piece.shape[0] for piece in target.pieces)


def _columns_of(target: Target, adapter: Adapter) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The adapter's a [I, R] and b [R, O], for each piece of the matrix that it changes; O: all
    outputs of the matrix, 0 at those of the other pieces.
    """
    outputs = _outputs(target)
    first = 0
    for piece in target.pieces:
        rows, inputs = piece.shape
        if _module_of(piece) in adapter.modules:
            a, own = adapter.halves(_module_of(piece), rows, inputs)
            if piece.order is not None:
                own = own[:, piece.order]
            b = np.zeros((own.shape[0], outputs), np.float32)
            b[:, first : first + rows] = own
            yield a, b
        first += rows


def _side_by_side(
    pieces: Sequence[tuple[np.ndarray, np.ndarray]], dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    a = np.concatenate([a for a, _ in pieces], axis=1)
    b = np.concatenate([b for _, b in pieces])
    return a.astype(dtype), b.astype(dtype)


def _with_columns(halves: _Halves, number: int, a: np.ndarray, b: np.ndarray) -> _Halves:
    """The halves with an adapter in the first free columns, of which there are enough."""
    new = _Halves(*(array.copy() for array in halves))
    at = np.flatnonzero(new.owners == _NOBODY)[: a.shape[1]]
    new.a[:, at], new.b[at], new.owners[at] = a, b, number
    return new
