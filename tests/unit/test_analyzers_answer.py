"""The sentences of the answer: right for each kind of run, with figures that follow from how the run was built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from traces import COST, CPU, GPU, META, Timeline, healthy, meta, model, roofs

from phaseprof.analyzers.answer import Findings, answer
from phaseprof.analyzers.bound import classify
from phaseprof.analyzers.passes import primary_model, sort_passes
from phaseprof.analyzers.phases import Basis
from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.requests import analyze_requests
from phaseprof.analyzers.results import Bound, Report
from phaseprof.phases import Phase


def report_of(timeline: Timeline, **changes: Any) -> Report:
    return build_report(timeline.trace(meta(**changes) if changes else META))


def answer_of(timeline: Timeline, **changes: Any) -> str:
    return "\n".join(report_of(timeline, **changes).answer)


def test_a_healthy_run() -> None:
    assert report_of(healthy(prefills=8, decodes=56)).answer == (
        "Prefill is compute-bound. Passes of 512 prompt tokens run at 0.6 TFLOP/s: 60 % of the 1 TFLOP/s measured on "
        "this machine.",
        "Decode is bandwidth-bound. Each step moves 0.22 GB (91 % of it weights) at 55 GB/s: 55 % of the 100 GB/s "
        "measured on this machine.",
        "78 % of the time is prefill. First lever: fewer prompt tokens. Cache shared prefixes or shorten the prompts; "
        "next, a lower-precision matmul (FP8 or INT8 where the device has it).",
    )


def test_decode_first_and_a_modelled_batch_where_decode_takes_the_time() -> None:
    """0.1 + 2.2 ms at the roofs for one sequence; for eight, 0.8 ms and (0.2 + 8 x 0.02) GB = 3.6 ms: 4.4 / 2.3."""
    lines = report_of(healthy(prefills=1, decodes=200)).answer
    assert lines[0].startswith("Decode is bandwidth-bound.")
    assert lines[2] == (
        "89 % of the time is decode. First lever: batch. Eight sequences would read the same weights once and cost "
        "about 1.9x a step (modelled)."
    )


def test_a_modelled_batch_starts_from_the_present_one() -> None:
    timeline = Timeline()
    for _ in range(20):
        timeline.add("decode", 4, gflop=0.4, gb=0.22, tokens=4, sequences=4, weights=0.2 / 0.22)
    assert "32 sequences in place of four would read the same weights once" in answer_of(timeline)


def test_no_modelled_batch_where_the_model_does_not_hold() -> None:
    def decode(**columns: Any) -> Timeline:
        timeline = Timeline()
        for _ in range(20):
            timeline.add("decode", 4, gflop=0.1, **columns)
        return timeline

    assert "modelled" in answer_of(decode(gb=0.22, weights=0.2 / 0.22))
    # No structure to take the weights from; bytes that are fewer than the weights; KV dominates; above the roof.
    assert "modelled" not in answer_of(decode(gb=0.22), models=(model(cost=None),))
    larger = replace(COST, body_weight_bytes=500_000_000)
    assert "modelled" not in answer_of(decode(gb=0.22), models=(model(cost=larger),))
    kv = answer_of(decode(gb=0.38, weights=0.2 / 0.38 - 0.1))
    assert "smaller KV cache" in kv and "modelled" not in kv
    assert "modelled" not in answer_of(decode(gb=0.5, weights=0.4))


def test_a_batch_without_gain_is_not_given_a_figure() -> None:
    """Half of the bytes are KV, and compute is near: eight sequences would cost 5x, four 2.7x, two 1.6x."""
    timeline = Timeline()
    for _ in range(20):
        timeline.add("decode", 4, gflop=1.5, gb=0.3, weights=0.2 / 0.3)
    text = answer_of(timeline)
    assert "First lever: batch." in text
    assert "modelled" not in text


def test_measured_batches_take_the_place_of_a_model() -> None:
    timeline = Timeline()
    for batch, ms in ((1, 4), (8, 5)):
        for _ in range(20):
            timeline.add("decode", ms, gflop=0.1 * batch, gb=0.3, tokens=batch, sequences=batch)
    # 8 tokens in 5 ms against 1 in 4 ms: 6.4 times.
    assert (
        "A step of eight sequences took 1.2x the time of a step of one, at 6.4x the output tokens/s (measured)."
        in answer_of(timeline)
    )


def both(ms: float, busy: float | None, *, gpu: bool = False) -> Timeline:
    """Prefill and decode with 5 ms of roof time each, and ``ms`` of time."""
    timeline = Timeline()
    works: dict[str, dict[str, Any]] = {
        "prefill": {"gflop": 5, "gb": 0.2},
        "decode": {"gflop": 0.1, "gb": 0.5},
    }
    for phase, work in works.items():
        for _ in range(10):
            timeline.add(phase, ms, tokens=1, **work)
        if busy is not None:
            timeline.add(phase, ms, tokens=1, busy=busy, **work)
    for kernel in timeline.kernels:
        kernel["device"] = "cuda:0" if gpu else "cpu"
    return timeline


def test_overhead_in_both_phases() -> None:
    on_gpu = {"models": (model(device=GPU),), "ceilings": (roofs(GPU),)}
    lines = report_of(both(100, 0.1, gpu=True), **on_gpu).answer
    assert lines[0] == (
        "Prefill is overhead-bound. The device works 10 % of a pass of 100 ms and waits for the host the rest; the "
        "nearer roof (compute) needs 5 ms."
    )
    assert lines[1].startswith(
        "Decode is overhead-bound. The device works 10 % of a step of 100 ms and waits for the host the rest; the "
        "nearer roof (bandwidth) needs 5 ms."
    )
    assert lines[2].startswith("50 % of the time is prefill. First lever: fewer launches.")


def test_latency() -> None:
    assert report_of(both(20, 0.95)).answer[1] == (
        "Decode is latency-bound. Operators run 95 % of a step of 20 ms, but the nearer roof (bandwidth) explains "
        "only 25 %: its kernels are small or inefficient."
    )


def test_overhead_or_latency() -> None:
    lines = report_of(both(20, None)).answer
    assert lines[1] == (
        "Decode is bound by overhead or latency. The nearer roof (bandwidth) explains only 25 % of a step of 20 ms; "
        "whether the device idles in the rest (overhead) or runs slow kernels (latency) was not measured."
    )
    assert "First lever: a kernel timeline." in lines[2]


def test_communication() -> None:
    """No collector sees collectives yet: the verdict is put in by hand, the sentence is the answer's."""
    timeline = both(20, 0.95)
    trace, report = timeline.trace(), report_of(timeline)
    verdict = classify(
        time_s=0.2, flops=1e9, bytes=5e9, ceilings=roofs(), busy_share=0.95, exposed_comm_share=0.6, phase=Phase.DECODE
    )  # fmt: skip
    decode = replace(report.phases["decode"], verdict=verdict, share=1.0)
    primary = primary_model(trace.passes)
    findings = Findings(
        facts=report.facts,
        phases={"decode": decode},
        by_batch={},
        requests=analyze_requests(trace.requests, trace.passes, "m", cut_off=False),
        passes=sort_passes(trace.passes, primary, roofs()),
        basis=Basis(ceilings=roofs()),
        other_share=0.0,
    )
    assert answer(findings)[:2] == (
        "Decode is communication-bound. Exposed collectives take more of a step of 20 ms than the nearer roof "
        "(bandwidth, 25 %).",
        "All of the time is decode. First lever: less exposed communication. Overlap collectives with compute or split "
        "the model over fewer ranks; a larger batch spends each collective on more tokens.",
    )


