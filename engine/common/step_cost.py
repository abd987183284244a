"""Bytes and operations of an engine's steps, and what its device can do at most. Plain numbers: the
core sends them to the server's process once, and simulators make them from a model's shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np

#: Prompt rows that read a key together.
_QUERY_BLOCK = 128

#: Of one step, or of many: [steps].
type _Amount = float | np.ndarray


class DeviceCeiling(msgspec.Struct, frozen=True, kw_only=True):
    """The most that was measured of a device, or of all devices of an engine together."""

    #: Bytes a second that a computation reads and writes in its memory.
    bytes_s: float
    #: Operations a second of products; None: the engine multiplies in other numbers than measured.
    operations_s: float | None = None


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a step of a decoder reads and computes: weights and KV once, and KV of its rows is
    written. Norms are left out, and attention is counted over the whole context even where the
    model has a window.
    """

    n_layers: int
    #: Numbers in the matrices that every row is multiplied with, all layers; and in one
    #: feed-forward of each layer. One feed-forward for every row is a mixture of one.
    shared_weights: int
    expert_weights: int
    n_experts: int
    #: Of them, those that a row goes through.
    n_chosen: int
    #: Bytes of one of these numbers, on average; of a feed-forward's, where they differ.
    weight_bytes: float
    expert_bytes: float | None = None
    #: Numbers in the output head, and their bytes.
    head_weights: int
    head_bytes: float
    #: Numbers of all query heads of all layers.
    attention_width: int
    #: Bytes of keys and values per position, all layers.
    kv_bytes: float

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of all layers."""
        return self.shared_weights + self.n_experts * self.expert_weights

    @property
    def row_weights(self) -> int:
        """Of them, those that one row is multiplied with."""
        return self.shared_weights + self.n_chosen * self.expert_weights

    def read_weights(self, rows: _Amount) -> _Amount:
        """Bytes of the layers' matrices that so many rows read: of a mixture, the experts that any
        of them chose, if each chooses by chance.
        """
        missed = (1 - self.n_chosen / self.n_experts) ** rows
        experts = self.n_experts * (1 - missed) * self.expert_weights
        of_expert = self.weight_bytes if self.expert_bytes is None else self.expert_bytes
        return self.shared_weights * self.weight_bytes + experts * of_expert

    def read_bytes(self, rows: _Amount, keys: _Amount, pairs: _Amount) -> tuple[_Amount, _Amount]:
        """(weights read, KV read and written). keys, pairs: see `scheduler.plan.StepWork`. Of the
        embedding only the rows are read, which is nothing.
        """
        weights = self.read_weights(rows) + self.head_bytes
        return weights, (keys + pairs / _QUERY_BLOCK + rows) * self.kv_bytes

    def operations(
        self, rows: _Amount, logit_rows: _Amount, attended: _Amount
    ) -> tuple[_Amount, _Amount]:
        """(in the layers' products, in output head and attention): two for each weight and row,
        four for each number of a query and key attended to. The last layer's feed-forward is
        computed for the rows that logits are wanted of.
        """
        others = rows - logit_rows
        others = (others + abs(others)) / 2  # 0 where there are fewer rows than logits
        last = self.n_chosen * self.expert_weights / self.n_layers
        layers = self.row_weights * rows - last * others
        attention = 4.0 * self.attention_width * attended
        return 2.0 * layers, 2.0 * self.head_weights * logit_rows + attention
