"""Who attends to prompts, as a device's rows say, and the table that it is kept in."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from msgspec.structs import replace

from jitney.engine.common.errors import ConfigError
from jitney.engine.lab.commands.bench_device import _choice_line
from jitney.engine.lab.device import check
from jitney.engine.lab.device.report import DeviceReport
from jitney.engine.lab.device.rows import About, PartJob, Row
from jitney.engine.lab.device.run import DevicePlan, DeviceResults
from jitney.engine.lab.device.saved import ResultFiles
from jitney.kernels.prompt_choices import PromptChoices
from jitney.kernels.select import reference

H100 = About(
    device="NVIDIA H100 80GB HBM3",
    platform="gpu",
    kernels="triton",
    kernel_set="triton",
    dtype="bfloat16",
    memory=60 << 30,
    versions={"jax": "0.11.2", "flashinfer-python": "0.7.2.post1", "transformers": "5.17.0"},
    sm=90,
)


def prompt(by: str, rows: str, seconds: float | None, **changes: Any) -> Row:
    row = Row(part="attention", name="prompt attention", case=f"{rows} rows", by=by, note="")
    return replace(row, seconds=seconds, **changes)


MEASURED = [
    prompt("triton", "512", 0.25e-3),
    prompt("triton", "4,096", 2e-3),
    prompt("flashinfer", "512", 0.25e-3),
    prompt("flashinfer", "4,096", 1e-3),
    Row(part="attention", name="decode attention", case="1 x 512", by="triton", seconds=1.0),
]


def results(rows: list[Row], about: About = H100, shape: str = "") -> DeviceResults:
    return DeviceResults(DevicePlan(shape=shape), about, None, rows)


def test_the_quicker_one_over_all_sizes_is_chosen():
    choice = DeviceReport(results(MEASURED)).prompt_choice()
    assert choice is not None
    assert choice == {
        "sm": 90,
        "head_dim": 128,
        "by": "flashinfer",
        "seconds": {"triton": 2.25e-3, "flashinfer": 1.25e-3},
        "rows": [512, 4096],
        "device": "NVIDIA H100 80GB HBM3",
        "versions": {"jax": "0.11.2", "flashinfer-python": "0.7.2.post1"},
    }
    assert _choice_line(choice) == (
        "prompt attention on sm_90 with heads of 128 (512, 4,096 rows): triton 2.25 ms, flashinfer "
        "1.25 ms; chosen: flashinfer"
    )


@pytest.mark.parametrize("seconds,by", [(1.88e-3, "flashinfer"), (1.9e-3, "triton")])
def test_an_even_race_is_ours(seconds: float, by: str):
    rows = [prompt("triton", "4,096", 2e-3), prompt("flashinfer (fa3)", "4,096", seconds)]
    choice = DeviceReport(results(rows)).prompt_choice()
    assert choice is not None and choice["by"] == by


def test_nothing_is_chosen_where_only_ours_was_measured_or_no_gpu_was():
    ours = [row for row in MEASURED if row.by != "flashinfer"]
    assert DeviceReport(results(ours)).prompt_choice() is None
    assert DeviceReport(results(MEASURED, replace(H100, sm=0))).prompt_choice() is None
    assert DeviceReport(results(MEASURED, shape="tiny")).prompt_choice() is None


def test_the_table_lies_beside_the_results_and_keeps_other_cards(tmp_path: Path):
    files = ResultFiles(tmp_path)
    first = results(MEASURED)
    files.take_up(first)
    files.save(first)
    table = tmp_path / "prompt_choices.json"
    assert [(each["sm"], each["by"]) for each in PromptChoices.read(table).entries] == [
        (90, "flashinfer")
    ]
    other = results(MEASURED[:2] + MEASURED[:2], replace(H100, device="L4", sm=89))
    other.rows += [prompt("flashinfer", "512", 1.0), prompt("flashinfer", "4,096", 1.0)]
    more = ResultFiles(tmp_path)
    more.take_up(other)
    more.save(other)
    chosen = {each["sm"]: each["by"] for each in PromptChoices.read(table).entries}
    assert chosen == {89: "triton", 90: "flashinfer"}
    (empty := tmp_path / "next").mkdir()
    ResultFiles(empty).bring(tmp_path)
    assert (empty / "prompt_choices.json").read_text() == table.read_text()


def test_another_file_of_that_name_is_left_alone(tmp_path: Path):
    (tmp_path / "prompt_choices.json").write_text('{"mine": 1}')
    files = ResultFiles(tmp_path)
    first = results(MEASURED)
    files.take_up(first)
    with pytest.raises(ConfigError, match=r"prompt_choices.json: it is no list of entries$"):
        files.save(first)
    assert (tmp_path / "prompt_choices.json").read_text() == '{"mine": 1}'


def test_cases_that_it_does_not_take_are_no_wrong_answers():
    job = PartJob(
        part="check",
        shape="llama-3.1-8b",
        dtype="bfloat16",
        kernels="flashinfer",
        page_size=16,
        seconds=1.0,
    )
    named = dataclasses.replace(reference(), name="flashinfer")
    tasks = {task.row.case: task for task in check.checks(job, [named], jnp.bfloat16)}
    for case, reason in (
        ("head dim 80, bfloat16", "it takes heads of 64, 128, 256, not 80"),
        ("mixed, float32", "it takes bfloat16 and float16, not float32"),
        ("int8 pool, bfloat16", "its pools hold the activations' bfloat16, not int8"),
        ("plain weights, int8 KV", "its pools hold the activations' bfloat16, not int8"),
    ):
        (row,) = tasks[case].run(tasks[case].row)
        assert row.note == f"not for these kernels: {reason}"
        assert not row.wrong and row.error is None
    (row,) = tasks["prompts alone, bfloat16"].run(tasks["prompts alone, bfloat16"].row)
    assert row.note.startswith("right")
