"""The bands of benchmarks/gpu_evidence.py, on results that are written by hand."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from gpu_kit.checks import FAILED, NOT_RUN, PASSED, Case, Check, check, mean_of
from gpu_kit.importable import link

MS = 1_000_000


def sure(value: float) -> dict[str, Any]:
    return {"value": value, "state": "sure", "reason": ""}


def a_pass(
    number: int, phase: str, start_ms: float, device_ms: float, **more: Any
) -> dict[str, Any]:
    return {
        "pass_id": number,
        "phase": phase,
        "start_ns": round(start_ms * MS),
        "device_ns": round(device_ms * MS),
        "warmup": None,
        **more,
    }


def a_kernel(pass_id: int | None, start_ms: float, end_ms: float) -> dict[str, Any]:
    return {"pass_id": pass_id, "start_ns": round(start_ms * MS), "end_ns": round(end_ms * MS)}


def a_window(start_ms: float, end_ms: float, value: float, metric: str) -> dict[str, Any]:
    return {
        "start_ns": round(start_ms * MS),
        "end_ns": round(end_ms * MS),
        "value": value,
        "metric": metric,
        "source": "pm",
    }


LOG = {"same_output": True, "alone_s": 1.0, "recorded_s": [1.01, 1.02]}
PREFILL = {
    "passes": 2,
    "bound": "compute",
    "mfu": 0.8,
    "counters": {
        "sm_active": sure(0.97),
        "tensor_active": sure(0.80),
        "dram_active": sure(0.25),
    },
}
EAGER = {
    "passes": 10,
    "span_ms": 120.0,
    "bound": "overhead",
    "explained": 0.27,
    "gb_per_s": 1300.0,
    "counters": {
        "sm_active": sure(0.40),
        "tensor_active": sure(0.05),
        "dram_active": sure(0.30),
        "power_w": sure(300.0),
    },
}
COMPILED = {
    "passes": 10,
    "span_ms": 45.0,
    "bound": "bandwidth",
    "mbu": 0.85,
    "gb_per_s": 4000.0,
    "counters": {"dram_bytes_per_s": sure(4.1e12), "power_w": sure(500.0)},
}
#: One prefill of 30 ms and then ten decode steps of 12 ms, launched every 12 ms.
PASSES = [
    a_pass(0, "prefill", 0, 30),
    *(a_pass(n, "decode", 30 + 12 * n, 12) for n in range(1, 11)),
]
SAMPLED = [
    *(a_window(m, m + 1, 0.98, "sm_active_share") for m in range(30)),
    *(a_window(m, m + 1, 0.82, "tensor_active_share") for m in range(30)),
    *(a_window(m, m + 1, 0.22, "dram_active_share") for m in range(30)),
    *(a_window(m, m + 1, 0.42, "sm_active_share") for m in range(42, 162)),
    *(a_window(m, m + 1, 0.03, "tensor_active_share") for m in range(42, 162)),
    *(a_window(m, m + 1, 0.28, "dram_active_share") for m in range(42, 162)),
    *(a_window(m, m + 1, 1.25e12, "dram_read_bytes_per_s") for m in range(42, 162)),
    *(a_window(m, m + 1, 0.05e12, "dram_write_bytes_per_s") for m in range(42, 162)),
]


def case(name: str, *, kind: str = "cuda", log: dict[str, Any] | None = None, **parts: Any) -> Case:
    report = {"device": {"kind": kind}, "phases": parts.pop("phases", {})}
    return Case(name, report, LOG if log is None else log, **parts)


def healthy() -> dict[str, Case]:
    """What a GPU gives that is well."""
    kernels = [
        a_kernel(0, 0.5, 10),
        a_kernel(0, 12, 29.8),
        a_kernel(1, 42.5, 53.8),
        a_kernel(None, 1, 99),
    ]
    cases = (
        case("eager-counters-b1", phases={"prefill": PREFILL, "decode": EAGER}),
        case("eager-kernels-b1", passes=PASSES, kernels=kernels),
        case("pm-pm-b1", passes=PASSES, samples=SAMPLED, phases={"decode": EAGER}),
        case("compiled-counters-b1", phases={"prefill": PREFILL, "decode": COMPILED}),
    )
    return {each.name: each for each in cases}


def found(cases: dict[str, Case], part: str) -> Check:
    (line,) = (line for line in check(cases) if part in line.name)
    return line


def test_a_healthy_gpu_passes_all() -> None:
    assert [line for line in check(healthy()) if line.verdict != PASSED] == []


def test_nothing_ran() -> None:
    assert {line.verdict for line in check({})} == {NOT_RUN}


def test_a_cpu_is_not_held_against_the_bands_of_a_gpu() -> None:
    cases = {
        "eager-counters-b1": case("eager-counters-b1", kind="cpu", phases={"prefill": PREFILL})
    }
    lines = check(cases)
    assert lines[0].verdict == PASSED
    assert {line.verdict for line in lines[1:]} == {NOT_RUN}


def test_outputs_that_differ_are_named() -> None:
    cases = healthy()
    cases["pm-pm-b1"] = case("pm-pm-b1", log={"same_output": False})
    line = found(cases, "outputs")
    assert (line.verdict, line.found) == (FAILED, "differ in pm-pm-b1")


@pytest.mark.parametrize(
    ("name", "phase", "changes", "part"),
    [
        ("eager-counters-b1", "prefill", {"bound": "latency"}, "bound of prefill, eager-counters"),
        ("eager-counters-b1", "prefill", {"mfu": 0.3}, "MFU"),
        ("eager-counters-b1", "decode", {"bound": "bandwidth"}, "bound of eager"),
        ("eager-counters-b1", "decode", {"explained": 0.9}, "share of the floor"),
        ("eager-counters-b1", "decode", {"span_ms": 46.0}, "eager over compiled"),
        ("compiled-counters-b1", "decode", {"bound": "overhead"}, "bound of compiled"),
        ("compiled-counters-b1", "decode", {"mbu": 1.4}, "MBU"),
        ("compiled-counters-b1", "decode", {"gb_per_s": 2000.0}, "modelled, compiled"),
        ("pm-pm-b1", "decode", {"gb_per_s": 2000.0}, "modelled, pm"),
    ],
)
def test_a_figure_outside_of_its_band(
    name: str, phase: str, changes: dict[str, Any], part: str
) -> None:
    cases = healthy()
    old = cases[name]
    phases = {**old.report["phases"], phase: {**old.report["phases"][phase], **changes}}
    cases[name] = Case(
        name, {**old.report, "phases": phases}, old.log, old.passes, old.kernels, old.samples
    )
    assert found(cases, part).verdict == FAILED


def test_a_solution_off_by_more_than_five_points() -> None:
    cases = healthy()
    prefill = {**PREFILL, "counters": {**PREFILL["counters"], "tensor_active": sure(0.90)}}  # type: ignore[dict-item]
    cases["eager-counters-b1"] = case(
        "eager-counters-b1", phases={"prefill": prefill, "decode": EAGER}
    )
    line = found(cases, "tensor_active of prefill")
    assert (line.verdict, line.found) == (FAILED, "0.080")


def test_an_insufficient_solution_is_no_failure() -> None:
    figure = {"value": 0.9, "state": "insufficient", "reason": "too little prefill in the windows"}
    prefill = {**PREFILL, "counters": {"tensor_active": figure}}
    cases = healthy()
    cases["eager-counters-b1"] = case(
        "eager-counters-b1", phases={"prefill": prefill, "decode": EAGER}
    )
    line = found(cases, "tensor_active of prefill")
    assert (line.verdict, line.found) == (NOT_RUN, "too little prefill in the windows")


def test_windows_that_straddle_passes_do_not_count() -> None:
    passes = [a_pass(0, "prefill", 0, 10), a_pass(1, "decode", 10, 10), a_pass(2, "decode", 5, 10)]
    samples = [
        a_window(0, 9, 0.9, "m"),
        a_window(9, 11, 0.5, "m"),
        # The third pass was launched during the others, and has the device after them: from 20 to 30.
        a_window(21, 23, 0.2, "m"),
        a_window(23, 27, 0.4, "m"),
        a_window(29, 31, 0.9, "m"),
    ]
    one = case("x", passes=passes, samples=samples)
    assert mean_of(one, "m", "prefill") == pytest.approx(0.9)
    assert mean_of(one, "m", "mixed") is None
    assert mean_of(one, "other", "decode") is None


def test_warm_up_does_not_count() -> None:
    passes = [a_pass(0, "decode", 0, 10, warmup="requested"), a_pass(1, "decode", 10, 10)]
    samples = [a_window(1, 9, 0.9, "m"), a_window(11, 19, 0.3, "m")]
    assert mean_of(case("x", passes=passes, samples=samples), "m", "decode") == pytest.approx(0.3)


def test_a_checkout_is_made_importable_by_links(tmp_path: Path) -> None:
    """In an interpreter that knows no installed packages."""
    folder = link(tmp_path)
    ask = "import phaseprof, phaseprof.phases, phaseprof.collectors.known as k; print(phaseprof.__file__, k.__name__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", ask],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == [
        str(folder / "phaseprof" / "__init__.py"),
        "phaseprof.collectors.known",
    ], done.stderr


def test_missing_packages_come_from_wheels(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("a_package_that_is_missing-1.0-py3-none-any.whl", "pyarrow-1.0-py3-none-any.whl"):
        with zipfile.ZipFile(wheels / name, "w") as archive:
            archive.writestr(f"{name.partition('-')[0]}.py", "value = 7\n")
    ask = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1])\n"
        "from gpu_kit.importable import make_importable\n"
        "print(make_importable(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])))\n"
        "import subprocess, a_package_that_is_missing\n"
        "subprocess.run([sys.executable, '-c', 'import a_package_that_is_missing as a; print(a.value)'], check=True)"
    )
    benchmarks = str(Path(__file__).parents[2] / "benchmarks")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", ask, benchmarks, str(scratch), str(wheels)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "7" or "7" in done.stdout.split()
    assert "pyarrow" not in done.stdout
