"""The sampler where several devices share the vocabulary: logits stay where they are computed, and
what travels between devices is a few numbers a row.

All devices choose the same token, and the one that a device alone would: a running sum is that of
the same lanes of 128 tokens, in the same order. Inside a step's `shard_map` only.

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

from jitney.engine.executor.sampling import LANES, Vocabulary, greedy, in_lanes, pick_token, top
from jitney.engine.models.sharding import (
    AXIS,
    device_number,
    first_best,
    gather,
    largest,
    largest_of_all,
    total,
)
from jitney.kernels.interface import Threshold

#: Bits of a float32's magnitude that a pass of the search for a cut tells apart.
_DIGIT = 4
#: Magnitude bits of -inf.
_INFINITY = 0x7F800000


@dataclass(frozen=True)
class SplitVocabulary(Vocabulary):
    """The columns that this device has of a vocabulary over so many devices. engines: that run the
    step together.
    """

    devices: int
    engines: int = 1

    def anybody(self, rows: Array) -> Array:
        # What only some need has sums over devices in it, which those of all engines run or none:
        # XLA joins all devices of a program for some of them, whichever exchange anything.
        found = jnp.any(rows)
        if self.engines == 1:
            return found
        return largest_of_all(found.astype(jnp.int32)) > 0

    def columns(self, x: Array) -> Array:
        own = x.shape[-1] // self.devices
        return jax.lax.dynamic_slice_in_dim(x, device_number() * own, own, axis=-1)

    def places(self, ids: Array, columns: int) -> Array:
        own = ids - device_number() * columns
        return jnp.where(own >= 0, own, columns)  # a negative place would count from the end

    def greedy(self, logits: Array) -> Array:
        return first_best(jnp.max(logits, axis=-1), greedy(logits), logits.shape[-1])

    def largest(self, x: Array) -> Array:
        return largest(jnp.max(x, axis=-1, keepdims=True))

    def threshold(self, scaled: Array, top_k: Array, top_p: Array, cut: Threshold) -> Array:
        """By search, whatever cut is: it reads whole rows. At most 16 passes over the row, and as
        many sums over the devices."""
        everything = jnp.full_like(top_p, -jnp.inf)
        floor_k = jax.lax.cond(
            self.anybody(top_k > 0), lambda: self._cut_by_count(scaled, top_k), lambda: everything
        )
        floor_p = jax.lax.cond(
            self.anybody(top_p < 1.0),
            lambda: self._cut_by_mass(scaled, top_p, floor_k),
            lambda: everything,
        )
        return jnp.maximum(floor_k, jnp.where(top_p < 1.0, floor_p, -jnp.inf))

    def _cut_by_count(self, scaled: Array, top_k: Array) -> Array:
        """The smallest of the k greatest, [S]; -inf where k is 0, or the vocabulary and more."""
        columns = scaled.shape[-1] * self.devices
        k = jnp.where(top_k > 0, jnp.minimum(top_k, columns), columns)

        def holds(cuts: Array) -> Array:
            counts = jnp.sum(scaled[:, None, :] >= cuts[:, :, None], axis=-1)
            return total(counts) >= k[:, None]

        return _search(holds, scaled.shape[0])

    def _cut_by_mass(self, scaled: Array, top_p: Array, floor: Array) -> Array:
        """The smallest entry whose betters hold less than top_p of what floor [S] leaves, [S]."""
        weights = jnp.exp(scaled)
        kept = jnp.where(scaled >= floor[:, None], weights, 0.0)
        wanted = top_p * _sum_over_devices(jnp.sum(kept, axis=-1))

        def holds(cuts: Array) -> Array:
            inside = scaled[:, None, :] >= cuts[:, :, None]
            masses = jnp.sum(jnp.where(inside, weights[:, None, :], 0.0), axis=-1)
            return _sum_over_devices(masses) >= wanted[:, None]

        return _search(holds, scaled.shape[0])

    def invert(self, weights: Array, u: Array) -> Array:
        if weights.shape[-1] < LANES:  # lanes would reach over several devices
            return super().invert(gather(weights), u)
        lanes = self._own_lanes(weights)
        owners, places = _lane_places(weights.shape[-1], self.devices)
        at = owners * lanes.shape[1] + places
        sums = gather(jnp.sum(lanes, axis=-1))[:, at]

        def lane_of(block: Array) -> Array:
            place = jnp.asarray(places)[block]
            lane = jnp.take_along_axis(lanes, place[:, None, None], axis=1)[:, 0]
            mine = jnp.asarray(owners)[block] == device_number()
            return total(jnp.where(mine[:, None], lane, 0.0))

        return pick_token(sums, lane_of, u)

    def _own_lanes(self, weights: Array) -> Array:
        """The lanes of the whole vocabulary that begin in this device's columns, [S, most lanes of
        a device, LANES]; the rest of the last one comes from the next device."""
        columns = weights.shape[-1]
        to_the_left = [(device, device - 1) for device in range(1, self.devices)]
        rest = jax.lax.ppermute(weights[:, :LANES], AXIS, to_the_left)  # the last gets zeros
        most = int(_lane_places(columns, self.devices)[1].max()) + 1
        spare = max(0, LANES + most * LANES - columns - rest.shape[-1])
        row = jnp.pad(jnp.concatenate([weights, rest], axis=-1), ((0, 0), (0, spare)))
        skip = -(device_number() * columns) % LANES
        return in_lanes(jax.lax.dynamic_slice_in_dim(row, skip, most * LANES, axis=-1), 0)

    def log_total(self, logits: Array) -> Array:
        best = self.largest(logits)
        return jnp.log(_sum_over_devices(jnp.sum(jnp.exp(logits - best), axis=-1))) + best[:, 0]

    def top(self, logits: Array, k: int) -> tuple[Array, Array]:
        columns = logits.shape[-1]
        best, ids = top(logits, min(k, columns))
        first = device_number() * columns
        candidates, ids = gather(best), gather(ids + first)  # equal ones stay in order of their ids
        best, at = jax.lax.top_k(candidates, min(k, columns * self.devices))
        return best, jnp.take_along_axis(ids, at, axis=-1)

    def entry(self, logits: Array, tokens: Array) -> Array:
        columns = logits.shape[-1]
        place = self.places(tokens, columns)
        own = super().entry(logits, jnp.minimum(place, columns - 1))
        return total(jnp.where(place < columns, own, 0.0))


def _lane_places(columns: int, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each lane of the whole vocabulary, the device that has its beginning and its place among
    that device's lanes; int32."""
    lanes = -(-columns * devices // LANES)
    owners = np.arange(lanes) * LANES // columns
    first = -(-owners * columns // LANES)
    return owners.astype(np.int32), (np.arange(lanes) - first).astype(np.int32)


def _sum_over_devices(x: Array) -> Array:
    """In the same order on every device, so that all come to the same float."""
    return jnp.sum(jax.lax.all_gather(x, AXIS), axis=0)


def _search(holds: Callable[[Array], Array], rows: int) -> Array:
    """The largest t <= 0 of each row that holds, [S]; all smaller ones do, and -inf always does.

    holds: float32 [S, 15] -> bool. Floats up to 0 are ordered backwards by their magnitude bits, of
    which a pass finds four.
    """
    digits = jnp.arange(1, 1 << _DIGIT, dtype=jnp.uint32)

    def find_digit(step: Array, low: Array) -> Array:
        shift = jnp.uint32(32 - _DIGIT) - jnp.uint32(_DIGIT) * step.astype(jnp.uint32)
        last = low[:, None] + (digits << shift) - 1  # of all that begin with a smaller digit
        cuts = -bitcast_convert_type(jnp.minimum(last, _INFINITY), jnp.float32)
        found = holds(cuts) | (last >= _INFINITY)
        return low + (jnp.sum(~found, axis=-1).astype(jnp.uint32) << shift)

    magnitude = jax.lax.fori_loop(0, 32 // _DIGIT, find_digit, jnp.zeros((rows,), jnp.uint32))
    return -bitcast_convert_type(magnitude, jnp.float32)
