"""Steps in parts answer as whole ones do, and have parts in common."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.records import Ledger
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.executor.inputs import SAMPLING, MaskedRows
from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.executor.runner import Runner
from jitney.engine.core.executor.sampling import Sampled, SeatState
from jitney.engine.core.executor.step_parts import PartedStep, StepParts, StepRun
from jitney.engine.core.executor.step_programs import StepPrograms
from jitney.engine.core.measuring.made_up_steps import StepCase
from jitney.engine.core.models.registry import random_model
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.page_tables import PageTables
from jitney.engine.core.scheduler.scheduler import Scheduler
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.kernels.select import select

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

KERNELS = select("cpu", "reference")
#: More than four: a row that is chosen behind a step has a sampler of its own.
SEATS = 5
#: Numbers of logit rows that programs are made for.
ROWS = (2, SEATS)
BUCKETS = Buckets.of(max_seats=SEATS, token_budget=32, seat_sizes=ROWS, token_sizes=(32,))
SIZES = StateSizes(
    seats=SEATS, n_pages=32, page_size=16, context_length=64, kv_dtype=jnp.dtype("float32")
)
VOCAB = 512


@cache
def runner(in_parts: bool) -> Runner:
    """in_parts: the steps with prompts are also cut into two segments."""
    model = random_model(tiny_config())
    buckets = replace(BUCKETS, most_segments=2) if in_parts else BUCKETS
    programs = StepPrograms(
        model, buckets, KERNELS, SIZES, greedy_only_mixed=in_parts, in_parts=in_parts
    )
    made = Runner(programs, end_ids=())
    made.compile()
    return made


PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=1.0, seed=1),
    "cut": SamplingParams(temperature=0.9, seed=2, top_k=20, top_p=0.8),
    "floored": SamplingParams(temperature=1.3, seed=3, min_p=0.05),
    "penalised": SamplingParams(temperature=0.7, seed=4, repetition_penalty=1.3),
    "counted": SamplingParams(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5),
    "biased": SamplingParams(temperature=0.0, logit_bias={7: 50.0}, stop_token_ids=(7,)),
    "banned": SamplingParams(temperature=0.0, stop_token_ids=(9, 11), min_tokens=3),
    "scored": SamplingParams(temperature=0.8, seed=5, logprobs=3),
    "scored prompt": SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=2),
}


def fresh_core(own: Runner) -> EngineCore:
    """Over a runner whose state is as at the start."""
    own.state = own.programs.shapes.allocate(own.programs.config)
    scheduler = Scheduler(
        SchedulerLimits(SEATS, SIZES.context_length),
        BUCKETS,
        PageTables(PagePool(32, 16)),
        vocab_size=VOCAB,
    )
    return EngineCore(scheduler, own, Ledger())


def answers(in_parts: bool, names: list[str]) -> dict[str, Any]:
    """By name: tokens, log-probabilities of them and of the prompt."""
    own = runner(in_parts)
    core = fresh_core(own)
    for number, name in enumerate(names):
        prompt = [(31 * number + 7 * at) % VOCAB for at in range(5 + 3 * number)]
        core.add(EngineRequest(id=name, prompt=prompt, sampling=PARAMS[name], arrival=0.0))
    compiled = own.compiles
    found: dict[str, Any] = {name: ([], [], []) for name in names}
    for output in core.run_until_idle():
        assert output.error is None
        for kept, new in zip(
            found[output.request_id],
            (output.tokens, output.logprobs, output.prompt_logprobs),
            strict=True,
        ):
            kept += new or []
    assert own.compiles == compiled
    return found


def same_entries(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if b is None:
            assert a is None
            continue
        assert a.top_ids == b.top_ids
        np.testing.assert_allclose(a.logprob, b.logprob, rtol=1e-5)
        np.testing.assert_allclose(a.top_logprobs, b.top_logprobs, rtol=1e-5)


@pytest.mark.parametrize("names", [*([name] for name in PARAMS), list(PARAMS)], ids=", ".join)
def test_all_that_a_request_may_ask_for_answers_alike(names: list[str]):
    found, expected = answers(True, names), answers(False, names)
    for name in names:
        assert found[name][0] == expected[name][0] and found[name][0]
        for mine, theirs in zip(found[name][1:], expected[name][1:], strict=True):
            same_entries(mine, theirs)


@cache
def cut_runner() -> Runner:
    """Of steps in four segments, one for each layer."""
    buckets = Buckets.of(max_seats=2, token_budget=32, seat_sizes=(2,), token_sizes=(32,))
    programs = StepPrograms(
        random_model(replace(tiny_config(), n_layers=4, windows=(0,) * 4)),
        replace(buckets, most_segments=4),
        KERNELS,
        replace(SIZES, seats=2),
        greedy_only_mixed=True,
        in_parts=True,
    )
    made = Runner(programs, end_ids=())
    made.compile()
    return made


def cut_core() -> EngineCore:
    limits, buckets = SchedulerLimits(2, SIZES.context_length), cut_runner().programs.buckets
    scheduler = Scheduler(limits, buckets, PageTables(PagePool(32, 16)), vocab_size=VOCAB)
    return EngineCore(scheduler, cut_runner(), Ledger(), plans_late=True)


def greedy_request(name: str, length: int) -> EngineRequest:
    prompt = [(11 * length + 7 * at) % VOCAB for at in range(length)]
    return EngineRequest(id=name, prompt=prompt, sampling=PARAMS["greedy"], arrival=0.0)


def tokens_alone(core: EngineCore, request: EngineRequest) -> list[int]:
    core.add(request)
    tokens = [token for output in core.run_until_idle() for token in output.tokens]
    core.reset_prefix_cache()
    return tokens


def start_cut(core: EngineCore) -> list[SequenceOutput]:
    """Step, and launch only the first segment of the next step: segments take no time here."""
    runner = cut_runner()
    runner.feed = lambda launched: True
    outputs = core.step().outputs
    del runner.feed
    return outputs


def test_a_short_prompt_is_computed_between_the_segments_of_a_long_one():
    own, core = cut_runner(), cut_core()
    requests = [greedy_request("long", 40), greedy_request("short", 5)]
    expected = {alone.id: tokens_alone(core, alone) for alone in requests}
    buckets = own.programs.buckets
    made_up = StepCase(buckets.mixed[-1], prompts=((0, 32),)).on(core)
    launched = made_up.launch(made_up.batch())
    assert launched.output is not None, "a step is whole unless the engine looks after its segments"
    made_up.fetch(launched)
    core.add(requests[0])
    start_cut(core)
    running = core._flight
    assert running is not None and running.is_cut
    while not own.has_paused(running.launched_step):
        pass
    core.add(requests[1])
    outputs = core.step().outputs
    assert [output.request_id for output in outputs] == ["short"] and core._flight is running
    outputs += core.run_until_idle()
    core.check()
    found = {request.id: list[int]() for request in requests}
    for output in outputs:
        found[output.request_id] += output.tokens
    assert found == expected


def test_a_segment_that_cannot_be_launched_fails_its_step_alone():
    own, core = cut_runner(), cut_core()
    request = greedy_request("long", 40)
    expected = tokens_alone(core, request)
    kind = own.programs.buckets.mixed[-1], True
    step = own.programs.executables[kind]
    assert isinstance(step, PartedStep)
    first, *_ = step.model

    def fail(*args: Any) -> Any:
        own.programs.executables[kind] = step
        raise MemoryError("too little")

    own.programs.executables[kind] = replace(step, model=(first, fail))
    core.add(request)
    outputs = start_cut(core)
    while core.late_plan_slack_s:
        pass
    outputs += core.run_until_idle()
    assert own.programs.executables[kind] is step, "a segment has failed"
    assert [token for output in outputs for token in output.tokens] == expected
    core.check()


@pytest.mark.parametrize("rows", [1, SEATS])
def test_rows_are_chosen_under_masks_alike(rows: int):
    """Drawn, penalised and scored ones, one that may not be finite, and one whose mask hides it."""
    noise = np.random.default_rng(rows)
    logits = noise.normal(0, 3, (SEATS, VOCAB)).astype(np.float32)
    logits[4, 5] = np.nan
    asked = [PARAMS[name] for name in ("scored", "penalised", "counted", "cut", "drawn")]
    masks = noise.integers(-(2**31), 2**31, (rows, VOCAB // 32)).astype(np.int32)
    masks[-1, 0] = 0  # hides the 5
    numbers = None if rows == SEATS else np.array([1], np.int32)
    found = []
    for in_parts in (True, False):
        own = runner(in_parts)
        own.state = own.programs.shapes.allocate(own.programs.config)
        upload = MaskedRows.empty(rows, VOCAB, SEATS)
        for place in range(rows):
            seat = place if numbers is None else int(numbers[place])
            upload.heads[place, :4] = 20 + place, seat, 0, 0
            upload.heads[place, 4:] = np.frombuffer(SAMPLING.pack(asked[seat], 99), np.int32)
            upload.masks[place] = masks[place]
            own.board(seat, SeatState.row(asked[seat], [3, 4, 5, 4], 2, VOCAB, ()))
        sampled = own.run_choice(jnp.asarray(logits), numbers, upload).sampled
        found.append(jax.tree.map(np.asarray, (sampled, own.state.seat_tokens, own.state.seats)))
    (mine, *state), (theirs, *their_state) = found
    np.testing.assert_array_equal(mine.tokens, theirs.tokens)
    jax.tree.map(np.testing.assert_array_equal, state, their_state)
    if rows == SEATS:
        assert mine.tokens[4] == -1 and (mine.tokens[:4] >= 0).all()
        np.testing.assert_allclose(mine.logprobs[:4], theirs.logprobs[:4], rtol=1e-5)
        np.testing.assert_array_equal(mine.top_ids[0], theirs.top_ids[0])


def test_steps_of_as_many_logit_rows_have_one_sampler():
    """And both kinds of a bucket's steps have one model."""
    own = runner(True).programs
    compiled = []
    compile_one = own.step.compile
    own.step.compile = lambda lowered: compiled.append(lowered) or compile_one(lowered)  # pyright: ignore
    parts = StepParts(own.step, own.leaves, own.shapes, own.builder.layout, ROWS, lambda bucket: 1)
    with ThreadPoolExecutor(1) as pool:
        samplers = set()
        for bucket in BUCKETS.all():
            for plain in (True, False):
                step: Any = parts.start(pool, bucket, plain)()
                samplers |= {id(sampler.choose) for sampler in step.tails.samplers.values()}
    del own.step.compile
    assert len(samplers) == len(ROWS)
    names = sorted(str(lowered.as_text().split()[1]) for lowered in compiled)
    models, scores, sampler = len(BUCKETS.all()), len(BUCKETS.mixed), 6
    assert len(names) == models + scores + len(ROWS) * (1 + sampler)
    assert len(set(names)) == 3 + sampler


def test_a_greedy_step_in_parts_takes_no_parameters():
    packed = runner(True).builder.layout(Bucket(SEATS, SEATS), True)
    assert "sampling" not in packed.slices


def test_a_step_with_prompts_computes_logits_of_few_rows_where_few_are_wanted():
    own = runner(True)
    core = fresh_core(own)
    widths: list[tuple[int, int]] = []
    begin = own.begin

    def watched(bucket: Bucket, greedy_only: bool, packed: np.ndarray) -> StepRun:
        output, logits = yield from begin(bucket, greedy_only, packed)
        sampled = output.sampled
        assert isinstance(sampled, Sampled) is not greedy_only
        tokens = sampled.tokens if isinstance(sampled, Sampled) else sampled
        if not bucket.decode_only:
            widths.append((bucket.seats, len(tokens)))
        return output, logits

    own.begin = watched
    for count in (1, 4):
        for number in range(count):
            prompt = [3 + number, 4, 5]
            name = f"{count}-{number}"
            core.add(EngineRequest(id=name, prompt=prompt, sampling=PARAMS["drawn"], arrival=0.0))
        core.run_until_idle()
    del own.begin
    assert widths == [(SEATS, 2), (SEATS, SEATS)]
