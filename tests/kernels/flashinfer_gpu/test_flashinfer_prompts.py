"""The step's metadata in FlashInfer's form: beside what FlashInfer's own compiled code plans, and
read by a reader of that form, whence attention comes out, for every row of a prompt once.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flashinfer_reader import attend_by
from places import DATA
from ragged import Batch, Case, attention, make

from jitney.kernels.flashinfer_gpu.prompts import (
    _dealt,
    _hopper_plan,
    _page_lists,
    _PageLists,
    _tiled_plan,
)
from jitney.kernels.interface import AttentionMeta

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

MIXED = Case((4, 2, 64), (5, 90), ((420, 250), (17, 3), (9, 1)), rows=270, seqs=6, pages=32)
CASES = {
    "mixed": MIXED,
    "prompts alone": Case((2, 2, 128), (), ((300, 300), (160, 129)), rows=440, seqs=3, page=32),
    "a prompt's only row": Case((4, 1, 64), (3, 7), ((40, 1),), rows=8, seqs=4),
    "window": replace(MIXED, window=24),
    "softcap": replace(MIXED, softcap=5.0),
    "wide heads, few rows": Case((2, 2, 256), (300,), ((100, 12),), rows=16, seqs=2),
    "nobody": Case((4, 2, 64), (3, 7), (), rows=8, seqs=4),
}
#: More than there are tiles in some cases, fewer in others.
PROCESSORS = (3, 132)


def planned(
    template: str, batch: Batch, processors: int
) -> tuple[tuple[np.ndarray, tuple[int, ...]], _PageLists]:
    """(workspace and fields of the plan, page lists) that a step computes for the batch."""
    n_rows, n_heads, head_dim = batch.q.shape
    page, rows = batch.kv.shape[1:3]
    fields: list[tuple[int, ...]] = []

    def compute(meta: AttentionMeta) -> tuple[jax.Array, _PageLists]:
        if template == "fa3":
            plan = _hopper_plan(meta, n_rows, n_heads, head_dim, processors)
        else:
            plan = _tiled_plan(meta, n_rows, n_heads // (rows // 2), head_dim)
        fields.append(plan.fields)
        return plan.workspace, _page_lists(meta, page)

    workspace, lists = jax.tree.map(np.asarray, jax.jit(compute)(batch.meta))
    return (workspace, fields[0]), lists


def run(template: str, batch: Batch, processors: int) -> np.ndarray:
    """o [T, H, D] as FlashInfer would leave it; NaN where nothing was written."""
    plan, lists = planned(template, batch, processors)
    return attend_by(
        template,
        plan,
        lists,
        batch.q,
        batch.kv,
        batch.options,
        nobodys=np.nan,
        processors=processors,
    )


def prompt_rows(batch: Batch) -> slice:
    """Those that do not decode."""
    return slice(int(batch.meta.cu_q[int(batch.meta.counts[0])]), batch.n_rows)


THEIRS: dict[str, Any] = json.loads((DATA / "flashinfer_plans.json").read_text())


def planned_as(theirs: dict[str, Any], template: str) -> tuple[np.ndarray, tuple[int, ...]]:
    """(int32 words, fields) that a step computes for a case that FlashInfer planned."""
    sizes = {name: theirs[name] for name in ("rows", "seqs", "page", "pages")}
    prompts = tuple(map(tuple, theirs["prompts"]))
    batch = make(Case(tuple(theirs["heads"]), (), prompts, **sizes))
    (workspace, fields), _ = planned(template, batch, THEIRS["processors"])
    return workspace, fields


@pytest.mark.parametrize("theirs", THEIRS["cases"], ids=lambda case: str(case["heads"]))
def test_tiles_are_those_that_flashinfer_plans(theirs: dict[str, Any]):
    words, fields = planned_as(theirs, "fa2")
    wanted = theirs["fa2"]
    assert (fields[3], list(fields[13:])) == (wanted["rows_of_tile"], wanted["flags"])
    assert words.view(np.uint8)[fields[12] :][: fields[0]].sum() == len(wanted["tiles"])
    places = {"total": 2, "requests": 4, "tiles": 5, "parts": 6, "outputs": 8}
    for name, place in places.items():
        assert words[fields[place] // 4 :][: len(wanted[name])].tolist() == wanted[name], name


@pytest.mark.parametrize("theirs", THEIRS["cases"], ids=lambda case: str(case["heads"]))
def test_works_are_those_that_flashinfer_plans_dealt_nearly_as_well(theirs: dict[str, Any]):
    words, fields = planned_as(theirs, "fa3")
    wanted = theirs["fa3"]
    assert list(fields) == wanted["fields"]
    bounds = words[fields[6] // 4 :][: len(wanted["bounds"])].tolist()
    lists = [words[fields[at] // 4 :][: bounds[-1]].tolist() for at in (0, 1, 2, 3, 4, 5, 7)]
    works = list(zip(*lists, strict=True))
    assert sorted(works) == sorted(map(tuple, wanted["works"]))
    busiest = max(_keys(works, bounds, theirs))
    assert busiest <= 1.2 * max(_keys(wanted["works"], wanted["bounds"], theirs))


def _keys(works: list[Any], bounds: list[int], theirs: dict[str, Any]) -> list[int]:
    """What each processor's works cost by FlashInfer's own measure: keys, and twice the rows."""
    tile_rows = 192 if theirs["heads"][2] == 64 else 128
    costs = []
    for begin, end in pairwise(bounds):
        cost = 0
        for tile, _, _, rows, length, _, _ in works[begin:end]:
            cost += 2 * tile_rows + min(length, length - rows + (tile + 1) * tile_rows)
        costs.append(cost)
    return costs


@pytest.mark.parametrize(
    ("template", "processors", "name"),
    [
        *(("fa2", 0, name) for name in CASES),
        *(("fa3", few, name) for few, name in zip(PROCESSORS * 4, CASES, strict=False)),
        ("fa3", 132, "mixed"),
    ],
)
def test_a_reader_of_its_form_attends_to_every_row_of_prompts(
    template: str, processors: int, name: str
):
    batch = make(CASES[name])
    o = run(template, batch, processors)
    rows = prompt_rows(batch)
    np.testing.assert_allclose(o[rows], attention(batch, batch.kv)[rows], atol=2e-6)
    assert np.isnan(o[: rows.start]).all() and np.isnan(o[rows.stop :]).all()


def test_processors_get_as_many_keys_as_each_other():
    """Tiles of one long prompt on three processors: the busiest has a tenth more than its share."""
    batch = make(Case((8, 2, 128), (), ((3000, 3000),), rows=3000, seqs=1, pages=188))
    (workspace, fields), _ = planned("fa3", batch, 3)
    tiles, bounds = fields[0], fields[6]
    begins = workspace[bounds // 4 :][:4]
    keys = [
        sum(min(128 * (int(tile) + 1), 3000) for tile in workspace[tiles // 4 :][begin:end])
        for begin, end in pairwise(begins)
    ]
    assert begins[-1] == 24 * 8
    assert max(keys) < 1.1 * sum(keys) / 3


@pytest.mark.parametrize("count", [0, 4, 5, 9, 14])
def test_every_piece_is_dealt_once(count: int):
    bounds, pieces = map(np.asarray, _dealt(jnp.int32(count), 14, 5))
    assert sorted(pieces[:count].tolist()) == list(range(count))
    sizes = np.diff(bounds)
    assert bounds[0] == 0 and bounds[-1] == count
    assert sizes.max() - sizes.min() <= 1


def test_every_second_round_goes_back():
    bounds, pieces = map(np.asarray, _dealt(jnp.int32(8), 8, 3))
    dealt = [pieces[a:b].tolist() for a, b in pairwise(bounds)]
    assert dealt == [[0, 5, 6], [1, 4, 7], [2, 3]]


def test_lists_begin_where_flashinfer_aligns_them():
    for template in ("fa2", "fa3"):
        (workspace, fields), _ = planned(template, make(MIXED), 7)
        offsets = fields[:8] if template == "fa3" else fields[4:7]
        assert all(offset % 16 == 0 for offset in offsets)
        assert max(offsets) < workspace.nbytes
