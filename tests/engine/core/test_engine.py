"""The whole engine on a tiny random model: the same answer alone and in a crowd, whatever the
scheduler did.

The oracle is a forward pass over the whole sequence with dense attention: no pages, no batch, no
cache.
"""

import itertools
import os
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from cpu_library import packs_here
from oracle import VOCAB, oracle_logprobs, prompt
from programs import await_use

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.errors import RequestError
from jitney.engine.core import build as building
from jitney.engine.core.executor import ceiling
from jitney.engine.core.executor.step_programs import StepPrograms
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.load import load_model
from jitney.kernels.cpu import build, library

pytestmark = pytest.mark.usefixtures("kernels_unproved")

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True)
SPECIAL = SamplingParams(
    temperature=0.8,
    seed=5,
    top_k=50,
    repetition_penalty=1.3,
    frequency_penalty=0.2,
    max_tokens=24,
    logit_bias={7: 2.0, 300: -50.0},
    min_tokens=20,
    logprobs=3,
)
#: Few buckets: every engine below compiles each of them twice.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_seats": 8,
    "token_budget": 64,
    "context": 256,
    "seat_buckets": [4, 8],
    "token_buckets": [64],
}


#: Sizes of an engine for the questions and continuations of the default model.
EIGHT_SEATS: dict[str, Any] = {
    "max_seats": 8,
    "token_budget": 64,
    "context": 256,
    "seat_buckets": [8],
    "token_buckets": [64],
    "pages": 200,
}


@pytest.fixture(scope="module")
def model() -> Model:
    source = ModelSource.resolve("tiny-random")
    return load_model(source, source.config)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-random", **SETTINGS)


def when_used(name: str, **settings: Any) -> LLM:
    """An engine that compiles a program when a step first wants it: a greedy run wants half of
    them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepPrograms, "_compile_all", await_use)
        return LLM(name, **settings)


@pytest.fixture(autouse=True)
def nothing_is_lost(request):
    """After every test with the shared engine: all pages and seats back, the ledger closed, nothing
    compiled.
    """
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm")
        engine.core.check()
        assert not engine.core.has_work
        assert engine.core.scheduler.pool.used == 0


def tokens_of(llm: LLM, prompts, params) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def alone(llm: LLM, prompts, params) -> list[list[int]]:
    each = params if isinstance(params, list) else [params] * len(prompts)
    return [tokens_of(llm, [p], one)[0] for p, one in zip(prompts, each, strict=True)]


def test_nothing_compiles_after_ready(llm: LLM):
    """The first test of the shared engine, which no other has had compile anything."""
    assert llm.core.runner.compiles == 0
    scored = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=2)
    kinds = [GREEDY, SEEDED, SPECIAL, scored]
    for size in (1, 2, 5, 8, 20):
        llm.generate(
            [prompt(i, 1 + 9 * i) for i in range(size)], [kinds[i % 4] for i in range(size)]
        )
    assert llm.core.runner.compiles == 0
    assert llm.core.ledger.totals["compiled"] == 0


def test_greedy_equals_the_dense_forward(llm, model):
    prompts = [prompt(i, n) for i, n in enumerate((1, 5, 16, 17, 63, 64, 65, 130))]
    for p, tokens in zip(prompts, tokens_of(llm, prompts, GREEDY), strict=True):
        logprobs = oracle_logprobs(model, p + tokens)
        for at, token in enumerate(tokens, start=len(p) - 1):
            first, second = np.sort(logprobs[at])[::-1][:2]
            assert token == logprobs[at].argmax() or first - second < 1e-4, (
                f"position {at} of prompt {len(p)}"
            )


def test_logprobs_of_output_and_prompt_equal_the_dense_forward(llm, model):
    p = prompt(3, 90)
    params = SamplingParams(
        temperature=0, max_tokens=5, ignore_eos=True, logprobs=4, prompt_logprobs=2
    )
    answer = llm.generate([p], params)[0]
    done = answer.outputs[0]
    expected = oracle_logprobs(model, p + done.token_ids)
    assert answer.prompt_logprobs is not None and answer.prompt_logprobs[0] is None
    assert len(answer.prompt_logprobs) == len(p) and len(done.logprobs) == 5
    for at, entry in enumerate([*answer.prompt_logprobs[1:], *done.logprobs]):
        token = (p + done.token_ids)[at + 1]
        assert entry.logprob == pytest.approx(expected[at, token], abs=1e-4)
        n = 2 if at + 1 < len(p) else 4
        assert len(entry.top_ids) == n
        np.testing.assert_allclose(entry.top_logprobs, np.sort(expected[at])[::-1][:n], atol=1e-4)


class FailingSteps:
    """Makes steps of an engine fail: before the executable was called, after it had taken the state
    by donation, or when their result is fetched.
    """

    def __init__(self, runner: Any, how: str, monkeypatch: pytest.MonkeyPatch):
        self.how = how
        #: Which steps of several sequences fail, counted from 1; and the first token of prompts
        #: that make any step fail.
        self.steps: set[int] = set()
        self.poison = -1
        self.failures = 0
        self._count = 0
        self._bad: list[Any] = []
        self._launch, self._fetch = runner.launch, runner.fetch
        monkeypatch.setattr(runner, "launch", self.launch)
        monkeypatch.setattr(runner, "fetch", self.fetch)

    def launch(self, batch: Any) -> Any:
        crowded = len(batch.plan.chunks) > 1
        self._count += crowded
        poisoned = any(chunk.seq.tokens[0] == self.poison for chunk in batch.plan.chunks)
        fails = poisoned or (crowded and self._count in self.steps)
        if fails and self.how == "before":
            self.fail()
        launched = self._launch(batch)
        if fails and self.how == "donated":
            self.fail()
        if fails:
            self._bad.append(launched)
        return launched

    def fetch(self, launched: Any) -> Any:
        if any(bad is launched for bad in self._bad):
            self.fail()
        return self._fetch(launched)

    def fail(self) -> None:
        self.failures += 1
        raise RuntimeError("asked to fail")


@pytest.mark.parametrize("how", ["before", "donated", "fetched"])
def test_a_failed_step_loses_no_token(llm, how, monkeypatch):
    """The device's state is made anew: pages, tokens on the device, and counts for penalties."""
    prompts = [prompt(40 + i, n) for i, n in enumerate((5, 40, 70, 17))]
    params = [GREEDY, SEEDED, SPECIAL, GREEDY]
    want = alone(llm, prompts, params)
    compiles = llm.core.runner.compiles
    steps = FailingSteps(llm.core.runner, how, monkeypatch)
    steps.steps = {2, 9, 14}
    answers = llm.generate(prompts, params)
    assert [answer.outputs[0].token_ids for answer in answers] == want
    assert steps.failures == 3 and llm.core.runner.compiles == compiles


