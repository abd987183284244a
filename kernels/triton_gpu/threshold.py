"""Triton kernels that find the cut of top-k and top-p in a row of logits without sorting it.

All entries are at most 0. The kernels search the magnitude of the cut, the 31 bits of float32 below
the sign. Each pass over a row, shared by several programs, fixes 8 of the bits (`count_digits`),
until the entries that may be the cut fit a short list (`gather`), which one program per row
searches (`finish`). Usually two passes and the list suffice; four find any cut by one limit.

Masses are integers in units of 2**-33, so that sums depend neither on their order nor on how a row
is divided.
"""

from __future__ import annotations

# pyright: reportArgumentType=false, reportOperatorIssue=false
# Kernels are compiled, not called: numbers become constexprs and tensors on the way.
import triton
import triton.language as tl

#: Number of words in a row's state, int32: kind of search (0: done), least magnitude of the cut,
#: first and last magnitude of the list, entries and mass below the second word, mass of the row.
#: Masses take two words.
STATE_WORDS = 16
#: Bins of a pass, and sums per bin: entries, then the three parts of their mass.
BINS, SUMS = 256, 4

_NOTHING = tl.constexpr(0)
_BY_COUNT = tl.constexpr(1)
_BY_MASS = tl.constexpr(2)
_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def _magnitude_of(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _mass_parts(x):
    """exp(x) for x <= 0 in units of 2**-33, as three integers up to 2048: multiples of 2**22, of
    2**11 and of 1. Only the last is rounded; float16 represents each exactly.
    """
    scaled = tl.exp(x) * 2048.0
    high = tl.floor(scaled)
    scaled = (scaled - high) * 2048.0
    middle = tl.floor(scaled)
    low = tl.floor((scaled - middle) * 2048.0 + 0.5)
    return high, middle, low


@triton.jit
def _joined(high, middle, low):
    """The parts of masses, or sums of them, as int64."""
    return (high.to(tl.int64) << 22) + (middle.to(tl.int64) << 11) + low.to(tl.int64)


@triton.jit
def _share(p, whole):
    """The least integer that is at least p * `whole`."""
    exact = p.to(tl.float64) * whole.to(tl.float64)
    share = exact.to(tl.int64)
    return share + (share.to(tl.float64) < exact).to(tl.int64)


@triton.jit
def _load_mass(words):
    return (tl.load(words).to(tl.int64) << 30) + tl.load(words + 1).to(tl.int64)


@triton.jit
def _store_mass(words, mass):
    tl.store(words, (mass >> 30).to(tl.int32))
    tl.store(words + 1, (mass & 0x3FFFFFFF).to(tl.int32))


@triton.jit
def _kind_of(k, p, V: tl.constexpr):
    """The first kind of search of a row; k of the row's size or more is no limit."""
    kind = tl.where(p < 1.0, _BY_MASS, _NOTHING)
    return tl.where((k > 0) & (k < V), _BY_COUNT, kind)


@triton.jit
def count_digits(
    scaled,
    top_k,
    top_p,
    state,
    sums,
    V: tl.constexpr,
    LENGTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    FIRST: tl.constexpr,
):
    """scaled [S, V] -> sums int32 [S, SPLITS, SUMS, BINS] over the entries that may be the cut, by
    the digit of their magnitude at SHIFT; program (split of LENGTH entries, row).

    A digit consists of two 4-bit digits: the table of their counts is the product of two one-hot
    matrices of the entries. float32 holds its sums exactly up to 8192 entries. Blocks without
    entries that may be the cut, nearly all blocks with top-k, are only read.
    """
    split = tl.program_id(0)
    s = tl.program_id(1)
    words = state + s * 16
    if FIRST:
        kind = _kind_of(tl.load(top_k + s), tl.load(top_p + s), V)
        low = 0
    else:
        kind = tl.load(words)
        low = tl.load(words + 1)
    if kind != _NOTHING:
        row = scaled + s.to(tl.int64) * V
        values = tl.arange(0, 16)
        entries = tl.zeros((16, 16), tl.float32)
        high = tl.zeros((16, 16), tl.float32)
        middle = tl.zeros((16, 16), tl.float32)
        rest = tl.zeros((16, 16), tl.float32)
        for start in range(0, tl.minimum(LENGTH, V - split * LENGTH), BLOCK):
            at = split * LENGTH + start + tl.arange(0, BLOCK)[None, :]
            x = tl.load(row + at, mask=at < V, other=float("-inf"))
            magnitude = _magnitude_of(x)
            digit = (magnitude - low) >> SHIFT
            digit = tl.where((at < V) & (magnitude >= low) & (digit < 256), digit, -1)
            if tl.max(tl.max(digit, 1), 0) >= 0:
                upper = ((digit >> 4) == values[:, None]).to(tl.float16)
                lower = ((digit & 15) == values[:, None]).to(tl.float16)
                entries = tl.dot(upper, tl.trans(lower), entries)
                if kind == _BY_MASS:
                    a, b, c = _mass_parts(x)
                    high = tl.dot(upper, tl.trans(lower * a.to(tl.float16)), high)
                    middle = tl.dot(upper, tl.trans(lower * b.to(tl.float16)), middle)
                    rest = tl.dot(upper, tl.trans(lower * c.to(tl.float16)), rest)
        table = sums + (s * SPLITS + split).to(tl.int64) * 1024
        table += values[:, None] * 16 + values[None, :]
        tl.store(table, entries.to(tl.int32))
        if kind == _BY_MASS:
            tl.store(table + 256, high.to(tl.int32))
            tl.store(table + 512, middle.to(tl.int32))
            tl.store(table + 768, rest.to(tl.int32))


@triton.jit
def _summed(table, SPLITS: tl.constexpr):
    """A row's sums of one kind, over its splits: int64 [BINS]."""
    bins = tl.arange(0, 256)
    splits = tl.arange(0, 8)
    total = tl.zeros((256,), tl.int64)
    for start in range(0, SPLITS, 8):
        at = (start + splits)[:, None]
        part = tl.load(table + at * 1024 + bins[None, :], mask=at < SPLITS, other=0)
        total += tl.sum(part.to(tl.int64), 0)
    return total


@triton.jit
def choose_digit(
    top_k,
    top_p,
    before,
    sums,
    after,
    V: tl.constexpr,
    SPLITS: tl.constexpr,
    LISTED: tl.constexpr,
    SHIFT: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Find the digit of the cut at SHIFT from the sums of all splits: state before -> state after,
    both int32 [S, STATE_WORDS]; program (row).

    The search of a row ends when the remaining entries fit a list of LISTED entries. With both
    limits the list holds all entries that top-k may keep, since top-p cuts among them.
    """
    s = tl.program_id(0)
    k = tl.load(top_k + s)
    p = tl.load(top_p + s)
    words = after + s * 16
    if FIRST:
        kind = _kind_of(k, p, V)
        low = 0
        below = 0
        lighter = tl.zeros((), tl.int64)
        whole = tl.zeros((), tl.int64)
    else:
        kind = tl.load(before + s * 16)
        low = tl.load(before + s * 16 + 1)
        below = tl.load(before + s * 16 + 4)
        lighter = _load_mass(before + s * 16 + 5)
        whole = _load_mass(before + s * 16 + 7)
    if kind == _NOTHING:
        at = tl.arange(0, 16)
        known = tl.zeros((16,), tl.int32)
        if not FIRST:
            known = tl.load(before + s * 16 + at)
        tl.store(words + at, known)
    else:
        bins = tl.arange(0, 256)
        table = sums + s.to(tl.int64) * SPLITS * 1024
        entries = _summed(table, SPLITS).to(tl.int32)
        if kind == _BY_COUNT:
            mass = tl.zeros((256,), tl.int64)
            digit = tl.sum((below + tl.cumsum(entries, 0) < k).to(tl.int32), 0)
        else:
            mass = _joined(
                _summed(table + 256, SPLITS),
                _summed(table + 512, SPLITS),
                _summed(table + 768, SPLITS),
            )
            if FIRST:
                whole = tl.sum(mass, 0)
            reached = lighter + tl.cumsum(mass, 0)
            digit = tl.sum((reached < _share(p, whole)).to(tl.int32), 0)
        digit = tl.minimum(digit, 255)
        lighter += tl.sum(tl.where(bins < digit, mass, 0), 0)
        below += tl.sum(tl.where(bins < digit, entries, 0), 0)
        inside = tl.sum(tl.where(bins == digit, entries, 0), 0)
        low += digit << SHIFT
        end = low + (1 << SHIFT)
        if low >= _INFINITE:  # k reaches the banned entries, which are all alike
            inside = 0
            end = low
        start = low
        listed = inside
        if (kind == _BY_COUNT) & (p < 1.0):
            start = 0
            listed = below + inside
        fits = listed <= LISTED
        if SHIFT == 0:  # the cut is known, and a search by one limit needs nothing else
            fits = fits & (start == 0) & (kind == _BY_COUNT) & (p < 1.0)
        tl.store(words, tl.where(fits, _NOTHING, kind))
        tl.store(words + 1, low)
        tl.store(words + 2, start)
        tl.store(words + 3, tl.where(fits, end, start))
        tl.store(words + 4, below)
        _store_mass(words + 5, lighter)
        _store_mass(words + 7, whole)


@triton.jit
def gather(
    scaled,
    state,
    lengths,
    listed,
    V: tl.constexpr,
    LENGTH: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the entries of each row in its state's range, in any order, to listed [S, LISTED], and
    add their number to lengths [S], which is zero before; program (split, row).
    """
    split = tl.program_id(0)
    s = tl.program_id(1)
    start = tl.load(state + s * 16 + 2)
    end = tl.load(state + s * 16 + 3)
    if start < end:
        row = scaled + s.to(tl.int64) * V
        for i in range(0, tl.minimum(LENGTH, V - split * LENGTH), BLOCK):
            at = split * LENGTH + i + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < V, other=float("-inf"))
            magnitude = _magnitude_of(x)
            wanted = (at < V) & (magnitude >= start) & (magnitude < end)
            found = tl.sum(wanted.to(tl.int32), 0)
            if found > 0:
                place = tl.atomic_add(lengths + s, found)
                place += tl.cumsum(wanted.to(tl.int32), 0) - 1
                tl.store(listed + s * LISTED + place, x, mask=wanted & (place < LISTED))


@triton.jit
def _weights(x, at, n, MASS: tl.constexpr):
    """The weight of each entry, int64: its mass if MASS, else 1; 0 from entry n on."""
    if MASS:
        high, middle, low = _mass_parts(x)
        weight = _joined(high, middle, low)
    else:
        weight = tl.full(x.shape, 1, tl.int64)
    return tl.where(at < n, weight, 0)


@triton.jit
def _kept(entries, n, magnitude, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """Total weight of the entries among the first n with at most this magnitude."""
    kept = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(entries + at, mask=at < n, other=float("-inf"))
        kept += tl.where(_magnitude_of(x) <= magnitude, _weights(x, at, n, MASS), 0)
    return tl.sum(kept, 0)


@triton.jit
def _search(entries, n, target, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """The least magnitude that keeps a weight of `target`, found one bit at a time."""
    low = tl.zeros((), tl.int32)
    for i in range(31):
        step = tl.full((), 1, tl.int32) << (30 - i)
        low += tl.where(_kept(entries, n, low + step - 1, BLOCK, MASS) < target, step, 0)
    return low


@triton.jit
def finish(
    scaled,
    top_k,
    top_p,
    state,
    lengths,
    listed,
    floor,
    V: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write floor [S], the smallest kept entry, from the state and the list; program (row).
    See `jitney.kernels.interface.Threshold`.

    The row itself is read only if top-p cuts among more entries than a list holds.
    """
    s = tl.program_id(0)
    k = tl.load(top_k + s)
    p = tl.load(top_p + s)
    words = state + s * 16
    kind = _kind_of(k, p, V)
    magnitude = tl.full((), _INFINITE, tl.int32)
    if kind != _NOTHING:
        low = tl.load(words + 1)
        begin = tl.load(words + 2)
        gathered = tl.load(words) == _NOTHING
        below = tl.load(words + 4)
        entries = listed + s * LISTED
        n = tl.load(lengths + s)
        if kind == _BY_MASS:
            magnitude = low
            if gathered:
                target = _share(p, _load_mass(words + 7)) - _load_mass(words + 5)
                magnitude = _search(entries, n, target, BLOCK, True)
        else:
            magnitude = low
            if gathered & (low < _INFINITE):
                before = tl.where(begin == 0, 0, below)
                magnitude = _search(entries, n, (k - before).to(tl.int64), BLOCK, False)
            if p < 1.0:
                if not gathered:
                    entries = scaled + s.to(tl.int64) * V
                    n = V
                target = _share(p, _kept(entries, n, magnitude, BLOCK, True))
                magnitude = tl.minimum(magnitude, _search(entries, n, target, BLOCK, True))
    tl.store(floor + s, -magnitude.to(tl.float32, bitcast=True))
