"""The stand-in for NVML: its ABI is nvidia-ml-py's, and it shows what its script says."""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvml_standin import SharedClock, Standin, environment, library, standin

# It ships no types.
pynvml: Any = importlib.import_module("pynvml")

MS = 1_000_000
SECOND = 1000 * MS

# One second of prefill, four of decode, again and again; integrals are easily done by hand.
SCRIPT = """
clock set
device 0 name="NVIDIA H200" uuid=GPU-11111111-2222-3333-4444-555555555555 pci=0001:1b:00 memory_mib=143771 sms=100
device 1
state idle power=100 sm_clock=400 temperature=30
state prefill sm=1.0 tensor=0.8 hmma=0.75 dram=0.2 power=700 sm_clock=1500 pcie_tx=1e9 nvlink_rx=1048576000
state decode sm=0.5 tensor=0.1 dram=0.9 power=500 sm_clock=2000 memory_clock=2600 used_mib=1000 throttle=4
run 0 prefill 1s
run 0 decode 500ms times=8
repeat 0
"""


def _gpm(nvml: Standin, handle: Any, times: tuple[int, int], metrics: list[int]) -> list[Any]:
    samples = []
    for at in times:
        nvml.set_time_ns(at)
        samples.append(pynvml.nvmlGpmSampleGet(handle, pynvml.nvmlGpmSampleAlloc()))
    wanted = pynvml.c_nvmlGpmMetricsGet_t()
    wanted.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    wanted.numMetrics = len(metrics)
    wanted.sample1, wanted.sample2 = samples
    for at, metric in enumerate(metrics):
        wanted.metrics[at].metricId = metric
    pynvml.nvmlGpmMetricsGet(wanted)
    for sample in samples:
        pynvml.nvmlGpmSampleFree(sample)
    return [
        wanted.metrics[at].value
        if wanted.metrics[at].nvmlReturn == 0
        else -wanted.metrics[at].nvmlReturn
        for at in range(len(metrics))
    ]


def test_structures_have_the_sizes_of_the_bindings() -> None:
    sizes = ctypes.CDLL(str(library())).standin_size
    metrics = pynvml.c_nvmlGpmMetricsGet_t
    expected = [
        ctypes.sizeof(pynvml.nvmlPciInfo_t),
        ctypes.sizeof(pynvml.c_nvmlMemory_t),
        ctypes.sizeof(pynvml.c_nvmlMemory_v2_t),
        ctypes.sizeof(pynvml.c_nvmlUtilization_t),
        # Bindings before 12.565 have no name for it.
        ctypes.sizeof(getattr(pynvml, "c_nvmlTemperature_v1_t", ctypes.c_uint * 3)),
        ctypes.sizeof(pynvml.c_nvmlDeviceAttributes),
        ctypes.sizeof(pynvml.c_nvmlFieldValue_t),
        ctypes.sizeof(pynvml.c_nvmlGpmMetric_t),
        metrics.metrics.offset,
        ctypes.sizeof(pynvml.c_nvmlGpmSupport_t),
    ]
    assert [sizes(at) for at in range(len(expected))] == expected


def test_devices_are_found_as_the_script_names_them(tmp_path: Path) -> None:
    with standin(SCRIPT, tmp_path) as nvml:
        pynvml.nvmlInit()
        assert pynvml.nvmlSystemGetDriverVersion() == "580.95.05"
        assert pynvml.nvmlDeviceGetCount() == 2
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetName(handle) == "NVIDIA H200"
        uuid = "GPU-11111111-2222-3333-4444-555555555555"
        assert pynvml.nvmlDeviceGetUUID(handle) == uuid
        by_uuid = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        by_bus = pynvml.nvmlDeviceGetHandleByPciBusId("00000001:1B:00.0")
        assert pynvml.nvmlDeviceGetIndex(by_uuid) == pynvml.nvmlDeviceGetIndex(by_bus) == 0
        assert pynvml.nvmlDeviceGetPciInfo(handle).busId == "00000001:1B:00.0"
        with pytest.raises(pynvml.NVMLError_NotFound):
            pynvml.nvmlDeviceGetHandleByUUID("GPU-nowhere")
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            pynvml.nvmlDeviceGetHandleByIndex(2)
        pynvml.nvmlInit()
        assert nvml.references == 2
        pynvml.nvmlShutdown()
        pynvml.nvmlShutdown()
        assert nvml.references == 0
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            pynvml.nvmlDeviceGetCount()


