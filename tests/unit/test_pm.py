"""PM sampling: what a script of the GPU becomes in the table, and what each refusal says."""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cupti_stand_in import Gpu, Result, TriggerMode, collector_class, cuptiError, install

from phaseprof.clock import Clock
from phaseprof.collectors import cupti, permission, pm
from phaseprof.collectors.cupti import METRIC_SETS
from phaseprof.collectors.pm import DeviceRun, PmCollector, PmPlan, pm_collector
from phaseprof.errors import NotMeasured
from phaseprof.metrics import Metric
from phaseprof.records import Kernel, Sample
from phaseprof.trace.meta import ClockPair, Device

H200 = Device("NVIDIA H200", "cuda", 0, 132, None, 150_754_820_096, "cuda|h200", "GPU-1")
UNIX_NS = 1_700_000_000_000_000_000
MS = 1_000_000

_PERCENT = ".avg.pct_of_peak_sustained_elapsed"
SM = f"sm__cycles_active{_PERCENT}"
TENSOR = f"sm__pipe_tensor_cycles_active{_PERCENT}"
OCCUPANCY = f"sm__warps_active{_PERCENT}"
CLOCK = "sm__cycles_elapsed.avg"
DRAM = f"dram__throughput{_PERCENT}"
READ = "dram__bytes_read.sum"
WRITE = "dram__bytes_write.sum"


@dataclass
class Sink:
    """Keeps what it is given. Its clock puts the host's zero at `UNIX_NS`."""

    rows: list[Sample] = field(default_factory=list)
    notes: list[NotMeasured] = field(default_factory=list)
    mine: bool = True
    most_at_once: int = 0

    @property
    def clock(self) -> Clock:
        return Clock(ClockPair(UNIX_NS, 0))

    def put_samples(self, rows: Sequence[Sample]) -> None:
        self.rows.extend(rows)
        self.most_at_once = max(self.most_at_once, len(rows))

    def put_kernels(self, rows: Sequence[Kernel]) -> None:
        raise AssertionError("there are no kernels")

    def spent(self, cost: object) -> None:
        """Costs are not looked at."""

    def note(self, what: NotMeasured) -> None:
        if what not in self.notes:
            self.notes.append(what)

    def sampling_of(self, key: str) -> bool:
        assert key == "GPU-1"
        return self.mine

    def of(self, metric: Metric) -> list[Sample]:
        return [row for row in self.rows if row.metric == metric]


def constant(value: float) -> Callable[[int, int], float]:
    return lambda begin, end: value


def rate(per_second: float) -> Callable[[int, int], float]:
    """A sum that grows evenly."""
    return lambda begin, end: per_second * (end - begin) * 1e-9


def steps(first: float, second: float, at_ns: int) -> Callable[[int, int], float]:
    """One value before a moment and another after it, averaged over an interval that holds it."""

    def value(begin: int, end: int) -> float:
        before = min(max(at_ns - begin, 0), end - begin)
        return (first * before + second * (end - begin - before)) / (end - begin)

    return value


def whole(**changes: Callable[[int, int], float]) -> dict[str, Callable[[int, int], float]]:
    """A chip that has all metrics."""
    names = {"sm": SM, "tensor": TENSOR, "dram": DRAM, "read": READ}
    metrics = {
        SM: constant(90.0),
        TENSOR: constant(60.0),
        OCCUPANCY: constant(25.0),
        CLOCK: rate(1.98e9),
        DRAM: constant(40.0),
        READ: rate(1.9e12),
        WRITE: rate(0.1e12),
    }
    metrics.update({names[key]: value for key, value in changes.items()})
    return metrics


def sample(
    gpu: Gpu, seconds: float, monkeypatch: pytest.MonkeyPatch, *, plan: PmPlan | None = None
) -> Sink:
    """A run of so many simulated seconds."""
    install(gpu, monkeypatch)
    sink = Sink()
    end_ns = gpu.host_ns + round(seconds * 1e9)

    def wait(step_s: float) -> bool:
        gpu.wait(step_s)
        return gpu.host_ns >= end_ns

    DeviceRun(H200, sink, plan or PmPlan(), wait, gpu.monotonic_ns).run()
    assert gpu.holder is None, "the device is left enabled"
    return sink


