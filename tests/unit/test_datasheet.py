"""Datasheet peaks: the right board or none, and never a sparse figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from phaseprof.collectors.datasheet import DATASHEET, find, lookup
from phaseprof.trace.meta import Device

_GIB = 2**30


def _gpu(name: str, sms: int, memory_gib: float) -> Device:
    return Device(
        name=name,
        kind="cuda",
        index=0,
        cores=sms,
        threads=None,
        memory_bytes=round(memory_gib * _GIB),
        key=f"cuda|{name}",
    )


# Names, SM counts and memory as drivers report them; ridge = bfloat16 peak over bandwidth in FLOP/byte, worked out by
# hand from the product pages' dense figures.
KNOWN = [
    ("NVIDIA A100-SXM4-80GB", 108, 79.15, 153),
    ("NVIDIA A100 80GB PCIe", 108, 79.14, 161),
    ("NVIDIA A100-SXM4-40GB", 108, 39.39, 201),
    ("NVIDIA A100-PCIE-40GB", 108, 39.39, 201),
    ("NVIDIA L40S", 142, 44.39, 421),
    ("NVIDIA H100 PCIe", 114, 79.11, 378),
    ("NVIDIA H100 80GB HBM3", 132, 79.11, 295),
    ("NVIDIA H200", 132, 139.8, 206),
    ("NVIDIA B200", 148, 178.35, 281),
    ("AMD Instinct MI300X", 304, 191.98, 247),
]


@pytest.mark.parametrize(("name", "sms", "memory_gib", "ridge"), KNOWN)
def test_a_known_board_has_its_ridge(name: str, sms: int, memory_gib: float, ridge: int) -> None:
    device = _gpu(name, sms, memory_gib)
    roofs = lookup(device, "bfloat16")
    assert roofs is not None
    assert round(roofs.flops_per_s / roofs.bytes_per_s) == ridge
    assert (roofs.device_key, roofs.dtype, roofs.source) == (device.key, "bfloat16", "datasheet")
    assert roofs.measured_ns is None
    assert roofs.spread is None
    assert [row for row in DATASHEET if row.matches(device)] == [find(device)]


@pytest.mark.parametrize(
    ("name", "sms", "memory_gib", "multiply_adds_per_clock", "clock_hz"),
    [
        # SMs x 4 tensor cores x multiply-adds of a tensor core and clock, from the architecture white papers.
        ("NVIDIA A100-SXM4-80GB", 108, 79.15, 108 * 4 * 256, 1.41e9),
        ("NVIDIA L40S", 142, 44.39, 142 * 4 * 128, 2.49e9),
        ("NVIDIA H100 PCIe", 114, 79.11, 114 * 4 * 512, 1.62e9),
        ("NVIDIA H100 80GB HBM3", 132, 79.11, 132 * 4 * 512, 1.83e9),
        ("NVIDIA H200", 132, 139.8, 132 * 4 * 512, 1.83e9),
        ("AMD Instinct MI300X", 304, 191.98, 304 * 4 * 256, 2.1e9),
    ],
)
def test_peaks_are_dense(
    name: str, sms: int, memory_gib: float, multiply_adds_per_clock: int, clock_hz: float
) -> None:
    """What the tensor cores can do per clock, without sparsity, times the clock: a sparse figure is twice that."""
    roofs = lookup(_gpu(name, sms, memory_gib), "bfloat16")
    assert roofs is not None
    assert roofs.flops_per_s == pytest.approx(2 * multiply_adds_per_clock * clock_hz, rel=0.01)
    assert roofs.clock_hz in (clock_hz, None)


def test_the_clock_of_a_peak_is_known_of_the_boards_whose_counters_are_read() -> None:
    known = {row.board for row in DATASHEET if row.clock_ghz is not None}
    assert {"A100 SXM 80 GB", "H100 PCIe", "H100 SXM", "H200 SXM"} <= known


@pytest.mark.parametrize(
    ("name", "sms", "memory_gib"),
    [
        pytest.param("NVIDIA H100 NVL", 132, 93.1, id="a board that is not in the table"),
        pytest.param("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, 9.75, id="a MIG slice by its name"),
        pytest.param("NVIDIA H100 80GB HBM3", 16, 9.75, id="a MIG slice that keeps the name"),
        pytest.param("NVIDIA H100 80GB HBM3", 114, 79.1, id="the name of SXM, the SMs of PCIe"),
        pytest.param("NVIDIA H200 NVL", 132, 139.8, id="a sibling with the same SMs and memory"),
        pytest.param("NVIDIA A100-SXM-64GB", 124, 63.4, id="a custom A100"),
        pytest.param("NVIDIA A100-SXM4-80GB", 108, 39.4, id="half the memory"),
        pytest.param("NVIDIA L4", 58, 22.0, id="a prefix of a known name"),
        pytest.param("NVIDIA GeForce RTX 4090", 128, 23.6, id="a consumer board"),
    ],
)
def test_what_is_not_known_whole_is_unknown(name: str, sms: int, memory_gib: float) -> None:
    assert lookup(_gpu(name, sms, memory_gib), "bfloat16") is None


def test_a_cpu_is_unknown() -> None:
    cpu = Device("NVIDIA H200", "cpu", 0, 132, 2, round(139.8 * _GIB), "cpu|x")
    assert lookup(cpu, "bfloat16") is None


def test_a_dtype_without_a_figure_is_unknown() -> None:
    a100 = _gpu("NVIDIA A100-SXM4-80GB", 108, 79.15)
    assert lookup(a100, "float8_e4m3fn") is None
    assert lookup(a100, "float32") is None


def test_h100_variants_differ() -> None:
    sxm = lookup(_gpu("NVIDIA H100 80GB HBM3", 132, 79.11), "float8_e4m3fn")
    pcie = lookup(_gpu("NVIDIA H100 PCIe", 114, 79.11), "float8_e4m3fn")
    assert sxm is not None
    assert pcie is not None
    assert (sxm.flops_per_s, pcie.flops_per_s) == (1979e12, 1513e12)
    assert "1980 MHz" in sxm.reference


def test_every_row_names_its_source() -> None:
    assert all(row.source for row in DATASHEET)


def test_the_docs_show_the_same_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "ceilings.md"
    shown = {}
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[1].isdigit():
            shown[cells[0]] = (float(cells[1]), float(cells[2].split()[-1]), float(cells[3]))
    in_code = {}
    for row in DATASHEET:
        (other,) = (row.tflops[dtype] for dtype in row.tflops if "float16" not in dtype)
        in_code[row.board] = (row.tflops["bfloat16"], other, row.tb_per_s)
    assert shown == in_code
