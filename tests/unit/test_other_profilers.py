"""Other users of CUPTI and of the GPU's counters, found in variables and among processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phaseprof.collectors.findings import State
from phaseprof.collectors.other_profilers import find_others


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """This process, started by a shell, started by init."""
    _process(tmp_path, os.getpid(), "python", parent=50)
    _process(tmp_path, 50, "bash", parent=1)
    _process(tmp_path, 1, "init", parent=0)
    (tmp_path / "meminfo").write_text("")
    return tmp_path


def _process(proc: Path, pid: int, name: str, *, parent: int) -> None:
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "comm").write_text(f"{name}\n")
    (folder / "status").write_text(f"Name:\t{name}\nPid:\t{pid}\nPPid:\t{parent}\n")


def test_nobody_else(proc: Path) -> None:
    found = find_others({"PATH": "/usr/bin", "CUDA_INJECTION64_PATH": ""}, proc)
    assert (found.state, found.detail, found.fix) == (State.OK, "none is seen", "")


@pytest.mark.parametrize(
    ("variable", "value", "who"),
    [
        ("CUDA_INJECTION64_PATH", "/opt/tool.so", "(/opt/tool.so): a tool that is injected"),
        ("NSYS_PROFILING_SESSION_ID", "12", "Nsight Systems"),
        ("NV_NSIGHT_INJECTION_PORT_BASE", "49152", "Nsight"),
        ("KINETO_USE_DAEMON", "1", "dynolog"),
    ],
)
def test_a_tool_that_is_injected(variable: str, value: str, who: str, proc: Path) -> None:
    found = find_others({variable: value}, proc)
    assert found.state is State.LIMITED
    assert found.detail.startswith(f"{variable} is set")
    assert who in found.detail
    assert "one CUPTI subscriber" in found.fix


@pytest.mark.parametrize("name", ["nsys", "ncu", "nv-nsight-cu-cl"])
def test_a_profiler_among_the_parents(name: str, proc: Path) -> None:
    _process(proc, 50, "bash", parent=40)
    _process(proc, 40, name, parent=1)
    found = find_others({}, proc)
    assert (found.state, found.detail) == (State.LIMITED, f"this process runs under {name}")


def test_a_profiler_of_someone_else_does_not_matter(proc: Path) -> None:
    _process(proc, 70, "nsys", parent=1)
    assert find_others({}, proc).state is State.OK


def test_dcgm_samples_the_gpus(proc: Path) -> None:
    _process(proc, 60, "nv-hostengine", parent=1)
    found = find_others({}, proc)
    assert found.state is State.LIMITED
    assert "dcgmi profmetrics --pause" in found.fix


def test_processes_that_cannot_be_read(tmp_path: Path) -> None:
    assert find_others({}, tmp_path / "none").state is State.OK
    # A parent that has ended, or a circle.
    _process(tmp_path, os.getpid(), "python", parent=os.getpid())
    assert find_others({}, tmp_path).state is State.OK
