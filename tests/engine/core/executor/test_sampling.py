"""The sampler against numpy: which tokens may come, how often, and under which
log-probabilities.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import parse
from memory_traffic import account

from jitney.engine.common.requests import REQUEST_MOST, SamplingParams
from jitney.engine.core.executor.inputs import SAMPLING
from jitney.engine.core.executor.sampling import (
    _IN_PROMPT,
    Sampled,
    Sampler,
    SamplingRows,
    SeatState,
    score_rows_at_once,
    threshold,
)
from jitney.engine.core.executor.vocabulary import Vocabulary

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

VOCAB = 600
SEATS = 4


@jax.jit
def run(logits: jax.Array, rows: SamplingRows, state: SeatState) -> tuple[Sampled, SeatState]:
    """A step's tokens, and what is counted behind it."""
    sampled = Sampler().sample(logits, rows, state)
    return sampled, state.count_tokens(rows, sampled.tokens)


def rows_of(
    params: list[SamplingParams], seats: Sequence[int], *, seeds=None, positions=None
) -> SamplingRows:
    """One row per entry, of these seats (SEATS: none)."""
    n = len(params)
    packed = [SAMPLING.pack(p, seed) for p, seed in zip(params, seeds or [0] * n, strict=True)]
    words = np.frombuffer(b"".join(packed), np.int32).reshape(n, SAMPLING.words)
    columns = SAMPLING.columns(jnp.asarray(words))
    return SamplingRows(
        columns, jnp.asarray(positions or [0] * n, jnp.int32), jnp.asarray(seats, jnp.int32)
    )


def state_with(row: Sequence[np.ndarray], *, seat: int) -> SeatState:
    """One seat has this row, the others are empty."""
    columns = zip(SeatState.empty(SEATS, VOCAB), row, strict=True)
    return SeatState(*(column.at[seat].set(new) for column, new in columns))


def draw_many(logits: np.ndarray, params: SamplingParams, n: int = 4096) -> np.ndarray:
    """n draws from one row of logits, each with a seed of its own -> counts [V]."""
    rows = rows_of([params] * n, [SEATS] * n, seeds=list(range(n)))
    result, _ = run(jnp.tile(logits, (n, 1)), rows, SeatState.empty(SEATS, len(logits)))
    return np.bincount(np.asarray(result.tokens), minlength=len(logits))


