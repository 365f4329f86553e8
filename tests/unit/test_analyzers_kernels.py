"""Kernels of profiled passes: time split fairly, classes, collectives, gaps and launches, on timelines by hand."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import GPU, MS, START_NS, Timeline, meta, model, roofs

from phaseprof.analyzers.as_json import to_json
from phaseprof.analyzers.kernels.breakdown import Breakdown, breakdown
from phaseprof.analyzers.kernels.busy import split_time
from phaseprof.analyzers.kernels.kernel_results import KernelClass, KernelFigures, TensorCores
from phaseprof.analyzers.remedies import Circumstances, lever
from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.results import Bound, Report
from phaseprof.phases import Phase

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas"
PLAIN = "ampere_sgemm_32x128_tn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, int>(int)"
TEMPLATE = "triton_tem_fused_mm_5"
NORM = "void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*)"
CAT = (
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u> >(int)"
)
UNPACK = "void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*)"
ATTENTION = "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4> >(flash::Flash_fwd_params)"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
COPY = "Memcpy DtoD (Device -> Device)"


def ints(*values: int) -> pa.Array:
    return pa.array(values, pa.int64())


def split(
    *kernels: tuple[int, int], device: tuple[int, ...] = (), kind: tuple[bool, ...] = ()
) -> Any:
    count = len(kernels)
    return split_time(
        ints(*(device or (0,) * count)),
        ints(*(begin for begin, _ in kernels)),
        ints(*(end for _, end in kernels)),
        pa.array(kind or (False,) * count, pa.bool_()),
    )


def test_kernels_one_after_another_have_their_whole_time() -> None:
    assert split((0, 10), (10, 25), (30, 31)).own.to_pylist() == [10, 15, 1]


def test_kernels_that_overlap_share_the_time_equally() -> None:
    """0..10 alone, 10..20 two of them, 20..30 all three, 30..40 two again."""
    found = split((0, 30), (10, 40), (20, 40))
    assert found.own.to_pylist() == pytest.approx([10 + 5 + 10 / 3, 5 + 10 / 3 + 5, 10 / 3 + 5])
    assert sum(found.own.to_pylist()) == pytest.approx(40)


def test_kernels_of_other_devices_do_not_overlap() -> None:
    assert split((0, 10), (0, 10), device=(1, 2)).own.to_pylist() == [10, 10]


def test_a_kernel_of_no_length_takes_no_time() -> None:
    found = split((5, 5), (0, 10), (10, 10), (8, 3))
    assert found.own.to_pylist() == [0, 10, 0, 0]


def test_a_collective_is_exposed_where_nothing_else_runs() -> None:
    found = split((0, 10), (4, 30), (20, 40), kind=(False, True, True))
    # 0..4 computes; 4..10 both; 10..20 the first collective; 20..30 both collectives; 30..40 the second.
    assert found.own.to_pylist() == pytest.approx([4 + 3, 3 + 10 + 5, 5 + 10])
    assert found.alone.to_pylist() == pytest.approx([0, 10 + 5, 5 + 10])


def test_no_kernels_have_no_time() -> None:
    assert split().own.to_pylist() == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 20), st.booleans()),
        min_size=1,
        max_size=25,
    )
)
def test_parts_add_up_to_the_union_of_each_device(rows: list[tuple[int, int, int, bool]]) -> None:
    """Against a device that is walked through nanosecond by nanosecond."""
    found = split(
        *((begin, begin + length) for _, begin, length, _ in rows),
        device=tuple(device for device, *_ in rows),
        kind=tuple(kind for *_, kind in rows),
    )
    own, alone = [0.0] * len(rows), [0.0] * len(rows)
    for device in range(3):
        for now in range(100):
            running = [
                place
                for place, (of, begin, length, _) in enumerate(rows)
                if of == device and begin <= now < begin + length
            ]
            for place in running:
                own[place] += 1 / len(running)
                if all(rows[other][3] for other in running):
                    alone[place] += 1 / len(running)
    assert found.own.to_pylist() == pytest.approx(own)
    assert found.alone.to_pylist() == pytest.approx(alone)


class Device:
    """A GPU's kernels of one run: each pass of 10 ms, its kernels by name, begin and end in ms after its start."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.lost: list[dict[str, Any]] = []

    def add(
        self, phase: str, *kernels: tuple[str, float, float], rank: int = 0, **columns: Any
    ) -> dict[str, Any]:
        row = self.timeline.add(
            phase,
            10,
            gflop=0.1,
            gb=0.01,
            profiled=True,
            rank=rank,
            **{"device_ns": 10 * MS, **columns},
        )
        for name, begin, end in kernels:
            self.kernel(name, row["start_ns"], begin, end, pass_id=row["pass_id"], rank=rank)
        return row

    def kernel(self, name: str, at_ns: int, begin: float, end: float, **columns: Any) -> None:
        start_ns = at_ns + round(begin * MS)
        self.timeline.kernels.append(
            {
                "rank": 0,
                "pass_id": None,
                "name": name,
                "device": "cuda:0",
                "stream": 7,
                "start_ns": start_ns,
                "end_ns": at_ns + round(end * MS),
                "source": "kernels",
                "launched_ns": start_ns - 20_000,
                **columns,
            }
        )

    def found(self) -> Breakdown:
        from phaseprof.analyzers.passes import primary_model, sort_passes

        trace = self.timeline.trace()
        passes = sort_passes(trace.passes, primary_model(trace.passes), None)
        found = breakdown(passes.profiled, trace.kernels, "cuda")
        assert found is not None
        return found

    def figures(self, phase: Phase = Phase.DECODE, sequences: int | None = None) -> KernelFigures:
        figures = self.found().figures(phase, sequences)
        assert figures is not None
        return figures

    def report(self) -> Report:
        for _ in range(5):
            self.timeline.add("decode", 10, gflop=0.1, gb=0.01, device_ns=10 * MS)
        return build_report(
            self.timeline.trace(meta(models=(model(device=GPU),), ceilings=(roofs(GPU),)))
        )


