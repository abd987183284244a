"""Names of full pages: a hash chain, so that one key stands for a page's tokens and for everything before them."""

from __future__ import annotations

from array import array
from hashlib import blake2b

from jitney.engine.pages import PagePool
from jitney.engine.sequence import Sequence

KEY_BYTES = 16


def root_key(tenant: str, cache_salt: str, request_id: str = "") -> bytes:
    """The key before the first page: only sequences with equal parts can share pages.

    request_id is given when the prefix cache is off: then only the siblings of one request share.
    """
    parts = [part.encode("utf-8", "surrogatepass") for part in (tenant, cache_salt, request_id)]
    # Lengths go first, so that ("ab", "c") and ("a", "bc") differ.
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(framed, digest_size=KEY_BYTES).digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: list[int], page_size: int, n_pages: int) -> None:
    """Append to `keys` until it names the first n_pages full pages of `tokens`.

    A page's key is blake2b-128 of its parent's key and its tokens as int32.
    """
    for start in range(len(keys) * page_size, n_pages * page_size, page_size):
        parent = keys[-1] if keys else root
        page = array("i", tokens[start : start + page_size]).tobytes()
        keys.append(blake2b(parent + page, digest_size=KEY_BYTES).digest())


def shareable_keys(seq: Sequence, page_size: int) -> list[bytes]:
    """Keys of the pages a boarding sequence may share: full ones, and never the last token's, whose logits we need."""
    if not seq.shares:
        return []
    n_pages = (len(seq.tokens) - 1) // page_size
    extend_keys(seq.keys, seq.root, seq.tokens, page_size, n_pages)
    return seq.keys[:n_pages]


def publish(seq: Sequence, pool: PagePool) -> None:
    """Offer the index every full page of a seated sequence whose tokens the host knows and whose rows are launched.

    Prompts as soon as they are computed, outputs when the sequence leaves its seat: naming a page takes a hash, and
    many at once take less time than one in each step.
    """
    if not seq.shares:
        return
    full = min(seq.scheduled, len(seq.tokens)) // pool.page_size
    if full <= seq.published:
        return
    extend_keys(seq.keys, seq.root, seq.tokens, pool.page_size, full)
    for i in range(max(seq.published, seq.dropped), full):
        pool.publish(seq.pages[i], seq.keys[i])
    seq.published = full
