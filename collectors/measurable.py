"""What can be measured here: the last sections of `phaseprof doctor`. Each collector says itself whether it works."""

from __future__ import annotations

from collections.abc import Mapping

from phaseprof.collectors.base import Availability
from phaseprof.collectors.collection import make
from phaseprof.collectors.findings import Finding, State, guarded, short
from phaseprof.collectors.known import KNOWN, Chosen, Known
from phaseprof.collectors.nvml import Nvml

#: Collectors that have nothing to do on a machine without an NVIDIA GPU.
_FOR_GPUS = ("nvml", "gpm", "pm")
_NO_GPU = "no NVIDIA GPU on this machine"
_USE_ONE = "Profile on a machine with an NVIDIA GPU."


def probe_collectors(nvml: Nvml) -> dict[str, Availability]:
    """What each collector says of itself. Never raises; takes seconds where there is a GPU.

    Args:
        nvml: What the driver says: without a GPU those for GPUs are not asked.
    """
    found = {}
    for known in KNOWN:
        if known.takes:
            # It reads a file, and which is not said.
            continue
        if known.name in _FOR_GPUS and nvml.gpus == 0:
            found[known.name] = Availability(False, _NO_GPU)
            continue
        found[known.name] = _probe(known)
    return found


def _probe(known: Known) -> Availability:
    try:
        return make(Chosen(known, asked=True)).probe()
    except Exception as error:
        return Availability(False, f"the check failed: {short(error)}")


def collector_findings(found: Mapping[str, Availability]) -> tuple[Finding, ...]:
    """A line for each collector; those that say the same share one."""
    alike: dict[tuple[State, str, str], list[str]] = {}
    for known in KNOWN:
        answer = found.get(known.name)
        if answer is not None:
            state = State.OK if answer.available else State.MISSING
            alike.setdefault((state, answer.detail, answer.fix), []).append(known.name)
    return tuple(
        Finding(", ".join(names), state, detail, fix)
        for (state, detail, fix), names in alike.items()
    )


def measurable(
    found: Mapping[str, Availability], *, gpu: bool, driver_gpus: int, phases: Finding
) -> tuple[Finding, ...]:
    """What a report can have here.

    Args:
        found: From `probe_collectors`.
        gpu: Whether torch sees a CUDA device.
        driver_gpus: How many GPUs the driver has.
        phases: What is known of the engines.
    """
    return (
        phases,
        Finding(
            "FLOPs and bytes",
            State.OK,
            "closed form from the model's modules and its real cache",
        ),
        _device_time(gpu),
        guarded(_busy_name(gpu), lambda: _busy(found, gpu)),
        guarded(_COUNTERS, lambda: _counters(found, gpu, driver_gpus)),
        guarded(_EXPOSED, lambda: _exposed(found, gpu)),
    )


def _device_time(gpu: bool) -> Finding:
    if gpu:
        return Finding("device time of a pass", State.OK, "CUDA events on the pass's stream")
    return Finding(
        "device time of a pass",
        State.OK,
        "host clock: on a CPU a call returns when its work is done",
    )


def _busy_name(gpu: bool) -> str:
    return "busy time of the GPU" if gpu else "busy time of the CPU"


def _busy(found: Mapping[str, Availability], gpu: bool) -> Finding:
    kernels = found["kernels"]
    subject = _busy_name(gpu)
    if not kernels.available:
        return Finding(subject, State.MISSING, kernels.detail, kernels.fix)
    what = "kernels and copies" if gpu else "outermost operators"
    return Finding(subject, State.OK, f"{what} of some passes, by torch.profiler")


_COUNTERS = "SM, tensor-core and DRAM counters"


def _counters(found: Mapping[str, Availability], gpu: bool, driver_gpus: int) -> Finding:
    if not gpu and driver_gpus:
        return Finding(
            _COUNTERS, State.MISSING, "torch does not see the NVIDIA GPU of this machine"
        )
    if not gpu:
        return Finding(_COUNTERS, State.MISSING, _NO_GPU, _USE_ONE)
    gpm, pm = found["gpm"], found["pm"]
    if gpm.available:
        more = "; every 200 µs with `--collect pm`" if pm.available else ""
        return Finding(_COUNTERS, State.OK, f"by gpm, solved for the phases{more}")
    if pm.available:
        return Finding(_COUNTERS, State.LIMITED, f"with `--collect pm` alone: {gpm.detail}")
    return Finding(_COUNTERS, State.MISSING, gpm.detail, gpm.fix or pm.fix)


_EXPOSED = "exposed communication"


def _exposed(found: Mapping[str, Availability], gpu: bool) -> Finding:
    if not gpu:
        return Finding(_EXPOSED, State.MISSING, "it is read from the kernels of GPUs")
    kernels = found["kernels"]
    if not kernels.available:
        return Finding(_EXPOSED, State.MISSING, kernels.detail, kernels.fix)
    return Finding(
        _EXPOSED, State.OK, "collectives beside the other kernels, with `--collect kernels`"
    )
