"""What a trace says of the process and the devices that a recording is of."""

from __future__ import annotations

from collections.abc import Sequence

from phaseprof.collectors.files.contents import Contents, DeviceFound, Span
from phaseprof.trace.meta import Device

_GIB = 1 << 30


def devices_of(contents: Contents, *, on_cpu: bool) -> tuple[Device, ...]:
    """The devices of a recording; a CPU, of which profilers tell nothing, for one without any.

    Args:
        contents: The recording.
        on_cpu: Nothing in it ran on a device.
    """
    if on_cpu or not contents.devices:
        name = "CPU"
        return (Device(name, "cpu", 0, None, None, None, "imported|cpu"),)
    return tuple(_device(found, contents.rocm) for found in contents.devices)


def name_of(device: int) -> str:
    """What rows call a device of a recording."""
    return f"cuda:{max(device, 0)}"


def _device(found: DeviceFound, rocm: bool) -> Device:
    name = found.name or _nameless(found, rocm)
    capability = "" if found.capability is None else ".".join(map(str, found.capability))
    key = "|".join(
        ("imported", name, f"sm={found.cores}", f"memory={found.memory_bytes}", f"cc={capability}")
    )
    number, memory = max(found.number, 0), found.memory_bytes
    return Device(name, "cuda", number, found.cores, None, memory, key, found.uuid)


def _nameless(found: DeviceFound, rocm: bool) -> str:
    """What can be said of a device that the recording does not name: ``AMD GPU, 304 CUs, 192 GiB``."""
    parts = ["AMD GPU" if rocm else "GPU"]
    if found.cores:
        parts.append(f"{found.cores} {'CUs' if rocm else 'SMs'}")
    if found.memory_bytes:
        parts.append(f"{round(found.memory_bytes / _GIB)} GiB")
    return ", ".join(parts)


def engine_of(names: Sequence[str], functions: Sequence[Span]) -> str:
    """The engine whose functions ran, or that announced steps; empty if it is none that is known.

    Args:
        names: Of steps and of ranges that say something of them.
        functions: Calls that were recorded. They decide: SGLang's steps may have ranges in vLLM's form as well.
    """
    for span in functions:
        lowered = span.name.lower()
        for engine in ("sglang", "vllm", "transformers"):
            if f"{engine}/" in lowered:
                return engine
    if any(name.startswith("step[") for name in names):
        return "sglang"
    if any(name.startswith(("execute_", "gpu_model_runner")) for name in names):
        return "vllm"
    return ""
