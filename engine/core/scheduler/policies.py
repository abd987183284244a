"""Policies and orders: when waiting sequences may board, and in which order.

They are plain functions of counts and times. `jitney.engine.config.schema` lists their names for
the configuration and the command line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.scheduler.fair_queue import FairQueue
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.queues import WaitingQueue

#: Order "priority": one level counts as this many seconds of waiting; at most this many levels
#: count in either direction.
_LEVEL_S, _MAX_LEVELS = 10.0, 60
#: Order "shortest": one expected output token counts as this many seconds of waiting; all tokens
#: together count as at most this many seconds.
_TOKEN_S, _LONGEST_S = 0.1, 60.0


class Situation(NamedTuple):
    """The state that a policy sees between two steps. now, arrivals (of all waiting requests):
    seconds of the scheduler's clock.

    busy_seats: seats with a sequence in them, or held by a batch. more_to_come: whether a request
    can still arrive before an open one ends; always true in a server.
    """

    now: float
    free_seats: int
    busy_seats: int
    waiting: int
    arrivals: Iterator[float]
    more_to_come: bool = True


class Policy(Protocol):
    """Decides how many waiting sequences may take a seat in the next step; called only while
    sequences wait.

    holds: sequences that board together form a static batch. Their prompts are padded to the
    longest one, their steps to the size of the batch, and all their seats stay taken until the last
    sequence is done.
    """

    holds: bool

    def boarders(self, situation: Situation) -> int:
        """The most sequences that may board now."""
        ...

    def boards_at(self, situation: Situation) -> float:
        """Clock seconds at which `boarders` lets a sequence board if no other request arrives and
        no seat is freed before; inf: never.
        """
        ...


class _Continuous:
    """In-flight batching: every free seat is offered between any two steps."""

    holds = False

    def boarders(self, situation: Situation) -> int:
        return situation.free_seats

    def boards_at(self, situation: Situation) -> float:
        return situation.now


class _Batching:
    """Static batches of `size` sequences, one after the other; the next batch boards when the last
    sequence of this one has left. gives_up_at: clock seconds at which a smaller batch boards,
    although more requests could arrive; inf: never.
    """

    holds = True

    def __init__(self, size: int, gives_up_at: Callable[[Situation], float]):
        self.size = size
        self.gives_up_at = gives_up_at

    def boarders(self, situation: Situation) -> int:
        if self.boards_at(situation) > situation.now:
            return 0
        return min(self.size, situation.waiting)

    def boards_at(self, situation: Situation) -> float:
        if situation.busy_seats:
            return math.inf
        if situation.waiting >= self.size:
            return situation.now
        return self.gives_up_at(situation)


def _static(limits: SchedulerLimits) -> Policy:
    """Policy "static": a smaller batch boards if no other request can arrive, or once none has
    arrived for `static_timeout_s` seconds.
    """

    def gives_up_at(situation: Situation) -> float:
        if not situation.more_to_come:
            return situation.now
        return max(situation.arrivals) + limits.static_timeout_s

    return _Batching(limits.batch, gives_up_at)


def _dynamic(limits: SchedulerLimits) -> Policy:
    """Policy "dynamic": a smaller batch boards once the oldest request has waited `max_wait_s`."""
    return _Batching(limits.batch, lambda found: min(found.arrivals) + limits.max_wait_s)


def _by_arrival(request: EngineRequest, expected: int) -> float:
    """Orders "fcfs" and "fair": all requests are of one class, served in order of arrival."""
    return 0.0


def _by_priority(request: EngineRequest, expected: int) -> float:
    """Order "priority": a lower `priority` boards sooner and is preempted later, and a waiting
    request gains a level every _LEVEL_S seconds.

    All gain alike, so one number gives the order: the arrival time at which a request of priority 0
    would have the same rank. A request is therefore never overtaken by one that arrives more than
    2 * _MAX_LEVELS * _LEVEL_S seconds after it.
    """
    return request.arrival + _LEVEL_S * max(-_MAX_LEVELS, min(_MAX_LEVELS, request.priority))


def _by_length(request: EngineRequest, expected: int) -> float:
    """Order "shortest": requests with short expected answers board first; each expected token
    counts as _TOKEN_S seconds of waiting. No request is overtaken by one that arrives _LONGEST_S
    later.
    """
    return request.arrival + min(_LONGEST_S, _TOKEN_S * expected)


class _Order(NamedTuple):
    """The order of waiting requests. key: computes the class of a request from it and its expected
    output tokens; lower classes board first and are preempted last. queue: makes the queue.
    """

    key: Callable[[EngineRequest, int], float]
    queue: Callable[[], WaitingQueue]


POLICIES: dict[str, Callable[[SchedulerLimits], Policy]] = {
    "continuous": lambda limits: _Continuous(),
    "static": _static,
    "dynamic": _dynamic,
}
_ORDERS: dict[str, _Order] = {
    "fcfs": _Order(_by_arrival, WaitingQueue),
    "priority": _Order(_by_priority, WaitingQueue),
    "shortest": _Order(_by_length, WaitingQueue),
    "fair": _Order(_by_arrival, FairQueue),
}


def make_policy(limits: SchedulerLimits) -> Policy:
    """The policy that the limits name; ConfigError lists the known ones."""
    return _named(POLICIES, "policy", limits.policy)(limits)


def make_order(name: str) -> _Order:
    """The order of that name; ConfigError lists the known ones."""
    return _named(_ORDERS, "order", name)


def _named[T](table: dict[str, T], what: str, name: str) -> T:
    if name not in table:
        raise ConfigError(f"unknown {what} {name!r}; known: {', '.join(table)}")
    return table[name]