def decode() -> Device:
    """Two decode passes of the same kernels: 4 ms of products, 2 of an addition, 1 of a copy, 1 of which overlaps."""
    device = Device()
    for _ in range(2):
        device.add(
            "decode", (GEMM, 0, 3), (PLAIN, 3, 4), (ADD, 4, 6), (COPY, 5, 6), (TEMPLATE, 8, 9)
        )
    return device


def test_classes_of_a_phase_add_up_to_its_busy_time() -> None:
    figures = decode().figures()
    assert (figures.passes, figures.kernels, figures.kernels_per_pass) == (2, 10, 5)
    assert [each.kernel_class for each in figures.classes] == [
        KernelClass.GEMM,
        KernelClass.ELEMENTWISE,
        KernelClass.COPY,
    ]
    assert [each.busy_ms for each in figures.classes] == pytest.approx([10, 3, 1])
    assert [each.share for each in figures.classes] == pytest.approx([10 / 14, 3 / 14, 1 / 14])
    assert [each.calls for each in figures.classes] == [6, 2, 2]
    assert figures.busy_ms == pytest.approx(14)
    assert figures.span_ms == pytest.approx(20)
    assert figures.overlap_ms == pytest.approx(2)
    # From 6 to 8 ms nothing ran; before the first kernel and after the last is no gap.
    assert figures.gap_ms == pytest.approx(4)
    assert figures.of(KernelClass.GEMM) == pytest.approx(10 / 14)
    assert figures.of(KernelClass.MOE) == 0
    assert figures.unclassed_share == 0


def test_tensor_cores_by_name() -> None:
    figures = decode().figures()
    assert figures.tensor_core_share == pytest.approx(6 / 14)
    assert figures.tensor_core_unknown_share == pytest.approx(2 / 14)
    gemm, elementwise, _ = figures.classes
    assert (gemm.tensor_cores, elementwise.tensor_cores) == (TensorCores.YES, TensorCores.NO)
    assert gemm.tensor_core_ms == pytest.approx(6)
    assert gemm.longest == GEMM[:59] + "…"
    assert gemm.longest_share == pytest.approx(0.6)


def test_copies_of_the_driver_are_counted_apart() -> None:
    figures = decode().figures()
    assert figures.copies == 2
    assert figures.copy_ms == pytest.approx(1)


def test_launches_before_their_kernels() -> None:
    figures = decode().figures()
    assert figures.launch_delay_ms is not None
    assert figures.launch_delay_ms.count == 10
    assert figures.launch_delay_ms.p50 == pytest.approx(0.02)
    assert figures.graph_kernels == 0


def test_kernels_of_one_launch_are_those_of_a_graph() -> None:
    device = Device()
    row = device.add("decode", (ADD, 0, 1))
    for begin in (1, 2, 3):
        device.kernel(
            GEMM,
            row["start_ns"],
            begin,
            begin + 1,
            pass_id=row["pass_id"],
            launched_ns=row["start_ns"] - 9,
        )
    assert device.figures().graph_kernels == 3


def test_a_name_that_no_table_knows_is_other() -> None:
    device = Device()
    device.add("decode", ("zzz", 0, 1), ("my_company_attention_v7", 1, 4))
    figures = device.figures()
    assert [each.kernel_class for each in figures.classes] == [
        KernelClass.ATTENTION,
        KernelClass.OTHER,
    ]
    assert figures.unclassed_share == pytest.approx(0.25)
    assert figures.by_word_share == pytest.approx(0.75)


