"""The floor of a pass, operation by operation, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from traces import CPU, MS, Timeline, meta, model, roofs

from phaseprof.analyzers.kernels.kernel_results import KernelClass
from phaseprof.analyzers.passes import Primary
from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.results import PhaseFigures, Roof
from phaseprof.analyzers.steps.op_roofline import step_floors
from phaseprof.analyzers.steps.pass_rows import PassRows, rows_of_phases
from phaseprof.phases import Phase
from phaseprof.trace.meta import Device
from phaseprof.work.cost import AttentionCost, MatmulCost, ModelCost
from phaseprof.work.count import Rows, count
from phaseprof.work.ops import OpKind

PRIMARY = Primary("m", ("target",), 0.0)
#: Two matrices of 0.1 GB and 0.05 GFLOP a token; one layer of attention of 0.1 MB a token.
COST = ModelCost(
    linear_flops_per_token=100_000_000,
    head_flops_per_token=0,
    attention=(AttentionCost(1, 1, 1, 1, 1, None, 100_000),),
    body_weight_bytes=200_000_000,
    head_weight_bytes=0,
    lookup_bytes_per_token=0,
    parameter_bytes=200_000_000,
    parameters=50_000_000,
    dtype="float32",
    matmuls=(
        MatmulCost("qkv", 1, 5_000, 5_000, 100_000_000),
        MatmulCost("down", 1, 5_000, 5_000, 100_000_000),
    ),
)


def _pass(rows: Rows, ms: float, *, decode: bool, flops: float = 1.0) -> PassRows:
    work = count(COST, (rows,), logits_tokens=0, layout=None)
    assert work.kv_read_bytes is not None
    assert work.kv_write_bytes is not None
    moved = work.weight_bytes + work.kv_read_bytes + work.kv_write_bytes
    return PassRows(
        prefill=() if decode else (rows,),
        decode=(rows,) if decode else (),
        logits_tokens=0,
        span_ns=round(ms * MS),
        flops=round(work.flops * flops),
        moved_bytes=moved,
        experts_read=None,
    )


def _figures(timeline: Timeline) -> dict[str, PhaseFigures]:
    return dict(build_report(timeline.trace()).phases)


def _phases() -> dict[str, PhaseFigures]:
    timeline = Timeline()
    for _ in range(5):
        timeline.add("decode", 20)
        timeline.add("prefill", 20)
    return _figures(timeline)


def test_each_operation_has_a_roof_of_its_own() -> None:
    """One sequence behind 9,999 tokens. Each matrix: 1 ms to read, 0.05 ms to compute. Attention reads 10,000 tokens
    and writes one: 1.00010 GB at 100 GB/s."""
    rows = {Phase.DECODE: [_pass(Rows(9_999, 1, 1), 20, decode=True)]}
    floor = step_floors(rows, COST, roofs(), _phases())["decode"]
    by_kind = {op.kind: op for op in floor.ops}
    assert by_kind[OpKind.QKV].floor_ms == pytest.approx(1.0)
    assert by_kind[OpKind.QKV].compute_ms == pytest.approx(0.05)
    assert by_kind[OpKind.ATTENTION_DECODE].floor_ms == pytest.approx(10.001)
    assert floor.floor_ms == pytest.approx(12.001)
    assert floor.whole_floor_ms == pytest.approx(12.001)
    assert floor.ops[0].kind is OpKind.ATTENTION_DECODE
    assert floor.ops[0].share == pytest.approx(10.001 / 12.001)
    assert floor.distance == pytest.approx(20 / 12.001)
    assert by_kind[OpKind.QKV].rows == 1


def test_the_sum_of_the_floors_is_above_the_floor_of_the_whole() -> None:
    """A hundred sequences behind 1,000 tokens: matrices compute 5 ms each, attention reads 100.2 ms. As one, the pass
    reads 102.2 ms and computes 10 ms beside that."""
    rows = {Phase.DECODE: [_pass(Rows(1_000, 1, 100), 200, decode=True)]}
    floor = step_floors(rows, COST, roofs(), _phases())["decode"]
    by_kind = {op.kind: op for op in floor.ops}
    assert by_kind[OpKind.QKV].roof is Roof.COMPUTE
    assert by_kind[OpKind.ATTENTION_DECODE].roof is Roof.BANDWIDTH
    assert floor.floor_ms == pytest.approx(5 + 5 + 100.2)
    assert floor.whole_floor_ms == pytest.approx(102.2)


def test_what_was_recorded_is_what_is_shared_out() -> None:
    """Padding doubles the FLOPs of a prefill: those of each operation double."""
    plain = {Phase.PREFILL: [_pass(Rows(0, 100, 1), 20, decode=False)]}
    padded = {Phase.PREFILL: [_pass(Rows(0, 100, 1), 20, decode=False, flops=2.0)]}
    one = step_floors(plain, COST, roofs(), _phases())["prefill"]
    two = step_floors(padded, COST, roofs(), _phases())["prefill"]
    assert sum(op.flops for op in two.ops) == pytest.approx(2 * sum(op.flops for op in one.ops))
    assert two.floor_ms == pytest.approx(2 * one.floor_ms, rel=0.01)


def test_a_pass_is_above_its_floor_in_its_kernels_and_idle() -> None:
    """20 ms a step, of which half are kernels: 8 ms of products for a floor of 2, 2 ms of attention for 1.001; the
    other 10 ms nothing ran."""
    timeline = Timeline()
    for number in range(8):
        row = timeline.add(
            "decode",
            20,
            gflop=0.1,
            gb=0.3,
            past=999,
            profiled=number >= 4,
            slices=[
                {"request_id": "r0", "phase": "decode", "query": 1, "past": 999, "prompt": 999}
            ],
        )
        if number >= 4:
            _kernels(timeline, row)
    report = build_report(timeline.trace(meta(models=(model(cost=COST),))))
    floor = report.operations["decode"]
    above = {each.kernel_class: each for each in floor.above}
    assert above[None].measured_ms == pytest.approx(10, rel=0.01)
    assert above[KernelClass.GEMM].measured_ms == pytest.approx(8, rel=0.01)
    assert above[KernelClass.GEMM].floor_ms == pytest.approx(2, rel=0.01)
    assert above[KernelClass.ATTENTION].floor_ms == pytest.approx(1, rel=0.01)
    assert [each.kernel_class for each in floor.above][:2] == [None, KernelClass.GEMM]


def _kernels(timeline: Timeline, row: dict[str, object]) -> None:
    start = row["start_ns"]
    assert isinstance(start, int)
    for name, begin, end in (("aten::mm", 0, 8), ("aten::scaled_dot_product_attention", 8, 10)):
        timeline.kernels.append(
            {
                "pass_id": row["pass_id"],
                "name": name,
                "device": "cpu",
                "stream": 0,
                "rank": 0,
                "start_ns": start + begin * MS,
                "end_ns": start + end * MS,
                "source": "torch_profiler",
            }
        )


def test_without_roofs_structure_or_matrices_there_is_no_floor() -> None:
    rows = {Phase.DECODE: [_pass(Rows(9, 1, 1), 20, decode=True)]}
    phases = _phases()
    assert not step_floors(rows, None, roofs(), phases)
    assert not step_floors(rows, COST, None, phases)
    assert not step_floors(rows, replace(COST, matmuls=()), roofs(), phases)
    assert not step_floors({}, COST, roofs(), phases)


def test_rows_of_one_length_are_one_entry() -> None:
    timeline = Timeline()
    slices = [
        {"request_id": "a", "phase": "decode", "query": 1, "past": 7, "prompt": 5},
        {"request_id": "b", "phase": "decode", "query": 1, "past": 7, "prompt": 4},
        {"request_id": "c", "phase": "prefill", "query": 6, "past": 2, "prompt": 8},
    ]
    for _ in range(4):
        timeline.add("mixed", 5, slices=slices, sequences=3, logits_tokens=3)
    (row, *_) = rows_of_phases(timeline.trace().passes, PRIMARY)[Phase.MIXED]
    assert row.decode == (Rows(7, 1, 2),)
    assert row.prefill == (Rows(2, 6, 1),)
    assert row.prompts == (8,)
    assert (row.prefill_tokens, row.decode_tokens) == (6, 2)


def test_kernels_of_a_known_gpu_stand_beside_the_floor() -> None:
    """A decode step of a sequence on an H100: 0.2 GB of weights at 3.35 TB/s are 60 us, and no kernel is that fast."""
    h100 = Device("NVIDIA H100 80GB HBM3", "cuda", 0, 132, None, 80 * 10**9, "h100")
    peak = replace(roofs(h100, dtype="bfloat16"), flops_per_s=989e12, bytes_per_s=3.35e12)
    rows = {Phase.DECODE: [_pass(Rows(100, 1, 1), 1, decode=True)]}
    cost = replace(COST, dtype="bfloat16")
    floor = step_floors(rows, cost, replace(peak, source="datasheet"), _phases(), h100)["decode"]
    assert floor.floor_ms == pytest.approx(0.2 / 3.35 + 0.0102 / 3.35, rel=0.01)
    assert floor.modelled is not None
    assert floor.floor_ms < floor.modelled.ms < 2 * floor.floor_ms
    assert floor.modelled.low_ms < floor.modelled.ms < floor.modelled.high_ms
    assert "H100" in floor.modelled.reference


def test_nothing_is_modelled_for_a_cpu() -> None:
    rows = {Phase.DECODE: [_pass(Rows(100, 1, 1), 1, decode=True)]}
    assert step_floors(rows, COST, roofs(), _phases(), CPU)["decode"].modelled is None
