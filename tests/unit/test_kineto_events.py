"""What is read of kineto's events: outermost operators, kinds of events, names of devices; when a pass is looked at."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_recorded import Recorded

from phaseprof.attribution import DeviceEvent, Launch
from phaseprof.collectors.kineto_events import (
    DeviceNames,
    OperatorEvent,
    activity_type,
    outermost,
    read,
)
from phaseprof.collectors.windows import Schedule


def _event(start_ns: int, end_ns: int, thread_id: int = 1, name: str = "aten::mm") -> OperatorEvent:
    return OperatorEvent(name, start_ns, end_ns, thread_id)


def test_an_operator_inside_another_is_dropped() -> None:
    linear = _event(10, 100, name="aten::linear")
    addmm = _event(20, 90, name="aten::addmm")
    copy = _event(30, 40, name="aten::copy_")
    after = _event(100, 110, name="aten::gelu")
    assert outermost([copy, addmm, after, linear]) == (linear, after)


def test_same_begin_keeps_the_longer() -> None:
    outer, inner = _event(10, 100), _event(10, 50)
    assert outermost([inner, outer]) == (outer,)


def test_threads_do_not_hide_each_other() -> None:
    first, second = _event(10, 100, thread_id=1), _event(20, 30, thread_id=2)
    assert outermost([first, second]) == (first, second)


def test_a_child_whose_end_rounds_past_its_parent_is_still_a_child() -> None:
    parent, child = _event(10, 100), _event(50, 101)
    assert outermost([parent, child]) == (parent,)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20), st.integers(1, 3)), max_size=12))
def test_outermost_events_of_a_thread_never_overlap(intervals: list[tuple[int, int, int]]) -> None:
    events = [_event(start, start + length, thread) for start, length, thread in intervals]
    for thread in (1, 2, 3):
        kept = [event for event in outermost(events) if event.thread_id == thread]
        for before, after in itertools.pairwise(kept):
            assert before.end_ns <= after.start_ns


def test_events_of_a_gpu_are_told_apart() -> None:
    events = [
        Recorded("cpu_op", "aten::mm", (0, 100), resource=11),
        Recorded("cpu_op", "aten::copy_", (10, 20), resource=11),
        Recorded("cpu_op", "aten::waiting", (200, 210), resource=11, asynchronous=True),
        Recorded("cpu_op", "an annotation", (300, 310), resource=11, recorded_scope=7),
        Recorded("user_annotation", "## Call CompiledFxGraph f ##", (400, 450), resource=11),
        Recorded("cuda_runtime", "cudaLaunchKernel", (30, 35), resource=11, correlation=5),
        Recorded("cuda_driver", "cuLaunchKernelEx", (36, 37), resource=11, correlation=6),
        Recorded("cuda_runtime", "cudaMemcpyAsync", (40, 41), resource=11, correlation=7),
        Recorded("cuda_runtime", "cudaStreamSynchronize", (50, 90), resource=11, correlation=8),
        Recorded("kernel", "gemm", (60, 70), device=1, resource=7, correlation=5),
        Recorded("gpu_memcpy", "Memcpy HtoD", (71, 72), device=1, resource=7, correlation=7),
        Recorded("gpu_memset", "Memset (Device)", (73, 74), device=1, resource=9, correlation=9),
        Recorded("gpu_user_annotation", "a span", (60, 999), device=1, resource=7),
        Recorded("overhead", "Buffer Flush", (1, 2)),
    ]
    results = SimpleNamespace(events=lambda: events)
    found = read(results, shift_ns=1_000, name_device=lambda index: f"cuda:{index}")
    assert found.operators == (OperatorEvent("aten::mm", 1_000, 1_100, 11),)
    assert [region.start_ns for region in found.compiled] == [1_400]
    assert found.launches == (
        Launch(5, 1_030, 11, "cudaLaunchKernel"),
        Launch(6, 1_036, 11, "cuLaunchKernelEx"),
        Launch(7, 1_040, 11, "cudaMemcpyAsync"),
    )
    assert found.device_events == (
        DeviceEvent("gemm", "cuda:1", 1_060, 1_070, 7, 5),
        DeviceEvent("Memcpy HtoD", "cuda:1", 1_071, 1_072, 7, 7),
        DeviceEvent("Memset (Device)", "cuda:1", 1_073, 1_074, 9, 9),
    )
    assert found.count == len(events)
    assert found.on_device


@pytest.mark.parametrize(
    ("device", "name", "annotation", "kind"),
    [
        ("CPU", "aten::mm", False, "cpu_op"),
        ("CPU", "_C::rms_norm", False, "cpu_op"),
        ("CPU", "cudaLaunchKernel", False, "cuda_runtime"),
        ("CPU", "hipExtModuleLaunchKernel", False, "cuda_runtime"),
        ("CPU", "cuLaunchKernelEx", False, "cuda_driver"),
        ("CPU", "ProfilerStep#1", True, "user_annotation"),
        ("CUDA", "ProfilerStep#1", True, "gpu_user_annotation"),
        ("CUDA", "void gemm<float>(float*)", False, "kernel"),
        ("CUDA", "Memcpy DtoH (Device -> Pinned)", False, "gpu_memcpy"),
        ("CUDA", "Memset (Device)", False, "gpu_memset"),
    ],
)
def test_a_torch_that_does_not_tell_the_type_of_an_event(
    device: str, name: str, annotation: bool, kind: str
) -> None:
    event: Any = SimpleNamespace(
        name=lambda: name,
        device_type=lambda: SimpleNamespace(name=device),
        is_user_annotation=lambda: annotation,
    )
    assert activity_type(event) == kind


def test_devices_are_named_as_torch_names_them() -> None:
    assert DeviceNames(["cuda:0", "cuda:1"], counts_agents=False).name(1) == "cuda:1"
    # The second of two CPUs and eight GPUs, of which the process sees one.
    assert DeviceNames(["cuda:0"], counts_agents=True).name(9) == "cuda:0"
    assert DeviceNames(["cuda:0", "cuda:1"], counts_agents=True).name(9) == "cuda:9"


def test_a_schedule_skips_the_warm_up_and_comes_again() -> None:
    schedule = Schedule(skip=2, passes=3, every=10, wide_passes=1, wide_every=9)
    assert [number for number in range(30) if schedule.due(number, wide=False)] == [
        *(2, 3, 4),
        *(12, 13, 14),
        *(22, 23, 24),
    ]
    assert [number for number in range(30) if schedule.due(number, wide=True)] == [2, 11, 20, 29]