@pytest.mark.parametrize(
    ("begin_ms", "end_ms", "sm", "tensor", "dram"),
    [
        (0, 1000, 100.0, 80.0, 20.0),
        (1000, 2000, 50.0, 10.0, 90.0),
        # 900 to 1100 ms: half of either.
        (900, 1100, 75.0, 45.0, 55.0),
        # A whole period, and three of them: (1 * 100 + 4 * 50) / 5.
        (0, 5000, 60.0, 24.0, 76.0),
        (700, 15_700, 60.0, 24.0, 76.0),
        # Over the seam between two periods: 200 ms of decode, 300 of prefill.
        (4800, 5300, 80.0, 52.0, 48.0),
    ],
)
def test_gpm_is_the_average_of_the_script(
    begin_ms: int, end_ms: int, sm: float, tensor: float, dram: float, tmp_path: Path
) -> None:
    with standin(SCRIPT, tmp_path) as nvml:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        seen = _gpm(nvml, handle, (begin_ms * MS, end_ms * MS), [2, 5, 10])
        assert seen == pytest.approx([sm, tensor, dram])
        assert nvml.samples == 0


@settings(max_examples=40, deadline=None)
@given(
    runs=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(1, 3)), min_size=1, max_size=8
    ),
    window=st.tuples(st.integers(0, 2000), st.integers(1, 500)),
    repeats=st.booleans(),
)
def test_gpm_is_the_average_of_any_script(
    runs: list[tuple[int, int, int]], window: tuple[int, int], repeats: bool
) -> None:
    """Against a sum over milliseconds."""
    shares = [0.1, 0.35, 0.6, 0.95]
    each_ms = [shares[state] for state, length, times in runs for _ in range(length * times)]
    begin, length = window

    def at(ms: int) -> float:
        if ms < len(each_ms) or repeats:
            return each_ms[ms % len(each_ms)]
        return 0.05

    expected = 100 * sum(at(begin + ms) for ms in range(length)) / length
    script = "\n".join(
        [
            "clock set\ndevice 0\nstate idle sm=0.05",
            *(f"state s{number} sm={share}" for number, share in enumerate(shares)),
            *(f"run 0 s{state} {length}ms times={times}" for state, length, times in runs),
            "repeat 0" if repeats else "",
        ]
    )
    with tempfile.TemporaryDirectory() as folder, standin(script, Path(folder)) as nvml:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        (seen,) = _gpm(nvml, handle, (begin * MS, (begin + length) * MS), [2])
    assert seen == pytest.approx(expected, abs=1e-6)


def test_gpm_rates_cycles_and_what_there_is_not(tmp_path: Path) -> None:
    with standin(SCRIPT, tmp_path) as nvml:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        # Half a second of prefill: MiB a second; then counters at 1.5 s; 477 is no metric.
        assert _gpm(nvml, handle, (0, 500 * MS), [20, 60, 61, 477]) == pytest.approx(
            [1e9 / 2**20, 1000.0, 0.0, -pynvml.NVML_ERROR_NOT_SUPPORTED]
        )
        elapsed, active, mma = _gpm(nvml, handle, (SECOND, 1500 * MS), [248, 249, 250])
        # 100 SMs: a second at 1.5 GHz, half a second at 2 GHz.
        assert elapsed == pytest.approx(100 * (1.5e9 + 1.0e9))
        assert active == pytest.approx(100 * (1.5e9 + 0.5e9))
        assert mma == pytest.approx(100 * (1.2e9 + 0.1e9))
        assert _gpm(nvml, handle, (SECOND, SECOND), [2]) == [-pynvml.NVML_ERROR_NO_DATA]