@pytest.mark.parametrize("how", ["before", "donated", "fetched"])
def test_a_request_that_fails_every_step_ends_alone(llm, how, monkeypatch):
    prompts = [prompt(50 + i, 20) for i in range(3)]
    want = alone(llm, prompts, GREEDY)
    steps = FailingSteps(llm.core.runner, how, monkeypatch)
    steps.poison = 3
    prompts.insert(1, [3, *prompt(60, 9)])
    answers = llm.generate(prompts, GREEDY)
    bad = answers.pop(1)
    assert bad.error is not None and bad.error.code == "request_failed"
    assert [answer.outputs[0].token_ids for answer in answers] == want
    assert all(tokens[0] != 3 for tokens in prompts[2:])


def same_scores(model: Model, ids: list[int], entries: Any, most: int) -> None:
    """Each token of a prompt given all before it, as the dense forward has it."""
    expected = oracle_logprobs(model, ids)
    assert entries[0] is None and len(entries) == len(ids)
    for at, entry in enumerate(entries[1:]):
        assert entry.logprob == pytest.approx(expected[at, ids[at + 1]], abs=1e-4)
        np.testing.assert_allclose(
            entry.top_logprobs, np.sort(expected[at])[::-1][:most], atol=1e-4
        )


def test_scored_prompts_equal_the_dense_forward_however_they_are_cut(llm, model):
    """At the edges of chunks and pages, several in one step, beside decoding streams, and with
    prefix hits.
    """
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    base = prompt(500, 80)
    prompts = [prompt(501 + n, n) for n in (1, 2, 63, 64, 65, 130)]
    prompts += [base, base + prompt(510, 7), base[:48], base[:33] + prompt(511, 40)]
    for _ in range(2):  # the second time from what is known
        steps, before = llm.core.ledger.steps, llm.core.ledger.totals["prefill"]
        answers = llm.generate([*prompts, prompt(520, 9)], [params] * len(prompts) + [GREEDY])
        for ids, answer in zip(prompts, answers, strict=False):
            same_scores(model, ids, answer.prompt_logprobs, 3)
        rows = llm.core.ledger.totals["prefill"] - before
    # Of each prompt of more than two pages, all but the last page that is known and what follows
    # it.
    assert rows < 250 and llm.core.ledger.steps - steps < 40


