"""The collector `nvml` against scripted drivers: values, windows, ways that are missing, and faults at every call."""

from __future__ import annotations

import gc
import importlib
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nvml_standin import Standin, standin

from phaseprof.clock import Clock
from phaseprof.collectors.nvml_samples import FAILURES, NvmlSampler, nvml_collector, probe
from phaseprof.collectors.sampling import PERIOD_NS, CannotSample
from phaseprof.errors import NotMeasured
from phaseprof.metrics import Metric
from phaseprof.records import Kernel, Sample
from phaseprof.trace.meta import ClockPair, CollectorCost, Device

# It ships no types.
pynvml: Any = importlib.import_module("pynvml")

MS = 1_000_000
SECOND = 1000 * MS
UUID = "GPU-12345678-0000-0000-0000-000000000000"
GPU = Device("NVIDIA H200", "cuda", 0, 132, None, 150 * 10**9, "cuda|h200", UUID)

SCRIPT = f"""
clock set
device 0 name="NVIDIA H200" uuid={UUID} memory_mib=143771
state prefill sm=1 dram=0.2 power=690 sm_clock=1500 memory_clock=2600 temperature=61 used_mib=4096 throttle=4 \
pcie_tx=2e9 pcie_rx=1e9 nvlink_tx=102400000 nvlink_rx=204800000
state decode sm=0.5 dram=0.9 power=450 sm_clock=1980 memory_clock=2619 temperature=55 used_mib=8192 throttle=32
run 0 prefill 2s
run 0 decode 8s
"""


#: Bindings before 12.565 know the older function alone.
TEMPERATURE = [
    name
    for name in ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
    if hasattr(pynvml, name)
]


class Simulated(Clock):
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        super().__init__(ClockPair(unix_ns=0, monotonic_ns=0))
        object.__setattr__(self, "now_ns", 0)

    def now_unix_ns(self) -> int:
        return int(vars(self)["now_ns"])


class Sink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.clock: Clock = Simulated()
        self.rows: list[Sample] = []
        self.notes: list[NotMeasured] = []

    def put_samples(self, rows: Sequence[Sample]) -> None:
        self.rows += rows

    def put_kernels(self, rows: Sequence[Kernel]) -> None:
        raise AssertionError("a sampler has no kernels")

    def note(self, what: NotMeasured) -> None:
        if what not in self.notes:
            self.notes.append(what)

    def spent(self, cost: CollectorCost) -> None:
        raise AssertionError("a sampler takes none of the workload's time")

    def sampling_of(self, key: str) -> bool:
        return True


class Bench:
    """A sampler of a scripted device, and the one clock of both."""

    def __init__(self, library: Standin, device: Device = GPU) -> None:
        self.library = library
        self.sink = Sink()
        self.go(0)
        self.sampler = NvmlSampler(device, self.sink)

    def go(self, now_ns: int) -> None:
        self.library.set_time_ns(now_ns)
        object.__setattr__(self.sink.clock, "now_ns", now_ns)

    def at(self, now_ns: int) -> dict[str, Sample]:
        """The rows of a turn, by their metric."""
        self.go(now_ns)
        rows = self.sampler.sample()
        assert all(row.device == UUID and row.source == "nvml" for row in rows)
        found = {row.metric: row for row in rows}
        assert len(found) == len(rows)
        return found

    def every_turn(self, begin_ns: int, end_ns: int) -> list[Sample]:
        rows: list[Sample] = []
        for now_ns in range(begin_ns, end_ns, PERIOD_NS):
            self.go(now_ns)
            rows += self.sampler.sample()
        return rows

    @property
    def missing(self) -> list[str]:
        return [note.what for note in self.sink.notes]


@contextmanager
def bench(script: str, folder: Path, device: Device = GPU) -> Iterator[Bench]:
    with standin(script, folder) as library:
        made = Bench(library, device)
        try:
            yield made
        finally:
            made.sampler.close()
            assert library.references == 0


def values(rows: dict[str, Sample]) -> dict[str, float]:
    return {metric: row.value for metric, row in rows.items()}


#: What a whole GPU shows.
EVERYTHING = {
    Metric.SM_CLOCK,
    Metric.MEMORY_CLOCK,
    Metric.THROTTLE,
    Metric.TEMPERATURE,
    Metric.MEMORY_USED,
    Metric.POWER,
    Metric.ENERGY,
    Metric.GPU_UTILIZATION,
    Metric.PCIE_TX,
    Metric.PCIE_RX,
    Metric.NVLINK_TX,
    Metric.NVLINK_RX,
}


# Values and windows