def test_what_is_shown_now(tmp_path: Path) -> None:
    with standin(SCRIPT, tmp_path) as nvml:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        nvml.set_time_ns(1550 * MS)
        assert pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) == 2000
        assert pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM) == 2600
        assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle) == 4
        assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 100
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        assert (memory.total, memory.used) == (143_771 * 2**20, 1000 * 2**20)
        assert pynvml.nvmlDeviceGetMemoryInfo(handle).used == 1600 * 2**20
        # The last second: 450 ms of prefill and 550 of decode.
        assert pynvml.nvmlDeviceGetPowerUsage(handle) == 450 * 700 + 550 * 500
        # The counter was updated at 1.5 s: 700 J and half a second of 500 W.
        assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) == 950_000
        fields = pynvml.nvmlDeviceGetFieldValues(handle, [186, 83, 198, 7])
        assert [each.nvmlReturn for each in fields] == [0, 0, 0, pynvml.NVML_ERROR_NOT_SUPPORTED]
        assert fields[0].value.uiVal == 500_000
        assert fields[1].value.ullVal == 950_000
        nvml.set_time_ns(0)
        other = pynvml.nvmlDeviceGetHandleByIndex(1)
        assert pynvml.nvmlDeviceGetTemperature(other, 0) == 30
        assert pynvml.nvmlDeviceGetUtilizationRates(other).gpu == 0


def test_faults_come_when_they_are_due(tmp_path: Path) -> None:
    script = f"""{SCRIPT}
    fault nvmlDeviceGetPowerUsage code=3 device=1
    fault nvmlDeviceGetPowerUsage code=15 device=0 from=2 count=1
    fault nvmlDeviceGetTemperature code=4 after=2s until=3s
    fault nvmlDeviceGetFieldValues code=999 item=83
    fault nvmlGpmMetricsGet code=3 item=5
    value nvmlGpmMetricsGet set=250 item=10
    value nvmlDeviceGetClockInfo set=4294967295 item=1
    fault nvmlDeviceGetName code=13
    """
    with standin(script, tmp_path) as nvml:
        pynvml.nvmlInit()
        first, second = (pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(2))
        nvml.set_time_ns(SECOND)

        def power(handle: Any) -> int:
            try:
                pynvml.nvmlDeviceGetPowerUsage(handle)
            except pynvml.NVMLError as error:
                return int(error.value)
            return 0

        assert [power(first) for _ in range(4)] == [0, 15, 0, 0]
        assert [power(second) for _ in range(2)] == [3, 3]
        pynvml.nvmlDeviceGetTemperature(first, 0)
        nvml.set_time_ns(2500 * MS)
        with pytest.raises(pynvml.NVMLError_NoPermission):
            pynvml.nvmlDeviceGetTemperature(first, 0)
        nvml.set_time_ns(3 * SECOND)
        pynvml.nvmlDeviceGetTemperature(first, 0)
        fields = pynvml.nvmlDeviceGetFieldValues(first, [83, 186])
        assert [each.nvmlReturn for each in fields] == [999, 0]
        assert _gpm(nvml, first, (0, SECOND), [2, 5, 10]) == pytest.approx([100.0, -3, 250.0])
        assert pynvml.nvmlDeviceGetClockInfo(first, 1) == 4_294_967_295
        assert pynvml.nvmlDeviceGetClockInfo(first, 2) == 2600
        with pytest.raises(pynvml.NVMLError_FunctionNotFound):
            pynvml.nvmlDeviceGetName(first)
        codes = [(call.device, call.code) for call in nvml.calls("nvmlDeviceGetPowerUsage")]
        assert codes == [("0:-1", 0), ("0:-1", 15), ("0:-1", 0), ("0:-1", 0)] + [("1:-1", 3)] * 2


