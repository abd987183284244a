"""Fair shares for tenants: the tenant that was served least boards first, so that one tenant's load
does not make another tenant wait.

The method is virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI
2024, arXiv 2401.00588). Each tenant has a counter of the tokens computed for it: prompt tokens are
counted at boarding (those found in pages are free), output tokens one by one. The waiting tenant
with the least counter boards next. The counter of a tenant that returns after a time without
waiting requests is raised to the least one of the waiting tenants, so no tenant saves up.

The counters decide which tenant boards, not which one leaves: if one tenant's long answers fill all
seats, another would wait until one of them ends. So a tenant with less than its share of the seats
may take a seat of a tenant with more (`claimant`, `crowding`; `Preemption` chooses the sequence).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

from jitney.engine.core.scheduler.queues import WaitingQueue
from jitney.engine.core.scheduler.sequence import Sequence

#: Once in this many boardings the sequence that has waited longest goes first: otherwise new
#: tenants, not served yet, could go before an old one for ever.
_EVERY = 16
#: Fewest accounts that are stored.
_FEWEST_KEPT = 64


@dataclass(slots=True, eq=False)
class _Account:
    """One tenant. counter: tokens computed for it, raised when it returns. queue: its waiting
    sequences.

    listed: whether it has an entry in the heap of tenants. seated: number of its seated sequences.
    """

    counter: int
    listed: bool = False
    seated: int = 0
    queue: WaitingQueue = field(default_factory=WaitingQueue)

    def may_claim(self, share: float) -> bool:
        """Whether it has a waiting sequence whose seat would be within `share` seats."""
        return bool(self.queue.waiting) and self.seated + 1 <= share

    def must_stay(self, floor: int) -> bool:
        """Whether it must not be forgotten. floor: initial counter of new tenants."""
        return bool(self.queue.waiting) or self.seated > 0 or self.counter > floor


#: (counter, request number of the longest-waiting sequence, unique number, account).
type _Entry = tuple[int, int, int, _Account]


@dataclass(eq=False)
class FairQueue(WaitingQueue):
    """The waiting sequences of all tenants, by arrival within a tenant. All operations are O(log n)
    amortised.

    The base class holds all sequences by arrival, for the one boarding in _EVERY by arrival.
    """

    #: Accounts by tenant or user.
    _accounts: dict[str, _Account] = field(default_factory=dict[str, _Account])
    #: Heap of accounts by counter; an entry's counter may be out of date, but never too high.
    _least: list[_Entry] = field(default_factory=list[_Entry])
    #: The account whose queue became empty last.
    _last: _Account | None = None
    _boardings: int = 0
    #: Number of accounts above which those that are not needed are forgotten.
    _room: int = _FEWEST_KEPT

    def push(self, seq: Sequence) -> None:
        """Add a sequence to the queue of its tenant."""
        super().push(seq)
        account = self._account(seq)
        if not account.queue.waiting:
            account.counter = max(account.counter, self._floor())
        account.queue.push(seq)
        if not account.listed:
            account.listed = True
            heappush(self._least, self._entry(account))

    def head(self) -> Sequence | None:
        """The sequence that boards next: a preempted one, else the first of the tenant served
        least. Once in _EVERY boardings it is the one that has waited longest.
        """
        longest = super().head()
        by_arrival = self._boardings % _EVERY == _EVERY - 1
        if longest is None or longest.preemptions or by_arrival:
            return longest
        return _head_of(self._first())

    def shortest(self, most: int) -> Sequence | None:
        """The shortest sequence of the tenant served least, or of all tenants if that one has none
        with at most `most` rows.
        """
        first = self._first()
        own = first.queue.shortest(most) if first else None
        return own or super().shortest(most)

    def claimant(self, seats: int) -> Sequence | None:
        """The first sequence of a tenant that has less than its share of the seats; of several such
        tenants, of the one served least.
        """
        share = self._share(seats)
        small = (account for account in self._accounts.values() if account.may_claim(share))
        return _head_of(min(small, key=_counter, default=None))

    def crowding(self, seats: int) -> set[str]:
        """Tenants with more than their share of the seats."""
        share = self._share(seats)
        return {name for name, account in self._accounts.items() if account.seated > share}

    def gives_way(self, seats: int) -> bool:
        """Whether for a new tenant that arrives now another would have more than its share."""
        share = self._share(seats, newcomers=1)
        most = max([account.seated for account in self._accounts.values()], default=0)
        return most > share >= 1

    def _share(self, seats: int, newcomers: int = 0) -> float:
        """Seats per tenant with open sequences. newcomers: further tenants to count."""
        accounts = self._accounts.values()
        present = sum(1 for account in accounts if account.seated or account.queue.waiting)
        return seats / max(1, present + newcomers)

    def gave_seat_back(self, seq: Sequence) -> None:
        """Count a seat of the sequence's tenant as free."""
        self._account(seq).seated -= 1

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence from both queues."""
        super().remove(seq)
        account = self._account(seq)
        account.queue.remove(seq)
        if not account.queue.waiting:
            self._last = account

    def board(self, seq: Sequence) -> None:
        """Seat a sequence; its tenant pays once for the prompt tokens that must be computed."""
        self._boardings += 1
        if not seq.preemptions:
            self.charge(seq, seq.n_fresh)
        self._account(seq).seated += 1
        self.remove(seq)

    def charge(self, seq: Sequence, tokens: int) -> None:
        """Add computed tokens to the counter of the sequence's tenant."""
        self._account(seq).counter += tokens

    def ahead(self, seq: Sequence, held: Collection[Sequence] = ()) -> int:
        """Estimate the sequences before a newcomer: all n waiting ones of its own tenant, and up to
        n + 1 of every other tenant.
        """
        waiting = Counter(other.request.account for other in held)
        for name, account in self._accounts.items():
            waiting[name] += len(account.queue.waiting)
        own = waiting.pop(seq.request.account, 0)
        return own + sum(min(count, own + 1) for count in waiting.values())

    def counters(self) -> dict[str, int]:
        """Counters by tenant, without forgotten tenants."""
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
        """Forget tenants whose counter would be raised anyway when they return, because there may
        be as many names as requests.
        """
        floor = self._floor()
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if account is self._last or account.must_stay(floor)
        }
        self._room = 2 * len(self._accounts) + _FEWEST_KEPT

    def _entry(self, account: _Account) -> _Entry:
        """The heap entry of an account: with equal counters the longest wait comes first. The third
        number only prevents comparing accounts.
        """
        head = account.queue.head()
        return account.counter, head.rank[1] if head else 0, next(self._entries), account

    def _first(self) -> _Account | None:
        """The waiting tenant with the least counter. Counters only grow, so outdated entries move
        down the heap when they are updated.
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
        """The least counter of the waiting tenants, or else of the last tenant that waited; it
        never falls.
        """
        account = self._first() or self._last
        return account.counter if account else 0


def _head_of(account: _Account | None) -> Sequence | None:
    """The sequence of a tenant that boards next."""
    return account.queue.head() if account else None


def _counter(account: _Account) -> int:
    return account.counter
