"""Those who wait: the queue in boarding order, and the backlog that admission is refused by."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from itertools import count

from jitney.engine.errors import RequestError
from jitney.engine.scheduler.sequence import Sequence
from jitney.engine.types import EngineRequest

#: Dead entries that a lazily pruned heap may hold beyond its living ones.
SLACK = 64
#: Bounds of the advised wait, in seconds, and the advice before anything has boarded.
_SHORTEST_RETRY, LONGEST_RETRY, _FIRST_RETRY = 0.1, 60.0, 1.0


class WaitingQueue:
    """Sequences by class, then preempted before fresh, then arrival; all is O(log n) amortised.

    expected: output tokens that those who wait are expected to generate.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, bool, float, int], int, Sequence]] = []
        self._entries = (
            count()
        )  # keeps two entries of one sequence, the older one dead, from being compared
        self._waiting: set[Sequence] = set()
        self.expected = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, seq: Sequence) -> None:
        """Enter the queue; a preempted sequence goes to the front of its class."""
        group, number, index = seq.rank
        place = (group, True, number, index)
        if seq.preemptions:  # among these who lost its seat first
            place = (group, False, seq.unseated_at, 0)
        heappush(self._heap, (place, next(self._entries), seq))
        self._waiting.add(seq)
        self.expected += seq.expected

    def head(self) -> Sequence | None:
        """Who boards next, if anybody waits."""
        heap = self._heap
        while heap and heap[0][2] not in self._waiting:
            heappop(heap)
        return heap[0][2] if heap else None

    def claimant(self, seats: int) -> Sequence | None:
        """Who may take a seat of somebody else's, of so many seats. Nobody may here; see
        `FairQueue`.
        """
        return None

    def crowding(self, seats: int) -> set[str]:
        """The tenants (`EngineRequest.account`) that a claimant may take a seat of."""
        return set()

    def left(self, seq: Sequence) -> None:
        """A seated sequence gave back its seat. Nobody keeps count here; `FairQueue` does."""

    def remove(self, seq: Sequence) -> None:
        """A waiting sequence boards, or has ended: its entry is skipped when it comes up."""
        self._waiting.remove(seq)
        self.expected -= seq.expected
        if len(self._heap) > 2 * len(self._waiting) + SLACK:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapify(self._heap)

    def board(self, seq: Sequence) -> None:
        """The head takes a seat; its prompt tokens that were not found in pages are computed for
        it.
        """
        self.remove(seq)

    def charge(self, seq: Sequence, tokens: int) -> None:
        """So many tokens were generated for a sequence. Nobody keeps count here; `FairQueue`
        does.
        """

    def ahead(self, seq: Sequence) -> int:
        """How many of those who wait would board before a newcomer."""
        return sum(other.rank < seq.rank for other in self._waiting)

    def may_overflow(self, request: EngineRequest, most: int) -> bool:
        """Whether a request may wait though as many wait as may (`most`). Nobody may here; see
        `FairQueue`.
        """
        return False

    def members(self) -> set[Sequence]:
        """All who wait."""
        return self._waiting


class Backlog:
    """Requests none of whose sequences has boarded yet, and how fast requests have been boarding.

    max_requests, max_tokens: caps on waiting requests and on their prompt tokens.
    """

    def __init__(self, max_requests: int, max_tokens: int):
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.requests = 0
        self.tokens = 0
        self._boarded: deque[tuple[float, int]] = deque(maxlen=64)  # (when, prompt tokens)

    def admit(self, tokens: int, free_seats: int, now: float, *, overflow: bool = False) -> None:
        """Count a request in, or raise RequestError queue_full with the seconds until there should
        be room.

        Requests that find a free seat do not wait beyond the next step, so the caps count those
        beyond the free seats; one prompt larger than max_tokens may still wait alone. overflow:
        this one may wait up to twice the caps.
        """
        too_many, too_long = self.excess(tokens, free_seats, 2 if overflow else 1)
        if too_many > 0 or too_long > 0:
            wait = self._seconds_until(too_many, too_long, now)
            what = "requests" if too_many > 0 else "prompt tokens"
            raise RequestError(
                f"too many {what} are waiting; retry in {wait:.1f} s",
                code="queue_full",
                retry_after=wait,
            )
        self.requests += 1
        self.tokens += tokens

    def excess(self, tokens: int, free_seats: int, times: int = 1) -> tuple[int, int]:
        """By how many (requests, prompt tokens) one more would exceed `times` the caps; up to 0 it
        may wait.
        """
        too_many = self.requests + 1 - free_seats - times * self.max_requests
        too_long = self.tokens + tokens - times * self.max_tokens if self.requests else 0
        return too_many, too_long

    def leave(self, tokens: int) -> None:
        """A request boarded or ended."""
        self.requests -= 1
        self.tokens -= tokens

    def boarded(self, tokens: int, now: float) -> None:
        """A request boarded: it leaves, and the rate of boarding is known better."""
        self.leave(tokens)
        self._boarded.append((now, tokens))

    def _seconds_until(self, requests: int, tokens: int, now: float) -> float:
        """Seconds until so many requests and tokens have boarded, at the rate of the last ones."""
        if not self._boarded:
            return _FIRST_RETRY
        # Time since the last boarding counts too: a queue that has stopped moving advises longer
        # and longer waits.
        span = max(now - self._boarded[0][0], 1e-3)
        return advised(
            span
            * max(requests / len(self._boarded), tokens / max(1, sum(n for _, n in self._boarded)))
        )


def advised(wait: float) -> float:
    """Seconds after which to try again, within reason."""
    return min(max(wait, _SHORTEST_RETRY), LONGEST_RETRY)
