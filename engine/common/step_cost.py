"""Bytes and operations of an engine's steps, and its device's measured maximum."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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


class StepRows(NamedTuple):
    """The rows of a step, or of each of some, and what they attend to; see `StepWork`."""

    decode: _Amount = 0
    prompt: _Amount = 0
    keys: _Amount = 0
    pairs: _Amount = 0


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and operations of a decoder's step: weights and KV are read once, KV of its rows is
    written; the state of recurrent layers is read and written once for each decode row, and for one
    prompt.

    Norms are left out. A row sees no more positions than its layer's window has; with sums over a
    step's rows alone, a short context beside long ones counts as part of their window.
    """

    n_layers: int
    #: Weights of all layers for every row, and of one expert; a dense model counts as one.
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
    #: Window (0: none) -> share of `kv_bytes` that layers with this window read.
    windows: dict[int, float] = {}
    #: Bytes of a sequence's recurrent state, all layers.
    state_bytes: float = 0.0

    @property
    def layer_weights(self) -> int:
        return self.shared_weights + self.n_experts * self.expert_weights

    @property
    def row_weights(self) -> int:
        """Weights of all layers that one row uses."""
        return self.shared_weights + self.n_chosen * self.expert_weights

    def _read_experts(self, rows: _Amount) -> _Amount:
        """Weights of the experts that `rows` rows read, if they choose at random."""
        missed = (1 - self.n_chosen / self.n_experts) ** rows
        return self.n_experts * (1 - missed) * self.expert_weights

    def read_bytes(self, rows: _Amount, work: StepRows) -> tuple[_Amount, _Amount]:
        """(bytes of weights and state, bytes of KV), without the embedding. rows: with padding."""
        of_expert = self.weight_bytes if self.expert_bytes is None else self.expert_bytes
        layers = self.shared_weights * self.weight_bytes + self._read_experts(rows) * of_expert
        state = 2 * (work.decode + (work.prompt > 0)) * self.state_bytes
        keys, pairs = self._seen(work)
        kv = (keys + pairs / _QUERY_BLOCK + rows) * self.kv_bytes
        return layers + self.head_bytes + state, kv

    def _seen(self, work: StepRows) -> tuple[_Amount, _Amount]:
        """(keys, pairs) that rows see, as a mean over the layers' keys and values."""
        keys, pairs = 0.0 * work.keys, 0.0 * work.pairs
        for window, share in (self.windows or {0: 1.0}).items():
            seen, seen_pairs = work.keys, work.pairs
            if window:
                seen = _least(seen, window * work.decode)
                seen_pairs = _least(seen_pairs, window * work.prompt)
            keys, pairs = keys + share * seen, pairs + share * seen_pairs
        return keys, pairs

    def operations(
        self, rows: _Amount, logit_rows: _Amount, work: StepRows
    ) -> tuple[_Amount, _Amount]:
        """(operations of the layers' products, of output head and attention): 2 per weight and row,
        4 per number of a query-key pair. The last layer's feed-forward runs for rows with logits
        only.
        """
        others = rows - logit_rows
        others = (others + abs(others)) / 2  # 0 if there are fewer rows than logits
        last = self.n_chosen * self.expert_weights / self.n_layers
        layers = self.row_weights * rows - last * others
        keys, pairs = self._seen(work)
        attention = 4.0 * self.attention_width * (keys + pairs)
        return 2.0 * layers, 2.0 * self.head_weights * logit_rows + attention


def _least(one: _Amount, other: _Amount) -> _Amount:
    """The lesser, of numbers or of arrays."""
    return (one + other - abs(one - other)) / 2