def test_a_call_hangs_as_long_as_a_file_is_there(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    script = f"{SCRIPT}\nsleep nvmlDeviceGetCount_v2 while={hold} from=2"
    counts: list[int] = []
    with standin(script, tmp_path) as nvml:
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == 2
        thread = threading.Thread(target=lambda: counts.append(pynvml.nvmlDeviceGetCount()))
        thread.start()
        while len(nvml.calls("nvmlDeviceGetCount_v2")) < 2:
            time.sleep(0.001)
        # Others are answered meanwhile.
        pynvml.nvmlDeviceGetHandleByIndex(0)
        assert counts == []
        hold.unlink()
        thread.join()
        assert counts == [2]


def test_mig_instances(tmp_path: Path) -> None:
    script = """
    clock set
    device 0
    instance 0 gi=3 uuid=MIG-aaaaaaaa-0000-0000-0000-000000000001
    instance 0 gi=5 uuid=MIG-aaaaaaaa-0000-0000-0000-000000000002
    state busy sm=0.4
    run 0:5 busy 1s
    """
    with standin(script, tmp_path) as nvml:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
        part = pynvml.nvmlDeviceGetHandleByUUID("MIG-aaaaaaaa-0000-0000-0000-000000000002")
        assert pynvml.nvmlDeviceIsMigDeviceHandle(part).value == 1
        assert pynvml.nvmlDeviceGetGpuInstanceId(part) == 5
        parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
        assert pynvml.nvmlDeviceGetIndex(parent) == 0
        samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
        for at, sample in enumerate(samples):
            nvml.set_time_ns(at * SECOND)
            pynvml.nvmlGpmMigSampleGet(gpu, 5, sample)
        wanted = pynvml.c_nvmlGpmMetricsGet_t()
        wanted.version, wanted.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, 1
        wanted.sample1, wanted.sample2 = samples
        wanted.metrics[0].metricId = pynvml.NVML_GPM_METRIC_SM_UTIL
        assert pynvml.nvmlGpmMetricsGet(wanted).metrics[0].value == pytest.approx(40.0)
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetPowerUsage(part)


def test_noise_is_repeatable_and_about_the_truth(tmp_path: Path) -> None:
    with standin(f"{SCRIPT}\nnoise 0.03\nseed 5", tmp_path) as nvml:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        seen = [_gpm(nvml, handle, (SECOND, 2 * SECOND), [2])[0] for _ in range(400)]
    mean = sum(seen) / len(seen)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in seen) / len(seen))
    assert mean == pytest.approx(50.0, abs=0.6)
    assert deviation == pytest.approx(3.0, abs=0.5)


def test_a_subprocess_loads_it_and_shares_a_clock(tmp_path: Path) -> None:
    clock = SharedClock(tmp_path / "clock", 1500 * MS)
    script = SCRIPT.replace("clock set", f"clock file {clock.path}")
    code = (
        "import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0);"
        "print(pynvml.nvmlDeviceGetClockInfo(h, 1)); pynvml.nvmlShutdown()"
    )
    env = environment(script, tmp_path)
    shown = []
    for now_ns in (500 * MS, 1500 * MS):
        clock.set_time_ns(now_ns)
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout.strip())
    assert shown == ["1500", "2000"]


def test_a_fork_has_to_open_it_anew(tmp_path: Path) -> None:
    with standin(SCRIPT, tmp_path):
        pynvml.nvmlInit()
        pid = os.fork()
        if pid == 0:
            try:
                pynvml.nvmlDeviceGetCount()
            except pynvml.NVMLError_Uninitialized:
                pynvml.nvmlInit()
                os._exit(pynvml.nvmlDeviceGetCount())
            os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
        assert pynvml.nvmlDeviceGetCount() == 2


def test_a_script_that_is_wrong_says_where(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with standin("device 0\nrun 0 nothing 1s", tmp_path), pytest.raises(pynvml.NVMLError_Unknown):
        pynvml.nvmlInit()
    assert "line 2" in capfd.readouterr().err


def test_it_is_gone_afterwards(tmp_path: Path) -> None:
    before = pynvml.nvmlLib
    with standin(SCRIPT, tmp_path):
        assert pynvml.nvmlLib is not before
    assert pynvml.nvmlLib is before
