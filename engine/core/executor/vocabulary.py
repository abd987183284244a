"""Operations of the sampler on the columns of logits, held by one device or split over several.

Split logits stay on their devices, and only a few numbers per row are exchanged. All devices choose
the same token as a single device would: running sums are over the same lanes of 128 tokens in the
same order. For use inside a step's `shard_map` only.

Axes: S logit rows, C columns of this device, V of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import bitcast_convert_type

from jitney.engine.core.models.sharding import DATA, TENSOR
from jitney.kernels.interface import Threshold

#: Tokens of a lane in the two-level inverse transform: it chooses a lane by the lanes' sums, then a
#: token of that lane.
_LANES = 128
#: Bits of a float32's magnitude that one pass of `_search` determines.
_DIGIT = 4
#: Magnitude bits of -inf.
_INFINITY = 0x7F800000


class Vocabulary:
    """Operations on arrays [S, V] whose columns are all on this device."""

    def any_row(self, rows: Array) -> Array:
        """Whether any of rows bool [S] needs a part of the sampler, which is skipped otherwise."""
        return jnp.any(rows)

    def columns(self, x: Array) -> Array:
        """This device's columns of an array [R, V] that it has in full."""
        return x

    def places(self, ids: Array, columns: int) -> Array:
        """This device's column of each token id, of `columns` columns; a result of `columns` or
        more: the token is on another device.
        """
        return ids

    def greedy(self, logits: Array) -> Array:
        """First argmax of float32 [S, V] -> int32 [S]; -1 where the row's maximum is not finite.

        Two maxima, the second over float32 ranks (exact below 2**24): XLA:CPU runs argmax's
        two-valued reduction one element at a time, 3 times slower at [32, 49152].
        """
        vocab = logits.shape[-1]
        top = jnp.max(logits, axis=-1, keepdims=True)
        rank = jnp.arange(vocab, 0, -1, dtype=jnp.float32)
        first = vocab - jnp.max(jnp.where(logits == top, rank, 0.0), axis=-1).astype(jnp.int32)
        return jnp.where(jnp.isfinite(top[:, 0]), first, -1)

    def largest(self, x: Array) -> Array:
        """The maximum of each row, [S, V] -> [S, 1]."""
        return jnp.max(x, axis=-1, keepdims=True)

    def threshold(self, scaled: Array, top_k: Array, top_p: Array, cut: Threshold) -> Array:
        """See `jitney.kernels.interface.Threshold`. cut: the kernel for whole rows."""
        return cut(scaled, top_k, top_p)

    def invert(self, weights: Array, u: Array) -> Array:
        """Inverse transform sampling: the token where the running sum of weights [S, V] passes
        u * total -> int32 [S]."""
        lanes = _in_lanes(weights, 0)

        def lane(block: Array) -> Array:
            return jnp.take_along_axis(lanes, block[:, None, None], axis=1)[:, 0]

        return _pick_token(jnp.sum(lanes, axis=-1), lane, u)

    def log_total(self, logits: Array) -> Array:
        """Logarithm of the sum of exponentials, [S]."""
        return jax.nn.logsumexp(logits, axis=-1)

    def top(self, logits: Array, k: int) -> tuple[Array, Array]:
        """`jax.lax.top_k` of [S, V] -> (values [S, k], ids int32 [S, k]), ties by id; at most all
        columns.

        The k best entries lie in the k blocks with the best maxima, since k other entries come
        before every entry of the remaining blocks. A GPU sorts whole rows if k is more than 16;
        here it sorts V / 128 maxima and 128 k entries.
        """
        k = min(k, logits.shape[-1])
        padded = _in_lanes(logits, -jnp.inf)
        if padded.shape[1] <= k:
            return jax.lax.top_k(logits, k)
        blocks = jnp.sort(jax.lax.top_k(jnp.max(padded, axis=-1), k)[1], axis=-1)
        candidates = jnp.take_along_axis(padded, blocks[:, :, None], axis=1)
        best, at = jax.lax.top_k(candidates.reshape(logits.shape[0], -1), k)
        return best, jnp.take_along_axis(blocks, at // _LANES, axis=-1) * _LANES + at % _LANES

    def entry(self, logits: Array, tokens: Array) -> Array:
        """The logit of each row's token, [S]."""
        return jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]


