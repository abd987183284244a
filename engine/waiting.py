"""Those who wait: the queue in boarding order, and the backlog that admission is refused by."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

from jitney.engine.errors import RequestError
from jitney.engine.sequence import Sequence

#: Dead entries that a lazily pruned heap may hold beyond its living ones.
SLACK = 64
#: Bounds of the advised wait, in seconds, and the advice before anything has boarded.
SHORTEST_RETRY, LONGEST_RETRY, FIRST_RETRY = 0.1, 60.0, 1.0


class WaitingQueue:
    """Sequences by class, then preempted before fresh, then arrival; `discard` is lazy, all is O(log n) amortised."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, bool, int, int], Sequence]] = []
        self._living = 0

    def __len__(self) -> int:
        return self._living

    def push(self, seq: Sequence) -> None:
        """Enter the queue; a preempted sequence goes to the front of its class."""
        group, number, index = seq.rank
        heappush(self._heap, ((group, not seq.preemptions, number, index), seq))
        self._living += 1

    def head(self) -> Sequence | None:
        """Who boards next, if anybody waits."""
        heap = self._heap
        while heap and heap[0][1].finish is not None:
            heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> None:
        """Remove the head, which `head` has just returned."""
        heappop(self._heap)
        self._living -= 1

    def discard(self, seq: Sequence) -> None:
        """A waiting sequence has finished (`seq.finish` is set): its entry is skipped when it comes up."""
        assert seq.finish is not None
        self._living -= 1
        if len(self._heap) > 2 * self._living + SLACK:
            self._heap = self.members_with_keys()
            heapify(self._heap)

    def members_with_keys(self) -> list[tuple[tuple[int, bool, int, int], Sequence]]:
        """Living entries, in no order."""
        return [entry for entry in self._heap if entry[1].finish is None]

    def members(self) -> list[Sequence]:
        """Living sequences, in no order."""
        return [seq for _, seq in self.members_with_keys()]


class Backlog:
    """Requests none of whose sequences has boarded yet, and how fast requests have been boarding.

    max_requests, max_tokens: caps on waiting requests and on their prompt tokens.
    """

    def __init__(self, max_requests: int, max_tokens: int):
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.requests = 0
        self.tokens = 0
        self._boarded: deque[tuple[float, int]] = deque(maxlen=64)  # (when, prompt tokens)

    def admit(self, tokens: int, free_seats: int, now: float) -> None:
        """Count a request in, or raise RequestError queue_full with the seconds until there should be room.

        Requests that find a free seat do not wait beyond the next step, so the caps count those beyond the free seats;
        one prompt larger than max_tokens may still wait alone.
        """
        too_many = self.requests + 1 - free_seats - self.max_requests
        too_long = self.tokens + tokens - self.max_tokens if self.requests else 0
        if too_many > 0 or too_long > 0:
            wait = self._seconds_until(too_many, too_long, now)
            what = "requests" if too_many > 0 else "prompt tokens"
            raise RequestError(f"too many {what} are waiting; retry in {wait:.1f} s", code="queue_full",
                               retry_after=wait)
        self.requests += 1
        self.tokens += tokens

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
            return FIRST_RETRY
        # Time since the last boarding counts too: a queue that has stopped moving advises longer and longer waits.
        span = max(now - self._boarded[0][0], 1e-3)
        wait = span * max(requests / len(self._boarded), tokens / max(1, sum(n for _, n in self._boarded)))
        return min(max(wait, SHORTEST_RETRY), LONGEST_RETRY)
