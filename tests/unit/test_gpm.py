"""GPM on the stand-in for NVML: values against the script's own averages, every reason not to sample, nothing left."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from nvml_standin import Standin, library, standin

from phaseprof.clock import Clock
from phaseprof.collectors import gpm, gpm_probe
from phaseprof.collectors.collection import collection
from phaseprof.collectors.gpm import LEAST_NS, GpmSampler, gpm_collector
from phaseprof.collectors.gpm_probe import Look, Looking, look
from phaseprof.collectors.nvml import NvmlState
from phaseprof.collectors.sampling import CannotSample, SamplingTask
from phaseprof.errors import NotMeasured
from phaseprof.metrics import Metric
from phaseprof.records import Kernel, Sample
from phaseprof.trace.meta import CollectorCost, Device

MS = 1_000_000
UUID = "GPU-11aaaaaa-0000-0000-0000-000000000000"
GPU = Device("NVIDIA H200", "cuda", 0, 132, None, 143 * 10**9, "cuda|h200", UUID)
INSTANCE = "MIG-22bbbbbb-0000-0000-0000-000000000000"
CARD = f'device 0 name="NVIDIA H200" uuid={UUID}'

#: What the two states of the script show, by metric; the rest is as the script's documentation has it.
PREFILL = {
    Metric.SM_ACTIVE: 0.92,
    Metric.SM_OCCUPANCY: 0.3,
    Metric.TENSOR_ACTIVE: 0.71,
    Metric.TENSOR_HMMA_ACTIVE: 0.7,
    Metric.TENSOR_DMMA_ACTIVE: 0.02,
    Metric.TENSOR_IMMA_ACTIVE: 0.03,
    Metric.DRAM_ACTIVE: 0.25,
    Metric.INTEGER_ACTIVE: 0.11,
    Metric.FP16_ACTIVE: 0.04,
    Metric.FP32_ACTIVE: 0.12,
    Metric.FP64_ACTIVE: 0.01,
    Metric.PCIE_TX: 3e9,
    Metric.PCIE_RX: 1e9,
    Metric.NVLINK_TX: 40e9,
    Metric.NVLINK_RX: 50e9,
}
DECODE = {
    Metric.SM_ACTIVE: 0.6,
    Metric.SM_OCCUPANCY: 0.15,
    Metric.TENSOR_ACTIVE: 0.08,
    Metric.TENSOR_HMMA_ACTIVE: 0.07,
    Metric.DRAM_ACTIVE: 0.88,
    Metric.INTEGER_ACTIVE: 0.05,
    Metric.FP32_ACTIVE: 0.06,
    Metric.PCIE_TX: 1e6,
    Metric.NVLINK_TX: 2e9,
}
KEYS = {
    Metric.SM_ACTIVE: "sm",
    Metric.SM_OCCUPANCY: "occupancy",
    Metric.TENSOR_ACTIVE: "tensor",
    Metric.TENSOR_HMMA_ACTIVE: "hmma",
    Metric.TENSOR_DMMA_ACTIVE: "dmma",
    Metric.TENSOR_IMMA_ACTIVE: "imma",
    Metric.DRAM_ACTIVE: "dram",
    Metric.INTEGER_ACTIVE: "integer",
    Metric.FP16_ACTIVE: "fp16",
    Metric.FP32_ACTIVE: "fp32",
    Metric.FP64_ACTIVE: "fp64",
    Metric.PCIE_TX: "pcie_tx",
    Metric.PCIE_RX: "pcie_rx",
    Metric.NVLINK_TX: "nvlink_tx",
    Metric.NVLINK_RX: "nvlink_rx",
}
CYCLES = frozenset(KEYS) - {
    Metric.SM_OCCUPANCY,
    Metric.DRAM_ACTIVE,
    Metric.PCIE_TX,
    Metric.PCIE_RX,
    Metric.NVLINK_TX,
    Metric.NVLINK_RX,
}


def state(name: str, shows: dict[Metric, float]) -> str:
    pairs = " ".join(f"{KEYS[metric]}={value:g}" for metric, value in shows.items())
    return f"state {name} {pairs} sm_clock=1980 memory_clock=2619"


#: One prefill of 80 ms, then five decodes of 12 ms, over and over.
TIMELINE = f"""
{state("prefill", PREFILL)}
{state("decode", DECODE)}
run 0 prefill 80ms
run 0 decode 12ms times=5
repeat 0
"""
SCRIPT = f"clock set\norigin 0\n{CARD}\n{TIMELINE}"


def average(metric: Metric, begin_ns: int, end_ns: int) -> float:
    """What the script shows on average between two moments, by walking along it."""
    total, at = 0.0, 0
    steps = itertools.cycle([(80 * MS, PREFILL), *[(12 * MS, DECODE)] * 5])
    while at < end_ns:
        length, shows = next(steps)
        inside = min(at + length, end_ns) - max(at, begin_ns)
        total += max(inside, 0) * shows.get(metric, 0.0)
        at += length
    return total / (end_ns - begin_ns)


@dataclass(frozen=True)
class ScriptClock(Clock):
    """The time of the script."""

    library: Standin = field(kw_only=True)
    at: list[int] = field(default_factory=lambda: [0], kw_only=True)

    def set(self, now_ns: int) -> None:
        self.at[0] = now_ns
        self.library.set_time_ns(now_ns)

    def now_unix_ns(self) -> int:
        return self.at[0]


class Sink:
    """Keeps what it is given."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.rows: list[Sample] = []
        self.notes: list[NotMeasured] = []

    def put_samples(self, rows: Sequence[Sample]) -> None:
        self.rows += rows

    def put_kernels(self, rows: Sequence[Kernel]) -> None: ...

    def note(self, what: NotMeasured) -> None:
        if what not in self.notes:
            self.notes.append(what)

    def spent(self, cost: CollectorCost) -> None: ...

    def sampling_of(self, key: str) -> bool:
        return True


