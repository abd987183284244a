"""Random runs of a core on a fake device, and invariants that they must satisfy."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from fakes import VOCAB, FakeClock, code_of, ends_of, make_core, make_request, solo, tokens_of

from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.scheduler.sequence_factory import _sibling_seed

CONTEXT, PAGES, PAGE_SIZE = 40, 15, 4


LONGEST = min(CONTEXT, (PAGES - 1) * PAGE_SIZE + 1)


def cramped_core(**settings: Any) -> EngineCore:
    """A core with too few pages for all seats; settings: of `make_core`."""
    sizes: dict[str, Any] = {"pages": PAGES, "page_size": PAGE_SIZE, "context": CONTEXT}
    return make_core(**{"seats": 4, "budget": 13, "batch_size": 3, **sizes, **settings})


def random_request(
    rng: random.Random, number: int, now: float = 0.0, background: float = 0.0
) -> EngineRequest:
    """A random request. Requests have few distinct prefixes, so that pages are shared; about 1 in
    20 can never run. background: share of background requests.
    """
    head = [rng.randrange(1, 4)] * rng.choice((0, 4, 8, 12))
    prompt = head + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))]
    return make_request(
        f"r{number}",
        prompt if rng.random() > 0.05 else [1] * 200,
        arrival=now,
        n=rng.choice((1, 1, 1, 2, 4)),
        deadline=now + rng.uniform(0, 30) if rng.random() < 0.15 else None,
        priority=rng.choice((0, 0, 1, -1)),
        salt=rng.choice(("", "", "salt")),
        tenant=rng.choice(("", "", "key")),
        user=rng.choice(("", "ann", "bob")),
        seed=rng.choice((0, 7, 99)),
        max_tokens=rng.choice((None, 1, 2, 5, 12)),
        background=rng.random() < background,
        ignore_eos=rng.random() < 0.2,
        prompt_logprobs=rng.choice((None,) * 9 + (2,)),
        logprobs=rng.choice((None,) * 9 + (1,)),
    )


def random_events(
    core: EngineCore, clock: FakeClock, rng: random.Random, count: int
) -> tuple[list[EngineRequest], list[SequenceOutput]]:
    """Submit, abort or step `count` times, then step until no request is left. Returns all requests
    and all outputs.
    """
    requests: list[EngineRequest] = []
    outputs: list[SequenceOutput] = []
    background = 0.3 if core.scheduler.limits.policy == "continuous" else 0.0
    for event in range(count):
        clock.now += rng.random()
        kind = rng.random()
        if kind < 0.07:
            requests.append(random_request(rng, len(requests), clock.now, background))
            core.add(requests[-1])
        elif kind < 0.10 and requests:
            core.abort(
                rng.choice(requests[-8:]).id,
                rng.choice((None, 0, 1)),
                rng.choice(("abort", "stop")),
            )
        else:
            outputs += core.step().outputs
        if event % 5 == 0:
            core.scheduler.check()
            ended = core.report_ended()
            outputs += [] if ended is None else ended.outputs
    outputs += core.run_until_idle(20_000)
    core.check()
    return requests, outputs


def steps_with_arrivals(
    core: EngineCore, requests: list[EngineRequest], pause: random.Random
) -> Iterator[list[SequenceOutput]]:
    """The outputs of each step until all requests are answered. Each request arrives at a random
    step; after each step the core's page accounting is checked.
    """
    coming = list(requests)
    while coming or core.has_work:
        if coming and pause.random() < 0.4:
            core.add(coming.pop(0))
        outputs = core.step().outputs
        core.check()
        yield outputs


def alike_requests(
    shapes: Iterable[tuple[int, int, int, int, str]],
) -> list[EngineRequest]:
    """A request for each (prompt tokens, output tokens, head, n, kind). Requests with the same
    nonzero head have prompts with a common prefix. kind: "background", "leaves" (it has a
    deadline), or "".
    """
    return [
        make_request(
            f"r{number}",
            ([head] * n_prompt + [number])[-n_prompt:] if head else [number] * n_prompt,
            max_tokens=n_output,
            n=n,
            background=kind == "background",
            deadline=0.6 if kind == "leaves" else None,
        )
        for number, (n_prompt, n_output, head, n, kind) in enumerate(shapes)
    ]


def forgetful_run(
    core: EngineCore, requests: list[EngineRequest], pause: random.Random
) -> list[SequenceOutput]:
    """All outputs of `steps_with_arrivals`; resets the prefix cache at random steps."""
    outputs: list[SequenceOutput] = []
    for new in steps_with_arrivals(core, requests, pause):
        outputs += new
        if pause.random() < 0.02:
            core.scheduler.forget_prefixes()
    return outputs


def assert_solo_tokens(requests: list[EngineRequest], outputs: list[SequenceOutput]) -> None:
    """Assert that each sequence ended once. A sequence that finished by itself must have its solo
    tokens, any other one a prefix of them.
    """
    ends = ends_of(outputs)
    assert set(ends) == {(request.id, i) for request in requests for i in range(request.sampling.n)}
    for request in requests:
        for index in range(request.sampling.n):
            end, got = ends[request.id, index], tokens_of(outputs, request.id, index)
            if code_of(end) == "context_length_exceeded":
                assert not got
                continue
            want = solo(
                request,
                _sibling_seed(request.sampling.seed or 0, index),
                LONGEST - len(request.prompt),
            )
            assert got == want[: len(got)]
            if end.tokens:  # else it was aborted
                assert end.finish in ("stop", "length") and got == want