def test_an_unknown_device_gets_no_percentage() -> None:
    report = report_of(healthy(prefills=8, decodes=56), ceilings=())
    verdicts = report.answer[:2]
    assert verdicts == (
        "Prefill takes 100 ms a pass, 5,120 prompt tokens/s. What bounds it is not known: the roofs of Stand-in CPU "
        "for float32 are not known.",
        "Decode takes 4 ms a step, 250 output tokens/s. What bounds it is not known: the roofs of Stand-in CPU for "
        "float32 are not known.",
    )
    assert report.answer[2] == "78 % of the time is prefill."
    assert [n.fix for n in report.not_measured if n.what == "share of the roofs"] == [
        "phaseprof calibrate"
    ]


def test_a_model_that_is_not_covered_says_why() -> None:
    timeline = Timeline()
    for _ in range(5):
        timeline.add("decode", 5)
    cost = replace(COST, not_covered=("its experts are routed",))
    text = answer_of(timeline, models=(model(cost=cost),))
    assert (
        "What bounds it is not known: the closed form for FLOPs and bytes does not cover StandInForCausalLM (its "
        "experts are routed)." in text
    )
    assert "All of the time is decode." in text


def test_above_the_roof_is_explained_at_once() -> None:
    timeline = Timeline()
    for _ in range(20):
        timeline.add("decode", 0.5, gflop=0.01, gb=0.06)
    text = answer_of(timeline)
    assert (
        "120 % of the 100 GB/s measured on this machine. 120 % of the bandwidth roof is above it:"
        in text
    )
    assert "the 60 MB of a step are smaller than many a last-level cache" in text


def test_prefill_only() -> None:
    timeline = Timeline()
    for i in range(5):
        timeline.add("prefill", 100, gflop=60, gb=0.2, tokens=512, request=f"r{i}")
        timeline.request(f"r{i}", output_tokens=1, tpot_ns=None, itl_ns=[])
    report = report_of(timeline)
    assert list(report.phases) == ["prefill"]
    assert "There is no decode: every request ended with its first token." in report.answer
    timeline.requests.clear()
    assert "No decode step was seen." in report_of(timeline).answer