def mean(rows: Sequence[Sample]) -> float:
    return sum(r.value * (r.end_ns - r.start_ns) for r in rows) / sum(
        r.end_ns - r.start_ns for r in rows
    )


def test_units_and_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Percent become shares, sums become rates, and windows of a millisecond follow one another."""
    gpu = Gpu(whole())
    begin = gpu.host_ns
    sink = sample(gpu, 0.5, monkeypatch)
    assert sink.notes == []
    assert {row.source for row in sink.rows} == {"pm"}
    assert {row.device for row in sink.rows} == {"GPU-1"}
    assert mean(sink.of(Metric.SM_ACTIVE)) == pytest.approx(0.90)
    assert mean(sink.of(Metric.TENSOR_ACTIVE)) == pytest.approx(0.60)
    assert mean(sink.of(Metric.SM_OCCUPANCY)) == pytest.approx(0.25)
    assert mean(sink.of(Metric.DRAM_ACTIVE)) == pytest.approx(0.40)
    assert mean(sink.of(Metric.SM_CLOCK)) == pytest.approx(1.98e9)
    assert mean(sink.of(Metric.DRAM_READ)) == pytest.approx(1.9e12)
    assert mean(sink.of(Metric.DRAM_WRITE)) == pytest.approx(0.1e12)
    windows = sink.of(Metric.SM_ACTIVE)
    assert len(windows) == 500
    for before, after in itertools.pairwise(windows):
        assert after.start_ns == pytest.approx(before.end_ns, abs=2)
    assert windows[0].start_ns - UNIX_NS == pytest.approx(begin, abs=5_000)
    assert windows[-1].end_ns - windows[0].start_ns == pytest.approx(500 * MS, rel=1e-3)


@pytest.mark.parametrize("drift", [0.0, 4e-4, -4e-4])
def test_a_change_lies_where_it_was(drift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With clocks that differ by hours and drift apart by 2 ms in the run."""
    gpu = Gpu(whole(), offset_ns=7_200_000_000_000, drift=drift)
    at_ns = gpu.host_ns + 4_000_400_000
    gpu.metrics = whole(tensor=steps(10.0, 80.0, at_ns))
    plan = PmPlan(decode_s=0.5)
    sink = sample(gpu, 5.0, monkeypatch, plan=plan)
    change = [r for r in sink.of(Metric.TENSOR_ACTIVE) if 0.1001 < r.value < 0.7999]
    assert len(change) == 1
    (row,) = change
    found = row.end_ns - (row.value - 0.1) / 0.7 * (row.end_ns - row.start_ns)
    assert found - UNIX_NS == pytest.approx(at_ns, abs=20_000)


def test_samples_on_a_clock_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seconds beside `cuptiGetTimestamp`: their bounds place them, and that is said."""
    gpu = Gpu(whole(), stamp_offset_ns=3_000_000_000, drift=3e-4)
    at_ns = gpu.host_ns + 8_000_400_000
    gpu.metrics = whole(tensor=steps(10.0, 80.0, at_ns))
    sink = sample(gpu, 9.0, monkeypatch)
    (change,) = [r for r in sink.of(Metric.TENSOR_ACTIVE) if 0.1001 < r.value < 0.7999]
    assert abs(change.start_ns - UNIX_NS - at_ns) < 2 * MS
    assert [note.what for note in sink.notes] == ["exact times of PM samples"]


def test_samples_whose_clock_makes_no_sense_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes at twice the speed of time."""
    sink = sample(Gpu(whole(), drift=1.0), 1.0, monkeypatch)
    assert sink.rows == []
    assert [note.why for note in sink.notes] == [
        "the clock of the samples cannot be related to that of the host"
    ]