@dataclass(frozen=True)
class SplitVocabulary(Vocabulary):
    """Operations on this device's columns of a vocabulary that is split over `devices` devices.
    engines: number of engines that run the step.
    """

    devices: int
    engines: int = 1

    def any_row(self, rows: Array) -> Array:
        # Skipped parts contain sums over devices, which all engines must run or none: for some of
        # them XLA synchronises all devices of a program, also those that exchange nothing.
        any_here = jnp.any(rows)
        if self.engines == 1:
            return any_here
        return DATA.largest(any_here.astype(jnp.int32)) > 0

    def columns(self, x: Array) -> Array:
        own = x.shape[-1] // self.devices
        return jax.lax.dynamic_slice_in_dim(x, TENSOR.number() * own, own, axis=-1)

    def places(self, ids: Array, columns: int) -> Array:
        own = ids - TENSOR.number() * columns
        return jnp.where(own >= 0, own, columns)  # a negative place would count from the end

    def greedy(self, logits: Array) -> Array:
        return _first_best(jnp.max(logits, axis=-1), super().greedy(logits), logits.shape[-1])

    def largest(self, x: Array) -> Array:
        return TENSOR.largest(jnp.max(x, axis=-1, keepdims=True))

    def threshold(self, scaled: Array, top_k: Array, top_p: Array, cut: Threshold) -> Array:
        """The threshold by search, without `cut`, which reads whole rows. It takes at most 16
        passes over the row, and as many sums over the devices."""
        everything = jnp.full_like(top_p, -jnp.inf)
        floor_k = jax.lax.cond(
            self.any_row(top_k > 0), lambda: self._cut_by_count(scaled, top_k), lambda: everything
        )
        floor_p = jax.lax.cond(
            self.any_row(top_p < 1.0),
            lambda: self._cut_by_mass(scaled, top_p, floor_k),
            lambda: everything,
        )
        return jnp.maximum(floor_k, jnp.where(top_p < 1.0, floor_p, -jnp.inf))

    def _cut_by_count(self, scaled: Array, top_k: Array) -> Array:
        """The k-th greatest entry, [S]; -inf if k is 0 or at least the vocabulary's size."""
        columns = scaled.shape[-1] * self.devices
        k = jnp.where(top_k > 0, jnp.minimum(top_k, columns), columns)

        def holds(cuts: Array) -> Array:
            counts = jnp.sum(scaled[:, None, :] >= cuts[:, :, None], axis=-1)
            return TENSOR.total(counts) >= k[:, None]

        return _search(holds, scaled.shape[0])

    def _cut_by_mass(self, scaled: Array, top_p: Array, floor: Array) -> Array:
        """The smallest entry kept by top_p, [S]: the entries above it have less than top_p of the
        mass at or above floor [S].
        """
        weights = jnp.exp(scaled)
        kept_weights = jnp.where(scaled >= floor[:, None], weights, 0.0)
        least_mass = top_p * _sum_over_devices(jnp.sum(kept_weights, axis=-1))

        def holds(cuts: Array) -> Array:
            inside = scaled[:, None, :] >= cuts[:, :, None]
            masses = jnp.sum(jnp.where(inside, weights[:, None, :], 0.0), axis=-1)
            return _sum_over_devices(masses) >= least_mass[:, None]

        return _search(holds, scaled.shape[0])

    def invert(self, weights: Array, u: Array) -> Array:
        if weights.shape[-1] < _LANES:  # lanes would reach over several devices
            return super().invert(TENSOR.side_by_side(weights), u)
        lanes = self._own_lanes(weights)
        owners, places = _lane_places(weights.shape[-1], self.devices)
        at = owners * lanes.shape[1] + places
        sums = TENSOR.side_by_side(jnp.sum(lanes, axis=-1))[:, at]

        def lane_of(block: Array) -> Array:
            place = jnp.asarray(places)[block]
            lane = jnp.take_along_axis(lanes, place[:, None, None], axis=1)[:, 0]
            mine = jnp.asarray(owners)[block] == TENSOR.number()
            return TENSOR.total(jnp.where(mine[:, None], lane, 0.0))

        return _pick_token(sums, lane_of, u)

    def _own_lanes(self, weights: Array) -> Array:
        """The lanes of the whole vocabulary that begin in this device's columns, [S, most lanes of
        a device, _LANES]; the rest of the last one comes from the next device."""
        columns = weights.shape[-1]
        to_the_left = [(device, device - 1) for device in range(1, self.devices)]
        # The last gets zeros.
        rest = jax.lax.ppermute(weights[:, :_LANES], TENSOR.name, to_the_left)
        most = int(_lane_places(columns, self.devices)[1].max()) + 1
        spare = max(0, _LANES + most * _LANES - columns - rest.shape[-1])
        row = jnp.pad(jnp.concatenate([weights, rest], axis=-1), ((0, 0), (0, spare)))
        skip = -(TENSOR.number() * columns) % _LANES
        return _in_lanes(jax.lax.dynamic_slice_in_dim(row, skip, most * _LANES, axis=-1), 0)

    def log_total(self, logits: Array) -> Array:
        best = self.largest(logits)
        return jnp.log(_sum_over_devices(jnp.sum(jnp.exp(logits - best), axis=-1))) + best[:, 0]

    def top(self, logits: Array, k: int) -> tuple[Array, Array]:
        columns = logits.shape[-1]
        best, ids = super().top(logits, k)
        first = TENSOR.number() * columns
        # Equal ones stay in order of their ids.
        candidates, ids = TENSOR.side_by_side(best), TENSOR.side_by_side(ids + first)
        best, at = jax.lax.top_k(candidates, min(k, columns * self.devices))
        return best, jnp.take_along_axis(ids, at, axis=-1)

    def entry(self, logits: Array, tokens: Array) -> Array:
        columns = logits.shape[-1]
        place = self.places(tokens, columns)
        own = super().entry(logits, jnp.minimum(place, columns - 1))
        return TENSOR.total(jnp.where(place < columns, own, 0.0))


