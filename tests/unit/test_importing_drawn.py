"""Steps by ranges that a profiler drew on devices: recordings of devices alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phaseprof.importing.drawn import steps_drawn
from phaseprof.importing.forms import Span
from phaseprof.importing.run import Options, import_files
from phaseprof.phases import Phase
from phaseprof.trace.reader import Trace, open_trace

PREFILL = "execute_context_1(888)_generation_0(0)"
MIXED = "execute_context_1(64)_generation_2(2)"
DECODE = "execute_context_0(0)_generation_3(3)"


def span(name: str, start: int, end: int, stream: int = 7, device: int = 0) -> Span:
    return Span(name, start, end, stream, device)


def test_spans_of_one_range_on_several_streams_are_one_step() -> None:
    drawn = steps_drawn(
        [
            span(PREFILL, 100, 200),
            span(PREFILL, 150, 250, stream=9),
            span(DECODE, 240, 300),  # begins while the other stream is still at it
            span(DECODE, 320, 400),  # the next one, of the same name
            span("my_range", 100, 200),
        ],
        {},
    )
    assert [(step.start_ns, step.end_ns, step.work.phase) for step in drawn.steps] == [
        (100, 250, Phase.PREFILL),
        (240, 300, Phase.DECODE),
        (320, 400, Phase.DECODE),
    ]
    assert {step.thread_id for step in drawn.steps} == {None}
    at = [(7, 150), (9, 245), (7, 245), (7, 310), (7, 399), (7, 400), (9, 260)]
    assert [drawn.of(0, *each) for each in at] == [0, 0, 1, None, 2, None, None]
    # On a stream without spans: in one step, in two, in none; another device.
    others = [(0, 11, 120), (0, 11, 245), (0, 11, 500), (1, 7, 150)]
    assert [drawn.of(*each) for each in others] == [0, None, None, None]


def test_names_of_the_user_s(tmp_path: Path) -> None:
    drawn = steps_drawn([span("my_range", 1, 5)], {"my_*": Phase.DECODE})
    assert [step.work.phase for step in drawn.steps] == [Phase.DECODE]


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def kernel(ts: float, correlation: int, stream: int = 7) -> dict[str, Any]:
    args = {"device": 0, "stream": stream, "correlation": correlation}
    return event("kernel", "gemm", ts, 10.0, **args)


def imported(tmp_path: Path, *events: dict[str, Any]) -> Trace:
    file, folder = tmp_path / "gpu.json", tmp_path / "trace"
    file.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 10**18}))
    folder.mkdir()
    import_files([str(file)], folder, Options())
    return open_trace(folder)


DRAWN = [
    event("gpu_user_annotation", MIXED, 100.0, 50.0, device=0, stream=7),
    event("gpu_user_annotation", DECODE, 200.0, 50.0, device=0, stream=7),
]


def test_a_recording_of_a_device_alone(tmp_path: Path) -> None:
    kernels = [kernel(100.0, 1), kernel(110.0, 2), kernel(170.0, 3), kernel(240.0, 4)]
    trace = imported(tmp_path, *DRAWN, *kernels)
    rows = trace.passes.sort_by("start_ns").to_pylist()
    assert [(row["phase"], row["tag_source"], row["device_ns"]) for row in rows] == [
        ("mixed", "annotation", 20_000),
        ("decode", "annotation", 10_000),
    ]
    assert [(row["prefill_tokens"], row["decode_tokens"]) for row in rows] == [(64, 2), (0, 3)]
    ids = [row["pass_id"] for row in rows]
    found = trace.kernels.sort_by("start_ns").column("pass_id").to_pylist()
    assert found == [ids[0], ids[0], None, ids[1]]
    # A span is no work.
    assert trace.kernels.num_rows == 4
    said = {entry.what: entry.why for meta in trace.metas for entry in meta.not_measured}
    assert "within" in said["which step launched a kernel"]


@pytest.mark.parametrize("cat", ["user_annotation", "python_function"])
def test_with_the_host_its_own_evidence_decides(tmp_path: Path, cat: str) -> None:
    """The span on the device covers a kernel that the step before it launched."""
    name = (
        DECODE
        if cat == "user_annotation"
        else "vllm/v1/worker/gpu_model_runner.py(1): execute_model"
    )
    trace = imported(
        tmp_path,
        *DRAWN,
        {**event(cat, name, 10.0, 20.0), "pid": 5, "tid": 5},
        {**event("cuda_runtime", "cudaLaunchKernel", 12.0, 1.0, correlation=1), "pid": 5, "tid": 5},
        kernel(110.0, 1),
        kernel(120.0, 2),
    )
    (row,) = trace.passes.to_pylist()
    assert row["start_ns"] == 10**18 + 10_000
    found = trace.kernels.sort_by("start_ns").column("pass_id").to_pylist()
    assert found == [row["pass_id"], None]
