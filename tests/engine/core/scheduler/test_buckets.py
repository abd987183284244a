"""Bucket choice: what a step pads to, and when a prompt is worth splitting over two steps."""

from dataclasses import replace

import pytest

from jitney.engine.core.scheduler.buckets import Bucket, Buckets

BUCKETS = Buckets.of(max_seats=32, token_budget=512)


def test_default_sizes():
    assert [b.tokens for b in BUCKETS.decode] == [1, 4, 8, 16, 32]
    assert [b.tokens for b in BUCKETS.mixed] == [64, 128, 256, 512]
    assert {b.seats for b in BUCKETS.mixed} == {32}
    assert BUCKETS.token_budget == 512


@pytest.mark.parametrize(
    "tokens,sequences,decode_only,logit_rows,expected",
    [
        (1, 1, True, 1, Bucket(1, 1)),
        (2, 2, True, 2, Bucket(4, 4)),
        (5, 5, True, 5, Bucket(8, 8)),
        (32, 32, True, 32, Bucket(32, 32)),
        (3, 1, False, 1, Bucket(64, 32)),
        (64, 32, False, 32, Bucket(64, 32)),
        (65, 2, False, 1, Bucket(128, 32)),
    ],
)
def test_the_smallest_that_holds_the_step(tokens, sequences, decode_only, logit_rows, expected):
    assert (
        BUCKETS.choose(
            tokens=tokens, sequences=sequences, decode_only=decode_only, logit_rows=logit_rows
        )
        == expected
    )


def test_nothing_lies_above_the_budget():
    with pytest.raises(ValueError, match="513 rows"):
        BUCKETS.choose(tokens=513, sequences=1, decode_only=False, logit_rows=1)


@pytest.mark.parametrize(
    "rows,count,riders,expected",
    [
        (31, 97, 31, 97),  # exactly 128: nothing to gain
        (31, 120, 31, 97),  # 128 + 64 rows instead of 256 + 32
        (31, 200, 31, 200),  # 256 + 32 instead of 128 + 256
        (0, 300, 0, 256),  # 256 + 64 instead of 512
        (0, 500, 0, 500),  # 512 instead of 256 + 256: as many rows, one step less
        (0, 40, 0, 40),  # no smaller bucket
        (511, 1, 31, 1),
    ],
)
def test_a_prompt_is_split_where_that_computes_fewer_rows(rows, count, riders, expected):
    assert BUCKETS.thrifty(rows, count, riders, riders + 1) == expected


def test_no_prompt_is_split_where_padding_is_free():
    buckets = replace(BUCKETS, padding_is_free=True)
    assert buckets.thrifty(31, 120, 31, 32) == 120 and buckets.thrifty(0, 300, 0, 1) == 300


@pytest.mark.parametrize(
    ("seats", "sizes"),
    [
        (1, [1]),
        (4, [1, 4]),
        (64, [1, 4, 16, 64]),
        (96, [1, 4, 16, 64, 96]),
        (256, [1, 4, 16, 64, 128, 192, 256]),
        (512, [1, 4, 16, 64, 128, 192, 256, 384, 512]),
    ],
)
def test_a_device_has_few_decode_sizes(seats: int, sizes: list[int]):
    buckets = Buckets.of(max_seats=seats, token_budget=4 * seats + 1, on_device=True)
    assert [b.seats for b in buckets.decode] == sizes
    explicit = Buckets.of(max_seats=8, token_budget=100, seat_sizes=(2,), on_device=True)
    assert [b.seats for b in explicit.decode] == [2, 8]


@pytest.mark.parametrize(
    ("seats", "budget", "mixed"),
    [
        (256, 2048, [(64, 16), (256, 64), (512, 256), (1024, 256), (2048, 256)]),
        (32, 1024, [(64, 32), (128, 32), (256, 32), (512, 32), (1024, 32)]),
        (16, 256, [(32, 16), (64, 16), (128, 16), (256, 16)]),
    ],
)
def test_a_device_has_small_steps_with_prompts(
    seats: int, budget: int, mixed: list[tuple[int, int]]
):
    buckets = Buckets.of(max_seats=seats, token_budget=budget, on_device=True)
    assert [(bucket.tokens, bucket.seats) for bucket in buckets.mixed] == mixed


def test_few_sequences_with_a_short_prompt_are_a_small_step():
    """23 rows and 4 logit rows where 512 and 256 were computed."""
    buckets = Buckets.of(max_seats=256, token_budget=2048, on_device=True)

    def chosen(tokens: int, sequences: int, logit_rows: int) -> Bucket:
        return buckets.choose(
            tokens=tokens, sequences=sequences, decode_only=False, logit_rows=logit_rows
        )

    assert chosen(23, 4, 4) == Bucket(64, 16)
    assert chosen(40, 17, 17) == Bucket(256, 64), "more sequences than its seats"
    assert chosen(40, 2, 30) == Bucket(256, 64), "a prompt that is scored"
    assert chosen(120, 100, 100) == Bucket(512, 256)
    assert [bucket.tokens for bucket in buckets.mixed_for(65)] == [512, 1024, 2048]
    assert buckets.mixed_for(1) == buckets.mixed
    assert buckets.mixed_for(1000) == buckets.mixed[2:], "never none"


def test_no_prompt_is_split_for_a_step_that_cannot_hold_its_sequences():
    buckets = Buckets.of(max_seats=256, token_budget=2048, on_device=True)
    # 64 rows and then 64 more, each with its few sequences, beside 256 and a step of 4 rows.
    assert buckets.thrifty(3, 70, 3, 4) == 61
    # Seventeen sequences fill no step of 64 rows.
    assert buckets.thrifty(16, 57, 16, 17) == 57


def test_explicit_sizes_replace_the_powers_of_two_and_keep_the_limits():
    buckets = Buckets.of(max_seats=6, token_budget=100, seat_sizes=(2,), token_sizes=(50,))
    assert [str(b) for b in buckets.all()] == ["decode-2", "decode-6", "mixed-50", "mixed-100"]
