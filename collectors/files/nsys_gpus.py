"""Devices of an Nsight Systems export: three ways of numbering them, and what is known of each."""

from __future__ import annotations

from dataclasses import dataclass

from phaseprof.collectors.files.contents import DeviceFound
from phaseprof.collectors.files.nsys_database import Database


@dataclass(frozen=True, slots=True)
class Gpu:
    """A row of ``TARGET_INFO_GPU``.

    Attributes:
        found: What it describes; its number is that of the table.
        cuda: What CUDA called it; None if the file does not tell.
        metrics: What rows of ``GPU_METRICS`` call it; None likewise.
        bandwidth_bytes_per_s: Of its memory; None likewise.
    """

    found: DeviceFound
    cuda: int | None
    metrics: int | None
    bandwidth_bytes_per_s: int | None


class Gpus:
    """Finds the devices that rows name.

    A process numbers the devices that it sees: device 0 of one may be device 3 of another. Where
    ``TARGET_INFO_CUDA_DEVICE`` tells which is which, numbers are the machine's; else they are the processes' own.
    """

    def __init__(self, database: Database) -> None:
        self._by_id: dict[int, Gpu] = {}
        for row in database.rows("TARGET_INFO_GPU", _COLUMNS, needs=("id",)):
            gpu = _gpu(row)
            if gpu is not None:
                self._by_id.setdefault(gpu.found.number, gpu)
        self._seen: dict[tuple[int, int], int] = {}
        for gpu_id, cuda, pid in database.rows(
            "TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId", "pid"), needs=("gpuId", "cudaId", "pid")
        ):
            if isinstance(gpu_id, int) and isinstance(cuda, int) and isinstance(pid, int):
                self._seen[pid, cuda] = gpu_id

    def __len__(self) -> int:
        return len(self._by_id)

    def number(self, pid: int, cuda: int) -> int:
        """The number of the device that a process calls ``cuda``."""
        return self._seen.get((pid, cuda), cuda)

    def described(self, number: int) -> DeviceFound:
        """What is known of a device by the number that `number` gives."""
        gpu = self._of(number)
        if gpu is None:
            return DeviceFound(number)
        own = gpu.found
        return DeviceFound(number, own.name, own.cores, own.memory_bytes, own.capability, own.uuid)

    def of_metrics(self, type_id: int) -> tuple[int, Gpu | None]:
        """The number of the device that a row of metrics is of, and what is known of it.

        The last 8 bits of the type are the number that the driver's performance counters go by.
        """
        own = type_id & 0xFF
        for gpu in self._by_id.values():
            if gpu.metrics == own:
                break
        else:
            found = self._by_id.get(own)
            if found is None:
                return own, None
            gpu = found
        if self._seen or gpu.cuda is None:
            return gpu.found.number, gpu
        return gpu.cuda, gpu

    def _of(self, number: int) -> Gpu | None:
        if not self._seen:
            for gpu in self._by_id.values():
                if gpu.cuda == number:
                    return gpu
        return self._by_id.get(number)


_COLUMNS = (
    "id",
    "name",
    "smCount",
    "totalMemory",
    "computeMajor",
    "computeMinor",
    "uuid",
    "cuDevice",
    "pwGpuId",
    "memoryBandwidth",
)


def _gpu(row: tuple[object, ...]) -> Gpu | None:
    number, name, cores, memory, major, minor, uuid, cuda, metrics, bandwidth = row
    if not isinstance(number, int):
        return None
    return Gpu(
        DeviceFound(
            number,
            name.strip() if isinstance(name, str) else "",
            _positive(cores),
            _positive(memory),
            (major, minor) if isinstance(major, int) and isinstance(minor, int) else None,
            _uuid(uuid),
        ),
        cuda if isinstance(cuda, int) else None,
        metrics if isinstance(metrics, int) else None,
        _positive(bandwidth),
    )


def _uuid(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        return ""
    text = value.strip()
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