def test_without_cupti_s_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(whole(), fails={"get_timestamp": cuptiError(Result.ERROR_UNKNOWN)})
    sink = sample(gpu, 1.0, monkeypatch)
    assert len(sink.of(Metric.SM_ACTIVE)) > 900
    assert [note.what for note in sink.notes] == ["exact times of PM samples"]


def test_an_overflow_lengthens_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer holds a third of what comes between two decodes."""
    gpu = Gpu(whole(), capacity=170)
    sink = sample(gpu, 3.0, monkeypatch)
    (note,) = sink.notes
    assert "overflowed 2 times" in note.why
    assert "800 µs" in note.why
    # What was lost is not there, and nothing is there twice.
    assert mean(sink.of(Metric.SM_ACTIVE)) == pytest.approx(0.9)
    spans = [(r.start_ns, r.end_ns) for r in sink.of(Metric.SM_ACTIVE)]
    assert all(a[1] <= b[0] + 5 for a, b in itertools.pairwise(spans))


def test_a_buffer_that_is_always_full_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = sample(Gpu(whole(), capacity=3), 3.0, monkeypatch)
    assert sink.rows == []
    assert "overflowed 4 times" in sink.notes[0].why
    assert sink.notes[0].fix == "leave the process a free core"


def test_missing_samples_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(whole())
    install(gpu, monkeypatch)
    decode = sys.modules["cupti.pm_sampling"].Collector.decode

    def lossy(self: object, max_samples: int = 10000) -> object:
        data = decode(self, max_samples)
        del data._samples[100:105]
        return data

    monkeypatch.setattr(sys.modules["cupti.pm_sampling"].Collector, "decode", lossy)
    monkeypatch.setattr("cupti_stand_in.install", lambda *_: None)
    sink = Sink()
    waits = iter([False, False, True])

    def wait(step_s: float) -> bool:
        gpu.wait(step_s)
        return next(waits)

    DeviceRun(H200, sink, PmPlan(), wait, gpu.monotonic_ns).run()
    (note,) = sink.notes
    assert note.why.startswith("samples are missing in 3 places, 3.0 ms in all")


def test_the_chip_without_time_triggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GA100: samples come by cycles of its clock."""
    sink = sample(Gpu(whole(), time_trigger=False), 0.5, monkeypatch)
    assert sink.notes == []
    assert mean(sink.of(Metric.DRAM_READ)) == pytest.approx(1.9e12, rel=1e-4)


