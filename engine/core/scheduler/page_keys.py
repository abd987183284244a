"""Keys of full pages, by which prompts with the same start find them."""

from __future__ import annotations

from array import array
from hashlib import blake2b

from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.scheduler.sequence import OwnPages, Sequence

_KEY_BYTES = 16


def root_of(request: EngineRequest, *, retain: bool) -> bytes:
    """The key before the first page. Only sequences with the same tenant, salt and adapter can
    share pages, since an adapter changes keys and values. retain: there is a prefix cache; without
    one only siblings of one request share.
    """
    request_id = "" if retain else request.id
    parts = request.tenant, request.cache_salt, request_id, str(request.adapter)
    return blake2b(b"".join(map(_framed, parts)), digest_size=_KEY_BYTES).digest()


def _framed(part: str) -> bytes:
    """Encode a part with its length first, so that ("ab", "c") and ("a", "bc") differ."""
    encoded = part.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(8, "little") + encoded


def keys_of(seq: Sequence, page_size: int, n_pages: int) -> list[bytes]:
    """The keys of a sequence's first n_pages pages, which must be full."""
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

    A page's key is blake2b-128 of its parent's key and its tokens as int32, followed by the owner's
    name if only the owner may find it.
    """
    for start in range(len(keys) * page_size, n_pages * page_size, page_size):
        parent = keys[-1] if keys else root
        end = start + page_size
        page = array("i", tokens[start:end]).tobytes()
        owner = own.owner if own and end > own.start else b""
        keys.append(blake2b(parent + page + owner, digest_size=_KEY_BYTES).digest())
