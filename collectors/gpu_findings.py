"""What the NVIDIA driver says of its GPUs that matters to a profile: CUDA, MIG, ECC, persistence, clocks.

All of it is asked for on a thread that is given up when the driver hangs. GPUs that are alike share a line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phaseprof.collectors.findings import Finding, State, counted, short
from phaseprof.collectors.nvml import Driver, NvmlError, NvmlState, within

#: Longer than `ask_nvml` waits, as it asks more.
PATIENCE_S = 40.0

#: NVML's number of the SM clock.
_SM_CLOCK = 1
#: Bits of the clocks-event reasons that hold a GPU back whether it works or not, from nvml.h.
_HELD_BACK = {
    0x08: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
_UNANSWERED = (NvmlState.NOT_SUPPORTED, NvmlState.TOO_OLD, NvmlState.NO_DATA)


@dataclass(frozen=True, slots=True)
class _Topic:
    """Something that is asked of each GPU. None: there is nothing to say of it."""

    subject: str
    ask: Callable[[Driver, Any], Finding | None]


def gpu_findings(torch_cuda: str | None) -> tuple[Finding, ...]:
    """Findings on all GPUs of the driver; none without a driver or a GPU. Never raises.

    Args:
        torch_cuda: The CUDA version that torch was built with, ``13.0``; None if it was built without.
    """
    found = within(PATIENCE_S, lambda: _guarded_look(torch_cuda))
    if found is None:
        state = NvmlState.TIMEOUT
        return (Finding("GPUs", State.MISSING, state.value, state.remedy),)
    return found


def _guarded_look(torch_cuda: str | None) -> tuple[Finding, ...]:
    try:
        return _look(torch_cuda)
    except NvmlError as error:
        # That NVML cannot be asked stands in its own line.
        if error.function in ("", "nvmlInit"):
            return ()
        return (Finding("GPUs", State.MISSING, str(error), error.fix),)
    except Exception as error:
        return (Finding("GPUs", State.MISSING, f"the check failed: {short(error)}"),)


def _look(torch_cuda: str | None) -> tuple[Finding, ...]:
    with Driver() as driver:
        handles: list[Any] = []
        lost: list[Finding] = []
        for index in range(int(driver.ask("nvmlDeviceGetCount"))):
            try:
                handles.append(driver.ask("nvmlDeviceGetHandleByIndex", index))
            except NvmlError as error:
                lost.append(Finding(f"GPU {index}", State.MISSING, error.why, error.fix))
        if not handles and not lost:
            return ()
        findings = [_cuda(driver, torch_cuda), *lost]
        for topic in _TOPICS:
            findings += _together(topic, [_asked(topic, driver, handle) for handle in handles])
        return tuple(findings)


def _asked(topic: _Topic, driver: Driver, handle: Any) -> Finding | None:
    try:
        return topic.ask(driver, handle)
    except NvmlError as error:
        if error.state in _UNANSWERED:
            return None
        return Finding(topic.subject, State.MISSING, error.why, error.fix)


def _together(topic: _Topic, findings: Sequence[Finding | None]) -> list[Finding]:
    """One line if all GPUs are alike, else one for those that are."""
    alike: dict[Finding, list[int]] = {}
    for number, finding in enumerate(findings):
        if finding is not None:
            alike.setdefault(finding, []).append(number)
    if len(alike) == 1 and len(next(iter(alike.values()))) == len(findings):
        return list(alike)
    return [
        Finding(
            f"{topic.subject} of GPU {', '.join(map(str, numbers))}",
            finding.state,
            finding.detail,
            finding.fix,
        )
        for finding, numbers in alike.items()
    ]


def _cuda(driver: Driver, torch_cuda: str | None) -> Finding:
    version = int(driver.ask("nvmlSystemGetCudaDriverVersion"))
    major, minor = version // 1000, version % 1000 // 10
    detail = f"the driver supports up to {major}.{minor}"
    if torch_cuda is None:
        return Finding("CUDA of the driver", State.OK, detail)
    detail += f", torch was built with {torch_cuda}"
    # Within a major version a newer toolkit runs on an older driver.
    if int(torch_cuda.partition(".")[0]) > major:
        fix = f"Update the driver, or install a torch for CUDA {major}."
        return Finding("CUDA of the driver", State.LIMITED, detail, fix)
    return Finding("CUDA of the driver", State.OK, detail)


def _mig(driver: Driver, handle: Any) -> Finding | None:
    on, pending = driver.ask("nvmlDeviceGetMigMode", handle)
    if on != pending:
        return Finding(
            "MIG",
            State.LIMITED,
            f"{_switch(on)} now, {_switch(pending)} after a reset",
            "Reset the GPU: nvidia-smi --gpu-reset",
        )
    if not on:
        return Finding("MIG", State.OK, "off")
    places = int(driver.ask("nvmlDeviceGetMaxMigDeviceCount", handle))
    parts = 0
    for place in range(places):
        try:
            driver.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
            parts += 1
        except NvmlError as error:
            if error.state not in (NvmlState.NOT_FOUND, NvmlState.REFUSED):
                raise
    return Finding(
        "MIG",
        State.LIMITED,
        f"on, {counted(parts, 'instance')}: gpm samples the instance, power and clocks are those of the whole GPU, and "
        "pm has nothing",
        "For all counters profile on a whole GPU: nvidia-smi -mig 0",
    )


def _ecc(driver: Driver, handle: Any) -> Finding | None:
    on, pending = driver.ask("nvmlDeviceGetEccMode", handle)
    if on != pending:
        detail = f"{_switch(on)} now, {_switch(pending)} after a reboot"
        return Finding("ECC", State.LIMITED, detail, "Reboot, so that runs can be compared.")
    return Finding("ECC", State.OK, _switch(on))


def _persistence(driver: Driver, handle: Any) -> Finding | None:
    if driver.ask("nvmlDeviceGetPersistenceMode", handle):
        return Finding("persistence", State.OK, "on")
    return Finding(
        "persistence",
        State.LIMITED,
        "off: the driver lets go of the GPU between runs, and the first call of a run waits for it",
        "sudo nvidia-smi -pm 1",
    )


def _clocks(driver: Driver, handle: Any) -> Finding | None:
    """Whether the SM clock may move. What `nvidia-smi -lgc` has locked no driver tells: then the samples show it."""
    greatest = int(driver.ask("nvmlDeviceGetMaxClockInfo", handle, _SM_CLOCK))
    held = _held_back(driver, handle)
    if held:
        return Finding(
            "clocks",
            State.LIMITED,
            f"held back now by {' and '.join(held)}",
            "Look at cooling and power supply: nvidia-smi -q -d PERFORMANCE",
        )
    try:
        applied = int(driver.ask("nvmlDeviceGetApplicationsClock", handle, _SM_CLOCK))
    except NvmlError as error:
        if error.state not in _UNANSWERED:
            raise
        applied = greatest
    if applied < greatest:
        return Finding(
            "clocks",
            State.LIMITED,
            f"applications get {applied} MHz of the {greatest} MHz that the SMs can do",
            "sudo nvidia-smi -rac",
        )
    return Finding(
        "clocks",
        State.OK,
        f"the SMs may boost to {greatest} MHz; `nvidia-smi -lgc` locks them for runs that are to be compared "
        "(whether it has, the driver does not tell)",
    )


def _held_back(driver: Driver, handle: Any) -> list[str]:
    try:
        bits = int(driver.ask("nvmlDeviceGetCurrentClocksEventReasons", handle))
    except NvmlError as error:
        if error.state not in _UNANSWERED:
            raise
        return []
    return [name for bit, name in _HELD_BACK.items() if bits & bit]


def _switch(on: int) -> str:
    return "on" if on else "off"


_TOPICS = (
    _Topic("MIG", _mig),
    _Topic("ECC", _ecc),
    _Topic("persistence", _persistence),
    _Topic("clocks", _clocks),
)
