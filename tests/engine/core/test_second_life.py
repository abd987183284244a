"""Requests that another core goes on with: every token once, as if nothing had happened."""

from __future__ import annotations

import random

import pytest
from core_runs import CONTEXT, LONGEST, cramped_core, random_request
from fakes import FakeClock, ends_of, make_core, make_request, score, solo, tokens_of, watch

from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.executor.sampling import SeatState
from jitney.engine.core.scheduler.sequence_factory import _sibling_seed
from jitney.engine.core.text.detokenizer import TextStream
from jitney.engine.server.process.stream import Stream


def run_steps(core: EngineCore, streams: dict[str, Stream], steps: int) -> list[SequenceOutput]:
    """So many steps, told to the streams as a client is told."""
    outputs: list[SequenceOutput] = []
    for _ in range(steps):
        if not core.has_work:
            break
        outputs += core.step().outputs
    for output in outputs:
        streams[output.request_id].put(output)
    return outputs


def streams_of(requests: list[EngineRequest]) -> dict[str, Stream]:
    return {request.id: Stream(request, lambda stream: None) for request in requests}


def resume(core: EngineCore, streams: dict[str, Stream]) -> None:
    """Give a new core whatever is still open."""
    for stream in streams.values():
        if stream.open:
            core.add(stream.resumed())


@pytest.mark.parametrize(
    ("seed", "policy", "share_outputs"),
    [
        *((0, "continuous", True), (1, "continuous", True), (2, "continuous", False)),
        *((3, "continuous", False), (4, "static", True), (5, "static", False)),
    ],
)
def test_random_requests_go_on_through_three_cores(seed: int, policy: str, share_outputs: bool):
    rng = random.Random(seed)
    requests = [random_request(rng, number) for number in range(12)]
    requests = [r for r in requests if len(r.prompt) < CONTEXT and r.deadline is None]
    streams, outputs = streams_of(requests), []
    for life in range(3):
        core = cramped_core(
            policy=policy,
            share_outputs=share_outputs,
            static_timeout_ms=50.0,
            clock=FakeClock(tick=0.001),
        )
        if life:
            resume(core, streams)
        else:
            for request in requests:
                core.add(request)
        last = 10_000 if life == 2 else rng.randrange(3, 25)
        outputs += run_steps(core, streams, last)
        core.check()
    assert set(ends_of(outputs)) == {(r.id, i) for r in requests for i in range(r.sampling.n)}
    for request in requests:
        for index in range(request.sampling.n):
            check_sequence(request, index, outputs)


def check_sequence(request: EngineRequest, index: int, outputs: list[SequenceOutput]) -> None:
    """Tokens and log-probabilities are those of a run without an interruption, each told once."""
    own = [o for o in outputs if (o.request_id, o.index) == (request.id, index)]
    seed = _sibling_seed(request.sampling.seed or 0, index)
    want = solo(request, seed, LONGEST - len(request.prompt))
    assert tokens_of(outputs, request.id, index) == want
    if request.sampling.logprobs is not None:
        told = [entry.logprob for output in own for entry in output.logprobs or ()]
        history = [*request.prompt, *want]
        first = len(request.prompt)
        whole = [score(history[:i], history[i]).logprob for i in range(first, len(history))]
        assert told == whole
    prompts = [o.prompt_logprobs for o in own if o.prompt_logprobs is not None]
    if request.sampling.prompt_logprobs is None:
        assert not prompts
        return
    (entries,) = prompts
    prompt = request.prompt
    got = [entry.logprob for entry in entries if entry is not None]
    assert got == [score(prompt[:i], prompt[i]).logprob for i in range(1, len(prompt))]