def test_a_prompt_row_whose_logits_are_not_needed_must_be_finite(llm):
    """An embedding that is not finite, read in one of the first two of four chunks: the attention
    of later rows may or may not carry it on. The pages are not shared once the weights are whole
    again."""
    ids = [*prompt(540, 20), 401, *prompt(541, 200)]
    runner = llm.core.runner
    leaf = next(i for i, leaf in enumerate(runner.leaves) if leaf.shape == (VOCAB, 64))
    embed = runner.leaves[leaf]
    steps = llm.core.scheduler.steps
    runner.leaves[leaf] = embed.at[401].set(jnp.inf)
    try:
        bad, good = llm._request(ids, GREEDY), llm._request(prompt(542, 10), GREEDY)
        llm.core.add(bad)
        llm.core.add(good)
        outputs = llm.core.run_until_idle()
    finally:
        runner.leaves[leaf] = embed
    ends = {output.request_id: output for output in outputs if output.finish}
    assert ends[bad.id].error.code == "nan_logits" and ends[good.id].finish == "length"
    records = llm.core.ledger.since(steps)
    assert records["prefill"].sum() + records["cancelled"].sum() < 200, (
        "computed on though a chunk was broken"
    )
    assert llm.generate([ids], GREEDY)[0].cached_tokens == 0


def test_alone_and_in_a_crowd_of_32_of_every_kind(llm):
    prompts = [prompt(i, 3 + 5 * i) for i in range(32)]
    kinds = list(itertools.islice(itertools.cycle([GREEDY, SEEDED, SPECIAL]), 32))
    crowd = tokens_of(llm, prompts, kinds)
    picked = [0, 1, 5, 9, 16, 17, 30, 31]
    ours, own = ([of[i] for i in picked] for of in (prompts, kinds))
    assert [crowd[i] for i in picked] == alone(llm, ours, own)
    assert len({tuple(tokens) for tokens in crowd}) > 16


