"""Names of full pages, by which prompts that start alike find them."""

from __future__ import annotations

from array import array
from hashlib import blake2b

from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.scheduler.sequence import OwnPages, Sequence

_KEY_BYTES = 16


def root_of(request: EngineRequest, *, retain: bool) -> bytes:
    """The key before the first page: only sequences with equal parts can share pages. Keys and
    values of one adapter are not those of another. retain: without a prefix cache only the siblings
    of one request share.
    """
    request_id = "" if retain else request.id
    parts = request.tenant, request.cache_salt, request_id, str(request.adapter)
    return blake2b(b"".join(map(_framed, parts)), digest_size=_KEY_BYTES).digest()


def _framed(part: str) -> bytes:
    """Its length goes first, so that ("ab", "c") and ("a", "bc") differ."""
    encoded = part.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(8, "little") + encoded


def keys_of(seq: Sequence, page_size: int, n_pages: int) -> list[bytes]:
    """The keys of a sequence's first n_pages pages, which are full."""
    seq.root = seq.root or root_of(seq.request, retain=seq.retains)
    _extend_keys(seq.keys, seq.root, seq.tokens, page_size, n_pages, seq.own_pages)
    return seq.keys[:n_pages]


def _extend_keys(
    keys: list[bytes],
    root: bytes,
    tokens: list[int],
    page_size: int,
    n_pages: int,
    own: OwnPages | None = None,
) -> None:
    """Append to `keys` until it names the first n_pages full pages of `tokens`.

    A page's key is blake2b-128 of its parent's key and its tokens as int32, and of the owner's name
    where only the owner may find it.
    """
    for start in range(len(keys) * page_size, n_pages * page_size, page_size):
        parent = keys[-1] if keys else root
        end = start + page_size
        page = array("i", tokens[start:end]).tobytes()
        owner = own.owner if own and end > own.start else b""
        keys.append(blake2b(parent + page + owner, digest_size=_KEY_BYTES).digest())
