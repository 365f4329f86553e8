"""Latencies of requests, recorded or rebuilt from the passes of a run that was cut off."""

from __future__ import annotations

from typing import Any

import pytest
from traces import META, MS, START_NS, Timeline, healthy, meta

from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.results import Percentiles, Report


def report_of(timeline: Timeline, **changes: Any) -> Report:
    return build_report(timeline.trace(meta(**changes) if changes else META))


def test_percentiles_are_nearest_rank() -> None:
    timeline = healthy()
    timeline.requests.clear()
    for i in range(1, 11):
        timeline.request(f"r{i}", ttft_ns=i * MS, tpot_ns=2 * i * MS, itl_ns=[i * MS])
    figures = report_of(timeline).requests
    assert figures.count == 10
    assert figures.ttft_ms == Percentiles(10, 5.0, 9.0, 10.0)
    assert figures.tpot_ms == Percentiles(10, 10.0, 18.0, 20.0)
    assert figures.itl_ms == Percentiles(10, 5.0, 9.0, 10.0)
    assert (figures.prompt_tokens, figures.output_tokens) == (80, 30)


def test_one_token_requests_have_no_tpot() -> None:
    timeline = Timeline()
    timeline.add("prefill", 10, tokens=8)
    timeline.request("r0", output_tokens=1, tpot_ns=None, itl_ns=[])
    figures = report_of(timeline).requests
    assert figures.count == 1
    assert figures.ttft_ms == Percentiles(1, 20.0, 20.0, 20.0)
    assert figures.tpot_ms is None
    assert figures.itl_ms is None


def test_other_models_requests_do_not_count() -> None:
    timeline = healthy()
    timeline.request("x", model_id="other", ttft_ns=10**12)
    assert report_of(timeline).requests.count == 8


def test_unfinished_and_aborted_are_counted_apart() -> None:
    timeline = healthy()
    timeline.request("gone", finish="abort")
    timeline.request("running", finish=None, finished_ns=None, tpot_ns=None)
    figures = report_of(timeline).requests
    assert (figures.count, figures.unfinished, figures.aborted) == (10, 1, 1)


def test_warmup_requests_do_not_count_where_others_do() -> None:
    timeline = healthy()
    timeline.request("w", warmup="requested", ttft_ns=10**12, itl_ns=[10**12])
    report = report_of(timeline)
    assert report.requests.count == 8
    assert report.requests.ttft_ms == Percentiles(8, 20.0, 20.0, 20.0)
    assert report.requests.itl_ms == Percentiles(16, 10.0, 10.0, 10.0)
    assert not any("requests" in entry.what for entry in report.not_measured)


def test_only_warmup_requests_are_counted_and_said() -> None:
    timeline = healthy()
    timeline.requests.clear()
    timeline.request("w", warmup="first")
    report = report_of(timeline)
    assert report.requests.count == 1
    assert (
        "All requests were warm-up; their latencies are shown for want of others." in report.answer
    )
    assert [e.why for e in report.not_measured if e.what == "latencies of steady requests"] == [
        "all requests were warm-up; they are counted for want of others"
    ]


def test_requests_that_a_collector_slowed_do_not_count_where_others_do() -> None:
    timeline = healthy()
    timeline.add("decode", 90, gflop=0.1, gb=0.2, request="slow", busy=0.9)
    timeline.request("slow", ttft_ns=10**12)
    assert report_of(timeline).requests.count == 8
    timeline.requests = timeline.requests[-1:]
    report = report_of(timeline)
    assert report.requests.count == 1
    assert any("ran under a collector" in line for line in report.answer)


def test_a_run_without_requests_has_no_latencies() -> None:
    timeline = healthy()
    timeline.requests.clear()
    figures = report_of(timeline).requests
    assert (figures.count, figures.ttft_ms, figures.tpot_ms, figures.itl_ms) == (
        0,
        None,
        None,
        None,
    )


# --- runs that were cut off ----------------------------------------------------------------------


def cut_off() -> Timeline:
    """Two requests of two sequences each: `b` ended, `a` was being served. 10 ms prefill, 4 ms steps, 1 ms between."""
    timeline = Timeline(gap_ns=MS)
    for request in ("b", "a"):
        slices = [
            {"request_id": request, "phase": "prefill", "query": 8, "past": 0, "prompt": 8}
        ] * 2
        timeline.add("prefill", 10, request=request, tokens=16, sequences=2, slices=slices)
        for k in range(3):
            step = {
                "request_id": request,
                "phase": "decode",
                "query": 1,
                "past": 8 + k,
                "prompt": 8,
            }
            timeline.add("decode", 4, request=request, tokens=2, sequences=2, slices=[step] * 2)
    timeline.request("b", prompt_tokens=8, output_tokens=8, ttft_ns=11 * MS, tpot_ns=5 * MS)
    return timeline