@pytest.mark.skipif(not packs_here(), reason="this CPU's weights are not packed in pairs")
@pytest.mark.parametrize("weights", ["plain", "int8"])
def test_bfloat16_gives_the_same_answer_in_every_bucket(weights: str):
    """Alone, in a crowd of 32 and in other chunks. A sum that was rounded elsewhere would move a
    log-probability by 1e-3; the last bit of it is XLA's, which adds up the vocabulary of fewer than
    8 rows in another order."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)
    prompts = [prompt(300 + i, 3 + 3 * i) for i in range(40)]

    def answers(**settings: Any) -> tuple[list[list[int]], np.ndarray]:
        kept: dict[str, Any] = {"dtype": "bfloat16", "weights": weights, "max_seats": 32}
        options: dict[str, Any] = SETTINGS | kept | settings
        engine = when_used("tiny-random", **options)
        done = engine.generate(prompts, params) + [
            engine.generate([one], params)[0] for one in prompts[::7]
        ]
        completions = [answer.outputs[0] for answer in done]
        return (
            [list(c.token_ids) for c in completions],
            np.array([[entry.logprob for entry in c.logprobs or ()] for c in completions]),
        )

    tokens, logprobs = answers(seat_buckets=[1, 32], token_buckets=[64])
    others, other_logprobs = answers(seat_buckets=[32], token_budget=40, token_buckets=[40])
    assert tokens == others and tokens[40:] == tokens[:40:7]
    np.testing.assert_allclose(logprobs, other_logprobs, rtol=0, atol=2e-6)
    np.testing.assert_allclose(logprobs[40:], logprobs[:40:7], rtol=0, atol=2e-6)


@pytest.mark.usefixtures("rash")
@pytest.mark.parametrize(
    "settings",
    [
        {
            "max_seats": 32,
            "token_budget": 600,
            "seat_buckets": [32],
            "token_buckets": [600],
        },  # all prompts in one chunk
        {
            "page_size": 8,
            "max_seats": 3,
            "token_budget": 33,
            "seat_buckets": [3],
            "token_buckets": [33],
        },  # odd edges
        {
            "pages": 20,
            "prefill_share": 1.0,
        },  # for about two sequences: preemption, and cached pages to evict
    ],
    ids=str,
)
def test_chunks_pages_and_preemption_change_nothing(llm, settings):
    prompts = [prompt(i, 40 + 7 * i) for i in range(8)]
    kinds = [GREEDY, SEEDED, SPECIAL, GREEDY] * 2
    expected = alone(llm, prompts, kinds)
    other = when_used("tiny-random", **(SETTINGS | settings))
    assert tokens_of(other, prompts, kinds) == expected
    other.core.check()
    totals = other.core.ledger.totals
    assert (totals["preempted"] > 0) == ("pages" in settings)
    assert (totals["recomputed"] > 0) == ("pages" in settings)


def test_prefix_hits_save_rows_and_change_nothing():
    base = prompt(7, 100)
    prompts = [base + prompt(50 + i, 9) for i in range(4)]
    cold = when_used("tiny-random", **SETTINGS, prefix_cache=False)
    warm = when_used("tiny-random", **SETTINGS)
    expected = alone(cold, prompts, GREEDY)
    assert alone(warm, prompts, GREEDY) == expected
    assert warm.generate([prompts[0]], GREEDY)[0].cached_tokens == 96
    assert cold.core.ledger.totals["prefill"] == 4 * 109
    assert warm.core.ledger.totals["prefill"] == 109 + 3 * 13 + 13


@pytest.mark.skipif(not packs_here(), reason="this CPU's weights are not packed in pairs")
def test_in_bfloat16_the_next_turn_has_the_same_answer_after_any_other():
    """A prompt that begins with another's answer finds that one's prompt alone: the answer's own
    pages, computed by decode steps, may hold other bits. Those of this prompt do.
    """
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=2)

    def next_turn(**settings: Any) -> tuple[int, list[int], list[float]]:
        options: dict[str, Any] = SETTINGS | {"dtype": "bfloat16", "context": 512} | settings
        engine = when_used("tiny-random", **options)
        first = engine.generate([prompt(15, 100)], params)[0]
        talk = first.prompt_ids + first.outputs[0].token_ids + prompt(16, 9)
        answer = engine.generate([talk], params)[0]
        done = answer.outputs[0]
        logprobs = [entry.logprob for entry in done.logprobs or ()]
        return answer.cached_tokens, done.token_ids, logprobs

    _, cold_tokens, cold = next_turn(prefix_cache=False)
    found, tokens, logprobs = next_turn()
    assert found == 96 and tokens == cold_tokens
    np.testing.assert_allclose(logprobs, cold, rtol=0, atol=2e-6)
    found, _, logprobs = next_turn(share_outputs="on")
    assert found == 192 and np.abs(np.subtract(logprobs, cold)).max() > 2e-6


def test_siblings_share_the_prompt_and_differ(llm):
    params = SamplingParams(n=4, temperature=1.2, seed=3, max_tokens=12, ignore_eos=True)
    before = llm.core.ledger.totals["prefill"]
    p = prompt(77, 50)
    answer = llm.generate([p], params)[0]
    assert (
        llm.core.ledger.totals["prefill"] - before == 50 + 3 * 2
    )  # 48 of 50 tokens are whole pages
    texts = [tuple(done.token_ids) for done in answer.outputs]
    assert len(set(texts)) == 4
    assert [tuple(done.token_ids) for done in llm.generate([p], params)[0].outputs] == texts


def test_aborted_neighbours_and_reused_seats_change_nothing(llm):
    prompts = [prompt(200 + i, 30) for i in range(6)]
    expected = alone(llm, prompts, SEEDED)
    streams = [llm.stream(prompt(300 + i, 50), GREEDY) for i in range(3)]
    for stream in streams:
        next(stream)
        stream.close()
    assert tokens_of(llm, prompts, SEEDED) == expected


def test_stop_string_ends_text_and_sequence(llm):
    p = prompt(9, 12)
    whole = llm.generate([p], GREEDY)[0].outputs[0]
    stop = whole.text[5:7]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(stop,))
    cut = llm.generate([p], params)[0].outputs[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop) == ("stop", stop)
    assert len(cut.token_ids) < len(whole.token_ids)
    assert "".join(llm.stream(p, params)) == cut.text


@pytest.mark.parametrize(
    "bad,param",
    [
        ({"temperature": 3.0}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"logit_bias": {512: 1.0}}, "logit_bias"),
        ({"max_tokens": 300}, "max_tokens"),
    ],
)
def test_bad_parameters_name_their_field(llm, bad, param):
    with pytest.raises(RequestError) as caught:
        llm.generate([prompt(0, 4)], SamplingParams(**bad))
    assert caught.value.info.param == param


def levels_that_run() -> list[str]:
    """Of the native kernels, on this machine, greatest first; none without a compiler."""
    if next(build._compilers(), None) is None:
        return []
    try:
        return [level.name for level in build.Level.here()]
    except build.BuildError:
        return []


def kernels_of(level_name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a kernel set whose native kernels, if it is of those, are of that level.

    Of the levels that this CPU runs, the one that it is served at, and the reference where it runs
    none; the others, half a minute each, with JITNEY_TEST_COMPILE=1.
    """
    here = [*levels_that_run(), "reference"]
    if level_name not in here:
        pytest.skip(f"no library for {level_name} here")
    if level_name != here[0] and os.environ.get("JITNEY_TEST_COMPILE") != "1":
        pytest.skip("half a minute a level: JITNEY_TEST_COMPILE=1")
    if level_name == "reference":
        return level_name
    level = next(level for level in build._LEVELS if level.name == level_name)
    build.build([level])
    loaded = library._opened(level)
    monkeypatch.setattr(library, "load", lambda: loaded)
    return "native"