class Here:
    """Looks in this process, where the clock of the script is that of the test: the process apart has tests below."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid

    def answer(self) -> Look | None:
        return look(self.uuid)

    def end(self) -> None: ...


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpm, "Looking", Here)
    monkeypatch.setattr(gpm_probe, "APART_S", 0.0)


def sampled(
    script: str, folder: Path, times_ns: Sequence[int], device: Device = GPU
) -> tuple[list[Sample], list[NotMeasured]]:
    """What a sampler gives when its turns come at these times of the script."""
    with standin(script, folder) as nvml:
        clock = ScriptClock(Clock.start().pair, library=nvml)
        sink = Sink(clock)
        task = SamplingTask(gpm_collector(), device, sink)
        task.step(0)
        for now in times_ns:
            clock.set(now)
            if not task.ended:
                task.step(now)
        task.end()
        assert (nvml.samples, nvml.references) == (0, 0)
    return sink.rows, sink.notes


def turns(count: int) -> list[int]:
    """Turns every 110 ms, a little late each time."""
    return [110 * MS * (number + 1) + (number * 7919) % 9 * MS for number in range(count)]


# Values


def test_every_metric_is_the_average_of_the_script_over_its_window(
    tmp_path: Path, here: None
) -> None:
    times = turns(30)
    rows, notes = sampled(SCRIPT, tmp_path, times)
    windows = list(itertools.pairwise(times))
    assert notes == []
    for metric in KEYS:
        mine = [row for row in rows if row.metric == metric and row.source == "gpm"]
        assert [(row.start_ns, row.end_ns) for row in mine] == windows, metric
        for row in mine:
            truth = average(metric, row.start_ns, row.end_ns)
            assert row.value == pytest.approx(truth, rel=1e-6, abs=1e-9), metric
    for row in rows:
        assert row.device == UUID
        if row.source == "gpm.counters":
            truth = average(Metric(row.metric), row.start_ns, row.end_ns)
            assert row.value == pytest.approx(truth, rel=1e-6, abs=1e-9)


def test_clocks_stand_beside_the_counters(tmp_path: Path, here: None) -> None:
    rows, _ = sampled(SCRIPT, tmp_path, turns(3))
    clocks = {row.metric: row.value for row in rows if row.metric.endswith("clock_hz")}
    assert clocks == {Metric.SM_CLOCK: 1980e6, Metric.MEMORY_CLOCK: 2619e6}


def test_counters_of_cycles_stand_beside_the_averages_once_they_agree(
    tmp_path: Path, here: None
) -> None:
    rows, _ = sampled(SCRIPT, tmp_path, turns(15))
    assert {row.metric for row in rows if row.source == "gpm.counters"} == CYCLES
    for metric in CYCLES:
        mine = [row for row in rows if row.metric == metric]
        averages = [row for row in mine if row.source == "gpm"]
        exact = [row for row in mine if row.source == "gpm.counters"]
        # 14 windows: the first has no counter before it, and ten are compared.
        assert len(averages) == 14, metric
        assert [(row.start_ns, row.end_ns) for row in exact] == [
            (row.start_ns, row.end_ns) for row in averages[-4:]
        ]
        assert [row.value for row in exact] == pytest.approx(
            [row.value for row in averages[-4:]], rel=1e-9, abs=1e-12
        )


def test_a_counter_that_does_not_agree_is_not_used(tmp_path: Path, here: None) -> None:
    """One that stands still: its share would be 0."""
    script = f"{SCRIPT}\nvalue nvmlGpmMetricsGet item=250 set=1e15"
    rows, notes = sampled(script, tmp_path, turns(20))
    tensor = [row for row in rows if row.metric == Metric.TENSOR_ACTIVE]
    assert {row.source for row in tensor} == {"gpm"}
    assert [note.what for note in notes] == ["exact tensor_active_share"]
    assert {row.source for row in rows if row.metric == Metric.SM_ACTIVE} == {"gpm", "gpm.counters"}


def test_a_driver_without_counters_gives_averages_and_that_is_no_lack(
    tmp_path: Path, here: None
) -> None:
    faults = "\n".join(f"fault nvmlGpmMetricsGet item={n} code=3" for n in range(248, 261))
    rows, notes = sampled(f"{SCRIPT}\n{faults}", tmp_path, turns(15))
    assert {row.source for row in rows} == {"gpm"}
    assert notes == []


def test_a_metric_that_is_missing_is_said_and_the_others_are_there(
    tmp_path: Path, here: None
) -> None:
    faults = "\n".join(f"fault nvmlGpmMetricsGet item={n} code=3" for n in (8, 10, 60, 61))
    rows, notes = sampled(f"{SCRIPT}\n{faults}", tmp_path, turns(3))
    missing = {Metric.DRAM_ACTIVE, Metric.NVLINK_RX, Metric.NVLINK_TX}
    assert set(KEYS) - {row.metric for row in rows} == missing | {Metric.TENSOR_DMMA_ACTIVE}
    assert notes == [
        NotMeasured(
            "tensor_dmma_active_share, dram_active_share of NVIDIA H200",
            "the GPU does not support it",
        )
    ]


def test_a_value_that_cannot_be_is_left_out_and_said_once(tmp_path: Path, here: None) -> None:
    script = f"{SCRIPT}\nvalue nvmlGpmMetricsGet item=2 set=4294967295 from=3 count=2"
    rows, notes = sampled(script, tmp_path, turns(8))
    shown = [row for row in rows if row.metric == Metric.SM_ACTIVE]
    whole = [row for row in rows if row.metric == Metric.DRAM_ACTIVE]
    assert len(whole) == 7 and len(shown) == 5
    assert all(row.value < 1 for row in shown)
    assert [note.what for note in notes] == ["sm_active_share at some moments"]


# Windows


def test_a_turn_that_comes_too_early_is_left_out_and_its_window_is_longer(
    tmp_path: Path, here: None
) -> None:
    times = [200 * MS, 299 * MS, 310 * MS, 409 * MS, 430 * MS]
    rows, _ = sampled(SCRIPT, tmp_path, times)
    windows = sorted({(row.start_ns, row.end_ns) for row in rows})
    assert windows == [(200 * MS, 310 * MS), (310 * MS, 430 * MS)]
    assert all(end - begin >= LEAST_NS for begin, end in windows)


def test_a_driver_that_has_nothing_new_makes_the_window_longer(tmp_path: Path, here: None) -> None:
    """Its counters are refreshed every 250 ms: a pair without a refresh in between has no data."""
    script = f"clock set\norigin 0\nrefresh 250ms\n{CARD}\n{TIMELINE}"
    times = [110 * MS * number for number in range(3, 12)]
    rows, notes = sampled(script, tmp_path, times)
    windows = sorted({(row.start_ns, row.end_ns) for row in rows})
    assert [begin for begin, _ in windows[1:]] == [end for _, end in windows[:-1]]
    assert len(windows) < len(times) - 1 and windows[0][0] == 330 * MS
    assert notes == []


def test_errors_that_pass_leave_a_longer_window(tmp_path: Path, here: None) -> None:
    # Two samples are taken by the look; the fourth and the fifth of the sampler's own fail.
    script = f"{SCRIPT}\nfault nvmlGpmSampleGet code=10 from=6 count=2"
    times = turns(8)
    rows, notes = sampled(script, tmp_path, times)
    windows = sorted({(row.start_ns, row.end_ns) for row in rows})
    assert (times[2], times[5]) in windows and notes == []
    for row in rows:
        if row.metric == Metric.TENSOR_ACTIVE:
            truth = average(Metric.TENSOR_ACTIVE, row.start_ns, row.end_ns)
            assert row.value == pytest.approx(truth, rel=1e-6)


# Reasons


@pytest.mark.parametrize(
    ("code", "from_call", "why", "left"),
    [
        (15, 5, "the NVIDIA driver has lost the GPU: NVIDIA H200", 1),
        (4, 5, "this user may not ask the NVIDIA driver: NVIDIA H200", 1),
        (999, 5, "the NVIDIA driver gave an error (Unknown Error): NVIDIA H200", 1),
    ],
)
def test_a_gpu_that_does_not_answer_any_more_ends_the_sampling(
    code: int, from_call: int, why: str, left: int, tmp_path: Path, here: None
) -> None:
    script = f"{SCRIPT}\nfault nvmlGpmSampleGet code={code} from={from_call}"
    rows, notes = sampled(script, tmp_path, turns(40))
    assert len({row.start_ns for row in rows}) == left
    assert [(note.what, note.why) for note in notes] == [(gpm.WHAT, why)]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes of this one load the stand-in as well."""
    before = os.environ.get("LD_LIBRARY_PATH")
    folder = str(library().parent)
    monkeypatch.setenv("LD_LIBRARY_PATH", folder if before is None else f"{folder}:{before}")
    yield


