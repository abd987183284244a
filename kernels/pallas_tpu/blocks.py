"""How the attention kernel cuts its work, by chip and by how a pool lies.

Nothing here was timed: the figures follow from the chips' data sheets. A copy from HBM takes some
two microseconds to arrive, so that bandwidth times two microseconds must be on its way at any time;
fewer key heads, as on each of many devices, make smaller blocks, of which more are on their way.
And rows that share a block of keys do G * B operations for each of its bytes, which must be more
than the chip does while it reads one.
"""

from __future__ import annotations

from typing import NamedTuple


class BlockSizes(NamedTuple):
    """The sizes of one kernel."""

    keys: int  # of a block
    depth: int  # blocks in memory at a time, one of them computed on
    rows: int  # query rows times query heads of a prompt's item, at most

    @classmethod
    def on(cls, chip: str, key_bytes: int, page: int) -> BlockSizes:
        """The sizes on a chip ("" or unknown: any) for a pool with `key_bytes` a token, key and
        value of all heads, and pages of so many tokens.
        """
        wanted = _CHIPS.get(chip, _OTHER)
        keys = max(_MANY_KEYS if key_bytes <= _SMALL else _KEYS, page)
        on_the_way = -(-wanted.on_the_way // (keys * key_bytes))
        return cls(keys, min(max(on_the_way, 2) + 1, _DEEPEST), wanted.rows)


class _Chip(NamedTuple):
    """What decides the sizes on a chip."""

    on_the_way: int  # bytes to have on their way from HBM
    rows: int  # as in `BlockSizes`; float32 sums and scores of 2048 take 2 MiB each


#: By chip: 819 GB/s and 240 operations a byte, 1,640 and 560, 3,690 (one of a chip's two devices)
#: and 310.
_CHIPS = {
    "v5e": _Chip(2 << 20, 2048),
    "v6e": _Chip(4 << 20, 4096),
    "v7x": _Chip(8 << 20, 4096),
}
#: Of a chip that is not in the table: enough on its way for any, and rows that fit in any.
_OTHER = _Chip(8 << 20, 2048)
#: Keys of a block; of those whose blocks would be short, and where that begins, in bytes of a key.
_KEYS, _MANY_KEYS, _SMALL = 256, 512, 1024
#: A ring deeper than this takes more time to fill than it saves.
_DEEPEST = 12
#: Words by which jax names chips (`device_kind`).
_KINDS = {"v5e": ("v5 lite", "v5e"), "v6e": ("v6 lite", "v6e"), "v7x": ("tpu7", "v7")}


def chip_of(device_kind: str) -> str:
    """ "TPU v5 lite" -> "v5e"; "" for a chip that is not in the table."""
    kind = device_kind.lower()
    found = (chip for chip, words in _KINDS.items() if any(word in kind for word in words))
    return next(found, "")