def test_what_a_turn_reads(tmp_path: Path) -> None:
    with bench(SCRIPT, tmp_path) as nvml:
        assert values(nvml.at(MS)) == pytest.approx(
            {
                Metric.SM_CLOCK: 1.5e9,
                Metric.THROTTLE: 4.0,
                Metric.MEMORY_CLOCK: 2.6e9,
                Metric.TEMPERATURE: 61.0,
                Metric.MEMORY_USED: 4096 * 2.0**20,
                Metric.POWER: 690.0,
                Metric.GPU_UTILIZATION: 1.0,
            }
        )
        # The next turn reads what changes fast, over the time since the last.
        second = nvml.at(111 * MS)
        assert set(second) == {Metric.SM_CLOCK, Metric.THROTTLE, Metric.POWER}
        assert {(row.start_ns, row.end_ns) for row in second.values()} == {(MS, 111 * MS)}
        # After a second the rest: counters have a first value to compare with now.
        slow = nvml.at(MS + SECOND)
        assert {(row.start_ns, row.end_ns) for row in slow.values()} == {
            (111 * MS, MS + SECOND),
            (MS, MS + SECOND),
        }
        assert values(slow)[Metric.PCIE_TX] == pytest.approx(2e9)
        assert values(slow)[Metric.PCIE_RX] == pytest.approx(1e9)
        assert values(slow)[Metric.NVLINK_TX] == pytest.approx(102_400_000, rel=1e-4)
        assert values(slow)[Metric.NVLINK_RX] == pytest.approx(204_800_000, rel=1e-4)
        assert nvml.missing == []
        assert set(slow) == EVERYTHING


def test_values_follow_the_script_from_phase_to_phase(tmp_path: Path) -> None:
    with bench(SCRIPT, tmp_path) as nvml:
        nvml.at(0)
        rows = values(nvml.at(5 * SECOND))
    assert rows[Metric.SM_CLOCK] == 1.98e9
    assert rows[Metric.POWER] == 450
    assert rows[Metric.THROTTLE] == 32
    assert rows[Metric.MEMORY_USED] == 8192 * 2**20
    # 5 s of counters: 2 s of prefill, none afterwards; 2 * 690 + 3 * 450 J.
    assert rows[Metric.PCIE_TX] == pytest.approx(2e9 * 2 / 5)
    assert rows[Metric.ENERGY] == pytest.approx(2730)


def test_energy_is_believed_over_long_windows_alone(tmp_path: Path) -> None:
    """The counter is updated every 100 ms: windows of a second and more, and their sum is what was used."""
    with bench(SCRIPT, tmp_path) as nvml:
        rows = nvml.every_turn(0, 8 * SECOND)
        energy = [row for row in rows if row.metric == Metric.ENERGY]
    assert len(energy) == 7
    assert all(row.end_ns - row.start_ns >= SECOND for row in energy)
    # They follow each other without a gap.
    assert [row.start_ns for row in energy[1:]] == [row.end_ns for row in energy[:-1]]
    sampled_s = energy[-1].end_ns / SECOND
    expected = 690 * 2 + 450 * (sampled_s - 2)
    # Known to one update of the counter.
    assert sum(row.value for row in energy) == pytest.approx(expected, abs=45)


def test_a_reading_at_an_odd_moment_gives_no_short_energy_window(tmp_path: Path) -> None:
    with bench(SCRIPT, tmp_path) as nvml:
        nvml.at(0)
        assert Metric.ENERGY not in nvml.at(300 * MS)


def test_counters_that_go_back_are_left_out_for_a_window(tmp_path: Path) -> None:
    script = f"""{SCRIPT}
    value nvmlDeviceGetTotalEnergyConsumption set=0 from=3 count=1
    value nvmlDeviceGetFieldValues item=197 set=5 from=3 count=1
    """
    with bench(script, tmp_path) as nvml:
        turns = [nvml.at(second * SECOND) for second in range(5)]
    assert [Metric.ENERGY in rows for rows in turns] == [False, True, False, True, True]
    assert [Metric.PCIE_TX in rows for rows in turns] == [False, True, False, True, True]
    # The other direction goes on.
    assert [Metric.PCIE_RX in rows for rows in turns] == [False, True, True, True, True]


# Ways


