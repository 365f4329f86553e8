"""What operators do in each phase, from a real model on a CPU to the report: counted against the model's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import phaseprof
from phaseprof.analyzers.kernels.kernel_results import KernelClass, KernelFigures

#: Of the tiny Llama: four projections and three of the MLP in each of two layers, and the head.
_LINEARS = 2 * 7 + 1
_STEPS = 4


@pytest.fixture(scope="module")
def report(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two calls that are counted, and one that is looked at."""
    ids = torch.randint(3, 250, (2, 12), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": _STEPS, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    path: Path = tmp_path_factory.mktemp("kernels") / "trace"
    with torch.no_grad(), phaseprof.profile(trace=path, collect="none") as prof:
        for _ in range(2):
            llama.generate(ids, **options)
        with prof.operator_window():
            llama.generate(ids, **options)
    return prof.report(calibrate=False)


def kernels_of(report: Any, phase: str) -> KernelFigures:
    found: KernelFigures | None = report.phases[phase].kernels
    assert found is not None
    return found


def calls(figures: KernelFigures, kernel_class: KernelClass) -> int:
    return sum(each.calls for each in figures.classes if each.kernel_class is kernel_class)


@pytest.mark.parametrize(("phase", "passes"), [("prefill", 1), ("decode", _STEPS - 1)])
def test_operators_of_a_phase_are_those_of_its_passes(report: Any, phase: str, passes: int) -> None:
    figures = kernels_of(report, phase)
    assert figures.on_cpu
    assert figures.passes == passes
    # The angles of the rotary embedding are one more product in each pass of some versions.
    assert calls(figures, KernelClass.GEMM) - passes * _LINEARS in (0, passes)
    assert calls(figures, KernelClass.ATTENTION) == passes * 2
    assert calls(figures, KernelClass.ACTIVATION) == passes * 2
    assert calls(figures, KernelClass.EMBEDDING) == passes
    assert figures.unclassed_share == 0
    assert sum(each.share for each in figures.classes) == pytest.approx(1)
    assert 0 < figures.busy_ms <= figures.span_ms
    assert sum(each.calls for each in figures.classes) == figures.kernels


def test_what_runs_between_passes_is_in_no_phase(report: Any) -> None:
    """The arg-max of each step is the loop's, not the model's."""
    assert report.unattributed is not None
    assert report.unattributed.between >= _STEPS
    assert report.unattributed.launchless == 0
    for phase in ("prefill", "decode"):
        assert calls(kernels_of(report, phase), KernelClass.SAMPLING) == 0


def test_the_report_shows_them(report: Any) -> None:
    lines = str(report).splitlines()
    (head,) = [line for line in lines if line.startswith("  operators")]
    assert "GEMM" in head
    assert any(line.startswith("  Of no pass") for line in lines)