@pytest.mark.parametrize(
    ("card", "faults", "why", "fix"),
    [
        (
            'name="NVIDIA A100" gpm=0 capability=8.0',
            "",
            "GPM needs a GPU of the Hopper generation or newer, not a NVIDIA A100",
            "",
        ),
        (
            'name="NVIDIA H200" gpm=0',
            "",
            "the driver gives no GPM for NVIDIA H200",
            "Update the NVIDIA driver.",
        ),
        (
            'name="NVIDIA H200"',
            "fault nvmlGpmQueryDeviceSupport code=13",
            "the NVIDIA driver or nvidia-ml-py is too old for it",
            "Update the NVIDIA driver, and `pip install -U nvidia-ml-py`.",
        ),
        (
            'name="NVIDIA H200"',
            "fault nvmlGpmSampleGet code=4",
            "this user may not ask the NVIDIA driver",
            "Give this user access to /dev/nvidia*.",
        ),
        (
            'name="NVIDIA H200"',
            "fault nvmlDeviceGetMemoryInfo code=999 from=2",
            "with this driver, asking for GPM leaves other questions of the process unanswered",
            "Update the NVIDIA driver.",
        ),
        (
            'name="NVIDIA H200"',
            "fault nvmlGpmMetricsGet code=3",
            "the driver gives no metric of GPM for NVIDIA H200",
            "",
        ),
    ],
)
def test_a_device_without_gpm_has_its_reason_from_another_process(
    card: str, faults: str, why: str, fix: str, tmp_path: Path, elsewhere: None
) -> None:
    script = f"device 0 uuid={UUID} {card}\n{faults}"
    with standin(script, tmp_path) as nvml:
        sampler = GpmSampler(GPU, Sink(Clock.start()))
        with pytest.raises(CannotSample) as raised:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                assert sampler.sample() == ()
                time.sleep(0.01)
        sampler.close()
        # No question of GPM was asked in this process.
        asked = {call.pid for call in nvml.calls() if call.function.startswith("nvmlGpm")}
        assert os.getpid() not in asked and asked
        assert nvml.references == 0
    assert (raised.value.why, raised.value.fix) == (why, fix)