def allowed(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p and min-p, the slow way."""
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    keep = np.zeros(len(p), bool)
    keep[order[: params.top_k or len(p)]] = True
    p = np.where(keep, p, 0) / p[keep].sum()
    before = np.cumsum(p[order]) - p[order]
    cut = order[before >= params.top_p]
    top = p.max()
    p[cut] = 0
    p[p < params.min_p * top] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, top_k=40, top_p=0.5, min_p=0.05),
        SamplingParams(temperature=2.0, min_p=0.2),
        SamplingParams(
            temperature=2.0, top_k=400, top_p=0.97
        ),  # more than the candidates: the search decides
        SamplingParams(temperature=2.0, top_p=0.97),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params):
    logits = np.random.default_rng(3).normal(0, 2, VOCAB).astype(np.float32)
    expected = allowed(logits.astype(np.float64), params)
    counts = draw_many(logits, params)
    assert counts[expected == 0].sum() == 0, "a token outside the limits came up"
    common = expected > 5 / counts.sum()
    chi2 = (
        (counts - counts.sum() * expected)[common] ** 2 / (counts.sum() * expected[common])
    ).sum()
    degrees = common.sum()
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees) + 5, (chi2, degrees)


def test_greedy_is_argmax_and_a_nan_row_is_minus_one():
    logits = np.random.default_rng(0).normal(size=(3, VOCAB)).astype(np.float32)
    logits[1, 17] = np.nan
    expected = [logits[0].argmax(), -1, logits[2].argmax()]
    np.testing.assert_array_equal(Vocabulary().greedy(jnp.asarray(logits)), expected)
    rows = rows_of([SamplingParams(temperature=t) for t in (0, 1, 0)], range(3))
    result, _ = run(logits, rows, SeatState.empty(SEATS, VOCAB))
    np.testing.assert_array_equal(result.tokens, expected)


def test_a_row_depends_on_seed_and_position_alone():
    rng = np.random.default_rng(5)
    logits = rng.normal(size=VOCAB).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_p=0.9)

    def token(neighbours: int, at: int, seed: int, position: int) -> int:
        block = rng.normal(size=(neighbours, VOCAB)).astype(np.float32)
        block[at] = logits
        others = [SamplingParams(temperature=1.5, top_k=3, logprobs=2)] * neighbours
        others[at] = params
        seeds, positions = (
            rng.integers(0, 99, neighbours).tolist(),
            rng.integers(0, 99, neighbours).tolist(),
        )
        seeds[at], positions[at] = seed, position
        rows = rows_of(others, [SEATS] * neighbours, seeds=seeds, positions=positions)
        result, _ = run(block, rows, SeatState.empty(SEATS, VOCAB))
        return int(result.tokens[at])

    alone = [token(1, 0, seed, position) for seed in range(6) for position in range(4)]
    crowd = [token(32, 21, seed, position) for seed in range(6) for position in range(4)]
    assert alone == crowd
    assert len(set(alone)) > 4


def test_a_neighbour_with_penalties_changes_no_token():
    """Such a step runs another branch of the program."""
    logits = np.random.default_rng(5).normal(size=(32, VOCAB)).astype(np.float32)
    params = [SamplingParams(temperature=1.0, top_p=0.9, top_k=90 * (i % 2)) for i in range(31)]

    def tokens(neighbour: SamplingParams) -> list[int]:
        rows = rows_of([*params, neighbour], [SEATS] * 31 + [0], seeds=list(range(32)))
        result, _ = run(logits, rows, SeatState.empty(SEATS, VOCAB))
        return np.asarray(result.tokens)[:31].tolist()

    plain = tokens(SamplingParams())
    assert tokens(SamplingParams(presence_penalty=1.0)) == plain
    assert tokens(SamplingParams(logit_bias={3: 2.0})) == plain
    assert len(set(plain)) > 20


def test_logits_are_not_copied_where_no_row_has_penalties_or_biases():
    rows = rows_of([SamplingParams(temperature=1.0)] * 5, [SEATS] * 5)
    compiled = run.lower(jnp.zeros((5, VOCAB)), rows, SeatState.empty(SEATS, VOCAB)).compile()
    step = account(parse(compiled.as_text() or ""), lambda *_: (0.0, 0.0))
    assert step.made
    assert not [name for name, made in step.made if "copy" in name and made.dims == (5, VOCAB)]


def test_penalties_count_prompt_and_output_as_documented():
    params = SamplingParams(
        temperature=0,
        repetition_penalty=1.5,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logprobs=0,
    )
    prompt, output = [3, 5, 5], [7, 7, 3]
    row = SeatState.row(params, prompt + output, len(prompt), VOCAB, ())
    state = state_with(row, seat=2)
    logits = np.random.default_rng(1).normal(size=(1, VOCAB)).astype(np.float32)
    logits[0, [3, 5, 7]] = (9.0, -1.0, 9.1)
    expected = logits[0].copy()
    for token in {*prompt, *output}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token in output:
        expected[token] -= 0.3
    for token in set(output):
        expected[token] -= 0.4
    result, after = run(logits, rows_of([params], [2]), state)
    assert int(result.tokens[0]) == expected.argmax() == 3
    assert (np.asarray(after.counts)[2, 3] & 0xFF) == 2, "the sampled token was not counted"
    assert (np.asarray(after.counts)[[0, 1, 3]] == 0).all()
    raw = logits[0] - np.log(np.exp(logits[0]).sum())
    assert result.logprobs[0] == pytest.approx(raw[3], abs=1e-5), (
        "log-probabilities are the model's own"
    )


def test_bias_moves_and_min_tokens_bans_the_end_until_its_position():
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [2, 9, 11]] = (5.0, 4.0, 3.0)
    params = SamplingParams(
        temperature=0, logit_bias={11: 1.5}, min_tokens=3, stop_token_ids=(9,), max_tokens=9
    )
    row = SeatState.row(params, [1] * 10, 10, VOCAB, (2,))
    state = state_with(row, seat=0)

    def token(chunk_end: int) -> int:
        return int(
            run(logits, rows_of([params], [0], positions=[chunk_end - 1]), state)[0].tokens[0]
        )

    assert [token(end) for end in (10, 11, 12, 13)] == [11, 11, 11, 2]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Of each row, in float64."""
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide).sum(1, keepdims=True))


def test_logprobs_of_sampled_rows_are_exact():
    logits = np.random.default_rng(2).normal(size=(2, VOCAB)).astype(np.float32)
    params = SamplingParams(temperature=1.0, logprobs=5)
    result, _ = run(logits, rows_of([params, params], [SEATS, 1]), SeatState.empty(SEATS, VOCAB))
    expected = log_softmax(logits)
    np.testing.assert_allclose(
        result.logprobs, expected[[0, 1], np.asarray(result.tokens)], atol=1e-5
    )
    order = np.argsort(-expected, axis=1)[:, : REQUEST_MOST.logprobs]
    np.testing.assert_array_equal(result.top_ids, order)
    np.testing.assert_allclose(
        result.top_logprobs, np.take_along_axis(expected, order, 1), atol=1e-5
    )


def test_as_many_alternatives_as_the_engine_is_told_to_compute():
    logits = np.random.default_rng(2).normal(size=(2, VOCAB)).astype(np.float32)
    rows = rows_of([SamplingParams(temperature=0.0, logprobs=5)] * 2, [SEATS, 1])
    sampled = jax.jit(Sampler(width=37).sample)(
        jnp.asarray(logits), rows, SeatState.empty(SEATS, VOCAB)
    )
    order = np.argsort(-log_softmax(logits), axis=1)[:, :37]
    np.testing.assert_array_equal(sampled.top_ids, order)
    assert sampled.top_logprobs.shape == (2, 37)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 10])
