"""The thread that samples: its schedule, what it does with what samplers do, and that nothing of it can hang a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from phaseprof.clock import Clock
from phaseprof.collectors.base import Availability
from phaseprof.collectors.sampler_thread import SamplerThread
from phaseprof.collectors.sampling import (
    AGAIN_NS,
    HAND_OVER_NS,
    PERIOD_NS,
    CannotSample,
    SampledCollector,
    SamplingTask,
)
from phaseprof.errors import NotMeasured
from phaseprof.evidence import EvidenceSink
from phaseprof.metrics import Metric
from phaseprof.records import Kernel, Sample
from phaseprof.trace.meta import CollectorCost, Device

GPU = Device("NVIDIA Test", "cuda", 0, 132, None, 80 * 10**9, "cuda|test", "GPU-1")
OTHER = Device("NVIDIA Test", "cuda", 1, 132, None, 80 * 10**9, "cuda|test", "GPU-2")
CPU = Device("CPU", "cpu", 0, 4, 4, 16 * 10**9, "cpu|test")


class Sink:
    """Keeps what it is given."""

    def __init__(self, elsewhere: Sequence[str] = ()) -> None:
        self.clock = Clock.start()
        self.given: list[Sequence[Sample]] = []
        self.notes: list[NotMeasured] = []
        self.elsewhere = set(elsewhere)
        self.asked: list[str] = []

    def put_samples(self, rows: Sequence[Sample]) -> None:
        self.given.append(rows)

    def put_kernels(self, rows: Sequence[Kernel]) -> None:
        raise AssertionError("samplers have no kernels")

    def note(self, what: NotMeasured) -> None:
        self.notes.append(what)

    def spent(self, cost: CollectorCost) -> None:
        raise AssertionError("samplers open no windows")

    def sampling_of(self, key: str) -> bool:
        self.asked.append(key)
        return key not in self.elsewhere

    @property
    def rows(self) -> list[Sample]:
        return [row for rows in self.given for row in rows]


class Counting:
    """A sampler whose n-th reading is n, with whatever a test wants to happen at one of them."""

    def __init__(self, sink: EvidenceSink, happens: Callable[[int], None] | None = None) -> None:
        self.sink = sink
        self.happens = happens
        self.readings = 0
        self.closed = 0
        self.threads: set[str] = set()

    def sample(self) -> Sequence[Sample]:
        self.threads.add(threading.current_thread().name)
        self.readings += 1
        if self.happens is not None:
            self.happens(self.readings)
        now = self.sink.clock.now_unix_ns()
        return [Sample(now - 1, now, GPU.uuid, "test", Metric.POWER, float(self.readings))]

    def close(self) -> None:
        self.closed += 1


def available() -> Availability:
    return Availability(True, "numbers")


def collector(
    sampler: Callable[[Device, EvidenceSink], Counting],
    name: str = "test",
    thread: SamplerThread | None = None,
    **options: object,
) -> SampledCollector:
    made = SampledCollector(name, f"what {name} has", sampler, available, **options)  # type: ignore[arg-type]
    if thread is not None:
        made.thread = thread
    return made


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.002)


# One task, driven by a clock of the test


def drive(task: SamplingTask, times_ns: Sequence[int]) -> list[int]:
    """Open, then take turns at these times; when the next one is due after each."""
    task.step(times_ns[0])
    due = []
    for now in times_ns:
        task.step(now)
        due.append(task.due_ns)
    return due


def test_turns_lie_on_multiples_of_the_period_however_late_one_comes() -> None:
    sink = Sink()
    made = collector(lambda device, sink: Counting(sink), period_ns=100)
    task = SamplingTask(made, GPU, sink)
    # The third comes 250 late: the two that it missed are left out, and the next is on the old grid.
    assert drive(task, [1000, 1100, 1450, 1500, 1601]) == [1100, 1200, 1500, 1600, 1700]


def test_rows_are_handed_over_together_and_the_last_ones_at_the_end() -> None:
    sink = Sink()
    task = SamplingTask(collector(lambda device, sink: Counting(sink)), GPU, sink)
    start = 10 * HAND_OVER_NS
    drive(task, [start + turn * PERIOD_NS for turn in range(10)])
    # Four periods are over at the fifth turn and at the ninth.
    assert [len(rows) for rows in sink.given] == [5, 4]
    task.end()
    assert [len(rows) for rows in sink.given] == [5, 4, 2]
    assert [row.value for row in sink.rows] == list(range(1, 12))


def test_a_device_that_another_process_samples_is_asked_for_again() -> None:
    sink = Sink(elsewhere=[GPU.uuid])
    opened: list[Counting] = []

    def opens(device: Device, sink: EvidenceSink) -> Counting:
        opened.append(Counting(sink))
        return opened[-1]

    task = SamplingTask(collector(opens), GPU, sink)
    task.step(1000)
    assert (opened, sink.rows, task.due_ns) == ([], [], 1000 + AGAIN_NS)
    sink.elsewhere.clear()
    task.step(task.due_ns)
    assert task.due_ns == 1000 + AGAIN_NS
    task.end()
    assert len(opened) == 1 and opened[0].closed == 1
    assert sink.notes == []


def test_a_device_without_a_uuid_is_told_from_others_by_its_key() -> None:
    sink = Sink()
    task = SamplingTask(collector(lambda device, sink: Counting(sink)), CPU, sink)
    task.step(1000)
    assert sink.asked == ["cpu|test"]
    task.end()


def test_values_that_cannot_be_are_dropped_and_said_once_a_metric() -> None:
    class Broken(Counting):
        def sample(self) -> Sequence[Sample]:
            (row,) = super().sample()
            return [
                row,
                Sample(row.start_ns, row.end_ns, "GPU-1", "test", Metric.SM_ACTIVE, 42949672.95),
                Sample(row.start_ns, row.end_ns, "GPU-1", "test", Metric.DRAM_ACTIVE, float("nan")),
                Sample(row.start_ns, row.end_ns, "GPU-1", "test", Metric.TENSOR_ACTIVE, 1.0),
            ]

    sink = Sink()
    task = SamplingTask(collector(lambda device, sink: Broken(sink)), GPU, sink)
    drive(task, [PERIOD_NS, 2 * PERIOD_NS, 3 * PERIOD_NS])
    task.end()
    assert {row.metric for row in sink.rows} == {Metric.POWER, Metric.TENSOR_ACTIVE}
    assert len(sink.rows) == 8  # two metrics, three turns and the last one
    assert [note.what for note in sink.notes] == [
        "sm_active_share at some moments",
        "dram_active_share at some moments",
    ]
    assert "4.29497e+07" in sink.notes[0].why


def test_a_reason_to_stop_is_said_and_what_was_sampled_is_kept() -> None:
    def happens(reading: int) -> None:
        if reading == 3:
            raise CannotSample("the GPU is lost", "reboot")

    sink = Sink()
    made: list[Counting] = []

    def opens(device: Device, sink: EvidenceSink) -> Counting:
        made.append(Counting(sink, happens))
        return made[-1]

    task = SamplingTask(collector(opens), GPU, sink)
    drive(task, [PERIOD_NS, 2 * PERIOD_NS, 3 * PERIOD_NS])
    assert task.ended and made[0].closed == 1
    assert [row.value for row in sink.rows] == [1, 2]
    assert sink.notes == [NotMeasured("what test has", "the GPU is lost", "reboot")]


def test_a_bug_in_a_sampler_is_a_reason_as_well(caplog: pytest.LogCaptureFixture) -> None:
    def happens(reading: int) -> None:
        raise KeyError("power")

    sink = Sink()
    task = SamplingTask(collector(lambda device, sink: Counting(sink, happens)), GPU, sink)
    drive(task, [PERIOD_NS])
    assert task.ended
    assert sink.notes[0].why == "the collector test failed (KeyError: 'power')"
    assert "the workload goes on" in caplog.text


# On the thread


def test_it_samples_on_a_thread_of_its_own_until_it_is_stopped() -> None:
    sink = Sink()
    made: list[Counting] = []

    def opens(device: Device, sink: EvidenceSink) -> Counting:
        made.append(Counting(sink))
        return made[-1]

    sampled = collector(opens, period_ns=2_000_000)
    sampled.start(sink)
    assert not [t for t in threading.enumerate() if t.name.startswith("phaseprof-sampler")]
    sampled.device_seen(GPU)
    until(lambda: bool(made) and made[0].readings > 3)
    sampled.stop()
    assert made[0].closed == 1
    assert made[0].threads == {"phaseprof-sampler"}
    # Every reading has arrived, the last of them taken at the end.
    assert [row.value for row in sink.rows] == list(range(1, made[0].readings + 1))
    assert sampled.thread.cpu_ns > 0


def test_collectors_share_a_thread_and_one_that_ends_leaves_the_others() -> None:
    sink = Sink()
    thread = SamplerThread()
    samplers: dict[str, Counting] = {}

    def named(name: str) -> SampledCollector:
        def opens(device: Device, sink: EvidenceSink) -> Counting:
            return samplers.setdefault(name, Counting(sink))

        return collector(opens, name, thread, period_ns=2_000_000)

    first, second = named("a"), named("b")
    for each in (first, second):
        each.start(sink)
        each.device_seen(GPU)
    until(lambda: len(samplers) == 2 and all(s.readings > 1 for s in samplers.values()))
    first.stop()
    before = samplers["b"].readings
    assert samplers["a"].closed == 1 and samplers["b"].closed == 0
    until(lambda: samplers["b"].readings > before + 2)
    second.stop()
    assert samplers["b"].closed == 1


def test_a_second_device_is_sampled_beside_the_first() -> None:
    sink = Sink()
    opened: list[str] = []

    def opens(device: Device, sink: EvidenceSink) -> Counting:
        opened.append(device.uuid)
        return Counting(sink)

    sampled = collector(opens)
    sampled.start(sink)
    sampled.device_seen(GPU)
    sampled.device_seen(OTHER)
    until(lambda: len(opened) == 2)
    sampled.stop()
    assert opened == ["GPU-1", "GPU-2"]


class Hanging:
    """Hangs in one call until the test lets it go."""

    def __init__(self, sink: EvidenceSink, at: str) -> None:
        self.inner = Counting(sink)
        self.at = at
        self.hangs = threading.Event()
        self.free = threading.Event()
        self.back = threading.Event()

    def _maybe(self, call: str) -> None:
        if call == self.at:
            self.hangs.set()
            assert self.free.wait(30)
            self.back.set()

    def sample(self) -> Sequence[Sample]:
        self._maybe("sample")
        return self.inner.sample()

    def close(self) -> None:
        self._maybe("close")
        self.inner.close()


def _threads_gone() -> bool:
    return not [t for t in threading.enumerate() if t.name.startswith("phaseprof-sampler")]


def test_a_reading_that_hangs_is_left_alone_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("phaseprof.collectors.sampling.SAMPLE_PATIENCE_S", 0.05)
    sink = Sink()
    thread = SamplerThread(watch_s=0.02)
    hanging = Hanging(sink, "sample")
    going_on = Counting(sink)
    bad = collector(lambda device, sink: hanging, "bad", thread, period_ns=2_000_000)  # type: ignore[arg-type,return-value]
    good = collector(lambda device, sink: going_on, "good", thread, period_ns=2_000_000)
    for each in (bad, good):
        each.start(sink)
        each.device_seen(GPU)
    until(hanging.hangs.is_set)
    until(lambda: bool(sink.notes))
    before = going_on.readings
    until(lambda: going_on.readings > before + 3)
    assert [note.what for note in sink.notes] == ["what bad has"]
    assert "had no answer" in sink.notes[0].why and "nvidia-smi" in sink.notes[0].fix
    good.stop()
    bad.stop()
    rows = len(sink.rows)
    hanging.free.set()
    until(hanging.back.is_set)
    until(_threads_gone)
    # What it brought after it had been left alone was dropped, and its device let go.
    assert len(sink.rows) == rows and hanging.inner.closed == 1


@pytest.mark.parametrize("at", ["sample", "close"])
def test_the_end_does_not_wait_for_a_call_that_hangs(at: str) -> None:
    sink = Sink()
    thread = SamplerThread(end_s=0.05)
    hanging = Hanging(sink, at)
    going_on = Counting(sink)
    bad = collector(lambda device, sink: hanging, "bad", thread)  # type: ignore[arg-type,return-value]
    good = collector(lambda device, sink: going_on, "good", thread)
    good.start(sink)
    good.device_seen(GPU)
    bad.start(sink)
    bad.device_seen(GPU)
    until(lambda: going_on.readings > 0)
    until(hanging.hangs.is_set if at == "sample" else lambda: hanging.inner.readings > 0)
    bad.stop()
    good.stop()
    assert hanging.hangs.is_set() and not hanging.back.is_set()
    assert [note.what for note in sink.notes] == ["what bad has"]
    assert going_on.closed == 1
    hanging.free.set()
    until(_threads_gone)


def test_opening_that_hangs_does_not_hang_the_end() -> None:
    sink = Sink()
    free, opening = threading.Event(), threading.Event()

    def opens(device: Device, sink: EvidenceSink) -> Counting:
        opening.set()
        assert free.wait(30)
        return Counting(sink)

    sampled = collector(opens, thread=SamplerThread(end_s=0.05))
    sampled.start(sink)
    sampled.device_seen(GPU)
    until(opening.is_set)
    sampled.stop()
    assert len(sink.notes) == 1
    free.set()
    until(_threads_gone)
    assert sink.rows == []


# What it says when there was nothing to do


@pytest.mark.parametrize(
    ("asked", "seen", "said"),
    [(True, [CPU], 1), (False, [CPU], 0), (True, [], 0), (True, [CPU, GPU], 0)],
)
def test_only_one_that_was_asked_for_says_that_there_was_no_device(
    asked: bool, seen: list[Device], said: int
) -> None:
    sink = Sink()
    sampled = collector(lambda device, sink: Counting(sink))
    sampled.asked = asked
    sampled.start(sink)
    for device in seen:
        sampled.device_seen(device)
    sampled.stop()
    assert len(sink.notes) == said
    assert all(note.why == "no model ran on a CUDA device" for note in sink.notes)