def test_decode_only() -> None:
    timeline = Timeline()
    for _ in range(20):
        timeline.add("decode", 4, gflop=0.1, gb=0.22)
    report = report_of(timeline)
    assert report.phases["decode"].bound is Bound.BANDWIDTH
    assert report.answer[-1] == (
        "No prefill pass was seen: recording began after it, or the prompts were wholly in the cache."
    )


def test_a_phase_of_which_nothing_is_steady_is_named() -> None:
    timeline = healthy()
    for row in timeline.passes:
        if row["phase"] == "decode":
            row["warmup"] = "compile"
    assert (
        "No steady decode step is left: 56 steps of it were warm-up, profiled or failed, and are set aside."
        in answer_of(timeline)
    )


def test_only_warmup() -> None:
    timeline = healthy()
    for row in timeline.passes:
        row["warmup"] = "requested"
    report = report_of(timeline)
    assert report.phases == {}
    assert report.answer[0] == (
        "No steady pass was recorded: 64 passes of requested warm-up. Run longer, or without warm-up, to see what "
        "bounds this model."
    )


def test_mixed_steps_say_what_decode_waits() -> None:
    timeline = healthy()
    for _ in range(9):
        timeline.add("mixed", 120, gflop=60, gb=0.3, prefill_tokens=512, decode_tokens=7)
    assert (
        "A token that is decoded in a mixed step waits 120 ms, against 4 ms in a step of decode alone."
        in answer_of(timeline)
    )


def test_recompute_is_named_as_such() -> None:
    timeline = Timeline()
    for _ in range(8):
        timeline.add(
            "mixed", 10, gflop=6, gb=0.3, prefill_tokens=99, decode_tokens=1, recomputed_tokens=99
        )
    text = answer_of(timeline)
    assert "99 % of the tokens in mixed steps are computed again: the run had no KV cache" in text
    assert "First lever: the KV cache." in text
    assert "was seen" not in text


def test_a_killed_run_is_said() -> None:
    report = report_of(healthy(), complete=False, ended_ns=None, self_cost=None)
    assert report.answer[-1] == (
        "The end of 1 of 1 process is not in the trace: cut off, or still running. At most the last second before it "
        "is missing."
    )
    assert report.facts.incomplete == 1
    assert report.own_cost is None


def test_short_runs_are_not_to_be_relied_on() -> None:
    timeline = Timeline()
    timeline.add("prefill", 100, gflop=60, gb=0.2, tokens=512, warmup="first")
    timeline.add("decode", 4, gflop=0.1, gb=0.22, past=512)
    lines = report_of(timeline).answer
    assert lines[0].startswith(
        "Prefill is compute-bound. A pass of 512 prompt tokens runs at 0.6 TFLOP/s"
    )
    assert (
        "Low confidence in what bounds prefill and decode: only 1 pass of this phase could be counted."
        in lines
    )


def test_failed_passes_are_named() -> None:
    timeline = healthy()
    timeline.add("decode", 4, error="OutOfMemoryError")
    timeline.add("decode", 4, error="OutOfMemoryError")
    assert "2 passes were ended by an error (OutOfMemoryError), not counted here." in answer_of(
        timeline
    )


def test_time_in_other_models_is_named_where_it_matters() -> None:
    timeline = healthy()
    timeline.add("decode", 1, model_id="d", role="draft")
    assert "other models" not in answer_of(timeline)
    timeline.add("decode", 1023, model_id="d", role="draft")
    assert (
        "50 % of the time of all passes is in other models (Draft-5M), not counted here."
        in answer_of(timeline, models=(model(), model("d", name="Draft-5M")))
    )


def test_little_passes_of_other_kinds_take_no_sentence() -> None:
    timeline = healthy()
    timeline.add("other", 1)
    assert "Other" not in answer_of(timeline)
    timeline.add("other", 400)
    assert "Other takes" in answer_of(timeline)


def test_a_run_of_an_unknown_process_still_answers() -> None:
    """No meta file was left: labels and times are there, work is, roofs are not."""
    trace = healthy().trace()
    object.__setattr__(trace, "metas", ())
    report = build_report(trace)
    assert report.facts.model == "m"
    assert report.facts.device is None
    assert report.answer[0].startswith("Prefill takes 100 ms a pass, 5,120 prompt tokens/s.")
    assert build_report(trace, ceilings=roofs(CPU)).phases["decode"].bound is Bound.BANDWIDTH


def test_overhead_without_roofs_gives_the_busy_share_only() -> None:
    lines = report_of(both(100, 0.1), ceilings=()).answer
    assert lines[0] == (
        "Prefill is overhead-bound. Operators run 10 % of a pass of 100 ms, Python and the framework the rest."
    )
