"""Bytes and operations of an engine's steps, and its device's measured maximum.

Plain numbers, sent once by the core, or computed by the simulator from a model's shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np

#: Prompt rows that share one read of a key.
_QUERY_BLOCK = 128
#: A number for one step, or an array [steps].
type _Amount = float | np.ndarray


class DeviceCeiling(msgspec.Struct, frozen=True, kw_only=True):
    """The measured maximum of an engine's devices together."""

    #: Bytes read and written per second.
    bytes_s: float
    #: Operations per second of products; None: not measured in the engine's number format.
    operations_s: float | None = None


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and operations of a decoder's step: weights and KV are read once, KV of its rows is
    written.

    Norms are left out; attention counts the whole context even in models with a window.
    """

    n_layers: int
    #: Weights of all layers that every row uses; and of one expert, summed over layers. A dense
    #: model counts as one expert.
    shared_weights: int
    expert_weights: int
    n_experts: int
    #: Experts per row.
    n_chosen: int
    #: Mean bytes of a weight; of an expert's, where they differ.
    weight_bytes: float
    expert_bytes: float | None = None
    #: Weights of the output head, and their bytes.
    head_weights: int
    head_bytes: float
    #: Query heads times head size, summed over layers.
    attention_width: int
    #: Bytes of keys and values per position, all layers.
    kv_bytes: float

    @property
    def layer_weights(self) -> int:
        """Weights of all layers."""
        return self.shared_weights + self.n_experts * self.expert_weights

    @property
    def row_weights(self) -> int:
        """Weights of all layers that one row uses."""
        return self.shared_weights + self.n_chosen * self.expert_weights

    def read_weights(self, rows: _Amount) -> _Amount:
        """Weights of the layers that `rows` rows read, with experts chosen at random."""
        return self.shared_weights + self._read_experts(rows)

    def _read_experts(self, rows: _Amount) -> _Amount:
        missed = (1 - self.n_chosen / self.n_experts) ** rows
        return self.n_experts * (1 - missed) * self.expert_weights

    def read_bytes(self, rows: _Amount, keys: _Amount, pairs: _Amount) -> tuple[_Amount, _Amount]:
        """(bytes of weights read, bytes of KV read and written), without the embedding's few rows.

        keys, pairs: see `scheduler.plan.StepWork`.
        """
        of_expert = self.weight_bytes if self.expert_bytes is None else self.expert_bytes
        layers = self.shared_weights * self.weight_bytes + self._read_experts(rows) * of_expert
        return layers + self.head_bytes, (keys + pairs / _QUERY_BLOCK + rows) * self.kv_bytes

    def operations(
        self, rows: _Amount, logit_rows: _Amount, attended: _Amount
    ) -> tuple[_Amount, _Amount]:
        """(operations of the layers' products, of output head and attention): two per weight and
        row, four per number of each query-key pair.

        The last layer's feed-forward runs only for rows that need logits.
        """
        others = rows - logit_rows
        others = (others + abs(others)) / 2  # 0 if there are fewer rows than logits
        last = self.n_chosen * self.expert_weights / self.n_layers
        layers = self.row_weights * rows - last * others
        attention = 4.0 * self.attention_width * attended
        return 2.0 * layers, 2.0 * self.head_weights * logit_rows + attention
