"""Which of the driver's devices a device of torch is.

CUDA and the driver number GPUs differently: CUDA leaves out what `CUDA_VISIBLE_DEVICES` hides, and puts the fastest
first unless it is told otherwise. So a device is found by its UUID, else by its place on the PCI bus, and by its number
only where that is certain. Under MIG a device of torch is an instance, a part of a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from phaseprof.collectors.nvml import Driver, NvmlError, NvmlState
from phaseprof.trace.meta import Device

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"
#: What the driver answers to a name that it does not know, or that is not one.
_UNKNOWN = (NvmlState.NOT_FOUND, NvmlState.REFUSED)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device, as the driver knows it.

    Attributes:
        handle: NVML's handle of it: of a MIG instance its own, which few questions are answered for.
        whole: NVML's handle of the GPU that it is or is a part of.
        instance: Number of the GPU instance on that GPU, as `nvmlGpmMigSampleGet` takes it; None of a whole GPU.
        uuid: Its UUID: ``GPU-…`` or ``MIG-…``; empty if the driver does not tell it.
        name: As the driver calls it; empty likewise.
    """

    handle: Any
    whole: Any
    instance: int | None
    uuid: str
    name: str


def find(
    driver: Driver,
    device: Device,
    *,
    pci_bus_id: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Gpu:
    """The driver's device that a device of torch is.

    Args:
        driver: NVML, opened.
        device: A CUDA device.
        pci_bus_id: Its place on the PCI bus, ``0000:1b:00.0``; None to ask torch if it has to be known.
        environment: Where CUDA's variables stand; the process's by default.

    Raises:
        NvmlError: If the driver does not answer, or it is not certain which device it is.
    """
    environment = os.environ if environment is None else environment
    lost: NvmlError | None = None
    handle = None
    for uuid in _spellings(device.uuid):
        try:
            handle = handle or _known(driver, "nvmlDeviceGetHandleByUUID", uuid)
        except NvmlError as error:
            # A search by UUID asks every GPU on its way; the lost one may be another.
            if error.state is not NvmlState.GPU_LOST:
                raise
            lost = error
    if handle is None:
        bus_id = _bus_id(device.index) if pci_bus_id is None else pci_bus_id
        if bus_id:
            handle = _known(driver, "nvmlDeviceGetHandleByPciBusId", bus_id)
    if handle is None and lost is not None:
        raise lost
    gpu = _by_number(driver, device, environment) if handle is None else _gpu(driver, handle)
    part = _part(driver, gpu, environment)
    told = {gpu.uuid, part.uuid}
    if device.uuid and "" not in told and told.isdisjoint(_spellings(device.uuid)):
        raise NvmlError(NvmlState.NOT_FOUND, detail=device.uuid)
    return part


def _spellings(uuid: str) -> tuple[str, ...]:
    """torch gives a UUID without its kind, which may be that of a MIG instance."""
    if not uuid:
        return ()
    return (uuid, f"MIG-{uuid[4:]}") if uuid.startswith("GPU-") else (uuid,)


def _known(driver: Driver, function: str, name: str) -> Any | None:
    try:
        return driver.ask(function, name)
    except NvmlError as error:
        if error.state in _UNKNOWN:
            return None
        raise


def _bus_id(index: int) -> str:
    """As torch knows it; empty if it does not, or has not opened CUDA here."""
    torch: Any = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return ""
        found = torch.cuda.get_device_properties(index)
        return f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except Exception:
        # Versions of torch without it; there is another way.
        return ""


def _gpu(driver: Driver, handle: Any) -> Gpu:
    uuid = _text(driver, "nvmlDeviceGetUUID", handle)
    name = _text(driver, "nvmlDeviceGetName", handle)
    if not (uuid.startswith("MIG-") if uuid else _is_instance(driver, handle)):
        return Gpu(handle, handle, None, uuid, name)
    whole = driver.ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
    return Gpu(handle, whole, int(driver.ask("nvmlDeviceGetGpuInstanceId", handle)), uuid, name)


def _text(driver: Driver, function: str, handle: Any) -> str:
    try:
        return driver.ask_text(function, handle)
    except NvmlError as error:
        if error.state.device_gone:
            raise
        return ""


def _is_instance(driver: Driver, handle: Any) -> bool:
    try:
        answer = driver.ask("nvmlDeviceIsMigDeviceHandle", handle)
    except NvmlError as error:
        # A driver before MIG does not know the question.
        if error.state in (NvmlState.NOT_SUPPORTED, NvmlState.TOO_OLD):
            return False
        raise
    return bool(getattr(answer, "value", answer))


def _instances(driver: Driver, gpu: Gpu) -> Iterator[Gpu]:
    """The MIG instances of a GPU; none if it is not in that mode."""
    try:
        if not driver.ask("nvmlDeviceGetMigMode", gpu.handle)[0]:
            return
        places = int(driver.ask("nvmlDeviceGetMaxMigDeviceCount", gpu.handle))
    except NvmlError as error:
        if error.state.device_gone:
            raise
        return
    for place in range(places):
        handle = _at(driver, gpu, place)
        if handle is not None:
            yield _gpu(driver, handle)


def _at(driver: Driver, gpu: Gpu, place: int) -> Any | None:
    try:
        return driver.ask("nvmlDeviceGetMigDeviceHandleByIndex", gpu.handle, place)
    except NvmlError as error:
        if error.state in _UNKNOWN:
            return None
        raise


def _part(driver: Driver, gpu: Gpu, environment: Mapping[str, str]) -> Gpu:
    """The instance that CUDA uses, where the GPU that was found is divided into some."""
    if gpu.instance is not None:
        return gpu
    parts = list(_instances(driver, gpu))
    if not parts:
        return gpu
    named = _entries(environment)
    chosen = [part for part in parts if any(_names(entry, part, gpu, driver) for entry in named)]
    if len(chosen) == 1:
        return chosen[0]
    if len(parts) == 1:
        return parts[0]
    raise NvmlError(
        NvmlState.NOT_FOUND, detail=f"{gpu.name} is divided by MIG; {VISIBLE} does not say how"
    )


def _entries(environment: Mapping[str, str]) -> list[str]:
    return [entry.strip() for entry in environment.get(VISIBLE, "").split(",")]


def _names(entry: str, part: Gpu, whole: Gpu, driver: Driver) -> bool:
    """Whether an entry of `CUDA_VISIBLE_DEVICES` is an instance: ``MIG-…``, which may be cut short, or as drivers
    before 470 have it, ``MIG-GPU-…/1/0``."""
    if entry.startswith("MIG-GPU-"):
        uuid, _, numbers = entry.removeprefix("MIG-").partition("/")
        compute = int(driver.ask("nvmlDeviceGetComputeInstanceId", part.handle))
        return uuid == whole.uuid and numbers == f"{part.instance}/{compute}"
    return entry.startswith("MIG-") and part.uuid.startswith(entry)


def _numbered(driver: Driver, index: int) -> Gpu | None:
    """None of a GPU that was lost: it is not the one that is looked for, or that one cannot be sampled either."""
    try:
        return _gpu(driver, driver.ask("nvmlDeviceGetHandleByIndex", index))
    except NvmlError as error:
        if error.state in (NvmlState.GPU_LOST, NvmlState.RESET_REQUIRED):
            return None
        raise


def _by_number(driver: Driver, device: Device, environment: Mapping[str, str]) -> Gpu:
    count = int(driver.ask("nvmlDeviceGetCount"))
    gpus = [_numbered(driver, index) for index in range(count)]
    entries = _entries(environment) if VISIBLE in environment else [str(i) for i in range(count)]
    entry = entries[device.index] if device.index < len(entries) else ""
    if entry.isdecimal():
        if environment.get(_ORDER) != "PCI_BUS_ID" and len({gpu.name for gpu in gpus if gpu}) > 1:
            raise NvmlError(
                NvmlState.NOT_FOUND,
                detail=f"CUDA and the driver number the GPUs differently; {_ORDER}=PCI_BUS_ID helps",
            )
        gpu = gpus[int(entry)] if int(entry) < count else None
        if gpu is not None:
            return gpu
    elif entry.startswith("GPU-"):
        # CUDA takes as much of a UUID as tells the devices apart.
        chosen = [gpu for gpu in gpus if gpu and gpu.uuid.startswith(entry)]
        if len(chosen) == 1:
            return chosen[0]
    elif entry:
        parts = [
            part
            for gpu in gpus
            if gpu is not None
            for part in _instances(driver, gpu)
            if _names(entry, part, gpu, driver)
        ]
        if len(parts) == 1:
            return parts[0]
    raise NvmlError(
        NvmlState.NOT_FOUND, detail=f"cuda:{device.index} of {VISIBLE}={','.join(entries)}"
    )
