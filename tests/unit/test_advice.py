"""The advice of a report: which lines, in which order, what cannot help, and agreement with the first lever."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from traces import GPU, Timeline, healthy, meta, model, roofs
from what_if_runs import decode_step, mixed_step, on_cpu, prefill_step, run

from phaseprof.analyzers.advice import advise
from phaseprof.analyzers.as_json import to_json
from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.results import Bound, Lever
from phaseprof.cli.render.advice import advice_section
from phaseprof.cli.render.terminal import render


def titles(lines: tuple[str, ...]) -> list[str]:
    return [line.partition(":")[0] for line in lines]


def test_a_line_has_the_gain_with_its_interval_and_what_limits_then() -> None:
    advice = advise(run())
    (line,) = [line for line in advice.lines if line.startswith("INT4 weights")]
    assert re.fullmatch(
        r"INT4 weights: TPOT 6\.50 → \d\.\d\d ms \(\d\.\d\d to \d\.\d\d\), \d\.\dx \(\d\.\d to \d\.\d\) "
        r"output tokens/s; decode is then bandwidth-bound",
        line.replace("\N{EN DASH}", " to "),
    )


def test_five_lines_at_most_by_gain_and_one_format_of_eight_bits() -> None:
    for measured in (run(), on_cpu(), run(decode_step(12.0, sequences=32, context=4000.0))):
        advice = advise(measured)
        assert 0 < len(advice.lines) <= 5
        assert not {"FP8 weights", "INT8 weights"} <= set(titles(advice.lines))
        assert advice.what_if is not None
        gains = {each.title: each.gain.value for each in advice.what_if.outcomes}
        ordered = [gains[title] for title in titles(advice.lines)]
        assert ordered == sorted(ordered, reverse=True)
        assert min(ordered) >= 1.05


@pytest.mark.parametrize(
    ("lever", "first"),
    [
        ("batch", "batch 8"),
        ("fewer launches", "CUDA graphs"),
        ("cheaper matmuls", "batch 8"),
        (None, "batch 8"),
    ],
)
def test_the_first_lever_comes_first_where_it_gains(lever: str | None, first: str) -> None:
    measured = run(decode_step(16.0, idle=0.6, bound=Bound.OVERHEAD), prefill_step())
    advice = advise(measured, None if lever is None else Lever(lever, "how"))
    assert titles(advice.lines)[0] == first


def test_a_lever_that_gains_nothing_does_not_come_first() -> None:
    """The verdict's class may rest on little; the figures decide."""
    advice = advise(run(), Lever("a smaller KV cache", "how"))
    assert titles(advice.lines)[0] == "batch 8"
    assert (
        "FP8 KV cache: decode is bandwidth-bound, reading keys and values is 0.7 %" in advice.cannot
    )


def test_nothing_is_advised_that_the_device_cannot_do() -> None:
    advice = advise(on_cpu())
    said = " ".join(advice.lines)
    assert "FP8" not in said and "CUDA" not in said and "tensor parallel" not in said
    # That a CPU has neither needs no saying.
    assert "CUDA" not in advice.cannot and "FP8" not in advice.cannot


def test_what_takes_more_devices_or_another_model_is_not_advised_unasked() -> None:
    heavy = run(decode_step(14.0, sequences=32, context=6000.0))
    advice = advise(heavy)
    assert advice.what_if is not None
    tried = {each.title for each in advice.what_if.outcomes}
    assert {"latent attention (MLA)", "2 KV heads"} <= tried
    said = " ".join(advice.lines)
    assert "MLA" not in said and "KV heads" not in said and "tensor parallel" not in said


def test_smaller_chunks_say_what_they_trade() -> None:
    served = run(mixed_step(30.0, chunk=2048.0), decode_step(8.0, sequences=16))
    advice = advise(served, Lever("smaller prefill chunks", "how"))
    assert advice.lines[0].startswith("chunks of 1,024 tokens: tokens beside a prompt wait ")
    assert "TTFT 30.0 → " in advice.lines[0]


def test_gaps_that_were_not_measured_are_said_with_what_to_record() -> None:
    advice = advise(run(decode_step(16.0, idle=None), prefill_step()))
    assert (
        "CUDA graphs: the gaps between its kernels were not measured (record a few passes with "
        "`--collect default,kernels`)"
    ) in advice.cannot


def test_a_run_without_roofs_says_what_is_missing() -> None:
    report = build_report(healthy().trace(meta(ceilings=())))
    assert report.advice is not None
    assert report.advice.lines == () and report.advice.what_if is None
    assert report.advice.missing == (
        "no change can be worked out: the roofs of Stand-in CPU for float32 are not known; `phaseprof calibrate` "
        "measures them"
    )


def test_a_run_without_decode_is_judged_by_its_prompts() -> None:
    timeline = Timeline()
    for i in range(8):
        timeline.add("prefill", 100, gflop=60, gb=0.2, tokens=512, request=f"r{i}")
        timeline.request(f"r{i}", output_tokens=1, tpot_ns=None, itl_ns=[])
    report = build_report(timeline.trace())
    assert report.advice is not None and report.advice.what_if is not None
    assert not report.advice.what_if.generates
    assert all("speculation" not in line for line in report.advice.lines)


def test_the_verdict_and_the_advice_of_a_gpu_in_the_report_agree() -> None:
    """A decode that idles: the verdict says fewer launches, the advice begins with graphs."""
    timeline = healthy()
    for row in timeline.passes:
        row["dtype"] = "bfloat16"
    for row in list(timeline.passes):
        if row["phase"] == "decode":
            row["host_ns"] *= 5
    for _ in range(3):
        timeline.add("decode", 20, gflop=0.1, gb=0.22, busy=0.2, past=512, dtype="bfloat16")
    for kernel in timeline.kernels:
        kernel["device"] = "cuda:0"
    here = roofs(GPU, dtype="bfloat16")
    metas = meta(devices=(GPU,), models=(model(device=GPU),), ceilings=(here,))
    report = build_report(timeline.trace(metas))
    decode = report.phases["decode"]
    assert decode.bound is Bound.OVERHEAD
    assert decode.verdict.lever is not None and decode.verdict.lever.name == "fewer launches"
    assert report.advice is not None
    assert titles(report.advice.lines)[0] == "CUDA graphs"


def test_the_report_shows_it_on_a_terminal_and_in_json() -> None:
    report = build_report(healthy().trace())
    assert report.advice is not None and report.advice.lines
    text = render(report)
    assert f"  Advice          {titles(report.advice.lines)[0]}: " in text
    assert "The arithmetic: phaseprof what-if trace --explain" in text
    data = to_json(report)
    json.dumps(data, allow_nan=False)
    assert data["advice"]["lines"] == list(report.advice.lines)
    assert data["advice"]["what_if"]["measured"]["gain"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert "measured" not in data
    bare = replace(report, advice=None)
    assert "Advice" not in render(bare)
    assert to_json(bare)["advice"] is None


def test_the_title_of_a_change_is_bold() -> None:
    lines = advice_section(advise(run()), 120)
    (span,) = [span for span in lines[0].spans if str(span.style) == "bold" and span.start > 2]
    assert lines[0].plain[span.start : span.end] == "batch 8"
