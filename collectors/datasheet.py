"""Dense peaks of known GPUs, from their datasheets: the roofs of a device that was never calibrated.

Product pages headline figures with 2:4 structured sparsity, which are twice what a dense matrix multiplication can
reach: no such figure stands here. A datasheet value is a ceiling at one clock; boards that boost above it can honestly
pass it, and `DatasheetRow.note` says where that is known. float32 is left out: whether it runs on tensor cores depends
on a switch of the process.

Boards that share a name prefix differ (H100 PCIe, NVL and SXM; A100 with 40 and 80 GB; MIG slices carry the name of
the whole board), so a row matches on name, SM count and memory together. What matches no row is unknown, and an
unknown device gets no percentage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from phaseprof.trace.meta import Ceilings, Device

_GIB = 2**30
_PEAKS_SOURCE = "dense peaks as collected in stas00/ml-engineering, compute/accelerator"


@dataclass(frozen=True, slots=True)
class DatasheetRow:
    """One board.

    Attributes:
        board: What people call it.
        name: Regular expression for the whole name that the driver gives.
        sms: Streaming multiprocessors (compute units, for AMD).
        memory_gib: Lower and upper bound of the memory that the driver reports, in GiB. It is less than the nominal
            size: ECC and the driver keep a part.
        tflops: Dense peak per dtype, in 1e12 operations/s; dtypes as torch spells them.
        tb_per_s: Memory bandwidth in 1e12 bytes/s.
        source: Where the figures come from.
        note: What to know before comparing with them; may be empty.
        clock_ghz: SM clock of the 16-bit peak, in 1e9 Hz: with it, the peak is the number of SMs times the FLOPs of one
            in a clock (2048 on an A100, 4096 on an H100, 1024 on an L40S). None where that is not known.
    """

    board: str
    name: str
    sms: int
    memory_gib: tuple[float, float]
    tflops: Mapping[str, float]
    tb_per_s: float
    source: str
    note: str = ""
    clock_ghz: float | None = None

    def matches(self, device: Device) -> bool:
        """Whether `device` is this board, whole."""
        if device.kind != "cuda" or device.cores != self.sms or device.memory_bytes is None:
            return False
        low, high = self.memory_gib
        if not low <= device.memory_bytes / _GIB <= high:
            return False
        return re.fullmatch(self.name, device.name.strip()) is not None


def _half(tflops: float, **others: float) -> Mapping[str, float]:
    """bfloat16 and float16 share a peak on every board here."""
    return MappingProxyType({"bfloat16": tflops, "float16": tflops, **others})


_HOPPER_BOOST = "989 is at 1830 MHz; boards boost to 1980 MHz (1070 TFLOP/s)"

DATASHEET: tuple[DatasheetRow, ...] = (
    DatasheetRow(
        board="A100 SXM 80 GB",
        name=r"(NVIDIA )?A100-SXM4-80GB",
        sms=108,
        memory_gib=(78, 81),
        tflops=_half(312, int8=624),
        tb_per_s=2.04,
        source=_PEAKS_SOURCE,
        clock_ghz=1.41,
    ),
    DatasheetRow(
        board="A100 PCIe 80 GB",
        name=r"(NVIDIA )?A100 80GB PCIe",
        sms=108,
        memory_gib=(78, 81),
        tflops=_half(312, int8=624),
        tb_per_s=1.94,
        source=_PEAKS_SOURCE,
        clock_ghz=1.41,
    ),
    DatasheetRow(
        board="A100 40 GB",
        name=r"(NVIDIA )?A100-(SXM4|PCIE)-40GB",
        sms=108,
        memory_gib=(38, 41),
        tflops=_half(312, int8=624),
        tb_per_s=1.555,
        source=_PEAKS_SOURCE,
        clock_ghz=1.41,
    ),
    DatasheetRow(
        board="L40S",
        name=r"NVIDIA L40S",
        sms=142,
        memory_gib=(43, 48.5),
        tflops=_half(362, float8_e4m3fn=733),
        tb_per_s=0.86,
        source=_PEAKS_SOURCE,
        clock_ghz=2.49,
    ),
    DatasheetRow(
        board="H100 PCIe",
        name=r"NVIDIA H100 PCIe",
        sms=114,
        memory_gib=(78, 81),
        tflops=_half(756, float8_e4m3fn=1513),
        tb_per_s=2.00,
        source=_PEAKS_SOURCE,
        clock_ghz=1.62,
    ),
    DatasheetRow(
        board="H100 SXM",
        name=r"NVIDIA H100 80GB HBM3",
        sms=132,
        memory_gib=(78, 81),
        tflops=_half(989, float8_e4m3fn=1979),
        tb_per_s=3.35,
        source=_PEAKS_SOURCE,
        note=_HOPPER_BOOST,
        clock_ghz=1.83,
    ),
    DatasheetRow(
        board="H200 SXM",
        name=r"NVIDIA H200",
        sms=132,
        memory_gib=(137, 142),
        tflops=_half(989, float8_e4m3fn=1979),
        tb_per_s=4.80,
        source=_PEAKS_SOURCE,
        note=_HOPPER_BOOST,
        clock_ghz=1.83,
    ),
    DatasheetRow(
        board="B200 SXM",
        name=r"NVIDIA B200",
        sms=148,
        memory_gib=(175, 193),
        tflops=_half(2250, float8_e4m3fn=4500),
        tb_per_s=8.00,
        source=_PEAKS_SOURCE,
    ),
    DatasheetRow(
        board="MI300X",
        name=r"AMD Instinct MI300X( OAM)?",
        sms=304,
        memory_gib=(190, 193),
        tflops=_half(1307, float8_e4m3fnuz=2610),
        tb_per_s=5.30,
        source=_PEAKS_SOURCE,
        note="sustained matmuls reach about half of it",
    ),
)


def find(device: Device) -> DatasheetRow | None:
    """The board that `device` is; None if it is not in the table."""
    return next((row for row in DATASHEET if row.matches(device)), None)


def lookup(device: Device, dtype: str) -> Ceilings | None:
    """The dense datasheet peaks of `device` for `dtype`; None if the board or its figure for the dtype is not known."""
    row = find(device)
    tflops = row.tflops.get(dtype) if row is not None else None
    if row is None or tflops is None:
        return None
    note = f"; {row.note}" if row.note else ""
    return Ceilings(
        device_key=device.key,
        dtype=dtype,
        flops_per_s=tflops * 1e12,
        bytes_per_s=row.tb_per_s * 1e12,
        source="datasheet",
        measured_ns=None,
        spread=None,
        reference=f"{row.board} datasheet, dense: {row.source}{note}",
        clock_hz=None if row.clock_ghz is None else row.clock_ghz * 1e9,
    )