def test_a_look_that_hangs_is_given_up(tmp_path: Path, elsewhere: None) -> None:
    script = f"{CARD}\nsleep nvmlGpmSampleGet lasting=60s"
    with standin(script, tmp_path):
        looking = Looking(UUID, patience_s=1.5)
        assert looking.wait().state is NvmlState.TIMEOUT
        looking.end()


def test_a_look_that_dies_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    found = Looking(UUID).wait()
    assert (found.state, found.detail) == (
        NvmlState.FAILED,
        "the process that looked first ended with 1",
    )
    monkeypatch.setattr("sys.executable", "/no/such/python")
    assert "cannot be run" in Looking(UUID).wait().detail
    monkeypatch.setattr("sys.executable", "")
    assert "no Python interpreter" in Looking(UUID).wait().detail


def test_the_end_does_not_wait_for_the_look(tmp_path: Path, elsewhere: None) -> None:
    script = f"{CARD}\nsleep nvmlGpmSampleGet lasting=60s"
    with standin(script, tmp_path) as nvml:
        sampler = GpmSampler(GPU, Sink(Clock.start()))
        assert sampler.sample() == ()
        process = sampler._looking and sampler._looking._process
        assert process
        sampler.close()
        assert process.poll() is not None
        assert nvml.references == 0