@pytest.mark.parametrize("share_outputs", [True, False])
def test_a_resumed_sequence_counts_its_tokens_as_output(share_outputs: bool):
    """For penalties and min_tokens, for the ledger, and for its own length."""
    request = make_request(
        "a", [7] * 9, max_tokens=12, min_tokens=11, presence_penalty=1.0, ignore_eos=True
    )
    core, streams = make_core(), streams_of([request])
    core.add(request)
    run_steps(core, streams, 6)
    had = list(streams["a"].tokens[0])
    assert 2 < len(had) < 10
    core = make_core(share_outputs=share_outputs)
    plans = watch(core)
    resume(core, streams)
    outputs = run_steps(core, streams, 100)
    (seq,) = plans[0].boarded
    counts = SeatState.row(request.sampling, [7] * 9 + had, 9, 40, (0,))
    again = SeatState.row(request.sampling, seq.tokens[: 9 + len(had)], seq.n_prompt, 40, (0,))
    assert all((one == other).all() for one, other in zip(counts, again, strict=True))
    assert len(streams["a"].tokens[0]) == 12 and outputs[-1].finish == "length"
    totals = core.ledger.totals
    assert totals["recomputed"] == 9 + len(had) - 1 and totals["prefill"] == 0
    assert totals["decode"] == 12 - len(had)
    assert all(output.queued_s is None and not output.cached_tokens for output in outputs)


@pytest.mark.parametrize(
    ("max_tokens", "policy"),
    [(4, "continuous"), (5, "continuous"), (30, "continuous"), (30, "static")],
)
def test_reported_tokens_stay_where_a_new_core_would_draw_others(max_tokens: int, policy: str):
    """As where a device rounds otherwise."""
    one = make_request("a", [5] * 6, n=2, max_tokens=max_tokens, ignore_eos=True)
    told = [solo(one, _sibling_seed(0, i), 4)[:4] for i in range(2)]
    for tokens in told:
        for at in range(4):
            tokens[at] = (tokens[at] + 1 + at) % 40
    if max_tokens == 4:
        told = [tokens[:3] for tokens in told]
    streams = streams_of([one, make_request("b", [6] * 9, ignore_eos=True)])
    for index, tokens in enumerate(told):
        streams["a"].put(SequenceOutput("a", index, list(tokens)))
    core = make_core(
        share_outputs=False,
        policy=policy,
        batch_size=3,
        static_timeout_ms=50.0,
        clock=FakeClock(tick=0.001),
    )
    resume(core, streams)
    outputs = run_steps(core, streams, 200)
    assert not core.has_work
    core.check()
    for index, tokens in enumerate(told):
        left = max_tokens - len(tokens)
        after = make_request("a", [5] * 6 + tokens, max_tokens=left, ignore_eos=True)
        rest = solo(after, _sibling_seed(0, index), left)
        assert tokens_of(outputs, "a", index) == rest
        assert streams["a"].tokens[index] == tokens + rest


def test_a_resumed_request_is_let_in_however_many_wait():
    core = make_core(seats=1, max_requests=1, max_tokens=20)
    requests = [make_request(str(i), [i + 1] * 8, max_tokens=2) for i in range(5)]
    streams = streams_of(requests)
    resume(core, streams)
    outputs = run_steps(core, streams, 100)
    assert all(end.error is None for end in ends_of(outputs).values())
    core.check()


class Letters:
    """Token i is the i-th letter."""

    special_ids = frozenset[int]()

    def token_bytes(self, token_id: int, /) -> bytes:
        return bytes([ord("A") + token_id])


@pytest.mark.parametrize("after", [1, 5, 7])
def test_a_stop_string_is_found_across_two_cores(after: int):
    """The text half keeps what it has; the core that goes on is told to stop as ever."""
    request = make_request("a", [3, 4], max_tokens=20, ignore_eos=True)
    whole = solo(request, 0, 20)
    letters = "".join(Letters().token_bytes(token).decode() for token in whole)
    request = make_request("a", [3, 4], max_tokens=20, ignore_eos=True, stop=(letters[5:9],))
    text, streams = TextStream(Letters(), request.sampling), streams_of([request])
    shown, stopped = "", False
    core = make_core()
    core.add(request)
    for life in range(2):
        if life:
            core = make_core()
            resume(core, streams)
        for output in run_steps(core, streams, 100 if life else after):
            if not stopped:
                delta = text.push(output.tokens, final=output.finish is not None)
                shown, stopped = shown + delta.text, delta.stopped
    assert stopped and shown == letters[: letters.index(letters[5:9])]
