"""What doctor says can be measured, from what the collectors say of themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from phaseprof.collectors import measurable as module
from phaseprof.collectors.base import Availability
from phaseprof.collectors.findings import Finding, State
from phaseprof.collectors.measurable import collector_findings, measurable, probe_collectors
from phaseprof.collectors.nvml import Nvml, NvmlState

WORKS = Availability(True, "it works")
PHASES = Finding("phases, tokens, latencies", State.OK, "hooks on transformers 5.24.0")
NO_GPM = Availability(False, "the GPU does not support it")
NO_PM = Availability(False, "the package cupti-python is not installed", "pip install it")
NO_KINETO = Availability(False, "built without kineto", "another torch")


def figures(
    found: dict[str, Availability] | None = None, *, gpu: bool = True, driver_gpus: int = 1
) -> dict[str, Finding]:
    answers = {
        name: (found or {}).get(name, WORKS) for name in ("host", "nvml", "gpm", "pm", "kernels")
    }
    findings = measurable(answers, gpu=gpu, driver_gpus=driver_gpus, phases=PHASES)
    return {finding.subject: finding for finding in findings}


COUNTERS = "SM, tensor-core and DRAM counters"


@pytest.mark.parametrize(
    ("found", "state", "detail", "fix"),
    [
        ({}, State.OK, "by gpm, solved for the phases; every 200 µs with `--collect pm`", ""),
        ({"pm": NO_PM}, State.OK, "by gpm, solved for the phases", ""),
        (
            {"gpm": NO_GPM},
            State.LIMITED,
            "with `--collect pm` alone: the GPU does not support it",
            "",
        ),
        (
            {"gpm": NO_GPM, "pm": NO_PM},
            State.MISSING,
            "the GPU does not support it",
            "pip install it",
        ),
    ],
)
def test_counters_by_either_way(
    found: dict[str, Availability], state: State, detail: str, fix: str
) -> None:
    assert figures(found)[COUNTERS] == Finding(COUNTERS, state, detail, fix)


def test_a_gpu_that_torch_does_not_see() -> None:
    assert "torch does not see" in figures(gpu=False)[COUNTERS].detail
    assert "no NVIDIA GPU" in figures(gpu=False, driver_gpus=0)[COUNTERS].detail


@pytest.mark.parametrize("gpu", [True, False])
def test_busy_time_is_that_of_the_device(gpu: bool) -> None:
    subject = f"busy time of the {'GPU' if gpu else 'CPU'}"
    assert figures(gpu=gpu)[subject].state is State.OK
    missing = figures({"kernels": NO_KINETO}, gpu=gpu)[subject]
    assert missing == Finding(subject, State.MISSING, "built without kineto", "another torch")


def test_collectives_need_kernels_of_a_gpu() -> None:
    assert figures()["exposed communication"].state is State.OK
    assert figures({"kernels": NO_KINETO})["exposed communication"].fix == "another torch"
    assert figures(gpu=False)["exposed communication"].state is State.MISSING


def test_collectors_that_say_the_same_share_a_line() -> None:
    same = Availability(False, "no driver", "load it")
    lines = collector_findings({"host": WORKS, "nvml": same, "gpm": same, "pm": NO_PM})
    assert [(line.subject, line.state) for line in lines] == [
        ("host", State.OK),
        ("nvml, gpm", State.MISSING),
        ("pm", State.MISSING),
    ]


def test_a_collector_whose_probe_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def probe(self) -> Availability:
            raise RuntimeError("a bug")

    make: Callable[[object], Broken] = lambda chosen: Broken()  # noqa: E731
    monkeypatch.setattr(module, "make", make)
    found = probe_collectors(Nvml(NvmlState.AVAILABLE, "580", 1))
    assert {answer.detail for answer in found.values()} == {"the check failed: RuntimeError: a bug"}
    assert "replay" not in found