@pytest.mark.parametrize(
    ("metrics", "one_pass", "have"),
    [
        # As GB202: other names for the same.
        (
            {
                **{k: v for k, v in whole().items() if k not in (READ, WRITE)},
                "dram__bytes_op_read.sum": rate(1.5e12),
                "dram__bytes_op_write.sum": rate(1e11),
            },
            16,
            set(cupti.ALL_METRICS),
        ),
        # A driver that grants four, and one.
        (whole(), 4, {Metric.SM_ACTIVE, Metric.TENSOR_ACTIVE, Metric.DRAM_READ, Metric.DRAM_WRITE}),
        (whole(), 1, {Metric.TENSOR_ACTIVE}),
        # No memory of its own.
        (
            {k: v for k, v in whole().items() if not k.startswith("dram")},
            16,
            {Metric.SM_ACTIVE, Metric.TENSOR_ACTIVE, Metric.SM_OCCUPANCY, Metric.SM_CLOCK},
        ),
    ],
    ids=["other names", "four", "one", "no memory"],
)
def test_the_richest_set_that_a_chip_takes(
    metrics: Mapping[str, Callable[[int, int], float]],
    one_pass: int,
    have: set[Metric],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sink = sample(Gpu(metrics, one_pass=one_pass), 0.2, monkeypatch)
    assert {row.metric for row in sink.rows} == have
    missing = [m for m in cupti.ALL_METRICS if m not in have]
    assert [note.what for note in sink.notes] == (
        [f"{', '.join(missing)} by pm"] if missing else []
    )


def test_a_chip_with_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes for each."""
    sink = sample(Gpu(whole(), one_pass=0), 0.2, monkeypatch)
    assert [note.why for note in sink.notes] == [cupti.NO_METRICS.why]


def test_a_libcupti_that_is_too_old_for_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As seen with cupti-python 13.4 over libcupti 13.0: not even `sm__cycles_active` is a valid parameter."""
    sink = sample(Gpu({}), 0.2, monkeypatch)
    assert [(note.why, note.fix) for note in sink.notes] == [
        (cupti.OLD_LIBRARY.why, cupti.OLD_LIBRARY.fix)
    ]


def test_no_metric_stands_twice_in_a_set() -> None:
    for counters in METRIC_SETS:
        assert len({counter.metric for counter in counters}) == len(counters)


@pytest.mark.parametrize(
    ("error", "why", "fix"),
    [
        (PermissionError("see the web"), "ERR_NVGPUCTRPERM", "NVreg_RestrictProfilingToAdminUsers"),
        (
            cuptiError(Result.ERROR_INSUFFICIENT_PRIVILEGES),
            "ERR_NVGPUCTRPERM",
            "CAP_SYS_ADMIN",
        ),
        (RuntimeError("PM sampling is already enabled on this device."), "already", "nsys"),
        (cuptiError(Result.ERROR_HARDWARE_BUSY), "another profiler holds", "dcgmi"),
        (cuptiError(Result.ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED), "another profiler", "ncu"),
        (RuntimeError("CUPTI could not load the nvperf* libraries"), "too old", "580"),
        (cuptiError(Result.ERROR_MIG_DEVICE_NOT_SUPPORTED), "MIG", "gpm"),
        (MemoryError("while creating"), "no memory", "100 MB"),
        (cuptiError(Result.ERROR_UNKNOWN), "ERROR_UNKNOWN", "PHASEPROF_DEBUG"),
        (ValueError("Invalid device_index: 0"), "Invalid device_index", ""),
        (RuntimeError("CUDA driver is not found (libcuda.so.1: …)"), "no NVIDIA driver", ""),
    ],
)
@pytest.mark.parametrize("call", ["enable", "start", "stop"])
def test_a_refusal_is_said_and_nothing_raises(
    call: str, error: Exception, why: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(whole(), fails={call: error})
    sink = sample(gpu, 0.3, monkeypatch)
    (note,) = sink.notes
    assert note.what == pm.WHAT
    assert why in note.why
    assert fix in note.fix
    assert "\n" not in note.why + note.fix
    assert gpu.calls[-1] == ("disable" if call != "enable" else "enable")


@pytest.mark.parametrize(
    "error",
    [cuptiError(Result.ERROR_UNKNOWN), RuntimeError("a bug"), PermissionError("no")],
)
@pytest.mark.parametrize("call", ["configure", "decode"])
def test_configure_and_decode_may_fail(
    call: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sample(Gpu(whole(), fails={call: error}), 0.3, monkeypatch)
    assert len(sink.notes) == 1
    assert sink.rows == []


def test_a_failing_disable_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(whole(), fails={"disable": RuntimeError("gone")})
    install(gpu, monkeypatch)
    sink = Sink()
    waits = iter([False, True])

    def wait(step_s: float) -> bool:
        gpu.wait(step_s)
        return next(waits)

    DeviceRun(H200, sink, PmPlan(), wait, gpu.monotonic_ns).run()
    assert sink.notes == []
    assert sink.rows


def test_another_process_samples_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(whole())
    install(gpu, monkeypatch)
    DeviceRun(H200, Sink(mine=False), PmPlan(), lambda _: True, gpu.monotonic_ns).run()
    assert gpu.calls == []


def test_it_takes_over_when_the_other_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(whole())
    install(gpu, monkeypatch)
    sink = Sink(mine=False)
    waits = iter([False, False, False, True])

    def wait(step_s: float) -> bool:
        gpu.wait(step_s)
        # After ten seconds.
        sink.mine = gpu.host_ns > 11_000_000_000
        return next(waits)

    DeviceRun(H200, sink, PmPlan(), wait, gpu.monotonic_ns).run()
    assert mean(sink.of(Metric.SM_ACTIVE)) == pytest.approx(0.9)


def test_impossible_values_are_left_out_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = sample(
        Gpu(whole(sm=constant(4294967295.0), dram=constant(float("nan")))), 0.2, monkeypatch
    )
    assert sink.of(Metric.SM_ACTIVE) == []
    assert sink.of(Metric.DRAM_ACTIVE) == []
    assert mean(sink.of(Metric.TENSOR_ACTIVE)) == pytest.approx(0.6)
    assert len(sink.notes) == 2


def test_a_long_run_is_sampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated day: a minute whole, then a tenth; what is kept and what is written at once stays small."""
    gpu = Gpu(whole())
    plan = PmPlan(interval_ns=200 * MS, window_ns=600 * MS, decode_s=0.6)
    begin = gpu.host_ns
    sink = sample(gpu, 86_400.0, monkeypatch, plan=plan)
    windows = sink.of(Metric.SM_ACTIVE)
    covered_s = sum(r.end_ns - r.start_ns for r in windows) * 1e-9
    assert covered_s == pytest.approx(60 + 86_340 * 0.1, rel=0.3)
    first = [r for r in windows if r.end_ns - UNIX_NS < begin + 60e9]
    assert sum(r.end_ns - r.start_ns for r in first) * 1e-9 > 58
    assert sink.most_at_once <= 7 * 10
    assert [note.what for note in sink.notes] == ["PM samples of the whole run"]


def test_the_stand_in_is_like_the_package() -> None:
    """Where cupti-python is installed: the same parameters, codes and attributes of errors."""
    real = pytest.importorskip("cupti.pm_sampling", reason="cupti-python is not installed")
    bindings = sys.modules["cupti.cupti"]
    stand_in = collector_class(Gpu({}))
    for method in ("__init__", "enable", "configure", "start", "stop", "decode", "disable"):
        there = inspect.signature(getattr(real.Collector, method)).parameters
        here = inspect.signature(getattr(stand_in, method)).parameters
        assert [p for p in there if p in here] == list(here), method
        for name, parameter in here.items():
            assert there[name].kind is parameter.kind, (method, name)
            if isinstance(parameter.default, int):
                assert int(there[name].default) == int(parameter.default), (method, name)
    for code in Result:
        assert bindings.Result[code.name].value == code.value
        theirs, ours = bindings.cuptiError(code.value), cuptiError(code)
        assert (type(theirs.status), theirs.status) == (type(ours.status), ours.status)
    assert [mode.name for mode in TriggerMode] == [
        mode.name for mode in real.TriggerMode if mode.name != "COUNT"
    ]
    assert callable(bindings.get_timestamp)
    assert set(real.Sample.__dataclass_fields__) == {
        "start_timestamp",
        "end_timestamp",
        "metric_values",
    }


def test_every_code_that_is_named_is_one_of_the_package() -> None:
    pytest.importorskip("cupti.pm_sampling", reason="cupti-python is not installed")
    known = {code.name for code in sys.modules["cupti.cupti"].Result}
    assert set(cupti._REFUSALS) <= known


# The collector itself, on threads.


@pytest.fixture
def real_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A GPU whose clock is the host's."""
    import time

    class RealGpu(Gpu):
        @property
        def host_ns(self) -> int:
            return time.perf_counter_ns()

        @host_ns.setter
        def host_ns(self, value: int) -> None:
            pass

    gpu = RealGpu(whole())
    install(gpu, monkeypatch)
    yield gpu
    assert [t.name for t in threading.enumerate() if t.name.startswith("phaseprof")] == []


def test_from_start_to_stop(real_time: Gpu) -> None:
    sink = Sink()
    collector = PmCollector(PmPlan(decode_s=0.01))
    collector.start(sink)
    collector.device_seen(H200)
    threading.Event().wait(0.1)
    collector.stop()
    assert sink.notes == []
    assert mean(sink.of(Metric.TENSOR_ACTIVE)) == pytest.approx(0.6)
    assert real_time.calls[-1] == "disable"
    assert collector.cpu_ns > 0


def test_stopped_at_once(real_time: Gpu) -> None:
    collector = pm_collector()
    collector.start(Sink())
    collector.device_seen(H200)
    collector.stop()
    assert real_time.holder is None


def test_a_cpu_is_not_sampled_and_that_is_said(real_time: Gpu) -> None:
    """It runs only where it was asked for by name."""
    sink = Sink()
    collector = pm_collector()
    collector.start(sink)
    collector.device_seen(Device("A CPU", "cpu", 0, 1, 1, 1, "cpu|a"))
    collector.stop()
    assert real_time.calls == []
    assert sink.notes == [NotMeasured(pm.WHAT, "no model ran on a CUDA device")]


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cupti", "cupti.cupti", "cupti.pm_sampling"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(cupti, "is_installed", lambda: False)


@pytest.mark.usefixtures("no_package")
def test_without_the_package() -> None:
    sink = Sink()
    collector = pm_collector()
    assert not collector.probe().available
    assert collector.probe().fix == "pip install 'phaseprof[cupti]'"
    collector.start(sink)
    collector.device_seen(H200)
    collector.stop()
    assert sink.notes == [NotMeasured(pm.WHAT, cupti.NO_PACKAGE.why, cupti.NO_PACKAGE.fix)]


def test_a_package_without_pm_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 13.3."""
    old = types.ModuleType("cupti")
    old.__path__ = []
    monkeypatch.setitem(sys.modules, "cupti", old)
    monkeypatch.delitem(sys.modules, "cupti.pm_sampling", raising=False)
    sink = Sink()
    DeviceRun(H200, sink, PmPlan(), lambda _: True).run()
    assert [note.why for note in sink.notes] == [cupti.OLD_PACKAGE.why]


def test_an_old_driver_is_said_before_cupti_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(whole())
    install(gpu, monkeypatch)
    monkeypatch.setattr(cupti, "driver_cuda_version", lambda: 12_080)
    sink = Sink()
    DeviceRun(H200, sink, PmPlan(), lambda _: True).run()
    assert gpu.calls == []
    (note,) = sink.notes
    assert note.why.startswith("the driver supports CUDA 12.8")
    assert not pm_collector().probe().available


# Permission


def _proc(folder: Path, monkeypatch: pytest.MonkeyPatch, params: str, capabilities: str) -> None:
    (folder / "params").write_text(params)
    (folder / "status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    monkeypatch.setattr(permission, "PARAMS", folder / "params")
    monkeypatch.setattr(permission, "STATUS", folder / "status")


@pytest.mark.parametrize(
    ("params", "capabilities", "allowed"),
    [
        ("ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 0\n", "0000000000000000", True),
        ("RmProfilingAdminOnly: 1\n", "0000000000000000", False),
        # What root has in a container by default.
        ("RmProfilingAdminOnly: 1\n", "00000000a80425fb", False),
        # All; CAP_SYS_ADMIN (bit 21); CAP_PERFMON (bit 38).
        ("RmProfilingAdminOnly: 1\n", "000001ffffffffff", True),
        ("RmProfilingAdminOnly: 1\n", "0000000000200000", True),
        ("RmProfilingAdminOnly: 1\n", "0000004000000000", True),
        ("", "0000000000000000", None),
    ],
)
def test_who_may_read_counters(
    params: str,
    capabilities: str,
    allowed: bool | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _proc(tmp_path, monkeypatch, params, capabilities)
    found = permission.may_profile()
    assert found.allowed is allowed
    assert bool(found.fix) == (allowed is False)
    install(Gpu(whole()), monkeypatch)
    assert pm_collector().probe().available is (allowed is not False)


def test_no_driver_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permission, "PARAMS", tmp_path / "none")
    monkeypatch.setattr(permission, "STATUS", tmp_path / "none")
    assert permission.may_profile().allowed is None