@pytest.mark.parametrize(
    ("lacking", "metric", "value", "asked"),
    [
        (
            ["nvmlDeviceGetCurrentClocksEventReasons"],
            Metric.THROTTLE,
            4.0,
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        ),
        (TEMPERATURE[:-1], Metric.TEMPERATURE, 61.0, TEMPERATURE[-1]),
        # The older structure counts the 600 MiB that the driver reserves.
        (
            ["nvmlDeviceGetMemoryInfo_v2"],
            Metric.MEMORY_USED,
            4696 * 2.0**20,
            "nvmlDeviceGetMemoryInfo",
        ),
    ],
)
@pytest.mark.parametrize("code", [3, 13, 25])
def test_older_drivers_are_asked_in_their_way(
    lacking: list[str], metric: Metric, value: float, asked: str, code: int, tmp_path: Path
) -> None:
    faults = "\n".join(f"fault {name} code={code}" for name in lacking)
    with bench(f"{SCRIPT}\n{faults}", tmp_path) as nvml:
        rows = nvml.at(MS)
        nvml.at(2 * SECOND)
        assert rows[metric].value == value
        assert [len(nvml.library.calls(name)) for name in lacking] == [1] * len(lacking)
        assert len(nvml.library.calls(asked)) == 2
        assert nvml.missing == []


def test_power_as_a_mean_has_windows_of_its_second(tmp_path: Path) -> None:
    """Without a reading of the moment: the mean of the last second, once a second."""
    script = f"{SCRIPT}\nfault nvmlDeviceGetFieldValues item=186 code=3"
    with bench(script, tmp_path) as nvml:
        nvml.at(SECOND)
        assert Metric.POWER not in nvml.at(1500 * MS)
        power = nvml.at(2500 * MS)[Metric.POWER]
    assert (power.start_ns, power.end_ns) == (1500 * MS, 2500 * MS)
    assert power.value == pytest.approx((690 + 450) / 2)


