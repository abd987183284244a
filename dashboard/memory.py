"""KV pages by tenant over time, and hits of the prefix cache by depth in the prompt. Generators are
work for `TimeSlices`.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import pairwise

import numpy as np

from jitney.dashboard.tenants import label_of
from jitney.engine.common.history import History
from jitney.engine.common.request_record import RequestRecord, Stay
from jitney.engine.common.requests import JsonDict
from jitney.engine.server import Identity

#: Records that are processed between two pauses.
_LOOKS = 32
#: Points in time of an answer; tenants with a line of their own.
_MOMENTS, _MOST_TENANTS = 120, 7
#: Depths in tokens that prompts are cut at.
_DEPTHS = (0, 64, 256, 1024, 4096, 16384, 65536, 1 << 40)
_OTHERS = "others"


def memory(
    history: History, now: float, page_size: int, identity: Identity
) -> Generator[None, None, JsonDict]:
    """Pages that the sequences of each tenant needed at `_MOMENTS` of the last minutes, and the
    prompt tokens found in the prefix cache by their depth, of requests that `identity` may see.

    A sequence needs a page for every `page_size` tokens; they are taken to grow evenly between its
    first token and its last, and from its seat to its first token. Shared pages count once for each
    sequence.
    """
    times = np.linspace(history.kept_from, now, _MOMENTS)
    pages: dict[str, np.ndarray] = {}
    lengths: list[tuple[int, int]] = []
    for place, record in enumerate([*history.ended(times[0]), *history.open()]):
        if place % _LOOKS == 0:
            yield
        if not identity.may_see(record.tenant):
            continue
        if record.first_token is not None:
            lengths.append((record.n_prompt, record.cached_tokens))
        if record.stays:
            pages_then = pages.setdefault(record.account, np.zeros(_MOMENTS, np.int64))
            _add_pages(pages_then, times, record, page_size)
    return {
        "t": round(now, 4),
        "from": round(float(times[0]), 4),
        "tenants": _largest(pages),
        "depths": _depths(lengths),
    }


def _add_pages(pages: np.ndarray, times: np.ndarray, record: RequestRecord, page_size: int) -> None:
    """Add the pages of a sequence to `held`, int64[moments]."""
    n_before = 0
    for stay in record.stays:
        is_last = stay is record.stays[-1]
        n_after = record.n_output if is_last else n_before + _outputs_of(stay)
        low, high = np.searchsorted(times, (stay.start, stay.left))
        if high > low:
            tokens = _tokens(times[low:high], record, stay, (n_before, n_after))
            pages[low:high] += np.ceil(tokens / page_size).astype(np.int64)
        n_before = n_after


def _outputs_of(stay: Stay) -> int:
    """Output tokens of a stay that has ended, one a step."""
    return stay.last_step - stay.first_step + 1 if stay.first_step >= 0 else 0


def _tokens(
    times: np.ndarray, record: RequestRecord, stay: Stay, outputs: tuple[int, int]
) -> np.ndarray:
    """float64[moments]: tokens of a sequence while it sits. outputs: before the stay and after."""
    before, after = outputs
    read = record.n_prompt + before
    end = times[-1] if stay.end is None else stay.end
    first = end if stay.first_token is None else stay.first_token
    points = np.array([stay.start, max(first, stay.start), max(end, first, stay.start)])
    last = read if stay.first_token is None else record.n_prompt + after
    return np.interp(times, points, [record.cached_tokens, read, last])


def _largest(pages: dict[str, np.ndarray]) -> list[JsonDict]:
    ordered = sorted(pages.items(), key=lambda item: -int(item[1].sum()))
    lines = [
        {"name": label_of(name), "pages": pages_of_tenant.tolist()}
        for name, pages_of_tenant in ordered[:_MOST_TENANTS]
    ]
    rest = [pages_of_tenant for _, pages_of_tenant in ordered[_MOST_TENANTS:]]
    if rest:
        lines.append({"name": _OTHERS, "pages": np.sum(rest, axis=0).tolist()})
    return lines


def _depths(lengths: list[tuple[int, int]]) -> list[JsonDict]:
    """For each range of depths, the prompt tokens in it and those found in the cache. lengths: of
    prompts, and of what was found of each.
    """
    n_prompt, n_cached = np.array(lengths, np.int64).reshape(-1, 2).T
    rows: list[JsonDict] = []
    for low, high in pairwise(_DEPTHS):
        tokens = int(np.clip(n_prompt - low, 0, high - low).sum())
        if tokens:
            cached = int(np.clip(n_cached - low, 0, high - low).sum())
            prompts = int((n_prompt > low).sum())
            rows.append({"from": low, "prompts": prompts, "tokens": tokens, "found": cached})
    return rows