def test_phases_and_batches_have_their_own_kernels() -> None:
    device = Device()
    device.add("prefill", (GEMM, 0, 8), tokens=64)
    device.add("decode", (ADD, 0, 1))
    device.add("decode", (ADD, 0, 3), sequences=4, tokens=4)
    assert device.figures(Phase.PREFILL).busy_ms == pytest.approx(8)
    assert device.figures(Phase.DECODE).busy_ms == pytest.approx(4)
    assert device.figures(Phase.DECODE, 4).busy_ms == pytest.approx(3)
    assert device.found().figures(Phase.MIXED) is None
    assert device.found().figures(Phase.DECODE, 9) is None


def test_kernels_join_their_pass_by_rank_and_number() -> None:
    """Two ranks count their passes alike, and each calls its device cuda:0."""
    device = Device()
    device.add("decode", (GEMM, 0, 4), rank=0, pass_id=0)
    device.add("decode", rank=1, pass_id=0)
    device.kernel(ADD, device.timeline.passes[0]["start_ns"], 0, 2, rank=1, pass_id=0)
    figures = device.figures()
    assert figures.passes == 2
    assert [each.busy_ms for each in figures.classes] == pytest.approx([4, 2])


def test_kernels_outside_the_time_of_their_pass_are_still_its_own() -> None:
    device = Device()
    row = device.add("prefill", tokens=64)
    device.add("decode")
    device.kernel(GEMM, row["start_ns"], 12, 19, pass_id=row["pass_id"])
    assert device.figures(Phase.PREFILL).busy_ms == pytest.approx(7)
    assert device.found().figures(Phase.DECODE) is None


def test_kernels_of_no_pass_are_counted_and_not_guessed() -> None:
    device = decode()
    start = device.timeline.passes[0]["start_ns"]
    device.kernel(ADD, start, 9.5, 9.75)
    device.kernel(ADD, start, 9.75, 10, launched_ns=None)
    found = device.found().unattributed
    assert found is not None
    assert (found.between, found.launchless) == (1, 1)
    assert [found.between_ms, found.launchless_ms] == pytest.approx([0.25, 0.25])
    assert found.launchless_share == pytest.approx(0.25 / 14.5)
    assert device.figures().kernels == 10
    entries = [each.what for each in device.report().not_measured]
    assert "the pass of 1 kernel (2 % of the time of all)" in entries


def test_kernels_that_all_have_a_pass_leave_nothing_to_say() -> None:
    assert decode().found().unattributed is None


def test_a_phase_of_collectives_is_bound_by_communication() -> None:
    device = Device()
    for _ in range(3):
        device.add("decode", (GEMM, 0, 3), (REDUCE, 2, 9))
    figures = device.figures()
    assert figures.collective_ms == pytest.approx(3 * 6.5)
    assert figures.exposed_collective_ms == pytest.approx(3 * 6)
    assert figures.exposed_comm_share == pytest.approx(0.6)
    phase = device.report().phases["decode"]
    assert phase.bound is Bound.COMMUNICATION
    assert any(
        "exposed collectives take 60 %" in each.text.lower() for each in phase.verdict.evidence
    )


def test_each_rank_says_how_long_it_was_exposed() -> None:
    """Rank 1 comes late: rank 0 waits in the collective for 6 ms of 10, rank 1 for 2."""
    device = Device()
    for step in range(3):
        device.add("decode", (GEMM, 0, 3), (REDUCE, 3, 9), rank=0, pass_id=step)
        device.add("decode", (GEMM, 0, 7), (REDUCE, 7, 9), rank=1, pass_id=step)
        device.timeline.add("decode", 10, rank=1, device_ns=10 * MS)
    report = device.report()
    assert report.ranks is not None
    shares = [each.exposed_comm_share for each in report.ranks.ranks]
    assert shares == pytest.approx([0.6, 0.2])


def test_collectives_under_compute_bind_nothing() -> None:
    device = Device()
    for _ in range(3):
        device.add("decode", (GEMM, 0, 9), (REDUCE, 2, 8))
    assert device.figures().exposed_comm_share == 0
    assert device.report().phases["decode"].bound is not Bound.COMMUNICATION


def test_without_collectives_the_verdict_has_nothing_to_say_of_them() -> None:
    phase = decode().report().phases["decode"]
    assert phase.kernels is not None
    assert not any("collective" in each.text for each in phase.verdict.evidence)


