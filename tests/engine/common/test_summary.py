"""The figures of a run against sums made by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jitney.engine.common.records import STEP_DTYPE
from jitney.engine.common.request_record import RequestRecord, Stay
from jitney.engine.common.summary import Slo, quantile_of, spread, summarise
from jitney.engine.lab.figures import cell


def request(
    number: int,
    arrival: float,
    boarded: float | None,
    first: float | None,
    finished: float,
    n_output: int,
    finish: str = "length",
    tokens=None,
) -> RequestRecord:
    return RequestRecord(
        number=number,
        n_prompt=10,
        n_output=n_output,
        arrival=arrival,
        boarded=boarded,
        first_token=first,
        finished=finished,
        finish=finish,
        token_times=tokens,
    )


RUN = [
    request(0, 0.0, 0.0, 1.0, 3.0, 5, tokens=[1.0, 1.5, 2.0, 2.5, 3.0]),
    request(1, 0.0, 1.0, 2.0, 6.0, 3, tokens=[2.0, 3.0, 6.0]),
    request(2, 2.0, 4.0, 4.5, 4.5, 1, tokens=[4.5]),
    request(3, 5.0, None, None, 7.0, 0, finish="http_429"),
]


#: Request 1 was preempted at 3 and boarded again at 5.
STAYS = [
    Stay(0, 0, 0.0, 1.0, end=3.0),
    Stay(1, 1, 1.0, 2.0, end=3.0),
    Stay(1, 5, 5.0, end=6.0),
    Stay(0, 4, 4.0, 4.5, end=4.5),
]


def test_stays_are_cut_to_the_time_looked_at():
    assert [stay.seconds() for stay in STAYS] == [3.0, 2.0, 1.0, 0.5]
    assert [stay.seconds(2.0, 5.5) for stay in STAYS] == [1.0, 1.0, 0.5, 0.5]
    assert Stay(0, 1, 4.0).seconds(until=6.0) == 2.0, "who sits there still"


def test_the_figures_of_four_requests():
    figures = summarise(
        RUN,
        records=None,
        seats=2,
        seconds=8.0,
        seated_s=sum(stay.seconds() for stay in STAYS),
        slo=Slo(ttft_s=2.0, itl_s=1.0),
        price_per_hour=3.6,
    )
    assert (figures["requests"], figures["served"]) == (4, 3)
    assert figures["finish"] == {"length": 3, "http_429": 1}
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (30, 9)
    assert (
        figures["req_s"] == 3 / 8
        and figures["output_tok_s"] == 9 / 8
        and figures["total_tok_s"] == 39 / 8
    )
    assert figures["ttft_s"]["p50"] == 2.0 and figures["ttft_s"]["max"] == 2.5
    assert figures["ttft_s"]["mean"] == pytest.approx((1 + 2 + 2.5) / 3)
    assert figures["ttft_s"]["p90"] == pytest.approx(
        2.0 + 0.8 * 0.5
    )  # linear between the sorted values
    assert figures["e2e_s"]["p50"] == 3.0 and figures["queue_s"]["p50"] == 1.0
    assert (
        figures["itl_s"]["mean"] == pytest.approx((4 * 0.5 + 1 + 3) / 6)
        and figures["itl_s"]["max"] == 3.0
    )
    assert figures["tpot_s"]["mean"] == pytest.approx((0.5 + 2.0) / 2)
    assert (
        figures["goodput_req_s"] == 1 / 8
    )  # request 1 is slow between tokens, request 2 late with its first
    assert figures["seat_fill"] == pytest.approx((3.0 + 2.0 + 1.0 + 0.5) / 16)
    assert figures["cost_per_million_tokens"] == pytest.approx(0.001 * 8 / 9 * 1e6)
    json.dumps(figures)


def test_one_in_a_thousand_is_told_of_a_thousand_values():
    many, few = spread(np.arange(1000.0)), spread(np.arange(999.0))
    assert many is not None and few is not None
    assert quantile_of(many, "p999") == many["p999"] == pytest.approx(998.001)
    assert quantile_of(few, "p999") is None and quantile_of(few, "p99") == few["p99"]
    shown = [cell({"ttft_s": each}, "ttft_p999_s") for each in (many, few, None)]
    assert shown == ["998.00 s", "–", ""]


def test_steps_tell_rows_padding_and_pages():
    records = np.zeros(2, STEP_DTYPE)
    records["bucket_tokens"], records["padding"], records["decode"], records["prefill"] = (
        (8, 4),
        (2, 1),
        (6, 0),
        (0, 3),
    )
    records["pages_used"], records["pages"], records["device_s"] = (10, 30), 100, (0.3, 0.1)
    records["preempted"] = (0, 2)
    figures = summarise(RUN, records=records, seats=2, seconds=8.0)
    assert figures["rows"] == {
        "prefill": 3,
        "decode": 6,
        "accepted": 0,
        "padding": 3,
        "recomputed": 0,
        "past_end": 0,
        "cancelled": 0,
        "rejected": 0,
    }
    assert figures["padding_share"] == 0.25 and figures["steps"] == 2 and figures["preempted"] == 2
    assert figures["kv_use"] == pytest.approx((0.1 * 0.3 + 0.3 * 0.1) / 0.4)
    assert figures["device_s"] == pytest.approx(0.4)


def test_what_is_not_known_is_none_and_not_zero():
    times = [request(0, 0.0, None, None, 1.0, 0, finish="connect")]
    figures = summarise(times, records=None, seats=0, seconds=1.0)
    for name in (
        "ttft_s",
        "itl_s",
        "tpot_s",
        "queue_s",
        "e2e_s",
        "seat_fill",
        "padding_share",
        "kv_use",
        "rows",
        "goodput_req_s",
        "cost_per_million_tokens",
    ):
        assert figures[name] is None, name
    assert figures["served"] == 0 and figures["output_tok_s"] == 0.0
