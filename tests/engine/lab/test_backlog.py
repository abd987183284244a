"""A queue that grew for the whole run is told from one that did not, on queues whose truth is
known.
"""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from jitney.engine.common.request_record import RequestRecord
from jitney.engine.lab.backlog import QueueGrowth

SERVERS, SERVICE_S = 8, 3.0


def request(came: float, first_token: float | None, finish: str = "length") -> RequestRecord:
    return RequestRecord(
        number=0,
        n_prompt=8,
        n_output=8,
        arrival=came,
        first_token=first_token,
        finished=came + 30.0 if first_token is None else first_token,
        finish=finish,
    )


def growth(came, began) -> QueueGrowth:
    requests = map(request, np.asarray(came).tolist(), np.asarray(began).tolist())
    found = QueueGrowth.of(requests)
    assert found is not None
    return found


def queue(load: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """When requests came, and when one of 8 servers took them: Poisson arrivals, exponential
    service, first come first served. The queue is level below load 1."""
    rng = np.random.default_rng(seed)
    came = np.cumsum(rng.exponential(SERVICE_S / (load * SERVERS), count))
    free = [0.0] * SERVERS
    began = np.empty(count)
    for number, service in enumerate(rng.exponential(SERVICE_S, count)):
        began[number] = max(came[number], heapq.heappop(free))
        heapq.heappush(free, began[number] + service)
    return came, began


def batches(per_second: float, size: int = 32, batch_s: float = 8.0) -> tuple[np.ndarray, ...]:
    """Static batching with evenly spaced arrivals: a batch leaves once it is full and the one
    before it is back.
    """
    count = 320
    came = np.arange(count) / per_second
    began, free = np.empty(count), 0.0
    for first in range(0, count, size):
        batch = slice(first, first + size)
        free = max(free, came[batch][-1])
        began[batch] = free
        free += batch_s
    return came, began


def share_that_grew(load: float, count: int = 256) -> float:
    return float(np.mean([growth(*queue(load, count, seed)).grew for seed in range(100)]))


def test_an_overloaded_queue_is_said_to_grow_and_a_level_one_is_not():
    assert share_that_grew(0.5) == 0.0 and share_that_grew(0.85) <= 0.03
    assert share_that_grew(1.3) >= 0.8 and share_that_grew(2.0) == 1.0
    assert share_that_grew(1.15, count=1024) >= 0.8


def test_static_batching_grows_beyond_what_its_batches_carry():
    assert not growth(*batches(3.9)).grew  # 4 a second is what it carries
    assert growth(*batches(6.0)).grew


def test_its_figures_do_not_depend_on_the_order():
    came, began = batches(6.0)
    shuffled = np.random.default_rng(0).permutation(320)
    found = growth(came[shuffled], began[shuffled])
    quarter = came < came[-1] / 4
    assert found == growth(came, began)
    assert found.wait_s[0] == pytest.approx((began - came)[quarter].mean())
    assert found.waiting_at_end == np.count_nonzero(began > came[-1])
    assert found.offered_req_s == pytest.approx(6.0)
    assert "p99 is the length of the run" in str(found)


def test_who_timed_out_was_waiting_and_who_was_refused_was_not():
    rising = [request(n, 1.5 * n) for n in range(40)]
    late = [request(n, None, "timeout") for n in range(40, 60)]
    refused = [request(n + 0.1, None, "http_429") for n in range(60)]
    both = QueueGrowth.of([*rising, *late])
    assert both is not None and both.grew and both == QueueGrowth.of([*rising, *late, *refused])
    assert both.waiting_at_end == 20
    assert QueueGrowth.of(refused) is None
