"""The table of row kinds against the records that count them."""

from __future__ import annotations

import re

from jitney.engine.common.records import ROW_KINDS
from jitney.engine.common.row_kinds import ROW_KIND_TABLE


def test_the_table_has_every_kind_of_the_records_in_their_order():
    assert tuple(ROW_KIND_TABLE) == ROW_KINDS
    assert [kind.name for kind in ROW_KIND_TABLE.values()] == list(ROW_KIND_TABLE)


def test_no_two_kinds_look_alike():
    kinds = list(ROW_KIND_TABLE.values())
    for colours in ({kind.light for kind in kinds}, {kind.dark for kind in kinds}):
        assert len(colours) == len(kinds)
        assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)
    waste = [kind for kind in kinds if not kind.useful]
    assert len({kind.pattern for kind in waste} - {""}) == len(waste)