KERNELS = ["reference", *(level.name for level in build._LEVELS)]


@pytest.mark.parametrize("kernels", KERNELS[1:])
def test_the_first_question_is_answered_rightly(smollm2, kernels, monkeypatch):
    """By native kernels: greedy, with and without the model's own penalty, and as whoever says
    nothing of sampling is answered. In float32 the best two first tokens are 0.1 apart.
    """
    engine = when_used(
        "smollm2-135m",
        dtype="bfloat16",
        kernels=kernels_of(kernels, monkeypatch),
        **EIGHT_SEATS,
    )
    asked = engine.chat_ids([{"role": "user", "content": "What is the capital of France?"}])
    own = msgspec.structs.replace(engine.default_params(), max_tokens=16)
    params = [
        msgspec.structs.replace(own, temperature=0.0),
        SamplingParams(temperature=0.0, max_tokens=16),
        *(msgspec.structs.replace(own, seed=seed) for seed in range(6)),
    ]
    for answer in engine.generate([asked] * len(params), params):
        assert "Paris" in answer.outputs[0].text


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_default_model_equals_the_reference(smollm2, reference, kernels, monkeypatch):
    """The first 24 tokens of all continuations in one batch, token for token unless the reference's
    own best two were within 1e-3.

    docs/benchmarks/greedy_reference.py does it with all levels, and for other CPUs' names too.
    """
    name = kernels_of(kernels, monkeypatch)
    engine = when_used(
        "smollm2-135m",
        dtype="float32",
        kernels=name,
        **EIGHT_SEATS,
    )
    assert engine.info.kernels.label == (
        "reference" if name == "reference" else f"native ({kernels})"
    )
    runner: Any = engine.core.runner
    runner.leaves = [
        leaf.astype(jnp.bfloat16).astype(jnp.float32) for leaf in runner.leaves
    ]  # as the reference's
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=5)
    for item, answer in zip(
        reference, engine.generate([i["prompt_ids"] for i in reference], params), strict=True
    ):
        done = answer.outputs[0]
        assert len(done.token_ids) == 24
        for at, (token, top5) in enumerate(zip(done.token_ids, item["top5"], strict=False)):
            if token != item["output_ids"][at]:
                assert top5["logprobs"][0] - top5["logprobs"][1] < 1e-3, (
                    f"token {at} after {item['prompt']!r}"
                )
                break
            assert done.logprobs is not None
            np.testing.assert_allclose(done.logprobs[at].top_logprobs, top5["logprobs"], atol=2e-3)


def test_a_prompt_that_is_too_long_is_refused_before_anything_runs(llm):
    """Of eleven, the last: the others are not left running."""
    prompts = [prompt(700 + i, 20) for i in range(10)] + [prompt(710, 256)]
    steps = llm.core.ledger.steps
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, GREEDY)
    assert (caught.value.info.code, caught.value.info.param) == (
        "context_length_exceeded",
        "prompt",
    )
    assert not llm.core.has_work and llm.core.ledger.steps == steps


