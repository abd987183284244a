"""`prefill_share = "auto"`: prompt-heavy traffic as fast as with all rows, running streams in
rhythm all the same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jitney.engine.cli import main
from jitney.engine.common.errors import ConfigError
from jitney.engine.common.trace import Arrival
from jitney.engine.config.layers import ResolvedConfig
from jitney.engine.config.schema import AUTO, Config, Share
from jitney.engine.core.measuring.engine_shape import EngineShape
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.prefill_budget import _LEAST_SHARE, PrefillBudget
from jitney.engine.core.scheduler.step_times import StepTimeEstimate
from jitney.engine.lab.simulation.engine_run import EngineRun
from jitney.engine.lab.simulation.simulator import simulate
from jitney.engine.lab.simulation.step_table import Curve, StepTable
from jitney.engine.lab.simulation.workload import Closed, Fixed, Lengths, LogNormal, synthesise

#: A CPU's steps in milliseconds: decode-only, and with prompt rows, each of whose query-key pairs
#: takes 20 ns.
DECODE_MS = {1: 10, 4: 16, 8: 20, 16: 24, 32: 38}
MIXED_MS = {64: 42, 128: 58, 256: 100, 512: 185}
TABLE = StepTable(
    [Curve(rows, rows, ms / 1000) for rows, ms in DECODE_MS.items()]
    + [Curve(rows, 32, ms / 1000, per_pair=2e-8) for rows, ms in MIXED_MS.items()]
)


#: The same where padding is free: as long as steps have rows.
BY_ROWS = StepTable(
    [Curve(rows, rows, ms / 1000) for rows, ms in DECODE_MS.items()]
    + [Curve(rows, 32, 0.021, per_prompt=3.2e-4, per_pair=2e-8) for rows in MIXED_MS]
)


def run(
    arrivals: list[Arrival], share: Share, concurrency: int | None = None, *, free: bool = False
) -> EngineRun:
    """32 seats, 512 rows, as many pages as needed. free: padding is."""
    limits = SchedulerLimits(32, 8192, max_waiting_requests=1000, prefill_share=share)
    sizes = replace(Buckets.of(max_seats=32, token_budget=512), padding_is_free=free)
    table = BY_ROWS if free else TABLE
    engine = EngineShape(limits, sizes, 4097)
    return simulate(arrivals, engine, table, concurrency=concurrency)


@pytest.mark.parametrize(
    ("prompts", "outputs"),
    [(Fixed(400), Fixed(8)), (Fixed(1000), Fixed(16)), (LogNormal(600, 0.6, 50, 3000), Fixed(32))],
    ids=str,
)
@pytest.mark.parametrize("free", [False, True])
def test_prompt_heavy_traffic_is_as_fast_as_with_all_rows(
    prompts: Lengths, outputs: Lengths, free: bool
):
    """A quarter costs a fifth of the requests a second: weights are read for 128 rows at a time."""
    arrivals = synthesise(128, prompts, outputs, Closed(), 0)
    seconds = {share: run(arrivals, share, 32, free=free).seconds for share in (0.25, 1.0, AUTO)}
    assert seconds[AUTO] < seconds[1.0] / 0.95
    assert seconds[0.25] > (1.05 if free else 1.15) * seconds[1.0]


def p99_ratio(share: Share, *, free: bool = False) -> float:
    """p99 time between tokens of 16 streams while a prompt of 4,000 tokens is read, over the same
    before it came.
    """
    came = 6.0
    arrivals = [*[Arrival(0.0, 64, 500)] * 16, Arrival(came, 4000, 1)]
    *streams, long = run(arrivals, share, free=free).requests
    alone, beside = [], []
    for stream in streams:
        times = np.asarray(stream.token_times)
        gaps, ends = np.diff(times), times[1:]
        alone += gaps[(ends > 2.0) & (ends < came)].tolist()
        beside += gaps[(ends > came) & (ends < long.finished)].tolist()
    return float(np.percentile(beside, 99) / np.percentile(alone, 99))


@pytest.mark.parametrize("free", [False, True])
def test_streams_stay_in_rhythm_beside_a_long_prompt(free: bool):
    assert p99_ratio(AUTO, free=free) < 3.0 < p99_ratio(0.5, free=free)


def test_where_padding_is_free_a_step_has_the_rows_that_its_time_allows():
    """10 ms and a third of one for each row; six steps of 31 streams at 20 ms are 120 ms, which
    between a bucket of 256 rows and one of 512 hold 330.
    """
    sizes = replace(Buckets.of(max_seats=32, token_budget=512), padding_is_free=True)
    step_times = StepTimeEstimate(sizes)
    step_times.observe(sizes.decode[0], 0.010)
    step_times.observe(sizes.decode[-1], 0.020)
    for bucket in 3 * sizes.mixed:
        step_times.observe(bucket, 0.010 + bucket.tokens / 3000)
    short = PrefillBudget(step_times, AUTO, 0.0).most(31, short=True)
    assert short == 256, "what a short prompt may have, and no bucket's size"
    for _ in range(15):
        step_times.observe(sizes.decode[-1], 0.012)
    bearable = PrefillBudget(step_times, AUTO, 0.0).most(31, short=True)
    assert bearable == 160 - 31, "5 eighths of 256 rows take 63 ms, 6 would take 74 of 72"


def test_a_short_prompt_is_whole_in_one_step_where_padding_is_free():
    """A closed loop of 32 streams, prompts of 100: some stood in a step and a half before."""
    arrivals = synthesise(96, Fixed(100), LogNormal(64, 0.5, 8, 200), Closed(), 0)
    steps = {}
    for free in (False, True):
        later = run(arrivals, AUTO, 32, free=free).requests[32:]
        steps[free] = np.mean([each.stays[0].first_step - each.stays[0].step + 1 for each in later])
    assert steps[True] == pytest.approx(1.0, abs=0.1) and steps[False] > 1.2


def test_the_share_by_hand():
    """Of 512 rows: waiting prompts divided by decoding sequences, in sixteenths."""
    rows = PrefillBudget(StepTimeEstimate(Buckets.of(max_seats=32, token_budget=512)), AUTO, 0.0)
    shares = [
        rows.share_beside(decoding, prompts)
        for decoding, prompts in (
            (31, 1),
            (16, 1),
            (16, 4),
            (16, 8),
            (16, 9),
            (16, 16),
            (8, 24),
            (1, 1),
            (3, 2),
        )
    ]
    assert shares == [_LEAST_SHARE, _LEAST_SHARE, 0.25, 0.5, 9 / 16, 1.0, 1.0, 1.0, 10 / 16]
    assert rows.most(16, 0, 1) == 112 and rows.most(16, 0, 16) == 496 and rows.most(0, 0, 1) == 512
    fixed = PrefillBudget(rows.step_times, 0.5, 0.0)
    assert fixed.share_beside(31, 1) == fixed.share_beside(1, 31) == 0.5


def test_a_short_prompt_first_gets_a_slower_step_and_a_long_one_does_not():
    """256 rows take 100 ms, five steps of 8 streams at 20 ms and less of 31 at 38: they are a short
    prompt's. A long one gets what is within 2.7 of them, 58 ms are not beside 8.
    """
    step_times = StepTimeEstimate(Buckets.of(max_seats=32, token_budget=512))
    budget = PrefillBudget(step_times, AUTO, 0.0)
    for bucket in 3 * [*step_times.buckets.all()]:
        times = DECODE_MS if bucket.decode_only else MIXED_MS
        step_times.observe(bucket, times[bucket.tokens] / 1000)
    assert [budget.is_short(rest, rest) for rest in (1, 256, 257)] == [True, True, False]
    assert budget.is_short(256, 513)
    free = StepTimeEstimate(replace(step_times.buckets, padding_is_free=True))
    ends = PrefillBudget(free, AUTO, 0.0)
    assert ends.is_short(256, 512) and not ends.is_short(256, 513)
    assert budget.most(31, short=True) == 256 - 31 and budget.most(31) == 128 - 31
    assert budget.most(8, short=True) == 256 - 8 and budget.most(8) == 64 - 8
    for bucket in step_times.buckets.mixed[-2:]:
        for _ in range(15):
            step_times.observe(bucket, 0.150)
    # Seven and a half steps of 8 streams, and less than four of 31.
    assert budget.most(8, short=True) == 128 - 8 and budget.most(31, short=True) == 256 - 31
    assert PrefillBudget(step_times, 0.25, 0.0).most(31, short=True) == 128 - 31


def test_a_target_still_bounds_the_step():
    step_times = StepTimeEstimate(Buckets.of(max_seats=32, token_budget=512))
    for bucket in 3 * step_times.buckets.mixed:
        step_times.observe(bucket, bucket.tokens / 1000)
    assert PrefillBudget(step_times, AUTO, 0.15).most(4, 0, 28) == 128 - 4


def test_auto_and_numbers_in_every_layer(tmp_path, capsys: pytest.CaptureFixture[str]):
    assert (
        Config().engine.prefill_share
        == AUTO
        == ResolvedConfig.load(flags={"prefill_share": "auto"}).config.engine.prefill_share
    )
    assert (
        ResolvedConfig.load(environ={"JITNEY_PREFILL_SHARE": "0.5"}).config.engine.prefill_share
        == 0.5
    )
    file = tmp_path / "jitney.toml"
    for written in (Config(), ResolvedConfig.load(flags={"prefill_share": "0.25"}).config):
        file.write_text(ResolvedConfig(written, {}).to_toml())
        assert ResolvedConfig.load(file).config == written
    with pytest.raises(ConfigError, match="--prefill-share: must be a number or auto"):
        ResolvedConfig.load(flags={"prefill_share": "all"})
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    assert "--prefill-share" in capsys.readouterr().out
