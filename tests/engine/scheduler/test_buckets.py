"""Bucket choice: what a step pads to, and when a prompt is worth splitting over two steps."""

import pytest

from jitney.engine.scheduler.buckets import Bucket, make_buckets

BUCKETS = make_buckets(max_seats=32, token_budget=512)


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
    assert BUCKETS.thrifty(rows, count, riders) == expected


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
    buckets = make_buckets(max_seats=seats, token_budget=4 * seats + 1, on_device=True)
    assert [b.seats for b in buckets.decode] == sizes
    assert buckets.mixed == make_buckets(max_seats=seats, token_budget=4 * seats + 1).mixed
    explicit = make_buckets(max_seats=8, token_budget=100, seat_sizes=(2,), on_device=True)
    assert [b.seats for b in explicit.decode] == [2, 8]


def test_explicit_sizes_replace_the_powers_of_two_and_keep_the_limits():
    buckets = make_buckets(max_seats=6, token_budget=100, seat_sizes=(2,), token_sizes=(50,))
    assert [str(b) for b in buckets.all()] == ["decode-2", "decode-6", "mixed-50", "mixed-100"]