@pytest.mark.parametrize(
    ("capability", "window_ns"), [("9.0", SECOND), ("8.6", SECOND), ("8.0", 500 * MS)]
)
def test_the_oldest_power_function_is_taken_for_what_it_gives(
    capability: str, window_ns: int, tmp_path: Path
) -> None:
    """A mean over a second from GA102 on; the moment, for the time since the last turn, before."""
    script = SCRIPT.replace("memory_mib", f"capability={capability} memory_mib")
    script += "\nfault nvmlDeviceGetFieldValues code=3"
    with bench(script, tmp_path) as nvml:
        nvml.at(SECOND)
        later = [nvml.at(at) for at in (1500 * MS, 2000 * MS)]
    power = [rows[Metric.POWER] for rows in later if Metric.POWER in rows]
    assert [row.end_ns - row.start_ns for row in power] == [window_ns] * (SECOND // window_ns)
    assert power[-1].end_ns == 2 * SECOND


def test_pcie_without_counters_is_measured_rarely(tmp_path: Path) -> None:
    """The function makes everything else wait, so it is not asked every turn."""
    script = f"{SCRIPT}\nfault nvmlDeviceGetFieldValues item=197 code=3"
    with bench(script, tmp_path) as nvml:
        rows = nvml.at(SECOND)
        assert values(rows)[Metric.PCIE_TX] == pytest.approx(2e9)
        assert values(rows)[Metric.PCIE_RX] == pytest.approx(1e9)
        nvml.every_turn(SECOND, 9 * SECOND)
        assert len(nvml.library.calls("nvmlDeviceGetPcieThroughput")) == 4
        assert nvml.missing == []


# What a device does not have

UNSUPPORTED = {
    "the SM clock": ["nvmlDeviceGetClockInfo item=1"],
    "the memory clock": ["nvmlDeviceGetClockInfo item=2"],
    "throttling": [
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ],
    "the temperature": TEMPERATURE,
    "the used memory": ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"],
    "the power": [
        "nvmlDeviceGetFieldValues item=186",
        "nvmlDeviceGetFieldValues item=185",
        "nvmlDeviceGetPowerUsage",
    ],
    "the energy": ["nvmlDeviceGetTotalEnergyConsumption"],
    "utilization.gpu": ["nvmlDeviceGetUtilizationRates"],
    "PCIe traffic": ["nvmlDeviceGetFieldValues item=198", "nvmlDeviceGetPcieThroughput"],
    "NVLink traffic": ["nvmlDeviceGetFieldValues item=138"],
}


@pytest.mark.parametrize(("code", "why"), [(3, "does not support it"), (4, "may not ask")])
@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_is_not_there_is_asked_once_and_said_once(
    what: str, code: int, why: str, tmp_path: Path
) -> None:
    faults = "\n".join(f"fault {name} code={code}" for name in UNSUPPORTED[what])
    with bench(f"{SCRIPT}\n{faults}", tmp_path) as nvml:
        before = {row.metric for row in nvml.every_turn(0, 3 * SECOND)}
        for name in UNSUPPORTED[what]:
            function, _, item = name.partition(" item=")
            calls = nvml.library.calls(function)
            assert len([call for call in calls if not item or call.item == int(item)]) == 1
        notes = nvml.sink.notes
    # The rest is there.
    assert len(before) >= len(UNSUPPORTED) - 1
    if what == "NVLink traffic" and code == 3:
        # Most GPUs have no NVLink: nobody misses it.
        assert notes == []
    else:
        (note,) = notes
        assert note.what == f"{what} of NVIDIA H200"
        assert why in note.why


def test_several_things_that_are_missing_are_one_note(tmp_path: Path) -> None:
    faults = "fault nvmlDeviceGetTotalEnergyConsumption code=3\nfault nvmlDeviceGetUtilizationRates code=3"
    with bench(f"{SCRIPT}\n{faults}", tmp_path) as nvml:
        nvml.at(0)
        assert nvml.missing == ["the energy, utilization.gpu of NVIDIA H200"]


def test_a_device_that_shows_nothing_is_left_with_its_reason(tmp_path: Path) -> None:
    names = {name.partition(" ")[0] for ways in UNSUPPORTED.values() for name in ways}
    faults = "\n".join(f"fault {name} code=4" for name in names)
    with bench(f"{SCRIPT}\n{faults}", tmp_path) as nvml:
        with pytest.raises(CannotSample) as raised:
            nvml.at(0)
        assert raised.value.why == "this user may not ask the NVIDIA driver"
        assert "/dev/nvidia" in raised.value.fix
        assert nvml.missing == []


def test_a_mig_instance_has_its_memory_and_the_clocks_it_shares(tmp_path: Path) -> None:
    script = f"""
    clock set
    device 0 name="NVIDIA H100"
    instance 0 gi=2 name="NVIDIA H100 MIG 1g.10gb" uuid={UUID.replace("GPU", "MIG")}
    state busy power=500 sm_clock=1500 memory_clock=2600 temperature=50 used_mib=100
    state part used_mib=700
    run 0 busy 10s
    run 0:2 part 10s
    """
    # torch says GPU-, whatever it is; the rows keep the name of the trace.
    with bench(script, tmp_path, GPU) as nvml:
        nvml.at(0)
        rows = values(nvml.at(SECOND))
        assert rows == {
            Metric.SM_CLOCK: 1.5e9,
            Metric.MEMORY_CLOCK: 2.6e9,
            Metric.THROTTLE: 0,
            Metric.TEMPERATURE: 50,
            Metric.MEMORY_USED: 700 * 2**20,
        }
        (note,) = nvml.sink.notes
        assert note.what == "power, energy and link traffic of NVIDIA H100 MIG 1g.10gb"


# Faults

QUESTIONS = sorted({name.partition(" ")[0] for ways in UNSUPPORTED.values() for name in ways})
OPENING = ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetCudaComputeCapability"]


@pytest.mark.parametrize("function", QUESTIONS)
def test_failures_that_pass_are_forgotten(function: str, tmp_path: Path) -> None:
    script = f"{SCRIPT}\nfault {function} code=999 count={FAILURES - 1}"
    with bench(script, tmp_path) as nvml:
        nvml.every_turn(0, 2 * SECOND)
        rows = nvml.at(9 * SECOND)
        assert set(rows) == EVERYTHING
        assert nvml.missing == []


@pytest.mark.parametrize("code", [10, 21, 999])
def test_failures_that_stay_are_said(code: int, tmp_path: Path) -> None:
    script = f"{SCRIPT}\nfault nvmlDeviceGetUtilizationRates code={code} from=3"
    with bench(script, tmp_path) as nvml:
        rows = nvml.every_turn(0, 6 * SECOND)
        assert len([row for row in rows if row.metric == Metric.GPU_UTILIZATION]) == 2
        assert len(nvml.library.calls("nvmlDeviceGetUtilizationRates")) == 2 + FAILURES
        assert nvml.missing == ["utilization.gpu of NVIDIA H200"]


@pytest.mark.parametrize("code", [1, 9, 15, 16, 18])
@pytest.mark.parametrize(
    "function", sorted({ways[0].partition(" ")[0] for ways in UNSUPPORTED.values()})
)
def test_a_lost_device_stops_with_its_reason(function: str, code: int, tmp_path: Path) -> None:
    """Whichever call is the first to be told."""
    with bench(f"{SCRIPT}\nfault {function} code={code} after=1s", tmp_path) as nvml:
        assert len(nvml.at(0)) >= 6
        with pytest.raises(CannotSample) as raised:
            nvml.every_turn(2 * SECOND, 4 * SECOND)
        assert raised.value.why.endswith(f": NVIDIA H200, {UUID}")
        assert nvml.missing == []


@pytest.mark.parametrize("code", [2, 3, 4, 6, 9, 10, 13, 15, 18, 21, 25, 999])
@pytest.mark.parametrize("function", [*OPENING, *QUESTIONS])
def test_a_fault_at_any_call_is_a_reason_or_a_loss_that_is_said(
    function: str, code: int, tmp_path: Path
) -> None:
    with standin(f"{SCRIPT}\nfault {function} code={code}", tmp_path) as library:
        try:
            nvml = Bench(library)
            try:
                rows = nvml.every_turn(0, 3 * SECOND)
            finally:
                nvml.sampler.close()
        except CannotSample as error:
            assert error.why
        else:
            # All of it by another way, or the loss is said; NVLink alone is not missed.
            lost = EVERYTHING - {row.metric for row in rows}
            assert nvml.missing or lost <= {Metric.NVLINK_TX, Metric.NVLINK_RX}
        assert library.references == 0


def test_a_device_that_the_driver_does_not_know(tmp_path: Path) -> None:
    with standin("clock set\ndevice 0 name=Other uuid=GPU-other", tmp_path) as library:
        with pytest.raises(CannotSample) as raised:
            NvmlSampler(GPU, Sink())
        assert raised.value.why == f"the NVIDIA driver knows no such device ({UUID})"
        assert library.references == 0


IMPOSSIBLE = [
    (Metric.SM_CLOCK, "nvmlDeviceGetClockInfo item=1 set=4294967295"),
    (Metric.MEMORY_CLOCK, "nvmlDeviceGetClockInfo item=2 set=4294967295"),
    (Metric.POWER, "nvmlDeviceGetFieldValues item=186 set=4294967295"),
    (Metric.TEMPERATURE, f"{TEMPERATURE[0]} set=2147483647"),
    (Metric.GPU_UTILIZATION, "nvmlDeviceGetUtilizationRates set=250"),
    (Metric.MEMORY_USED, "nvmlDeviceGetMemoryInfo_v2 set=18446744073709551615"),
    (Metric.THROTTLE, "nvmlDeviceGetCurrentClocksEventReasons set=18446744073709551615"),
    (Metric.ENERGY, "nvmlDeviceGetTotalEnergyConsumption set=18446744073709551615"),
    (Metric.PCIE_TX, "nvmlDeviceGetFieldValues item=197 set=18446744073709551615"),
    (Metric.NVLINK_RX, "nvmlDeviceGetFieldValues item=139 set=18446744073709551615"),
]


@pytest.mark.parametrize(("metric", "value"), IMPOSSIBLE)
def test_impossible_values_are_kept_out_and_said_once(
    metric: Metric, value: str, tmp_path: Path
) -> None:
    function, _, rest = value.partition(" ")
    script = f"{SCRIPT}\nvalue {function} {rest} from=2 count=2"
    collector = nvml_collector()
    with bench(script, tmp_path) as nvml:
        rows = nvml.every_turn(0, 6 * SECOND)
        kept = collector.believed(rows, nvml.sink)
        # The driver is believed again afterwards.
        later = collector.believed(nvml.every_turn(7 * SECOND, 9 * SECOND), nvml.sink)
    assert len(kept) < len(rows)
    assert {row.metric for row in rows if row not in kept} == {metric}
    assert metric in {row.metric for row in later}
    (note,) = nvml.sink.notes
    assert note.what == f"{metric.value} at some moments"


def test_a_day_leaves_nothing_behind(tmp_path: Path) -> None:
    """Turns over a day: a sampler keeps the last readings of its counters, and no more."""
    with bench(f"{SCRIPT}\nrepeat 0", tmp_path) as nvml:
        turns = iter(range(0, 86_400 * SECOND, 48 * SECOND))
        for _ in range(100):
            nvml.at(next(turns))
        gc.collect()
        tracemalloc.start()
        try:
            for now_ns in turns:
                nvml.at(now_ns)
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    # Numbers of the last readings take the place of those before.
    assert kept < 10_000


# The collector


def test_probe(tmp_path: Path) -> None:
    with standin(f"driver 575.1\n{SCRIPT}\ndevice 1", tmp_path):
        assert probe().available
        assert probe().detail == "driver 575.1, 2 GPUs"
    with standin("driver 575.1", tmp_path):
        assert (probe().available, probe().detail) == (False, "driver 575.1 has no GPU")
    with standin("device 0\nfault nvmlInit code=18", tmp_path):
        answer = probe()
        assert not answer.available
        assert answer.detail == "the NVIDIA driver and its library are of different versions"
        assert answer.fix.startswith("Reboot")
