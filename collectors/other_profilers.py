"""Other tools that may hold what a collector needs: CUPTI in this process, or the counters of the GPU.

A process has one subscriber to CUPTI (pytorch#117935): under nsys or ncu torch.profiler sees no kernels. The counters
of a GPU have one user as well: DCGM's profiling metrics on GPUs before Hopper, nsys' GPU metrics, ncu.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from phaseprof.collectors.findings import Finding, State

SUBJECT = "other profilers"

#: Variables by which tools get into a process, and whose they are. A name that ends in ``*`` is a beginning.
_VARIABLES = {
    "CUDA_INJECTION64_PATH": "a tool that is injected into CUDA",
    "NVTX_INJECTION64_PATH": "a tool that is injected into NVTX",
    "NSYS_*": "Nsight Systems",
    "QUADD_INJECTION_PROXY": "Nsight Systems",
    "NV_NSIGHT_*": "Nsight",
    "NV_COMPUTE_PROFILER_*": "Nsight Compute",
    "NV_TPS_LAUNCH_TOKEN": "Nsight Compute",
    "KINETO_USE_DAEMON": "dynolog, through kineto",
}
#: Programs that profile what they start.
_STARTERS = {"nsys", "nsys-launcher", "ncu", "nv-nsight-cu-cli", "nvprof", "compute-sanitizer"}
#: Programs that sample the GPUs of the machine.
_SAMPLERS = {"nv-hostengine", "dcgm-exporter", "dcgmproftester"}
#: The kernel keeps so much of a program's name.
_COMM = 15

_END = "End it, or run without it: a process has one CUPTI subscriber, and `kernels` and `pm` would see nothing."
_PAUSE = "For pm let it pause: dcgmi profmetrics --pause"


def find_others(
    environment: Mapping[str, str] | None = None, proc: Path = Path("/proc")
) -> Finding:
    """What of them is there. Never raises.

    Args:
        environment: Of this process by default.
        proc: Where the kernel shows its processes.
    """
    environment = os.environ if environment is None else environment
    subscribers = [*_injected(environment), *_starters(proc)]
    if subscribers:
        return Finding(SUBJECT, State.LIMITED, "; ".join(dict.fromkeys(subscribers)), _END)
    samplers = sorted(set(_names(proc)) & {name[:_COMM] for name in _SAMPLERS})
    if samplers:
        detail = f"{' and '.join(samplers)} may hold the counters of the GPUs"
        return Finding(SUBJECT, State.LIMITED, detail, _PAUSE)
    return Finding(SUBJECT, State.OK, "none is seen")


def _injected(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in sorted(environment.items()):
        for pattern, tool in _VARIABLES.items():
            wanted = name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
            if wanted and value:
                shown = f" ({value})" if name.endswith("_PATH") else ""
                yield f"{name} is set{shown}: {tool}"


def _starters(proc: Path) -> Iterator[str]:
    """Programs among the parents of this process."""
    pid = os.getpid()
    for _ in range(64):
        status = _text(proc / str(pid) / "status")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        parent = fields.get("PPid", "0").strip()
        if not parent.isdecimal() or int(parent) < 1:
            return
        pid = int(parent)
        name = _text(proc / parent / "comm").strip()
        if name in {starter[:_COMM] for starter in _STARTERS}:
            yield f"this process runs under {name}"


def _names(proc: Path) -> Iterator[str]:
    """The names of all processes that are seen here; in a container those of the host are not."""
    try:
        entries = list(proc.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name.isdecimal():
            yield _text(entry / "comm").strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
