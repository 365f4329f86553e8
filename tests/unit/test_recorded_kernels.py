"""Kernels that others recorded: nearly all of their time has a class, and busy times are those of their readme.

The recordings lie in a folder of their own beside the checkout, or where PHASEPROF_RECORDED_TRACES says. They are not
part of the project: without them these tests are skipped.
"""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from phaseprof.analyzers.kernels.breakdown import Breakdown, breakdown
from phaseprof.analyzers.kernels.kernel_results import KernelClass, KernelFigures
from phaseprof.phases import Phase
from phaseprof.schema import KERNELS

_BESIDE = Path(__file__).parents[3] / "shared" / "traces"
FOLDER = Path(os.environ.get("PHASEPROF_RECORDED_TRACES", _BESIDE))

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the recorded traces are not here: set PHASEPROF_RECORDED_TRACES"
)

#: Of each: whether its operators of the CPU are looked at, for want of kernels.
FILES = {
    "hf-h100-qwen-forward.json.gz": False,
    "odd-cpu-only.json.gz": True,
    "odd-launchless-kernels.json.gz": False,
    "odd-no-distributed-info.json.gz": True,
    "odd-no-rank.json.gz": True,
    "old-2021-schema.json.gz": False,
    "sglang-mi300x-extend.json.gz": False,
    "vllm-b200-tp8-prefill.json.gz": False,
    "vllm-mi300x-decode-full-graph.json.gz": False,
    "nsys-h100-2gpu-training.sqlite.gz": False,
}
#: Kernels, copies and memsets, as the categories of both old and new recordings are called.
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
_ON_CPU = {"cpu_op", "operator"}


def rows_of(name: str, *, on_cpu: bool = False) -> list[dict[str, Any]]:
    """The rows of the `kernels` table that a recording holds, all of one pass."""
    data = gzip.decompress((FOLDER / name).read_bytes())
    found = _nsys(data) if name.endswith(".sqlite.gz") else _kineto(data, on_cpu=on_cpu)
    columns = {"rank": 0, "pass_id": 0, "source": "recorded", "launched_ns": None}
    rows = [
        {**columns, "name": kernel, "device": device, "stream": 0, "start_ns": start, "end_ns": end}
        for kernel, device, start, end in found
    ]
    return _outermost(rows) if on_cpu else rows


def _kineto(data: bytes, *, on_cpu: bool) -> Iterator[tuple[str, str, int, int]]:
    wanted = _ON_CPU if on_cpu else _ON_GPU
    for event in json.loads(data.decode("utf-8", "replace"), strict=False)["traceEvents"]:
        if event.get("ph") == "X" and str(event.get("cat")).lower() in wanted:
            start = round(float(event["ts"]) * 1e3)
            device = f"cpu:{event['tid']}" if on_cpu else f"cuda:{event.get('pid')}"
            yield event["name"], device, start, start + round(float(event["dur"]) * 1e3)


def _nsys(data: bytes) -> Iterator[tuple[str, str, int, int]]:
    with sqlite3.connect(":memory:") as database:
        database.deserialize(data)
        kernels = database.execute(
            "SELECT value, deviceId, start, end FROM CUPTI_ACTIVITY_KIND_KERNEL "
            "JOIN StringIds ON id = demangledName"
        ).fetchall()
    database.close()
    for name, device, start, end in kernels:
        yield name, f"cuda:{device}", start, end


def _outermost(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The operators that lie in no other one of their thread."""
    kept: list[dict[str, Any]] = []
    until: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: (row["start_ns"], -row["end_ns"])):
        if row["start_ns"] >= until.get(row["device"], 0):
            kept.append(row)
            until[row["device"]] = row["end_ns"]
    return kept


def broken_down(rows: list[dict[str, Any]]) -> Breakdown:
    schema = KERNELS.arrow.append(pa.field("rank", pa.int64()))
    profiled = pa.table(
        {
            "rank": pa.array([0], pa.int64()),
            "pass_id": pa.array([0], pa.int64()),
            "phase": pa.array(["prefill"]),
            "sequences": pa.array([1], pa.int64()),
            "span_ns": pa.array([1], pa.int64()),
        }
    )
    found = breakdown(profiled, pa.Table.from_pylist(rows, schema=schema), "")
    assert found is not None
    return found


def figures_of(name: str, *, on_cpu: bool = False) -> KernelFigures:
    figures = broken_down(rows_of(name, on_cpu=on_cpu)).figures(Phase.PREFILL)
    assert figures is not None
    return figures


def test_all_recordings_are_looked_at() -> None:
    there = {path.name for path in FOLDER.iterdir() if path.suffix == ".gz"}
    assert there <= FILES.keys(), "a recording that no test reads"


@pytest.mark.parametrize(("name", "on_cpu"), FILES.items())
def test_nearly_all_busy_time_has_a_class(name: str, on_cpu: bool) -> None:
    if not (FOLDER / name).is_file():
        pytest.skip(f"{name} is not here")
    figures = figures_of(name, on_cpu=on_cpu)
    assert figures.on_cpu is on_cpu
    assert figures.unclassed_share <= 0.01
    # Told by a rule for such names, and not by a word that happens to be in them.
    assert figures.by_word_share <= 0.01
    assert sum(each.share for each in figures.classes) == pytest.approx(1)
    if not on_cpu:
        assert figures.tensor_core_unknown_share is not None
        assert figures.tensor_core_unknown_share <= 0.01


@pytest.mark.parametrize(
    ("name", "kernels", "summed_ms"),
    [
        ("vllm-b200-tp8-prefill.json.gz", 768, 10.863),
        ("vllm-mi300x-decode-full-graph.json.gz", 425, 10.675),
        ("sglang-mi300x-extend.json.gz", 527, 492.774),
        ("nsys-h100-2gpu-training.sqlite.gz", 3442, 44.830),
    ],
)
def test_times_are_those_of_the_readme(name: str, kernels: int, summed_ms: float) -> None:
    """The readme adds up the durations of kernels, without copies; of what overlaps, busy time counts a part."""
    if not (FOLDER / name).is_file():
        pytest.skip(f"{name} is not here")
    rows = [row for row in rows_of(name) if not row["name"].startswith(("Memcpy", "Memset"))]
    figures = broken_down(rows).figures(Phase.PREFILL)
    assert figures is not None
    assert figures.kernels == kernels
    assert figures.busy_ms + figures.overlap_ms == pytest.approx(summed_ms, abs=0.001)


def test_what_a_tensor_parallel_prefill_of_experts_does() -> None:
    """gpt-oss on eight GPUs, recorded by vLLM: mostly experts, and an all-reduce by multicast after each half layer."""
    name = "vllm-b200-tp8-prefill.json.gz"
    if not (FOLDER / name).is_file():
        pytest.skip(f"{name} is not here")
    figures = figures_of(name)
    assert figures.classes[0].kernel_class is KernelClass.MOE
    assert figures.classes[1].kernel_class is KernelClass.COLLECTIVE
    assert figures.exposed_collective_ms == pytest.approx(figures.collective_ms, rel=0.05)
    assert figures.copies == 161
