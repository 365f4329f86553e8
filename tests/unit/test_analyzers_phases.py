"""Figures per phase, from timelines whose sums can be done by hand."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import COST, CPU, GPU, META, MS, Timeline, healthy, meta, model, roofs

from phaseprof.analyzers.kernels.busy import busy_per_pass
from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.results import Bound, Confidence, PhaseFigures, Report, SetAside


def report_of(timeline: Timeline, **changes: Any) -> Report:
    return build_report(timeline.trace(meta(**changes) if changes else META))


def phase_of(timeline: Timeline, phase: str, **changes: Any) -> PhaseFigures:
    return report_of(timeline, **changes).phases[phase]


def test_prefill_and_decode_of_a_healthy_run() -> None:
    """Each figure by hand; a report with the phases swapped fails nearly every line."""
    report = report_of(healthy(prefills=8, decodes=56))
    assert list(report.phases) == ["prefill", "decode"]
    prefill, decode = report.phases["prefill"], report.phases["decode"]

    assert (prefill.passes, decode.passes) == (8, 56)
    assert (prefill.prefill_tokens, prefill.decode_tokens) == (8 * 512, 0)
    assert (decode.prefill_tokens, decode.decode_tokens) == (0, 56)
    assert (prefill.tokens, decode.tokens) == (4096, 56)
    assert (prefill.span_ms, decode.span_ms) == (800.0, 224.0)
    assert prefill.share == pytest.approx(800 / 1024)
    assert decode.share == pytest.approx(224 / 1024)
    assert prefill.prompt_tokens_per_s == pytest.approx(5120)
    assert prefill.output_tokens_per_s is None
    assert decode.prompt_tokens_per_s is None
    assert decode.output_tokens_per_s == pytest.approx(250)
    assert prefill.tflops == pytest.approx(0.6)
    assert decode.tflops == pytest.approx(0.025)
    assert prefill.gb_per_s == pytest.approx(2)
    assert decode.gb_per_s == pytest.approx(55)
    assert prefill.intensity == pytest.approx(300)
    assert decode.intensity == pytest.approx(0.1 / 0.22)
    assert [prefill.mfu, prefill.mbu] == pytest.approx([0.6, 0.02])
    assert [decode.mfu, decode.mbu] == pytest.approx([0.025, 0.55])
    assert prefill.weight_byte_share == pytest.approx(1)
    assert decode.weight_byte_share == pytest.approx(0.2 / 0.22)
    assert prefill.bound is Bound.COMPUTE
    assert decode.bound is Bound.BANDWIDTH
    assert prefill.verdict.explained == pytest.approx(0.6)
    assert decode.verdict.explained == pytest.approx(0.55)
    assert prefill.verdict.confidence is Confidence.HIGH
    assert decode.verdict.confidence is Confidence.HIGH
    assert prefill.flops == 8 * 60 * 10**9
    assert decode.weight_bytes == 56 * 200_000_000
    assert decode.kv_read_bytes == 56 * 20_000_000
    assert prefill.sequences_per_pass == 1
    # One gap of 1 ms after each prefill; 56 steps have 48 successors in their own request.
    assert (prefill.between_ms, decode.between_ms) == (8.0, 48.0)
    assert report.by_batch == {}
    assert report.set_aside == ()


def test_attention_share_is_what_matrices_and_head_leave() -> None:
    # 512 tokens x 0.09 GFLOP + one position x 0.01 GFLOP = 46.09 of 60 GFLOP.
    figures = phase_of(healthy(), "prefill")
    assert figures.attention_flop_share == pytest.approx(1 - 46.09 / 60)
    assert phase_of(healthy(), "prefill", models=(model(cost=None),)).attention_flop_share is None


def test_padding_counts_as_computed_tokens_and_is_null_when_not_known() -> None:
    timeline = healthy()
    for row in timeline.passes:
        row["padding_tokens"] = 100 if row["phase"] == "prefill" else None
    report = report_of(timeline)
    assert report.phases["prefill"].padding_tokens == 800
    assert report.phases["prefill"].attention_flop_share == pytest.approx(
        1 - (612 * 0.09 + 0.01) / 60
    )
    assert report.phases["decode"].padding_tokens is None
    assert report.phases["decode"].attention_flop_share is None


def test_percentiles_of_the_pass_time_are_nearest_rank() -> None:
    timeline = Timeline()
    for ms in range(1, 101):
        timeline.add("decode", ms, gflop=0.1, gb=0.2)
    figures = phase_of(timeline, "decode")
    assert (figures.pass_ms_p50, figures.pass_ms_p90, figures.pass_ms_p99) == (50, 90, 99)


# --- what counts ---------------------------------------------------------------------------------


def test_warmup_compile_profiled_and_failed_passes_do_not_count() -> None:
    timeline = healthy()
    timeline.add("prefill", 500, gflop=60, gb=0.2, tokens=512, warmup="requested")
    timeline.add("decode", 70, gflop=0.1, gb=0.2, warmup="first")
    timeline.add("decode", 900, gflop=0.1, gb=0.2, warmup="compile")
    timeline.add("decode", 30, gflop=0.1, gb=0.2, busy=0.9)
    timeline.add("decode", 10, gflop=0.1, gb=0.2, error="RuntimeError")
    timeline.add("prefill", 20, gflop=60, gb=0.2, warmup="requested", error="ValueError")
    report = report_of(timeline)
    clean = report_of(healthy())
    for name, figures in clean.phases.items():
        assert report.phases[name].span_ms == figures.span_ms
        assert report.phases[name].passes == figures.passes
    assert report.set_aside == (
        SetAside("requested", 1, 500.0),
        SetAside("first", 1, 70.0),
        SetAside("compile", 1, 900.0),
        SetAside("profiled", 1, 30.0),
        SetAside("error", 2, 30.0),
    )


@pytest.mark.parametrize(("others", "counted"), [(0, 1), (1, 2), (2, 3), (3, 3), (4, 4)])
def test_the_first_pass_counts_unless_three_others_remain(others: int, counted: int) -> None:
    timeline = Timeline()
    timeline.add("prefill", 100, gflop=60, gb=0.2, tokens=512, warmup="first")
    for _ in range(others):
        timeline.add("prefill", 100, gflop=60, gb=0.2, tokens=512)
    report = report_of(timeline)
    assert report.phases["prefill"].passes == counted
    cold = counted == others + 1
    evidence = " ".join(e.text for e in report.phases["prefill"].verdict.evidence)
    assert ("cold caches" in evidence) is cold
    assert report.set_aside == (() if cold else (SetAside("first", 1, 100.0),))


def test_each_phase_decides_for_itself_about_its_first_pass() -> None:
    timeline = Timeline()
    timeline.add("prefill", 100, gflop=60, gb=0.2, tokens=512, warmup="first")
    timeline.add("decode", 40, gflop=0.1, gb=0.2, warmup="first")
    for _ in range(9):
        timeline.add("decode", 4, gflop=0.1, gb=0.2)
    report = report_of(timeline)
    assert report.phases["prefill"].passes == 1
    assert report.phases["decode"].span_ms == 36.0


def test_an_unknown_kind_of_warmup_is_still_a_warmup() -> None:
    timeline = healthy()
    timeline.add("decode", 500, gflop=0.1, gb=0.2, warmup="a later version's")
    assert report_of(timeline).phases["decode"].span_ms == 224.0


def test_draft_passes_and_other_models_do_not_count() -> None:
    timeline = healthy()
    for _ in range(50):
        timeline.add("decode", 1, gflop=0.01, gb=0.01, model_id="d", role="draft")
    timeline.add("decode", 3, gflop=0.01, gb=0.01, model_id="other")
    report = report_of(timeline, models=(model(), model("d", name="Draft-5M")))
    assert report.facts.model == "Stand-in-50M"
    assert report.facts.models == ("Draft-5M", "other")
    assert report.phases["decode"].span_ms == 224.0


def test_the_encoder_of_the_same_model_has_its_row() -> None:
    timeline = healthy()
    timeline.add("encode", 24, gflop=10, gb=0.1, tokens=64, role="encoder")
    report = report_of(timeline)
    assert list(report.phases) == ["prefill", "decode", "encode"]
    assert report.phases["encode"].span_ms == 24.0


def test_an_encoder_only_model_is_reported() -> None:
    timeline = Timeline()
    for _ in range(5):
        timeline.add("encode", 20, gflop=15, gb=0.1, tokens=64, role="encoder")
    assert report_of(timeline).phases["encode"].bound is Bound.COMPUTE


def test_device_events_take_the_place_of_host_time() -> None:
    timeline = Timeline()
    for _ in range(5):
        timeline.add("decode", 1, gflop=0.1, gb=0.2, device_ns=4 * MS)
    report = report_of(timeline)
    assert report.phases["decode"].span_ms == 20.0
    assert dict(report.provenance)["time"] == "device events"


# --- work that is not known --------------------------------------------------------------------


def test_passes_without_work_leave_the_others_their_rates() -> None:
    timeline = healthy()
    for _ in range(56):
        timeline.add("decode", 4)
    figures = phase_of(timeline, "decode")
    assert figures.passes == 112
    assert figures.tflops == pytest.approx(0.025)
    assert figures.mbu == pytest.approx(0.55)
    assert figures.verdict.explained == pytest.approx(0.55)
    assert figures.output_tokens_per_s == pytest.approx(250)
    assert any("50 % of the time" in e.text for e in figures.verdict.evidence)


def test_half_known_work_is_unknown() -> None:
    timeline = Timeline()
    for _ in range(5):
        timeline.add("decode", 4, gflop=0.1, gb=0.2, kv_read_bytes=None)
    figures = phase_of(timeline, "decode")
    assert figures.bound is Bound.UNKNOWN
    assert (figures.flops, figures.tflops, figures.gb_per_s, figures.mfu) == (None,) * 4


def test_no_roofs_no_percentage() -> None:
    figures = phase_of(healthy(), "decode", ceilings=())
    assert figures.bound is Bound.UNKNOWN
    assert (figures.mfu, figures.mbu, figures.verdict.explained) == (None, None, None)
    # What was counted and measured stays.
    assert figures.gb_per_s == pytest.approx(55)
    assert figures.intensity == pytest.approx(0.1 / 0.22)


def test_sums_beyond_int64_do_not_wrap() -> None:
    timeline = Timeline()
    for _ in range(40):
        timeline.add("prefill", 1000, gflop=0.5e9, gb=0.2, tokens=512)  # 5e17 FLOPs each
    assert phase_of(timeline, "prefill").flops == 20_000_000_000_000_000_000


# --- busy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("busy", "bound"),
    [(0.1, Bound.OVERHEAD), (0.95, Bound.LATENCY), (None, Bound.OVERHEAD_OR_LATENCY)],
)
def test_busy_of_profiled_passes_tells_overhead_from_latency(
    busy: float | None, bound: Bound
) -> None:
    timeline = Timeline()
    for phase, tokens in (("prefill", 512), ("decode", 1)):
        for _ in range(10):
            timeline.add(phase, 100, gflop=5, gb=0.2, tokens=tokens)
        if busy is not None:
            for _ in range(3):
                # A collector makes passes slower; only the share is used.
                timeline.add(phase, 150, gflop=5, gb=0.2, tokens=tokens, busy=busy)
    report = report_of(timeline)
    for phase in ("prefill", "decode"):
        figures = report.phases[phase]
        assert figures.bound is bound
        assert figures.span_ms == 1000.0
        assert figures.busy_ms == (None if busy is None else pytest.approx(busy * 1000))


def test_profiled_passes_without_kernels_say_nothing() -> None:
    timeline = healthy()
    timeline.add("decode", 10, gflop=0.1, gb=0.2, profiled=True)
    timeline.add("decode", 10, gflop=0.1, gb=0.2, busy=0.8)
    assert phase_of(timeline, "decode").busy_ms == pytest.approx(0.8 * 224)


def test_kernels_that_outlast_their_pass_make_it_busy_and_no_more() -> None:
    timeline = healthy()
    row = timeline.add("decode", 10, gflop=0.1, gb=0.2, busy=1.0)
    timeline.kernels[-1]["end_ns"] = row["end_ns"] + 50 * MS
    assert phase_of(timeline, "decode").busy_ms == pytest.approx(224)


def kernel_table(rows: list[tuple[int, int | None, int, int]], device: str = "cpu") -> pa.Table:
    names = ("rank", "pass_id", "start_ns", "end_ns")
    return pa.Table.from_pylist(
        [dict(zip(names, row, strict=True), device=device) for row in rows],
        schema=pa.schema([*((name, pa.int64()) for name in names), ("device", pa.string())]),
    )


def busy_of(table: pa.Table, kind: str = "cpu") -> dict[tuple[int, int], int]:
    rows = busy_per_pass(table, device_kind=kind).to_pylist()
    return {(row["rank"], row["pass_id"]): row["busy_ns"] for row in rows}


def test_union_of_kernels_by_hand() -> None:
    table = kernel_table(
        [
            (0, 1, 100, 110),  # 10
            (0, 1, 105, 120),  # 10 more
            (0, 1, 106, 108),  # inside
            (0, 1, 200, 230),  # 30
            (0, 2, 90, 95),  # another pass, earlier on the clock
            (1, 1, 100, 101),  # the same number on another rank
            (0, None, 0, 1000),  # of no pass
            (0, 3, 50, 50),  # of no length
        ]
    )
    assert busy_of(table) == {(0, 1): 50, (0, 2): 5, (1, 1): 1, (0, 3): 0}


def test_operators_on_the_host_are_not_the_busy_time_of_a_gpu() -> None:
    table = pa.concat_tables(
        [kernel_table([(0, 1, 0, 100)], "cpu"), kernel_table([(0, 1, 90, 130)], "cuda:0")]
    )
    assert busy_of(table, "cuda") == {(0, 1): 40}
    assert busy_of(table, "cpu") == {(0, 1): 100}
    assert busy_of(table, "") == {(0, 1): 40}
    assert busy_of(table.slice(0, 1), "cuda") == {}
    assert busy_of(table.slice(0, 1), "") == {(0, 1): 100}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 60), st.integers(0, 20)),
        max_size=25,
    )
)
def test_union_equals_counting_points(rows: list[tuple[int, int, int, int]]) -> None:
    expected: dict[tuple[int, int], set[int]] = {}
    for rank, pass_id, start, length in rows:
        expected.setdefault((rank, pass_id), set()).update(range(start, start + length))
    table = kernel_table([(r, p, s, s + n) for r, p, s, n in rows])
    assert busy_of(table) == {key: len(points) for key, points in expected.items()}


# --- gaps ----------------------------------------------------------------------------------------


def test_gaps_belong_to_the_pass_that_ended() -> None:
    timeline = Timeline(gap_ns=2 * MS)
    timeline.add("prefill", 10, request="a", tokens=8)
    timeline.add("decode", 5, request="a", past=8)
    timeline.now_ns += 100 * MS  # the caller pauses between two requests
    timeline.add("prefill", 10, request="b", tokens=8)
    timeline.add("decode", 5, request="b", past=8)
    timeline.add("decode", 5, request="b", past=9)
    report = report_of(timeline)
    assert report.phases["prefill"].between_ms == 4.0
    assert report.phases["decode"].between_ms == 2.0


def test_gaps_are_those_of_one_thread_and_of_passes_that_count() -> None:
    timeline = Timeline(gap_ns=2 * MS)
    for i in range(6):
        # Two threads in turn, each with its own request: the gap to the next of one's own is 2 + 5 + 2 ms.
        timeline.add("decode", 5, request=f"r{i % 2}", thread_id=i % 2)
    assert phase_of(timeline, "decode").between_ms == 4 * 9.0
    timeline.passes[2]["profiled"] = True
    assert phase_of(timeline, "decode").between_ms == 2 * 9.0


def test_a_draft_model_between_two_passes_is_no_gap() -> None:
    timeline = Timeline(gap_ns=MS)
    timeline.add("decode", 5)
    timeline.add("decode", 3, model_id="d", role="draft")
    timeline.add("decode", 5)
    assert phase_of(timeline, "decode").between_ms is None


def test_waiting_for_the_device_is_no_gap() -> None:
    """Calls of 2 ms that return before the device has done its 10 ms, and a host that waits for it and works 3 ms."""
    timeline = Timeline(gap_ns=11 * MS)
    for _ in range(6):
        timeline.add("decode", 2, device_ns=10 * MS)
    decode = phase_of(timeline, "decode")
    assert decode.span_ms == 6 * 10.0
    assert decode.between_ms == 5 * 3.0


def test_passes_that_are_launched_ahead_of_the_device_have_no_gap() -> None:
    """Back to back: each call returns after 2 ms and the next follows at once, while the device takes 10 ms each."""
    timeline = Timeline(gap_ns=0)
    for _ in range(6):
        timeline.add("decode", 2, device_ns=10 * MS)
    decode = phase_of(timeline, "decode")
    assert (decode.span_ms, decode.between_ms) == (60.0, 0.0)


def test_the_model_with_the_most_time_has_it_on_the_device() -> None:
    timeline = Timeline()
    for _ in range(6):
        timeline.add("decode", 5, device_ns=6 * MS, model_id="quick to launch")
        timeline.add("decode", 2, device_ns=30 * MS, model_id="slow on the device")
    assert build_report(timeline.trace()).phases["decode"].span_ms == 6 * 30.0


def test_gaps_do_not_depend_on_the_order_of_rows_or_chunks() -> None:
    timeline = healthy()
    trace = timeline.trace()
    rows = trace.passes
    mixed = pa.concat_tables([rows.slice(i, 1) for i in reversed(range(rows.num_rows))])
    object.__setattr__(trace, "passes", mixed)
    report = build_report(trace)
    assert report.phases["decode"].between_ms == 48.0
    assert report.phases == report_of(timeline).phases


def test_dictionary_columns_and_narrow_ranks_read_as_plain_ones() -> None:
    """What a partitioned dataset may hand over."""
    trace = healthy().trace()
    table = trace.passes
    for name in ("phase", "model_id", "role", "dtype", "tag_source"):
        encoded = table.column(name).dictionary_encode()
        table = table.set_column(table.schema.get_field_index(name), name, encoded)
    index = table.schema.get_field_index("rank")
    table = table.set_column(index, "rank", table.column("rank").cast(pa.int32()))
    object.__setattr__(trace, "passes", table)
    assert build_report(trace).phases == report_of(healthy()).phases


def test_passes_without_slices_have_no_gap() -> None:
    timeline = Timeline(gap_ns=MS)
    timeline.add("decode", 5, slices=[])
    timeline.add("decode", 5, slices=[])
    figures = phase_of(timeline, "decode")
    assert figures.between_ms is None
    assert figures.passes == 2


# --- batches -------------------------------------------------------------------------------------


def test_by_batch_where_several_batches_ran() -> None:
    timeline = Timeline()
    for batch in (1, 4, 16):
        timeline.add(
            "prefill", 10 * batch, gflop=6 * batch, gb=0.2, tokens=64 * batch, sequences=batch
        )
        for _ in range(5):
            timeline.add(
                "decode", 4 + batch / 4, gflop=0.1 * batch, gb=0.22, tokens=batch, sequences=batch
            )
    report = report_of(timeline)
    assert list(report.by_batch) == [1, 4, 16]
    for batch, phases in report.by_batch.items():
        assert list(phases) == ["prefill", "decode"]
        decode = phases["decode"]
        assert decode.passes == 5
        assert decode.sequences_per_pass == batch
        assert decode.decode_tokens == 5 * batch
        assert decode.output_tokens_per_s == pytest.approx(batch / (4 + batch / 4) * 1000)
        assert sum(figures.share for figures in phases.values()) == pytest.approx(1)
    assert report.phases["decode"].passes == 15
    assert report.phases["decode"].decode_tokens == 5 * 21
    assert report.phases["decode"].sequences_per_pass == pytest.approx(7)


def test_prefill_and_decode_of_different_batches_are_not_several_batches() -> None:
    timeline = Timeline()
    timeline.add("prefill", 10, tokens=64)
    timeline.add("decode", 4, tokens=8, sequences=8)
    assert report_of(timeline).by_batch == {}


def test_passes_that_differ_are_less_sure() -> None:
    timeline = Timeline()
    for ms in (4, 4, 4, 4, 4, 4, 4, 9, 9, 9):
        timeline.add("decode", ms, gflop=0.1, gb=0.4)
    figures = phase_of(timeline, "decode")
    assert figures.bound is Bound.BANDWIDTH
    assert figures.verdict.confidence is Confidence.MEDIUM
    assert any("2.25x the median" in e.text for e in figures.verdict.evidence)


def test_prompts_of_different_length_do_not_differ_against_their_own_roof() -> None:
    timeline = Timeline()
    for scale in (1, 1, 1, 1, 8, 8, 8, 8, 8, 8):
        timeline.add("prefill", 10 * scale, gflop=7 * scale, gb=0.01, tokens=64 * scale)
    assert phase_of(timeline, "prefill").verdict.confidence is Confidence.HIGH


def test_mixed_and_unknown_labels_have_rows() -> None:
    timeline = healthy()
    timeline.add("mixed", 50, prefill_tokens=64, decode_tokens=7, tokens=71)
    timeline.add("a later version's", 5)
    report = report_of(timeline)
    mixed = report.phases["mixed"]
    assert mixed.prompt_tokens_per_s == pytest.approx(64 / 0.05)
    assert mixed.output_tokens_per_s == pytest.approx(7 / 0.05)
    assert report.phases["other"].passes == 1


# --- properties ----------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    spans=st.lists(
        st.tuples(st.sampled_from(["prefill", "decode", "mixed"]), st.integers(1, 500)),
        min_size=1,
        max_size=30,
    ),
    factor=st.integers(2, 9),
)
def test_time_scales_rates_and_nothing_else(spans: list[tuple[str, int]], factor: int) -> None:
    def built(scale: int) -> Report:
        timeline = Timeline()
        for phase, ms in spans:
            timeline.add(phase, ms * scale, gflop=3, gb=0.1, tokens=4)
        return report_of(timeline)

    before, after = built(1), built(factor)
    assert sum(f.share for f in before.phases.values()) == pytest.approx(1)
    for name, figures in before.phases.items():
        slower = after.phases[name]
        assert slower.share == pytest.approx(figures.share)
        assert slower.span_ms == pytest.approx(figures.span_ms * factor)
        assert figures.tflops and slower.tflops == pytest.approx(figures.tflops / factor)
        assert figures.gb_per_s and slower.gb_per_s == pytest.approx(figures.gb_per_s / factor)
        assert figures.mfu and slower.mfu == pytest.approx(figures.mfu / factor)
        assert slower.intensity == pytest.approx(figures.intensity)
        assert (slower.tokens, slower.flops) == (figures.tokens, figures.flops)


def test_ranks_add_up_and_rates_stay_those_of_one() -> None:
    timeline = healthy()
    for row in [dict(row) for row in timeline.passes]:
        timeline.passes.append({**row, "rank": 1})
    report = report_of(timeline)
    assert report.facts.ranks == 2
    decode = report.phases["decode"]
    assert decode.passes == 112
    assert decode.tflops == pytest.approx(0.025)
    assert decode.output_tokens_per_s == pytest.approx(250)
    assert decode.between_ms == 96.0
    assert "rates are per rank" in dict(report.provenance)["ranks"]


def test_two_hundred_thousand_passes() -> None:
    """Large tables go through the same vectorised code; the figures are those of one part."""
    part = healthy(prefills=8, decodes=56).trace()
    copies = 3200
    tables = [part.passes] * copies
    object.__setattr__(part, "passes", pa.concat_tables(tables))
    assert part.passes.num_rows == 204_800
    report = build_report(part)
    assert report.phases["prefill"].passes == 8 * copies
    assert report.phases["decode"].span_ms == pytest.approx(224.0 * copies)
    assert report.phases["decode"].verdict.explained == pytest.approx(0.55)


def test_a_gpu_is_held_against_its_own_roofs() -> None:
    """Eager decode at batch 1: 27 % of the floor, the GPU idle for 70 %."""
    fast = roofs(GPU, flops_per_s=1e15, bytes_per_s=4e12)
    timeline = Timeline()
    for _ in range(20):
        timeline.add("decode", 10, gflop=10, gb=10.8)
    for _ in range(3):
        timeline.add("decode", 10, gflop=10, gb=10.8, busy=0.3)
    for kernel in timeline.kernels:
        kernel["device"] = "cuda:0"
    report = report_of(
        timeline, models=(model(device=GPU, cost=COST),), ceilings=(roofs(CPU), fast)
    )
    decode = report.phases["decode"]
    assert decode.mbu == pytest.approx(0.27)
    assert decode.bound is Bound.OVERHEAD
    assert "CUDA graphs" in decode.verdict.remedy
