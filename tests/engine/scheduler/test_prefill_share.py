"""`prefill_share = "auto"`: prompt-heavy traffic as fast as with all rows, running streams in
rhythm all the same.
"""

from __future__ import annotations

import numpy as np
import pytest

from jitney.engine.cli import main
from jitney.engine.config.layers import load_config, to_toml
from jitney.engine.config.schema import AUTO, Config, Share
from jitney.engine.errors import ConfigError
from jitney.engine.scheduler.buckets import make_buckets
from jitney.engine.scheduler.estimates import LEAST_SHARE, PrefillBudget, StepTimeEstimate
from jitney.engine.scheduler.limits import SchedulerLimits
from jitney.engine.simulation.simulator import EngineShape, SimulatedRun, simulate
from jitney.engine.simulation.step_table import Curve, StepTable
from jitney.engine.simulation.workload import Arrival, Closed, Fixed, Lengths, LogNormal, synthesise

#: A CPU's steps in milliseconds: decode-only, and with prompt rows, each of whose query-key pairs
#: takes 20 ns.
DECODE_MS = {1: 10, 4: 16, 8: 20, 16: 24, 32: 38}
MIXED_MS = {64: 42, 128: 58, 256: 100, 512: 185}
TABLE = StepTable(
    [Curve(rows, rows, ms / 1000) for rows, ms in DECODE_MS.items()]
    + [Curve(rows, 32, ms / 1000, per_pair=2e-8) for rows, ms in MIXED_MS.items()]
)


def run(arrivals: list[Arrival], share: Share, concurrency: int | None = None) -> SimulatedRun:
    """32 seats, 512 rows, as many pages as anybody wants."""
    limits = SchedulerLimits(32, 8192, max_waiting_requests=1000, prefill_share=share)
    engine = EngineShape(limits, make_buckets(max_seats=32, token_budget=512), 4097)
    return simulate(arrivals, engine, TABLE, concurrency=concurrency, keep_times=True)


@pytest.mark.parametrize(
    ("prompts", "outputs"),
    [(Fixed(400), Fixed(8)), (Fixed(1000), Fixed(16)), (LogNormal(600, 0.6, 50, 3000), Fixed(32))],
    ids=str,
)
def test_prompt_heavy_traffic_is_as_fast_as_with_all_rows(prompts: Lengths, outputs: Lengths):
    """A quarter costs a fifth of the requests a second: weights are read for 128 rows at a time."""
    arrivals = synthesise(128, prompts, outputs, Closed(), 0)
    seconds = {share: run(arrivals, share, 32).seconds for share in (0.25, 1.0, AUTO)}
    assert seconds[AUTO] < seconds[1.0] / 0.95 and seconds[0.25] > 1.15 * seconds[1.0]


def p99_ratio(share: Share) -> float:
    """p99 time between tokens of 16 streams while a prompt of 4,000 tokens is read, over the same
    before it came.
    """
    came = 6.0
    arrivals = [*[Arrival(0.0, 64, 500)] * 16, Arrival(came, 4000, 1)]
    *streams, long = run(arrivals, share).requests
    alone, beside = [], []
    for stream in streams:
        times = np.asarray(stream.token_times)
        gaps, ends = np.diff(times), times[1:]
        alone += gaps[(ends > 2.0) & (ends < came)].tolist()
        beside += gaps[(ends > came) & (ends < long.finished)].tolist()
    return float(np.percentile(beside, 99) / np.percentile(alone, 99))


def test_streams_stay_in_rhythm_beside_a_long_prompt():
    assert p99_ratio(AUTO) < 3.0 < p99_ratio(0.5) < p99_ratio(1.0)


def test_the_share_by_hand():
    """Of 512 rows: who waits for prompts over who waits for tokens, in sixteenths."""
    rows = PrefillBudget(StepTimeEstimate(make_buckets(max_seats=32, token_budget=512)), AUTO, 0.0)
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
    assert shares == [LEAST_SHARE, LEAST_SHARE, 0.25, 0.5, 9 / 16, 1.0, 1.0, 1.0, 10 / 16]
    assert rows.most(16, 0, 1) == 112 and rows.most(16, 0, 16) == 496 and rows.most(0, 0, 1) == 512
    fixed = PrefillBudget(rows.step_times, 0.5, 0.0)
    assert fixed.share_beside(31, 1) == fixed.share_beside(1, 31) == 0.5


def test_a_short_prompt_first_gets_a_slower_step_and_a_long_one_does_not():
    """256 rows take 100 ms, five steps of 8 streams at 20 ms and less of 31 at 38: they are a short
    prompt's. A long one gets what is within 2.7 of them, 58 ms are not beside 8.
    """
    step_times = StepTimeEstimate(make_buckets(max_seats=32, token_budget=512))
    budget = PrefillBudget(step_times, AUTO, 0.0)
    for bucket in step_times.buckets.all():
        times = DECODE_MS if bucket.decode_only else MIXED_MS
        step_times.observe(bucket, times[bucket.tokens] / 1000)
    assert [budget.is_short(rest) for rest in (1, 256, 257)] == [True, True, False]
    assert budget.most(31, short=True) == 256 - 31 and budget.most(31) == 128 - 31
    assert budget.most(8, short=True) == 256 - 8 and budget.most(8) == 64 - 8
    for bucket in step_times.buckets.mixed[-2:]:
        for _ in range(15):
            step_times.observe(bucket, 0.150)
    # Seven and a half steps of 8 streams, and less than four of 31.
    assert budget.most(8, short=True) == 128 - 8 and budget.most(31, short=True) == 256 - 31
    assert PrefillBudget(step_times, 0.25, 0.0).most(31, short=True) == 128 - 31


def test_a_target_still_bounds_the_step():
    step_times = StepTimeEstimate(make_buckets(max_seats=32, token_budget=512))
    for bucket in step_times.buckets.mixed:
        step_times.observe(bucket, bucket.tokens / 1000)
    assert PrefillBudget(step_times, AUTO, 0.15).most(4, 0, 28) == 128 - 4


def test_auto_and_numbers_in_every_layer(tmp_path, capsys: pytest.CaptureFixture[str]):
    assert (
        Config().engine.prefill_share
        == AUTO
        == load_config(flags={"prefill_share": "auto"}).engine.prefill_share
    )
    assert load_config(environ={"JITNEY_PREFILL_SHARE": "0.5"}).engine.prefill_share == 0.5
    file = tmp_path / "jitney.toml"
    for written in (Config(), load_config(flags={"prefill_share": "0.25"})):
        file.write_text(to_toml(written))
        assert load_config(file) == written
    with pytest.raises(ConfigError, match="--prefill-share: must be a number or auto"):
        load_config(flags={"prefill_share": "all"})
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "--prefill-share" in capsys.readouterr().out
