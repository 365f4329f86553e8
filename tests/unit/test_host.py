"""The host's counters: parsed from texts of /proc written by hand, and read from this machine while work is done."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from phaseprof.clock import Clock
from phaseprof.collectors.host import (
    HostSampler,
    host_collector,
    machine_ticks,
    probe,
    resident_bytes,
)
from phaseprof.collectors.sampling import AGAIN_NS, CannotSample
from phaseprof.errors import NotMeasured
from phaseprof.metrics import Metric
from phaseprof.records import Kernel, Sample
from phaseprof.trace.meta import CollectorCost

S = 1_000_000_000


@dataclass(frozen=True)
class SetClock(Clock):
    """A clock that a test sets."""

    at: list[int] = field(default_factory=lambda: [0], kw_only=True)

    def now_unix_ns(self) -> int:
        return self.at[0]


class Sink:
    """Says whether this process reads the machine."""

    def __init__(self, ours: bool = True, clock: Clock | None = None) -> None:
        self.clock = clock or SetClock(Clock.start().pair)
        self.ours = ours
        self.asked: list[str] = []

    def put_samples(self, rows: Sequence[Sample]) -> None: ...

    def put_kernels(self, rows: Sequence[Kernel]) -> None: ...

    def note(self, what: NotMeasured) -> None: ...

    def spent(self, cost: CollectorCost) -> None: ...

    def sampling_of(self, key: str) -> bool:
        self.asked.append(key)
        return self.ours

    def set(self, now_ns: int) -> None:
        assert isinstance(self.clock, SetClock)
        self.clock.at[0] = now_ns


def proc(folder: Path, stat: str, statm: str = "1000 250 100 1 0 300 0") -> Path:
    """A folder like /proc with these two files."""
    (folder / "self").mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(stat)
    (folder / "self" / "statm").write_text(statm)
    return folder


def values(rows: Sequence[Sample]) -> dict[str, float]:
    return {row.metric: row.value for row in rows}


def test_idle_and_waiting_is_not_busy_and_guests_count_once() -> None:
    # user nice system idle iowait irq softirq steal guest guest_nice
    stat = b"cpu  400 10 90 1300 100 5 15 80 200 0\ncpu0 1 2 3 4\nintr 7\n"
    assert machine_ticks(stat) == (600, 2000)


@pytest.mark.parametrize("text", [b"", b"cpu", b"intr 1 2 3 4 5", b"cpu a b c d e"])
def test_what_is_no_such_text_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        machine_ticks(text)


def test_memory_is_counted_in_pages() -> None:
    assert resident_bytes(b"1000 250 100 1 0 300 0\n") == 250 * os.sysconf("SC_PAGE_SIZE")


def test_the_machines_share_is_that_of_the_ticks_between_two_readings(tmp_path: Path) -> None:
    folder = proc(tmp_path, "cpu 100 0 100 800 0 0 0 0 0 0\n")
    sink = Sink()
    sampler = HostSampler(sink, folder)
    sink.set(1 * S)
    assert Metric.HOST_CPU not in values(sampler.sample())
    proc(folder, "cpu 250 0 150 1000 100 0 0 0 0 0\n")
    sink.set(2 * S)
    rows = sampler.sample()
    sampler.close()
    (host,) = [row for row in rows if row.metric == Metric.HOST_CPU]
    # 200 of 500 ticks were neither idle nor waiting.
    assert host == Sample(1 * S, 2 * S, "cpu", "host", Metric.HOST_CPU, 0.4)


def test_of_a_machine_that_is_slow_to_tell_less_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading that takes 3 ms is followed by a rest of 3 s."""
    folder = proc(tmp_path, "cpu 100 0 100 800 0 0 0 0 0 0\n")
    spent = iter(range(0, 10**9, 3_000_000))
    monkeypatch.setattr(time, "thread_time_ns", lambda: next(spent))
    sink = Sink()
    sampler = HostSampler(sink, folder)
    read = []
    for second in range(1, 11):
        proc(folder, f"cpu {second * 100} 0 0 {second * 100} 0 0 0 0 0 0\n")
        sink.set(second * S)
        read += [
            (row.start_ns // S, row.end_ns // S, row.value)
            for row in sampler.sample()
            if row.metric == Metric.HOST_CPU
        ]
    sampler.close()
    assert read == [(1, 4, 0.5), (4, 7, 0.5), (7, 10, 0.5)]


def test_one_process_reads_the_machine_and_each_reads_itself(tmp_path: Path) -> None:
    folder = proc(tmp_path, "cpu 100 0 100 800 0 0 0 0 0 0\n")
    sink = Sink(ours=False)
    sampler = HostSampler(sink, folder)
    for second in range(1, 4):
        proc(folder, f"cpu {second * 100} 0 0 {second * 100} 0 0 0 0 0 0\n")
        sink.set(second * S)
        rows = sampler.sample()
        assert set(values(rows)) == {Metric.PROCESS_CPU, Metric.PROCESS_MEMORY}
        assert {row.source for row in rows} == {f"host.p{os.getpid()}"}
    assert len(sink.asked) == 1
    # The other process may have ended: it is asked again, and then this one reads.
    sink.ours = True
    found = []
    for turn in range(1, 4):
        proc(folder, f"cpu {turn * 1000} 0 0 {turn * 1000} 0 0 0 0 0 0\n")
        sink.set(1 * S + AGAIN_NS * turn)
        found.append(Metric.HOST_CPU in values(sampler.sample()))
    sampler.close()
    assert found == [False, True, True] and len(sink.asked) == 2


def test_this_process_is_read_as_others_read_it() -> None:
    sink = Sink(clock=Clock.start())
    sampler = HostSampler(sink)
    before = time.process_time_ns()
    begun = time.perf_counter_ns()
    while time.process_time_ns() - before < 50_000_000:
        sum(range(1000))
    rows = sampler.sample()
    used, passed = time.process_time_ns() - before, time.perf_counter_ns() - begun
    sampler.close()
    found = values(rows)
    assert found[Metric.PROCESS_CPU] == pytest.approx(used / passed, rel=0.2)
    assert found[Metric.PROCESS_MEMORY] == pytest.approx(
        psutil.Process().memory_info().rss, rel=0.1
    )


def test_a_host_without_proc_has_a_reason(tmp_path: Path) -> None:
    with pytest.raises(CannotSample, match="stat cannot be read: No such file"):
        HostSampler(Sink(), tmp_path)
    assert not probe(tmp_path).available
    assert probe().available


def test_a_proc_that_says_nonsense_later_has_one_as_well(tmp_path: Path) -> None:
    folder = proc(tmp_path, "cpu 100 0 100 800 0 0 0 0 0 0\n")
    sink = Sink()
    sampler = HostSampler(sink, folder)
    proc(folder, "nothing\n")
    sink.set(S)
    with pytest.raises(CannotSample):
        sampler.sample()
    sampler.close()
    sampler.close()


def test_it_leaves_no_file_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    sampler = HostSampler(Sink())
    sampler.close()
    with pytest.raises(CannotSample):
        HostSampler(Sink(), proc(tmp_path, "cpu 1 1 1 1 1\n") / "self")
    assert set(os.listdir("/proc/self/fd")) == before


def test_it_is_of_the_process_and_not_of_a_device() -> None:
    made = host_collector()
    assert (made.name, made.of_process) == ("host", True)
