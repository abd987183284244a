"""When waiting sequences may board, and who goes first. Plain functions of counts; the scheduler does the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from jitney.engine.errors import ConfigError
from jitney.engine.types import EngineRequest


class Situation(NamedTuple):
    """What a policy may look at, between two steps. now and oldest_arrival: seconds on the scheduler's clock."""

    now: float
    free_seats: int
    busy_seats: int
    waiting: int
    oldest_arrival: float


class Policy(Protocol):
    """Decides how many waiting sequences may take a seat in the next step."""

    def boarders(self, situation: Situation) -> int:
        """At most this many board now; asked once per plan, only while somebody waits."""
        ...


class Continuous:
    """In-flight batching: every free seat is offered between any two steps."""

    def boarders(self, situation: Situation) -> int:
        return situation.free_seats


def fcfs(request: EngineRequest) -> int:
    """By arrival alone: all requests are of one class."""
    return 0


def by_priority(request: EngineRequest) -> int:
    """Lower `priority` boards sooner and is preempted later; by arrival within a priority."""
    return request.priority


POLICIES: dict[str, Callable[[], Policy]] = {"continuous": Continuous}
ORDERS: dict[str, Callable[[EngineRequest], int]] = {"fcfs": fcfs, "priority": by_priority}


def make_policy(name: str) -> Policy:
    """The policy of that name; ConfigError lists the known ones."""
    return _named(POLICIES, "policy", name)()


def make_order(name: str) -> Callable[[EngineRequest], int]:
    """The function from a request to its class in the waiting queue; ConfigError lists the known ones."""
    return _named(ORDERS, "order", name)


def _named[T](table: dict[str, T], what: str, name: str) -> T:
    if name not in table:
        raise ConfigError(f"unknown {what} {name!r}; known: {', '.join(table)}")
    return table[name]