def test_more_prompts_than_may_wait_are_all_answered():
    engine = when_used("tiny-random", **SETTINGS, max_waiting_requests=2, max_waiting_tokens=64)
    prompts = [prompt(720 + i, 30 + i) for i in range(12)]
    answers = engine.generate(prompts, GREEDY)
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [24] * 12


def test_an_interrupted_generate_leaves_nothing_running(llm):
    fetch, calls = llm.core.runner.fetch, itertools.count()

    def interrupted(launched):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return fetch(launched)

    expected = tokens_of(llm, [prompt(740, 9)], GREEDY)
    llm.core.runner.fetch = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt(730 + i, 20) for i in range(12)], GREEDY)
    finally:
        llm.core.runner.fetch = fetch
    assert not llm.core.has_work
    assert tokens_of(llm, [prompt(740, 9)], GREEDY) == expected


def test_a_request_that_fails_while_it_runs_changes_no_other_answer(llm):
    prompts = [prompt(750 + i, 20) for i in range(3)]
    expected = alone(llm, [prompts[0], prompts[2]], GREEDY)
    leaf = next(i for i, leaf in enumerate(llm.core.runner.leaves) if leaf.shape == (VOCAB, 64))
    embed = llm.core.runner.leaves[leaf]
    llm.core.runner.leaves[leaf] = embed.at[402].set(jnp.nan)
    try:
        answers = llm.generate([prompts[0], [*prompts[1], 402], prompts[2]], GREEDY)
    finally:
        llm.core.runner.leaves[leaf] = embed
    assert [answers[0].outputs[0].token_ids, answers[2].outputs[0].token_ids] == expected
    assert answers[1].error is not None and answers[1].error.code == "nan_logits"
    assert answers[1].outputs[0].finish_reason == "error"


def test_token_ids_outside_the_vocabulary_are_refused(llm):
    with pytest.raises(RequestError, match="0 to 511"):
        llm.generate([[1, 512]], GREEDY)


def test_tokens_that_may_not_come_do_not_come(llm: LLM):
    def tokens(**rules: Any) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, **rules)
        [found] = tokens_of(llm, [[5, 6, 7]], params)
        return found

    free = tokens()
    assert len(free) == 12
    assert set(tokens(allowed_token_ids=tuple(range(60, 70)))) <= set(range(60, 70))
    banned = tokens(banned_sequences=((free[0],), (free[1], free[2])))
    assert len(banned) == 12 and free[0] not in banned
    assert (free[1], free[2]) not in itertools.pairwise(banned)


@pytest.mark.parametrize(
    ("settings", "is_free"),
    [
        ({"dtype": "bfloat16"}, True),
        ({"weights": "int4"}, False),
        ({}, False),  # products of more than eight rows are XLA's
        ({"product_rows": 64}, True),
    ],
    ids=str,
)
def test_an_engine_says_whether_rows_of_padding_are_multiplied(
    settings: dict[str, Any], is_free: bool
):
    if is_free and not packs_here():
        pytest.skip("no native kernels that pack weights here")
    engine = when_used("tiny-random", **{**SETTINGS, **settings})
    assert engine.info.sizes.padding_is_free == is_free
    assert engine.core.scheduler.buckets.padding_is_free == is_free


@pytest.mark.parametrize("weights", ["plain", "int8"])
def test_an_engine_says_what_its_steps_cost_and_the_device_can_do(
    weights: str, monkeypatch: pytest.MonkeyPatch
):
    """Products of rows rounded to int8 are not those that were measured."""
    monkeypatch.setattr(building, "_LEAST_MEASURED_BYTES", 0)
    monkeypatch.setattr(ceiling, "_READ_BYTES", {True: 1 << 20, False: 1 << 20})
    monkeypatch.setattr(ceiling, "_PRODUCT", {True: (16, 128), False: (16, 128)})
    engine = when_used("tiny-random", **SETTINGS, weights=weights)
    cost, most = engine.info.step_cost, engine.info.ceiling
    rounds = weights == "int8" and engine.core.runner.programs.step.kernels.int8 is not None  # type: ignore[attr-defined]
    engine.close()
    assert cost is not None and most is not None and most.bytes_s > 0
    assert (most.operations_s is None) == rounds
    assert (1 if weights == "int8" else 4) <= cost.weight_bytes < 5
