"""What a device is called, what it has, and the key under which its ceilings are kept.

The CPU is a device like another. `Device.key` holds everything that a ceiling depends on, so that a figure measured
with two threads is never used for a run with eight, nor one of another torch build: see :func:`describe`.
torch is imported inside the functions.
"""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

from phaseprof.errors import UsageError
from phaseprof.trace.meta import Device

if TYPE_CHECKING:
    import torch

_CPUINFO = "/proc/cpuinfo"
_CGROUP_QUOTA = "/sys/fs/cgroup/cpu.max"


def describe(device: torch.device | str) -> Device:
    """Describe a device as torch sees it in this process, now.

    The key of a CPU holds its model name, family, model and stepping (a virtual machine may hide the name), the vector
    extension that torch uses, the cores that the process may run on, a CPU quota if there is one, the threads torch
    computes with, and torch's version. The key of a CUDA device holds its name, SM count, memory, compute capability,
    the CUDA version of the driver if known, and torch's version. Either ends with the float32 matmul precision where
    that is not torch's default, since it changes what a float32 matmul runs on.

    Args:
        device: A `torch.device`, or text such as ``cpu``, ``cuda`` or ``cuda:1``. Without an index, the current device.

    Raises:
        UsageError: If torch knows no such device, or there is none on this machine.
    """
    import torch

    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise UsageError(
            f"torch knows no device {str(device)!r}.", "Use cpu, cuda, or cuda:N for the N-th GPU."
        ) from None
    if wanted.type == "cpu":
        return _describe_cpu()
    if wanted.type == "cuda":
        return _describe_cuda(wanted.index)
    # No ceilings are measured for other kinds, so the key need not tell their settings apart.
    index = wanted.index or 0
    return Device(
        name=wanted.type,
        kind=wanted.type,
        index=index,
        cores=None,
        threads=None,
        memory_bytes=None,
        key=f"{wanted.type}|torch={torch.__version__}",
    )


def _describe_cpu() -> Device:
    import torch

    facts = _cpuinfo()
    name = facts.get("model name") or platform.processor() or platform.machine() or "CPU"
    cores = _usable_cores()
    threads = torch.get_num_threads()
    model = ".".join(facts.get(field, "?") for field in ("cpu family", "model", "stepping"))
    parts = [
        "cpu",
        name,
        f"model={model}",
        f"isa={_cpu_capability()}",
        f"cores={cores}",
        *([f"quota={quota}"] if (quota := _cpu_quota()) else []),
        f"threads={threads}",
        f"torch={torch.__version__}",
        *_matmul_precision(),
    ]
    return Device(
        name=name,
        kind="cpu",
        index=0,
        cores=cores,
        threads=threads,
        memory_bytes=_physical_memory_bytes(),
        key="|".join(parts),
    )


def _describe_cuda(index: int | None) -> Device:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise UsageError(
            "There is no CUDA device: torch sees none on this machine.",
            "Use --device cpu, or see `phaseprof doctor` for the reason.",
        )
    at = torch.cuda.current_device() if index is None else index
    if at >= count:
        raise UsageError(
            f"There is no cuda:{at}: torch sees {count} CUDA device{'s' if count > 1 else ''}.",
            f"Use cuda:0{f' to cuda:{count - 1}' if count > 1 else ''}.",
        )
    properties = torch.cuda.get_device_properties(at)
    parts = [
        "cuda",
        properties.name,
        f"sm={properties.multi_processor_count}",
        f"memory={properties.total_memory}",
        f"cc={properties.major}.{properties.minor}",
        *([f"driver={driver}"] if (driver := _cuda_driver()) else []),
        f"torch={torch.__version__}",
        *_matmul_precision(),
    ]
    return Device(
        name=properties.name,
        kind="cuda",
        index=at,
        cores=properties.multi_processor_count,
        threads=None,
        memory_bytes=properties.total_memory,
        key="|".join(parts),
        uuid=_uuid(properties),
    )


def _uuid(properties: object) -> str:
    """``GPU-…`` as NVML spells it; of a part of a GPU that torch calls a device (MIG), its own. Empty if torch does not
    know it."""
    found = str(getattr(properties, "uuid", "") or "")
    return found if not found or found.startswith(("GPU-", "MIG-")) else f"GPU-{found}"


def _cpuinfo() -> dict[str, str]:
    """The fields of the first core in /proc/cpuinfo; empty where there is no such file."""
    fields: dict[str, str] = {}
    try:
        with open(_CPUINFO, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.strip():
                    break
                field, _, value = line.partition(":")
                fields[field.strip()] = value.strip()
    except OSError:
        pass
    return fields


def _usable_cores() -> int:
    """Cores that the process may run on: what `taskset` or a container left it, not what the machine has."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def _cpu_quota() -> str:
    """CPU time that a container grants, in cores (``2`` or ``1.5``); empty without a limit."""
    try:
        with open(_CGROUP_QUOTA, encoding="ascii") as file:
            quota, period = file.read().split()
        return "" if quota == "max" else f"{int(quota) / int(period):g}"
    except (OSError, ValueError, ZeroDivisionError):
        return ""


def _physical_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _cpu_capability() -> str:
    import torch

    capability = getattr(torch.backends.cpu, "get_cpu_capability", None)
    return str(capability()) if capability is not None else "?"


def _cuda_driver() -> str:
    """Highest CUDA version that the driver supports, as the driver encodes it (``12040``); empty if not known."""
    import torch

    # Private, and absent from builds without CUDA.
    version = getattr(torch._C, "_cuda_getDriverVersion", None)
    try:
        return str(version()) if version is not None else ""
    except RuntimeError:
        return ""


def _matmul_precision() -> list[str]:
    """``float32-matmul=high`` where float32 matmuls may run as TF32 or bfloat16; nothing at the default."""
    import torch

    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        # torch refuses to answer when its older and newer switches were both used.
        precision = "mixed settings"
    return [] if precision == "highest" else [f"float32-matmul={precision}"]
