"""Whole runs with sampled counters: what the report says of each once the counters have been heard."""

from __future__ import annotations

from dataclasses import replace

from witnessed import DECODE, META, MODEL, PREFILL, Kind, run

from phaseprof.analyzers.as_json import to_json
from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.results import Bound, Confidence, Report

#: 15 ms for a step that memory allows in 4, on SMs that are active for a quarter of it.
EAGER = replace(DECODE, ms=15, sm=0.26, tensor=0.02, dram=0.27)


def said(report: Report, phase: str) -> str:
    return "\n".join(e.text for e in report.phases[phase].verdict.evidence)


def test_a_run_whose_counters_agree() -> None:
    report = build_report(run())
    prefill, decode = report.phases["prefill"], report.phases["decode"]
    assert (prefill.bound, decode.bound) == (Bound.COMPUTE, Bound.BANDWIDTH)
    # The roofs are a datasheet's: without the counters neither would be sure.
    assert {prefill.verdict.confidence, decode.verdict.confidence} == {Confidence.HIGH}
    assert "agree on the tensor cores" in said(report, "prefill")
    assert "agree on the memory traffic" in said(report, "decode")


def test_eager_decode_is_told_from_slow_kernels_without_a_timeline() -> None:
    report = build_report(run(decode=EAGER))
    decode = report.phases["decode"]
    assert (decode.bound, decode.verdict.confidence) == (Bound.OVERHEAD, Confidence.MEDIUM)
    assert decode.busy_ms is None
    assert report.phases["prefill"].bound is Bound.COMPUTE
    assert report.answer[0].startswith(
        "Decode takes 15 ms a step and is overhead-bound. The SMs were active only 26 % ±1 of the time"
    )


def test_less_traffic_than_the_model_needs_puts_the_verdict_in_doubt() -> None:
    report = build_report(run(decode=replace(DECODE, dram=0.3)))
    decode = report.phases["decode"]
    assert (decode.bound, decode.verdict.confidence) == (Bound.BANDWIDTH, Confidence.LOW)
    assert any("Low confidence in what bounds decode" in line for line in report.answer)


def test_a_throttled_prefill_is_held_against_the_clock_that_it_had() -> None:
    """36 % of the peak at 2 GHz, which is 60 % of that at 1.2; the power cap (bit 2) was set."""
    slow = Kind(ms=90, tflop=32.2, gb=16, sm=0.97, tensor=0.595, dram=0.14)
    report = build_report(run(slow, ghz=1.2, throttle=0x4))
    prefill = report.phases["prefill"]
    assert prefill.bound is Bound.COMPUTE
    assert prefill.verdict.lever is not None and prefill.verdict.lever.name == "a higher clock"
    assert "1.20 GHz, below the 2.00 GHz of the compute roof" in said(report, "prefill")
    assert "power cap" in said(report, "prefill") and "power cap" in said(report, "decode")
    # Decode reads memory, whose clock is another.
    assert report.phases["decode"].bound is Bound.BANDWIDTH


def test_a_model_that_is_not_covered_has_a_class_by_its_counters() -> None:
    report = build_report(run(replace(PREFILL, tensor=0.7), work=False))
    prefill, decode = report.phases["prefill"], report.phases["decode"]
    assert (prefill.bound, decode.bound) == (Bound.COMPUTE, Bound.BANDWIDTH)
    assert (prefill.mfu, decode.mbu) == (None, None)
    assert "DRAM was at 78 % ±1 of its peak" in report.answer[0]


def test_that_some_kernel_ran_says_nothing() -> None:
    """`utilization.gpu` is 100 % in every window, of a device whose SMs nobody has watched."""
    decode = build_report(run(decode=EAGER, counters=False)).phases["decode"]
    assert decode.bound is Bound.OVERHEAD_OR_LATENCY
    assert "100 %" not in "".join(e.text for e in decode.verdict.evidence)


def test_a_run_that_is_too_short_for_its_counters_is_judged_without_them() -> None:
    report = build_report(run(decode=EAGER, requests=1, steps=20))
    decode = report.phases["decode"]
    assert decode.counters is not None and decode.counters.sm_active is not None
    assert decode.counters.sm_active.sure is None
    assert decode.bound is Bound.OVERHEAD_OR_LATENCY
    assert "ounters (" not in said(report, "decode")


def test_counters_of_one_device_are_not_heard_of_a_model_on_two() -> None:
    report = build_report(
        run(decode=EAGER, meta=replace(META, models=(replace(MODEL, devices=2),)))
    )
    assert report.phases["decode"].bound is Bound.OVERHEAD_OR_LATENCY
    (lacking,) = [n for n in report.not_measured if "second witness" in n.what]
    assert "2 devices" in lacking.why


def test_what_a_verdict_answers_is_no_part_of_the_json() -> None:
    phase = to_json(build_report(run(requests=4)))["phases"]["decode"]
    assert "question" not in phase
    assert {"bound", "confidence", "evidence"} <= phase.keys()