# MIG


MIG = f"""clock set
origin 0
device 0 name="NVIDIA H200" uuid={UUID} mig=1
instance 0 gi=3 ci=0 uuid={INSTANCE} memory_mib=17000 sms=16 name="NVIDIA H200 MIG 1g.18gb"
{state("busy", PREFILL)}
{state("other", DECODE)}
run 0 other 10s
run 0:3 busy 10s
"""
PART = Device("NVIDIA H200 MIG 1g.18gb", "cuda", 0, 16, None, 17 * 10**9, "cuda|mig", INSTANCE)


def test_a_mig_instance_is_sampled_by_its_own_call(tmp_path: Path, here: None) -> None:
    rows, notes = sampled(MIG, tmp_path, turns(4), PART)
    assert notes == []
    for metric, truth in PREFILL.items():
        mine = [row for row in rows if row.metric == metric]
        assert len(mine) == 3 and {row.device for row in mine} == {INSTANCE}
        assert all(row.value == pytest.approx(truth, rel=1e-6) for row in mine)


def test_a_mig_instance_without_gpm_says_so(tmp_path: Path, here: None) -> None:
    rows, notes = sampled(f"{MIG}\nfault nvmlGpmMigSampleGet code=3", tmp_path, turns(3), PART)
    assert rows == []
    assert [note.why for note in notes] == [
        "the driver gives no GPM for a MIG instance of NVIDIA H200 MIG 1g.18gb"
    ]


# From the name to the rows


def test_asked_for_by_name_it_samples_on_the_thread_of_the_session(
    tmp_path: Path, elsewhere: None
) -> None:
    script = f"{CARD}\n{state('busy', PREFILL)}\nrun 0 busy 10s\nrepeat 0"
    with standin(script, tmp_path) as nvml:
        sink = Sink(Clock.start())
        made = collection("gpm")
        made.start(sink)
        made.device_seen(GPU)
        deadline = time.monotonic() + 30
        while len({row.start_ns for row in sink.rows}) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        made.stop()
        assert (nvml.samples, nvml.references) == (0, 0)
    assert sink.notes == []
    assert {row.value for row in sink.rows if row.metric == Metric.SM_CLOCK} == {1980e6}
    shown = [row.value for row in sink.rows if row.metric == Metric.TENSOR_ACTIVE]
    assert len(shown) >= 2
    assert all(value == pytest.approx(0.71, abs=0.02) for value in shown)
