"""Tenants of an engine: their seats, tokens, waits, refusals and share of the batch in the last
minutes. A user sees only its own row. Generators are work for `TimeSlices`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np

from jitney.engine.common.history import History
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import JsonDict
from jitney.engine.server import Identity, Quotas

#: Records that are processed between two pauses.
_LOOKS = 64
#: Hexadecimal digits of a key's digest that are shown.
_SHOWN_DIGITS = 8
_DIGEST_DIGITS = 64
_NOBODY = ("", "user ")


def label_of(account: str) -> str:
    """An account as the page names it: "key 1a2b3c4d", by the beginning of the key's digest, the
    user's name, or "no key".
    """
    if account in _NOBODY:
        return "no key"
    is_digest = len(account) == _DIGEST_DIGITS and " " not in account
    return f"key {account[:_SHOWN_DIGITS]}" if is_digest else account


@dataclass(slots=True)
class _Account:
    """Sums over the requests of one tenant."""

    #: Digest of its key; empty: it has none.
    tenant: str
    requests: int = 0
    seats: int = 0
    waiting: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seat_s: float = 0.0
    waits: list[float] = field(default_factory=list[float])
    first_tokens: list[float] = field(default_factory=list[float])

    @property
    def useful_tokens(self) -> int:
        """Prompt tokens computed, and output tokens."""
        return self.prompt_tokens - self.cached_tokens + self.output_tokens

    def add(self, record: RequestRecord, start: float, now: float) -> None:
        self.requests += 1
        if record.refused:
            self.refused += not self.tenant  # of keys, answers are counted
            return
        if record.finished is None:
            self.seats += record.stay is not None
            self.waiting += record.stay is None
        if record.first_token is not None:
            self.prompt_tokens += record.n_prompt
            self.cached_tokens += record.cached_tokens
        self.output_tokens += record.n_output
        self.seat_s += sum(stay.seconds(start, now) for stay in record.stays)
        if record.queue_s is not None:
            self.waits.append(record.queue_s)
        if record.ttft_s is not None:
            self.first_tokens.append(record.ttft_s)


def tenants(
    history: History, now: float, identity: Identity, quotas: Quotas | None = None
) -> Generator[None, None, JsonDict]:
    """A row for each tenant that `identity` may see, by their time in seats, and sums of all.

    Counted are requests that are open, or ended in the last minutes. share: of the seconds in seats
    of all; fair_share: of as many tenants as had requests, for administrators alone. quotas: the
    limits of keys; None: not known.
    """
    start = history.kept_from
    accounts: dict[str, _Account] = {}
    for place, record in enumerate([*history.ended(start), *history.open()]):
        _of(accounts, record.account, record.tenant).add(record, start, now)
        if place % _LOOKS == 0:
            yield
    refused = Counter(
        tenant for t, tenant in list(history.incidents.refused_tenants) if tenant and t > start
    )
    for tenant, count in refused.items():
        _of(accounts, tenant, tenant).refused += count
    yield
    seat_s = sum(account.seat_s for account in accounts.values())
    fair_share = 1 / len(accounts) if accounts and identity.is_admin else None
    shown = {
        name: account for name, account in accounts.items() if identity.may_see(account.tenant)
    }
    rows: list[JsonDict] = []
    for name, account in sorted(shown.items(), key=lambda item: -item[1].seat_s):
        share = account.seat_s / seat_s if seat_s else None
        limits = _limits(account.tenant, quotas)
        rows.append(_row(name, account) | {"share": share, "fair_share": fair_share} | limits)
        yield
    return {
        "t": round(now, 4),
        "seconds": round(now - start, 1),
        "seats": len(history.seats),
        "useful_tokens": sum(account.useful_tokens for account in accounts.values()),
        "tenants": rows,
    }


def _of(accounts: dict[str, _Account], name: str, tenant: str) -> _Account:
    return accounts.setdefault(name, _Account(tenant))


def _row(name: str, account: _Account) -> JsonDict:
    """search: finds its requests, see `request_detail.listing`."""
    return {
        "name": label_of(name),
        "search": name,
        "requests": account.requests,
        "seats": account.seats,
        "waiting": account.waiting,
        "refused": account.refused,
        "prompt_tokens": account.prompt_tokens,
        "cached_tokens": account.cached_tokens,
        "output_tokens": account.output_tokens,
        "useful_tokens": account.useful_tokens,
        "seat_s": round(account.seat_s, 2),
        "wait_s": _percentiles(account.waits),
        "ttft_s": _percentiles(account.first_tokens),
    }


def _percentiles(seconds: list[float]) -> dict[str, float] | None:
    """p50 and p95; None without any."""
    if not seconds:
        return None
    p50, p95 = np.quantile(seconds, (0.5, 0.95), method="inverted_cdf").round(4).tolist()
    return {"p50": p50, "p95": p95}


def _limits(tenant: str, quotas: Quotas | None) -> JsonDict:
    """Limits of a key and their use; null: there is none."""
    limits: JsonDict = {"max_open": None, "open": None, "tokens_per_minute": None, "left": None}
    if quotas is None or not tenant:
        return limits
    use = quotas.use(tenant)
    if quotas.max_concurrent:
        limits |= {"max_open": quotas.max_concurrent, "open": use.open}
    if use.tokens_left is not None:
        limits |= {
            "tokens_per_minute": quotas.tokens_per_minute,
            "left": max(0, round(use.tokens_left)),
        }
    return limits