def test_scored_rows_bring_exact_logprobs_block_by_block(count: int):
    """Of 10 rows, four at a time: no row is left out or computed for nothing, whatever the
    count.
    """
    logits = np.random.default_rng(2).normal(size=(12, VOCAB)).astype(np.float32)
    logits[7] = np.nan
    rows = np.array([3, 0, 11, 5, 4, 7, 8, 9, 1, 2], np.int32)
    targets = np.random.default_rng(3).integers(0, VOCAB, 10).astype(np.int32)
    computed: list[int] = []

    def logits_of(at: jax.Array) -> jax.Array:
        jax.debug.callback(lambda numbers: computed.extend(numbers.tolist()), at)
        return jnp.asarray(logits)[at]

    found = Sampler().score_prompt(
        logits_of, jnp.asarray(rows), jnp.asarray(targets), jnp.int32(count), 4
    )
    jax.effects_barrier()
    assert sorted(computed) == sorted([*rows, 0, 0][: -(-count // 4) * 4])
    assert found.logprobs.shape == (10,) and found.top_ids.shape == (10, REQUEST_MOST.logprobs)
    expected = log_softmax(logits[rows])
    np.testing.assert_allclose(
        found.logprobs[:count], expected[np.arange(count), targets[:count]], atol=1e-5
    )
    finite = [i for i in range(count) if rows[i] != 7]
    order = np.argsort(-expected, axis=1)[:, : REQUEST_MOST.logprobs]
    np.testing.assert_array_equal(np.asarray(found.top_ids)[finite], order[finite])
    assert np.isnan(np.asarray(found.logprobs)[:count][rows[:count] == 7]).all()


@pytest.mark.parametrize(
    ("rows", "vocab", "block"),
    [(512, 49_152, 256), (512, 151_936, 64), (96, 49_152, 96), (8192, 128_256, 512), (64, 512, 64)],
)
def test_logits_of_scored_rows_take_64_mib_or_a_sixteenth_of_the_step(
    rows: int, vocab: int, block: int
):
    assert score_rows_at_once(rows, vocab) == block
    assert block in (rows, rows // 16) or block * vocab * 4 <= 64 << 20


@pytest.mark.parametrize("count", [16_383, 16_384, 32_767, 32_768, 131_072])
def test_penalties_of_a_token_repeated_without_end(count: int):
    """Its count goes up by one at a time, in the state that a boarding seat gets and on the device;
    none overflows.
    """
    params = SamplingParams(
        temperature=0, frequency_penalty=0.01, presence_penalty=1.0, repetition_penalty=2.0
    )
    row = SeatState.row(params, [5] * (3 + count - 1), 3, VOCAB, ())
    state = state_with(row, seat=1)
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 5] = 9000.0
    rows = rows_of([params], [1])
    sampled, state = run(logits, rows, state)
    assert int(sampled.tokens[0]) == 5
    shaped = Sampler().shape_logits(jnp.asarray(logits), rows, state)
    np.testing.assert_allclose(shaped[0, 5], 4500.0 - 1.0 - 0.01 * count, rtol=1e-6)
    assert (
        int(state.counts[1, 5] & (_IN_PROMPT - 1)) == count and int(state.counts[1, 5]) > _IN_PROMPT
    )


def test_the_best_of_blocks_are_the_best_of_the_row():
    logits = np.round(np.random.default_rng(7).standard_normal((6, 5000)), 1).astype(
        np.float32
    )  # many ties
    logits[1], logits[2, 17:] = 0.0, -np.inf
    logits[3] = np.sort(logits[3])  # all of the best in the last block
    values, ids = jax.jit(Vocabulary().top, static_argnums=1)(logits, 20)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, order, 1))


def test_a_kernel_sets_own_cut_takes_the_searchs_place():
    params = [
        SamplingParams(temperature=1.0, top_p=0.9, top_k=3),
        SamplingParams(temperature=1.0),
    ] * 20
    rows = rows_of(params, [SEATS] * 40, seeds=list(range(40)))
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((40, VOCAB)), jnp.float32)

    def tokens(cut):
        step = jax.jit(Sampler(cut).sample)
        return np.asarray(step(logits, rows, SeatState.empty(SEATS, VOCAB)).tokens)

    np.testing.assert_array_equal(tokens(threshold), tokens(None))
    narrow = tokens(
        lambda scaled, top_k, top_p: jnp.zeros_like(top_p)
    )  # keeps nothing but the best of a row
    np.testing.assert_array_equal(narrow[::2], np.argmax(logits, 1)[::2])
    assert (narrow[1::2] != np.argmax(logits, 1)[1::2]).any()  # rows without limits ignore the cut
