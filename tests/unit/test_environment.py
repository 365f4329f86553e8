"""The probes of doctor: right on machines of every kind, and never an exception."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phaseprof.collectors import ceilings, environment
from phaseprof.collectors.environment import inspect
from phaseprof.collectors.findings import Finding, Section, State
from phaseprof.collectors.nvml import Nvml, NvmlState, ask_nvml
from phaseprof.trace.meta import Ceilings, Device

# It ships no types.
pynvml: Any = importlib.import_module("pynvml")

H200 = Device("NVIDIA H200", "cuda", 0, 132, None, 150_754_820_096, "cuda|h200")
CPU = Device("A CPU", "cpu", 0, 1, 1, 16 * 10**9, "cpu|a")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of its own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PHASEPROF_CACHE_DIR", str(folder))
    return folder


def _find(sections: tuple[Section, ...], title: str, subject: str) -> Finding:
    (found,) = (
        finding
        for section in sections
        if section.title == title
        for finding in section.findings
        if finding.subject == subject
    )
    return found


def _broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a broken installation\nwith a long story")


def test_what_is_installed_is_named() -> None:
    sections = inspect()
    assert _find(sections, "Versions", "torch") == Finding("torch", State.OK, torch.__version__)
    python = ".".join(str(part) for part in sys.version_info[:3])
    assert _find(sections, "Versions", "python").detail == python
    assert _find(sections, "Devices", "CPU").state is State.OK
    assert _find(sections, "Ceilings", "cache folder").state is State.OK


def test_nothing_raises_when_everything_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (environment, "describe"),
        (ceilings, "load"),
        (ceilings, "cache_path"),
        (importlib.metadata, "version"),
        (importlib.util, "find_spec"),
        (torch.cuda, "is_available"),
        (torch.profiler, "kineto_available"),
        (pynvml, "nvmlInit"),
    ):
        monkeypatch.setattr(module, name, _broken)
    sections = inspect()
    failed = _find(sections, "Engines", "transformers")
    assert failed.state is State.MISSING
    assert failed.detail == "the check failed: RuntimeError: a broken installation"
    assert _find(sections, "Devices", "NVML").state is State.MISSING
    assert _find(sections, "What can be measured here", "phases, tokens, latencies").state is (
        State.MISSING
    )


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    sections = inspect()
    finding = _find(sections, "Versions", "torch")
    assert finding.state is State.MISSING
    assert "pytorch.org" in finding.fix


@pytest.mark.parametrize(
    ("version", "state"),
    [("5.0.0", State.OK), ("5.24.0.dev0", State.OK), ("10.1", State.OK), ("4.57.1", State.LIMITED)],
)
def test_transformers_counts_from_version_5(
    version: str, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    finding = _find(inspect(), "Engines", "transformers")
    assert finding.state is state
    assert version in finding.detail
    assert ("pip install" in finding.fix) == (state is not State.OK)


def test_without_an_engine_only_hand_written_loops_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    sections = inspect()
    assert _find(sections, "Engines", "transformers").state is State.MISSING
    phases = _find(sections, "What can be measured here", "phases, tokens, latencies")
    assert (phases.state, phases.fix) == (State.LIMITED, "pip install 'phaseprof[hf]'")


def test_vllm_is_looked_for_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed here")
    assert _find(inspect(), "Engines", "vLLM").state is State.MISSING
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    (package / "_version.py").write_text("__version__ = version = '9.0.0'\n")
    sections = inspect()
    finding = _find(sections, "Engines", "vLLM")
    assert finding.state is State.LIMITED
    assert finding.detail.startswith("9.0.0; phaseprof was tried with ")
    seams = _find(sections, "Engines", "vLLM seams")
    assert seams.state is State.LIMITED
    assert "vllm.v1.worker.gpu_model_runner has no class GPUModelRunner" in seams.detail
    assert "vllm" not in sys.modules


def test_vllm_plugins_without_ours_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    finding = _find(inspect(), "Engines", "vLLM plugin")
    assert finding.state is State.LIMITED
    assert "VLLM_PLUGINS=lora_filesystem_resolver,phaseprof" in finding.fix


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, NvmlState.NO_LIBRARY),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, NvmlState.NOT_LOADED),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, NvmlState.MISMATCH),
        (pynvml.NVML_ERROR_NO_PERMISSION, NvmlState.NO_PERMISSION),
        (pynvml.NVML_ERROR_UNKNOWN, NvmlState.FAILED),
    ],
)
def test_the_drivers_errors_are_told_apart(
    code: int, state: NvmlState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert ask_nvml().state is state
    finding = _find(inspect(), "Devices", "NVML")
    assert finding.state is State.MISSING
    assert finding.detail.startswith(state.value)


def test_a_driver_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.95.05")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: ended.append("shutdown"))
    assert ask_nvml() == Nvml(NvmlState.AVAILABLE, driver="580.95.05", gpus=2)
    assert ended == ["shutdown"]
    finding = _find(inspect(), "Devices", "NVML")
    assert (finding.state, finding.detail) == (State.OK, "driver 580.95.05, 2 GPUs")


def test_a_driver_that_fails_half_way_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", _broken)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: ended.append("shutdown"))
    assert ask_nvml().state is NvmlState.FAILED
    assert ended == ["shutdown"]


def test_without_the_nvml_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert ask_nvml().state is NvmlState.NO_PACKAGE
    assert _find(inspect(), "Devices", "NVML").fix == "pip install nvidia-ml-py"


def _with_devices(monkeypatch: pytest.MonkeyPatch, *devices: Device) -> tuple[Section, ...]:
    monkeypatch.setattr(environment, "_devices", lambda: devices)
    return inspect()


def test_a_gpu_and_its_datasheet(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = _with_devices(monkeypatch, CPU, H200)
    assert _find(sections, "Devices", "CPU").detail == "A CPU · 1 core, 1 thread · 16 GB"
    assert _find(sections, "Devices", "cuda:0").detail == "NVIDIA H200 · 132 SMs · 151 GB"
    roofs = _find(sections, "Ceilings", "cuda:0")
    assert roofs.state is State.LIMITED
    assert "datasheet values of H200 SXM" in roofs.detail
    assert roofs.fix == "phaseprof calibrate --device cuda:0"
    time = _find(sections, "What can be measured here", "device time of a pass")
    assert time.detail.startswith("CUDA events")


def _measured(spread: float) -> Ceilings:
    return Ceilings(CPU.key, "float32", 0.264e12, 19.1e9, "measured", 1, spread, "a test")


@pytest.mark.parametrize(
    ("entry", "state", "detail", "fix"),
    [
        (None, State.LIMITED, "not measured yet", "phaseprof calibrate --device cpu"),
        (
            _measured(0.04),
            State.OK,
            "measured: float32 0.264 TFLOP/s; 19.1 GB/s; ±4 %",
            "",
        ),
        (
            _measured(0.4),
            State.LIMITED,
            "measured: float32 0.264 TFLOP/s; 19.1 GB/s; ±40 %",
            "phaseprof calibrate --device cpu --force",
        ),
    ],
)
def test_ceilings_of_a_cpu(
    entry: Ceilings | None,
    state: State,
    detail: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if entry is not None:
        ceilings.store([entry, replace(entry, device_key="cpu|another", flops_per_s=9e12)])
    finding = _find(_with_devices(monkeypatch, CPU), "Ceilings", "CPU")
    assert finding.state is state
    assert finding.detail.startswith(detail)
    assert finding.fix == fix


def test_a_cache_folder_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    finding = _find(inspect(), "Ceilings", "cache folder")
    assert finding.state is State.MISSING
    assert "PHASEPROF_CACHE_DIR" in finding.fix


@pytest.mark.parametrize(
    ("gpus", "why"),
    [(0, "no NVIDIA GPU on this machine"), (1, "torch does not see the NVIDIA GPU")],
)
def test_why_there_are_no_counters(gpus: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer: Callable[[], Nvml] = lambda: Nvml(NvmlState.AVAILABLE, "580.95.05", gpus)  # noqa: E731
    monkeypatch.setattr(environment, "ask_nvml", answer)
    sections = _with_devices(monkeypatch, CPU)
    counters = _find(sections, "What can be measured here", "SM, tensor-core and DRAM counters")
    assert counters.state is State.MISSING
    assert why in counters.detail


def test_collectors_for_gpus_are_not_asked_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times the same reason would be noise, and advice on packages would be wrong."""
    answer: Callable[[], Nvml] = lambda: Nvml(NvmlState.NO_LIBRARY)  # noqa: E731
    monkeypatch.setattr(environment, "ask_nvml", answer)
    sections = inspect()
    (section,) = (s for s in sections if s.title.startswith("Collectors"))
    found = {finding.subject: finding for finding in section.findings}
    assert found["nvml, gpm, pm"] == Finding(
        "nvml, gpm, pm", State.MISSING, "no NVIDIA GPU on this machine"
    )
    assert found["host"].state is State.OK
