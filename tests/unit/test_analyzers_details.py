"""The setting of a run, and products of matrices and attention apart, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from traces import COST, GPU, MS, START_NS, Timeline, healthy, meta, model, roofs

from phaseprof.analyzers.kernels.kernel_results import KernelClass
from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.viewing.details import build_details
from phaseprof.analyzers.viewing.parts_of_work import PartOfWork
from phaseprof.analyzers.viewing.setting import setting_of
from phaseprof.trace.meta import Host


def test_what_processes_share_stands_once() -> None:
    one = meta(rank=0, host=Host("a", "c", "t"), workload={"batch": [1, 4]})
    other = meta(
        rank=1,
        pid=2,
        host=Host("b", "c", "t"),
        versions={"transformers": "5.24.0", "torch": "2.13"},
        started_ns=START_NS - 5,
        ended_ns=None,
        complete=False,
    )
    found = setting_of([one, other])
    assert found.commands == (("python", "serve.py"),)
    assert found.versions == (("torch", "2.13"), ("transformers", "5.24.0"))
    assert (found.hosts, found.processes, found.cut_off) == (("a", "b"), 2, 1)
    assert (found.started_ns, found.ended_ns) == (START_NS - 5, None)
    assert [device.name for device in found.devices] == ["Stand-in CPU", "Stand-in GPU"]
    assert found.ceilings == (roofs(),)
    assert found.workload == (("batch", "1, 4"),)
    (facts,) = found.models
    assert (facts.name, facts.parameters) == ("Stand-in-50M", 50_000_000)


def test_a_trace_without_processes_has_an_empty_setting() -> None:
    found = setting_of([])
    assert (found.processes, found.started_ns, found.ended_ns, found.commands) == (
        0,
        None,
        None,
        (),
    )


def profiled(**changes: Any) -> Timeline:
    """Four decode passes of a batch of 2 under a profiler: 6 ms of GEMM and 2 ms of attention in each.

    Its matrices take 2 x 0.09 GFLOP and its head 2 x 0.01 GFLOP a pass, so that of 0.5 GFLOP 0.3 are attention's. Of
    0.3 GB 0.2 are weights, and 0.1 keys and values that are read.
    """
    made = healthy()
    for _ in range(4):
        row = made.add(
            "decode",
            10,
            gflop=0.5,
            gb=0.3,
            weights=2 / 3,
            sequences=2,
            tokens=2,
            request="p",
            profiled=True,
            **changes,
        )
        begin = row["start_ns"]
        for name, from_ms, to_ms in (
            ("aten::mm", 0, 6),
            ("aten::scaled_dot_product_attention", 6, 8),
        ):
            made.kernels.append(
                {
                    "rank": 0,
                    "pass_id": row["pass_id"],
                    "name": name,
                    "device": "cpu",
                    "stream": 0,
                    "start_ns": begin + from_ms * MS,
                    "end_ns": begin + to_ms * MS,
                    "source": "torch_profiler",
                }
            )
    return made


def parts_of(made: Timeline, **of_model: object) -> tuple[PartOfWork, ...]:
    trace = made.trace(meta(models=(replace(model(), **of_model),)))  # type: ignore[arg-type]
    return build_details(trace, build_report(trace)).parts


def test_matrices_and_attention_have_their_own_work_and_time() -> None:
    gemm, attention = parts_of(profiled())
    assert (gemm.kernel_class, attention.kernel_class) == (KernelClass.GEMM, KernelClass.ATTENTION)
    assert (gemm.phase.value, gemm.passes) == ("decode", 4)
    assert gemm.busy_ms == pytest.approx(24)
    assert gemm.flops == 4 * 2 * (90_000_000 + 10_000_000)
    assert gemm.tflops == pytest.approx(0.8e9 / 24e-3 / 1e12)
    assert gemm.intensity == pytest.approx(0.2e9 / 0.2e9)
    assert attention.flops == 4 * 300_000_000 and attention.busy_ms == pytest.approx(8)
    assert attention.tflops == pytest.approx(1.2e9 / 8e-3 / 1e12)
    assert attention.intensity == pytest.approx(0.3e9 / 0.1e9, rel=1e-6)


def test_nothing_is_split_that_is_not_known() -> None:
    assert parts_of(healthy()) == ()
    assert parts_of(profiled(padding_tokens=None)) == ()
    assert parts_of(profiled(), cost=None) == ()
    assert parts_of(profiled(), cost=replace(COST, counted=True)) == ()


def test_a_device_is_called_by_its_name() -> None:
    trace = healthy().trace(
        meta(devices=(replace(GPU, uuid="GPU-9"),), models=(model(device=GPU),))
    )
    found = build_details(trace, build_report(trace))
    assert found.setting.devices[0].uuid == "GPU-9"
    assert [d.metric for d in found.distributions] == ["ttft", "tpot", "itl"]