def test_requests_without_a_row_are_rebuilt_from_their_passes() -> None:
    report = report_of(cut_off(), complete=False, ended_ns=None, self_cost=None)
    figures = report.requests
    assert (figures.count, figures.unfinished) == (2, 1)
    assert (figures.prompt_tokens, figures.output_tokens) == (16, 16)
    # b: 11 ms, as its row says. a: the 10 ms of its first pass.
    assert figures.ttft_ms == Percentiles(2, 10.0, 11.0, 11.0)
    # a: three more tokens of each sequence in 3 x (1 + 4) ms.
    assert figures.tpot_ms == Percentiles(2, 5.0, 5.0, 5.0)
    # b: two of 10 ms, as its row says; a: three of 5 ms.
    assert figures.itl_ms == Percentiles(5, 5.0, 10.0, 10.0)
    assert [e.why for e in report.not_measured if e.what == "arrival of 1 request"] == [
        "they have no end in the trace; their time to first token begins with their first pass"
    ]


def test_a_whole_trace_is_not_searched_for_requests() -> None:
    assert report_of(cut_off()).requests.count == 1


def test_a_request_cut_off_in_its_prefill_has_no_first_token() -> None:
    timeline = Timeline()
    timeline.add("prefill", 10, tokens=4, prompt=9, past=0)
    timeline.add("prefill", 10, tokens=4, prompt=9, past=4)
    figures = report_of(timeline, complete=False).requests
    assert (figures.count, figures.unfinished, figures.output_tokens) == (1, 1, 0)
    assert (figures.ttft_ms, figures.tpot_ms, figures.itl_ms) == (None, None, None)
    timeline.add("prefill", 10, tokens=1, prompt=9, past=8)
    chunked = report_of(timeline, complete=False).requests
    assert chunked.ttft_ms == Percentiles(1, 30.0, 30.0, 30.0)
    assert chunked.output_tokens == 1


def test_a_rebuilt_token_is_there_when_the_device_has_computed_it() -> None:
    """Calls of 4 ms, every 12 ms; 9 ms on the device for the prompt, 7 for each step."""
    timeline = Timeline(gap_ns=8 * MS)
    timeline.add("prefill", 4, tokens=8, device_ns=9 * MS)
    for past in (8, 9):
        timeline.add("decode", 4, past=past, prompt=8, device_ns=7 * MS)
    figures = report_of(timeline, complete=False).requests
    assert figures.ttft_ms == Percentiles(1, 9.0, 9.0, 9.0)
    # The second token is there at 12 + 7 ms, the third 12 later.
    assert figures.itl_ms == Percentiles(2, 10.0, 12.0, 12.0)


@pytest.mark.parametrize(("warmup", "count"), [("requested", 1), ("first", 2)])
def test_rebuilt_requests_are_warmup_only_if_the_user_said_so(warmup: str, count: int) -> None:
    timeline = cut_off()
    for row in timeline.passes[4:]:
        row["warmup"] = warmup
    assert report_of(timeline, complete=False).requests.count == count


def test_each_rank_of_a_split_model_has_its_own_request() -> None:
    timeline = cut_off()
    timeline.passes += [{**row, "rank": 1} for row in timeline.passes]
    figures = report_of(timeline, complete=False).requests
    assert (figures.count, figures.unfinished) == (3, 2)
    assert figures.tpot_ms == Percentiles(3, 5.0, 5.0, 5.0)


def test_damage_counts_as_cut_off() -> None:
    trace = cut_off().trace(damage=("requests/rank=0/part-1.parquet: not a Parquet file",))
    report = build_report(trace)
    assert report.requests.count == 2
    assert report.damage == trace.damage


def test_rows_out_of_order_are_rebuilt_in_the_order_of_time() -> None:
    timeline = cut_off()
    timeline.passes.reverse()
    figures = report_of(timeline, complete=False).requests
    assert figures.itl_ms == Percentiles(5, 5.0, 10.0, 10.0)
    assert timeline.passes[-1]["start_ns"] == START_NS