def _pick_token(sums: Array, lane_of: Callable[[Array], Array], u: Array) -> Array:
    """The token where the running sum of weights passes u * total -> int32 [S].

    sums: of each lane's weights, [S, lanes]; lane_of: lane numbers int32 [S] -> [S, _LANES].
    """
    block, rest = _pick(sums, u * jnp.sum(sums, axis=-1))
    lane, _ = _pick(lane_of(block), rest)
    return (block * _LANES + lane).astype(jnp.int32)


def _in_lanes(values: Array, filling: float) -> Array:
    """[S, V] -> [S, ceil(V / _LANES), _LANES]."""
    rows, vocab = values.shape
    padded = jnp.pad(values, ((0, 0), (0, -vocab % _LANES)), constant_values=filling)
    return padded.reshape(rows, -1, _LANES)


def _pick(weights: Array, target: Array) -> tuple[Array, Array]:
    """First index of nonzero weight whose running sum exceeds target [S], and target's rest."""
    running = jnp.cumsum(weights, axis=-1)
    positive = weights > 0
    last = weights.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    passed = (running > target[:, None]) & positive
    index = jnp.where(jnp.any(passed, axis=-1), jnp.argmax(passed, axis=-1), last)
    before = jnp.take_along_axis(running - weights, index[:, None], axis=-1)[:, 0]
    return index, target - before


def _first_best(best: Array, token: Array, columns: int) -> Array:
    """The whole vocabulary's greedy token from each device's best float32 [S] and its token int32
    [S]; -1 where that is not finite. Two numbers a row travel.
    """
    token += TENSOR.number() * columns
    pairs = jax.lax.all_gather(
        jnp.stack([jax.lax.bitcast_convert_type(best, jnp.int32), token]), TENSOR.name
    )
    bests = jax.lax.bitcast_convert_type(pairs[:, 0], jnp.float32)
    top = jnp.max(bests, axis=0)
    first = jnp.min(jnp.where(bests == top, pairs[:, 1], jnp.iinfo(jnp.int32).max), axis=0)
    return jnp.where(jnp.isfinite(top), first, -1)


def _lane_places(columns: int, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """For each lane of the whole vocabulary, the device that has its beginning and its place among
    that device's lanes; int32."""
    lanes = -(-columns * devices // _LANES)
    owners = np.arange(lanes) * _LANES // columns
    first = -(-owners * columns // _LANES)
    return owners.astype(np.int32), (np.arange(lanes) - first).astype(np.int32)


def _sum_over_devices(x: Array) -> Array:
    """Sum over devices in the same order on each, so that all get the same float."""
    return jnp.sum(jax.lax.all_gather(x, TENSOR.name), axis=0)


def _search(holds: Callable[[Array], Array], rows: int) -> Array:
    """The largest t <= 0 of each row for which `holds` is true, [S]. It must be true for all
    smaller values too, and is assumed true for -inf.

    holds: float32 [S, 15] -> bool. Floats up to 0 are ordered by magnitude bits, four a pass.
    """
    digits = jnp.arange(1, 1 << _DIGIT, dtype=jnp.uint32)

    def find_digit(step: Array, low: Array) -> Array:
        shift = jnp.uint32(32 - _DIGIT) - jnp.uint32(_DIGIT) * step.astype(jnp.uint32)
        last = low[:, None] + (digits << shift) - 1  # of all that begin with a smaller digit
        cuts = -bitcast_convert_type(jnp.minimum(last, _INFINITY), jnp.float32)
        holds_here = holds(cuts) | (last >= _INFINITY)
        return low + (jnp.sum(~holds_here, axis=-1).astype(jnp.uint32) << shift)

    magnitude = jax.lax.fori_loop(0, 32 // _DIGIT, find_digit, jnp.zeros((rows,), jnp.uint32))
    return -bitcast_convert_type(magnitude, jnp.float32)
