"""Fair shares for tenants: the one served least goes first, so that no tenant's load is another's
wait.

Method: virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024,
arXiv 2401.00588). Each tenant has a counter of the tokens computed for it: prompt tokens at
boarding (those found in pages cost nothing), output tokens as they come, one each. The waiting
tenant with the least counter boards next. A tenant that comes back after a time without waiting
requests is lifted to the least of those that wait, so none saves up.

The counters decide which tenant boards, not which leaves: beside one whose long answers fill all
seats, another would wait for one of them to end. So a tenant with less than its share of the seats
may take one of a tenant with more (`claimant`, `crowding`; `Preemption` chooses the sequence).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

from jitney.engine.core.scheduler.queues import WaitingQueue
from jitney.engine.core.scheduler.sequence import Sequence

#: Every so many boardings the sequence that has waited longest goes first: new tenants, each served
#: nothing yet, would otherwise go before an old one for ever.
_EVERY = 16
#: Accounts that are kept at least.
_FEWEST_KEPT = 64


@dataclass(slots=True, eq=False)
class _Account:
    """One tenant. counter: tokens computed for it, lifted when it comes back. queue: its sequences
    that wait.

    listed: it has its entry in the heap of tenants. seated: its sequences that have a seat.
    """

    counter: int
    listed: bool = False
    seated: int = 0
    queue: WaitingQueue = field(default_factory=WaitingQueue)

    def may_claim(self, share: float) -> bool:
        """Its next sequence still belongs to so large a share of the seats."""
        return bool(self.queue.waiting) and self.seated + 1 <= share

    def must_stay(self, floor: int) -> bool:
        """It would lose something by being forgotten. floor: what newcomers are lifted to."""
        return bool(self.queue.waiting) or self.seated > 0 or self.counter > floor


#: Counter, arrival of the sequence that waits longest, a number that no other entry has, account.
type _Entry = tuple[int, int, int, _Account]


@dataclass(eq=False)
class FairQueue(WaitingQueue):
    """The waiting sequences of all tenants; within a tenant by arrival. All is O(log n) amortised.

    The base class is the queue of all by arrival, for the one boarding in _EVERY that goes by that.
    """

    #: By tenant or user.
    _accounts: dict[str, _Account] = field(default_factory=dict[str, _Account])
    #: A heap; its counters may be out of date, never too high.
    _least: list[_Entry] = field(default_factory=list[_Entry])
    #: The account whose queue was the last one to become empty.
    _last: _Account | None = None
    _boardings: int = 0
    #: Accounts kept before those that are needed no more are forgotten.
    _room: int = _FEWEST_KEPT

    def push(self, seq: Sequence) -> None:
        """Enter the queue of its tenant."""
        super().push(seq)
        account = self._account(seq)
        if not account.queue.waiting:
            account.counter = max(account.counter, self._floor())
        account.queue.push(seq)
        if not account.listed:
            account.listed = True
            heappush(self._least, self._entry(account))

    def head(self) -> Sequence | None:
        """The sequence that boards next: one that lost its seat, else the first of the tenant
        served least, and once in _EVERY boardings the one that has waited longest.
        """
        longest = super().head()
        by_arrival = self._boardings % _EVERY == _EVERY - 1
        if longest is None or longest.preemptions or by_arrival:
            return longest
        return _head_of(self._first())

    def shortest(self, most: int) -> Sequence | None:
        """The shortest of the tenant served least, or of all if that tenant has none so short."""
        first = self._first()
        own = first.queue.shortest(most) if first else None
        return own or super().shortest(most)

    def claimant(self, seats: int) -> Sequence | None:
        """The first of a tenant whose next sequence still belongs to its share of the seats; of
        several such tenants that of the one served least.
        """
        share = self._share(seats)
        small = (account for account in self._accounts.values() if account.may_claim(share))
        return _head_of(min(small, key=_counter, default=None))

    def crowding(self, seats: int) -> set[str]:
        """Tenants that sit in more than their share of the seats."""
        share = self._share(seats)
        return {name for name, account in self._accounts.items() if account.seated > share}

    def gives_way(self, seats: int) -> bool:
        """Whether one more tenant, which comes now, would find one with more than its share."""
        share = self._share(seats, newcomers=1)
        most = max([account.seated for account in self._accounts.values()], default=0)
        return most > share >= 1

    def _share(self, seats: int, newcomers: int = 0) -> float:
        """Seats for each tenant with open sequences."""
        accounts = self._accounts.values()
        present = sum(1 for account in accounts if account.seated or account.queue.waiting)
        return seats / max(1, present + newcomers)

    def gave_seat_back(self, seq: Sequence) -> None:
        """A seat of its tenant is free again."""
        self._account(seq).seated -= 1

    def remove(self, seq: Sequence) -> None:
        """Leave both queues."""
        super().remove(seq)
        account = self._account(seq)
        account.queue.remove(seq)
        if not account.queue.waiting:
            self._last = account

    def board(self, seq: Sequence) -> None:
        """A sequence takes a seat; its tenant pays for the prompt tokens to be computed, once."""
        self._boardings += 1
        if not seq.preemptions:
            self.charge(seq, seq.n_fresh)
        self._account(seq).seated += 1
        self.remove(seq)

    def charge(self, seq: Sequence, tokens: int) -> None:
        """So many tokens were computed for a sequence."""
        self._account(seq).counter += tokens

    def ahead(self, seq: Sequence, held: Collection[Sequence] = ()) -> int:
        """About as many as wait of the newcomer's own tenant, of every tenant that has so many and
        one more.
        """
        waiting = Counter(other.request.account for other in held)
        for name, account in self._accounts.items():
            waiting[name] += len(account.queue.waiting)
        own = waiting.pop(seq.request.account, 0)
        return own + sum(min(count, own + 1) for count in waiting.values())

    def counters(self) -> dict[str, int]:
        """Tokens by tenant, as far as they are remembered."""
        return {tenant: account.counter for tenant, account in self._accounts.items()}

    def _account(self, seq: Sequence) -> _Account:
        name = seq.request.account
        return self._accounts.get(name) or self._new_account(name)

    def _new_account(self, name: str) -> _Account:
        if len(self._accounts) >= self._room:
            self._forget()
        account = self._accounts[name] = _Account(self._floor())
        return account

    def _forget(self) -> None:
        """Let go of tenants that would be lifted anyway when they come back: names may be as many
        as requests.
        """
        floor = self._floor()
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if account is self._last or account.must_stay(floor)
        }
        self._room = 2 * len(self._accounts) + _FEWEST_KEPT

    def _entry(self, account: _Account) -> _Entry:
        """Equal counters: the longest wait first. The third number only keeps accounts from being
        compared.
        """
        head = account.queue.head()
        return account.counter, head.rank[1] if head else 0, next(self._entries), account

    def _first(self) -> _Account | None:
        """The waiting tenant with the least counter; counters only grow, so what is out of date
        sinks.
        """
        heap = self._least
        while heap:
            account = heap[0][3]
            if not account.queue.waiting:
                account.listed = False
                heappop(heap)
            elif account.counter > heap[0][0]:
                heapreplace(heap, self._entry(account))
            else:
                return account
        return None

    def _floor(self) -> int:
        """The least counter of tenants that wait, or the one of the last that did; it never
        sinks.
        """
        account = self._first() or self._last
        return account.counter if account else 0


def _head_of(account: _Account | None) -> Sequence | None:
    """The sequence of one tenant that boards next."""
    return account.queue.head() if account else None


def _counter(account: _Account) -> int:
    return account.counter