def test_a_gpu_is_busy_for_the_time_of_its_kernels() -> None:
    """7 of 10 ms of each profiled pass, so 7 of 10 ms of the passes that are counted."""
    phase = decode().report().phases["decode"]
    assert phase.busy_ms == pytest.approx(5 * 7)


def test_a_pass_without_device_events_lasts_as_long_as_its_kernels() -> None:
    """The call took 10 ms and its kernels ran from 5 to 25 ms, half of the time."""
    device = Device()
    for _ in range(3):
        device.add("decode", (GEMM, 5, 10), (GEMM, 20, 25), device_ns=None)
    phase = device.report().phases["decode"]
    assert phase.busy_ms == pytest.approx(5 * 10 * 0.5)


def test_operators_of_a_cpu_have_classes_and_no_tensor_cores() -> None:
    timeline = Timeline()
    row = timeline.add("decode", 10, profiled=True)
    for name, begin, end in (("aten::linear", 0, 6), ("aten::mul", 6, 8), ("aten::view", 8, 9)):
        timeline.kernels.append(
            {
                "rank": 0,
                "pass_id": row["pass_id"],
                "name": name,
                "device": "cpu",
                "stream": 0,
                "start_ns": row["start_ns"] + begin * MS,
                "end_ns": row["start_ns"] + end * MS,
                "source": "kernels",
            }
        )
    timeline.add("decode", 10)
    figures = build_report(timeline.trace()).phases["decode"].kernels
    assert figures is not None
    assert figures.on_cpu
    assert [each.kernel_class for each in figures.classes] == ["gemm", "elementwise", "view"]
    assert figures.tensor_core_share is None
    assert figures.launch_delay_ms is None


def recorded(*kernels: tuple[str, float, float], **columns: Any) -> KernelFigures:
    device = Device()
    row = device.add("decode")
    for name, begin, end in kernels:
        device.kernel(name, row["start_ns"], begin, end, pass_id=row["pass_id"], **columns)
    return device.figures()


@pytest.mark.parametrize(
    ("bound", "kernels", "name"),
    [
        (Bound.LATENCY, ((ADD, 0, 3), (NORM, 3, 6), (GEMM, 6, 8)), "fused kernels"),
        (Bound.LATENCY, ((UNPACK, 0, 6), (GEMM, 6, 8)), "matmuls that take packed weights"),
        (Bound.LATENCY, ((CAT, 0, 6), (GEMM, 6, 8)), "fewer copies"),
        (Bound.LATENCY, ((ATTENTION, 0, 6), (GEMM, 6, 8)), "another attention kernel"),
        (Bound.LATENCY, ((PLAIN, 0, 6), (GEMM, 6, 8)), "tensor cores"),
        # Whether the template uses them, its name does not tell.
        (Bound.LATENCY, ((PLAIN, 0, 6), (TEMPLATE, 6, 8)), "better kernels"),
        (Bound.LATENCY, ((GEMM, 0, 6), (ADD, 6, 8)), "better kernels"),
        (Bound.OVERHEAD, ((GEMM, 0, 1), (ADD, 2, 3)), "fewer launches"),
        (Bound.COMMUNICATION, ((REDUCE, 0, 8),), "less exposed communication"),
    ],
)
def test_the_lever_follows_what_the_kernels_do(
    bound: Bound, kernels: tuple[tuple[str, float, float], ...], name: str
) -> None:
    known = Circumstances(device_kind="cuda", kernels=recorded(*kernels))
    found = lever(bound, Phase.DECODE, known)
    assert found is not None
    assert found.name == name


def test_graphs_are_no_lever_where_they_launch_the_kernels_already() -> None:
    kernels = recorded((GEMM, 0, 1), (ADD, 2, 3), launched_ns=START_NS)
    found = lever(Bound.OVERHEAD, Phase.DECODE, Circumstances(device_kind="cuda", kernels=kernels))
    assert found is not None
    assert found.name == "less work on the host"
    assert "100 % of the kernels" in found.how


def test_the_json_form_has_plain_values() -> None:
    device = decode()
    device.kernel(ADD, device.timeline.passes[0]["start_ns"], 9.5, 9.75)
    plain = json.loads(json.dumps(to_json(device.report())))
    figures = plain["phases"]["decode"]["kernels"]
    assert figures["classes"][0]["kernel_class"] == "gemm"
    assert figures["classes"][0]["tensor_cores"] == "yes"
    assert figures["launch_delay_ms"]["count"] == 10
    assert plain["unattributed"]["between"] == 1


def test_a_trace_without_kernels_has_no_breakdown() -> None:
    timeline = Timeline()
    timeline.add("decode", 10)
    report = build_report(timeline.trace())
    assert report.phases["decode"].kernels is None
    assert report.unattributed is None
