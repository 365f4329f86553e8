"""What a device is called, and that its key changes with everything that its ceilings depend on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phaseprof import devices
from phaseprof.devices import describe
from phaseprof.errors import UsageError

_NO_CUDA = not torch.cuda.is_available()


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """Undo what a test does to torch's threads and matmul precision."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def test_cpu_is_what_the_kernel_and_torch_say() -> None:
    device = describe("cpu")
    assert (device.kind, device.index) == ("cpu", 0)
    assert device.cores == len(os.sched_getaffinity(0))
    assert device.threads == torch.get_num_threads()
    meminfo = Path("/proc/meminfo").read_text().split()
    total_kib = int(meminfo[meminfo.index("MemTotal:") + 1])
    assert device.memory_bytes == pytest.approx(total_kib * 1024, rel=0.02)
    names = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    assert device.name in names or not names


def test_a_torch_device_and_its_text_are_the_same() -> None:
    assert describe(torch.device("cpu")) == describe("cpu") == describe("cpu:0")


@pytest.mark.usefixtures("torch_settings")
def test_key_holds_the_threads() -> None:
    torch.set_num_threads(1)
    one = describe("cpu")
    torch.set_num_threads(2)
    two = describe("cpu")
    assert (one.threads, two.threads) == (1, 2)
    assert one.key != two.key


@pytest.mark.usefixtures("torch_settings")
def test_key_holds_the_matmul_precision() -> None:
    torch.set_float32_matmul_precision("highest")
    usual = describe("cpu")
    torch.set_float32_matmul_precision("medium")
    assert describe("cpu").key != usual.key


def test_key_holds_the_torch_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = describe("cpu").key
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert describe("cpu").key != before


def test_cores_are_those_that_the_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("this machine leaves the process one core")
    before = describe("cpu")
    os.sched_setaffinity(0, {min(allowed)})
    try:
        pinned = describe("cpu")
    finally:
        os.sched_setaffinity(0, allowed)
    assert pinned.cores == 1
    assert pinned.key != before.key


@pytest.mark.parametrize(
    ("content", "part"),
    [("150000 100000\n", "quota=1.5"), ("200000 100000\n", "quota=2"), ("max 100000\n", None)],
)
def test_key_holds_a_containers_cpu_quota(
    content: str, part: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(content)
    monkeypatch.setattr(devices, "_CGROUP_QUOTA", str(quota))
    parts = describe("cpu").key.split("|")
    assert [each for each in parts if each.startswith("quota")] == ([part] if part else [])


def test_without_cpuinfo_there_is_still_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_CPUINFO", str(tmp_path / "absent"))
    assert describe("cpu").name


def test_an_arm_cpuinfo_has_no_model_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\n\n")
    monkeypatch.setattr(devices, "_CPUINFO", str(cpuinfo))
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert describe("cpu").name == "aarch64"


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The driver's answers on a machine with one H200."""
    properties = SimpleNamespace(
        name="NVIDIA H200",
        multi_processor_count=132,
        total_memory=150_754_820_096,
        major=9,
        minor=0,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return properties


def test_cuda_is_what_the_driver_says(one_gpu: SimpleNamespace) -> None:
    device = describe("cuda")
    assert (device.name, device.kind, device.index) == ("NVIDIA H200", "cuda", 0)
    assert (device.cores, device.threads) == (132, None)
    assert device.memory_bytes == 150_754_820_096
    assert describe("cuda:0") == device


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "NVIDIA H100"), ("multi_processor_count", 114), ("total_memory", 85_000_000_000)],
)
def test_key_of_a_gpu_holds_name_sms_and_memory(
    field: str, value: object, one_gpu: SimpleNamespace
) -> None:
    before = describe("cuda").key
    setattr(one_gpu, field, value)
    assert describe("cuda").key != before


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="no cuda:3") as error:
        describe("cuda:3")
    assert "cuda:0" in error.value.remedy


@pytest.mark.skipif(not _NO_CUDA, reason="there is a CUDA device here")
def test_no_gpu_at_all() -> None:
    with pytest.raises(UsageError, match="no CUDA device") as error:
        describe("cuda")
    assert error.value.remedy


def test_a_device_that_torch_does_not_know() -> None:
    with pytest.raises(UsageError, match="'gpu'"):
        describe("gpu")


def test_other_kinds_are_described_without_figures() -> None:
    device = describe("meta")
    assert (device.name, device.kind, device.cores, device.memory_bytes) == (
        "meta",
        "meta",
        None,
        None,
    )
