"""Which program chooses for how many rows."""

from __future__ import annotations

import pytest

from jitney.engine.core.executor.choices import Choices


@pytest.mark.parametrize(
    ("seats", "sizes"),
    [(1, [1]), (4, [4]), (5, [1, 5]), (8, [1, 8]), (32, [1, 8, 32]), (100, [1, 8, 64, 100])],
)
def test_one_row_costs_one_row_and_all_seats_fit(seats: int, sizes: list[int]):
    choices = Choices(seats)
    assert choices.sizes == sizes
    for rows in range(1, seats + 1):
        size = choices.size(rows)
        assert size >= rows and size < max(8 * rows, 5)


def test_a_step_has_the_programs_that_its_rows_can_need():
    choices = Choices(32)
    assert [choices.sizes_for(rows) for rows in (1, 4, 8, 16, 32)] == [
        [1],
        [1, 8],
        [1, 8],
        [1, 8, 32],
        [1, 8, 32],
    ]
