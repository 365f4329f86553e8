"""Windows over a GPU's passes, from recorded events: what is joined, what is lost, what is said; and when they end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kineto_recorded import Recorded

from phaseprof.attribution import PassWindow, join
from phaseprof.clock import Clock
from phaseprof.collectors import kineto
from phaseprof.collectors.torch_profiler import KernelsCollector
from phaseprof.collectors.windows import Closed, Schedule, SeenPass, Windows
from phaseprof.errors import NotMeasured
from phaseprof.records import Kernel
from phaseprof.timers import CAPTURES
from phaseprof.trace.meta import ClockPair, CollectorCost, Device

#: The monotonic clock read 0 at this time of the trace's axis.
ORIGIN = 1_000_000_000
HOUR = 3_600_000_000_000
GPU = Device(
    "a GPU",
    "cuda",
    index=0,
    cores=None,
    threads=None,
    memory_bytes=1 << 30,
    key="a GPU:132:1.98 GHz",
)


class Sink:
    """Keeps what a collector hands over."""

    def __init__(self) -> None:
        self.clock = Clock(ClockPair(unix_ns=ORIGIN, monotonic_ns=0))
        self.kernels: list[Kernel] = []
        self.notes: list[NotMeasured] = []
        self.costs: list[CollectorCost] = []

    def put_samples(self, rows: Any) -> None:
        raise AssertionError(rows)

    def put_kernels(self, rows: Any) -> None:
        self.kernels += rows

    def note(self, what: NotMeasured) -> None:
        self.notes.append(what)

    def spent(self, cost: CollectorCost) -> None:
        self.costs.append(cost)

    def sampling_of(self, key: str) -> bool:
        raise AssertionError(key)


def closed(
    events: Sequence[Recorded], *passes: SeenPass, set_by_ns: int = 0, **changes: Any
) -> Closed:
    """A window. The system's clock stands `set_by_ns` from where it stood when the session began."""
    pair = ClockPair(unix_ns=ORIGIN + set_by_ns + 900_000, monotonic_ns=900_000)
    results = SimpleNamespace(events=lambda: list(events))
    return Closed(results, pair, passes, **{"warmup": False, **changes})


def collected(*windows: Closed, device: Device = GPU) -> Sink:
    """What comes of these windows."""
    sink, collector = Sink(), KernelsCollector()
    collector.start(sink)
    collector.device_seen(device)
    for window in windows:
        collector.window_closed(window)
    collector.stop()
    return sink


def launch(correlation: int, at: int, thread: int = 7, name: str = "cudaLaunchKernel") -> Recorded:
    return Recorded(
        "cuda_runtime",
        name,
        (ORIGIN + at, ORIGIN + at + 5),
        resource=thread,
        correlation=correlation,
    )


def kernel(correlation: int, at: int, length: int = 10, name: str = "gemm") -> Recorded:
    return Recorded(
        "kernel", name, (ORIGIN + at, ORIGIN + at + length), resource=13, correlation=correlation
    )


def test_kernels_carry_their_launch_and_are_joined_by_it() -> None:
    """The kernels of the first pass run during the second one."""
    first, second = SeenPass(7, True, 100, 200), SeenPass(7, False, 210, 300)
    sink = collected(
        closed(
            [
                launch(1, 110),
                kernel(1, 220),
                launch(2, 230, name="cudaGraphLaunch"),
                *(kernel(2, 240 + 20 * i) for i in range(5)),
                Recorded("gpu_memcpy", "Memcpy DtoD", (ORIGIN + 500, ORIGIN + 501), correlation=3),
                launch(3, 205, name="cudaMemcpyAsync"),
                Recorded("gpu_user_annotation", "a span", (ORIGIN, ORIGIN + 999)),
                Recorded("cpu_op", "aten::mm", (ORIGIN + 105, ORIGIN + 120), resource=7),
            ],
            first,
            second,
        )
    )
    windows = [
        PassWindow(41, 7, ORIGIN + 100, ORIGIN + 200),
        PassWindow(42, 7, ORIGIN + 210, ORIGIN + 300),
    ]
    rows = join(sink.kernels, windows)
    assert [(row.name, row.pass_id) for row in rows] == [
        ("gemm", 41),
        *[("gemm", 42)] * 5,
        ("Memcpy DtoD", None),
    ]
    assert {row.device for row in rows} == {"cuda:0"}
    assert {row.stream for row in rows if row.name == "gemm"} == {13}
    assert sink.notes == []


def test_times_are_placed_on_the_axis_of_the_trace_when_the_clock_was_set() -> None:
    shifted = [launch(1, HOUR + 110), kernel(1, HOUR + 150)]
    sink = collected(closed(shifted, SeenPass(7, False, 100, 200), set_by_ns=HOUR))
    (row,) = sink.kernels
    assert (row.launched_ns, row.start_ns, row.end_ns) == (ORIGIN + 110, ORIGIN + 150, ORIGIN + 160)


def test_a_pass_that_lost_a_kernel_is_left_out_whole_and_said() -> None:
    sink = collected(
        closed(
            [
                *(launch(1, 110), kernel(1, 115)),
                # Of the second launch of the first pass nothing came.
                launch(2, 120),
                *(launch(3, 220), kernel(3, 230)),
                # A kernel that no pass of the window launched.
                *(launch(4, 400), kernel(4, 410)),
            ],
            SeenPass(7, False, 100, 200),
            SeenPass(7, False, 210, 300),
        )
    )
    assert [row.launched_ns for row in sink.kernels] == [ORIGIN + 220, ORIGIN + 400]
    (note,) = sink.notes
    assert note.what == "kernels of 1 of 2 profiled passes"
    assert "lost" in note.why


def test_a_pass_that_was_cut_has_no_rows() -> None:
    events = [launch(1, 110), kernel(1, 115), launch(2, 220), kernel(2, 230)]
    sink = collected(
        closed(events, SeenPass(7, False, 100, 200), SeenPass(7, False, 210, 300, whole=False))
    )
    assert [row.launched_ns for row in sink.kernels] == [ORIGIN + 110]
    assert sink.notes == []


def test_what_warms_the_profiler_up_is_not_kept() -> None:
    events = [launch(1, 110), kernel(1, 115)]
    sink = collected(closed(events, SeenPass(7, False, 100, 200), warmup=True))
    assert sink.kernels == []


def test_no_kernel_though_a_gpu_computed_is_said() -> None:
    operators = [Recorded("cpu_op", "aten::mm", (ORIGIN + 105, ORIGIN + 120), resource=7)]
    sink = collected(closed(operators, SeenPass(7, False, 100, 200)))
    assert sink.kernels == []
    (note,) = sink.notes
    assert note.why == "torch.profiler saw no kernel in 1 passes, though a GPU computed them"


def test_a_kind_of_pass_without_kernels_is_said() -> None:
    sink = collected(
        closed(
            [launch(1, 220), kernel(1, 230)],
            SeenPass(7, True, 100, 200),
            SeenPass(7, False, 210, 300),
        )
    )
    (note,) = sink.notes
    assert note.what == "kernels of passes that compute several tokens a sequence"


def test_kernels_without_a_launch_are_kept_without_a_pass_and_said() -> None:
    events = [launch(1, 110), *(kernel(1, 115 + i) for i in range(3)), kernel(77, 130)]
    sink = collected(closed(events, SeenPass(7, False, 100, 200)))
    assert [row.launched_ns for row in sink.kernels] == [ORIGIN + 110] * 3 + [None]
    (note,) = sink.notes
    assert note.what == "the pass of 1 of 4 kernels"


# When a window over a GPU's passes ends


class FakeEvent:
    """A CUDA event; the device finishes when the test says so."""

    finished = False

    def record(self, stream: Any) -> None:
        assert stream == "stream 0"

    def query(self) -> bool:
        return FakeEvent.finished


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `torch.cuda` whose device has work, and a profiler that gives no events."""
    cuda: Any = SimpleNamespace(
        Event=FakeEvent,
        current_stream=lambda index: f"stream {index}",
        is_available=lambda: True,
        is_initialized=lambda: True,
        is_current_stream_capturing=lambda: cuda.capturing,
        capturing=False,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    began: list[bool] = []
    cuda.began = began

    def start(*, cuda: bool) -> kineto.KinetoSession:
        began.append(cuda)
        return kineto.KinetoSession(SimpleNamespace(), all_threads=True)  # type: ignore[arg-type]

    monkeypatch.setattr(kineto, "start", start)
    monkeypatch.setattr(kineto, "stop", lambda session: SimpleNamespace(events=list))
    FakeEvent.finished = False
    for variable, _ in kineto._INJECTED:
        monkeypatch.delenv(variable, raising=False)
    return cuda


def windows_of(taken: list[Closed], schedule: Schedule) -> Windows:
    windows = Windows(schedule, closed=taken.append, refused=lambda why: None)
    windows.cuda.add(0)
    return windows


def run_pass(windows: Windows, *, wide: bool = False) -> bool:
    inside = windows.begins(wide, False)
    windows.ended()
    return inside


def test_a_window_ends_when_the_device_has_finished_and_not_before(device: SimpleNamespace) -> None:
    taken: list[Closed] = []
    windows = windows_of(taken, Schedule(skip=1, passes=1, every=1000))
    FakeEvent.finished = True
    # Nothing is known of the profiler yet: the first pass warms it up.
    assert run_pass(windows)
    assert [window.warmup for window in taken] == [True]
    assert run_pass(windows, wide=True) is False
    FakeEvent.finished = False
    # Passes are inside until the device has done the work of the first one.
    assert [run_pass(windows) for _ in range(3)] == [True] * 3
    assert len(taken) == 1
    FakeEvent.finished = True
    assert run_pass(windows) is False
    assert [len(window.passes) for window in taken] == [1, 3]
    assert device.began == [True, True]
    windows.finish()


def test_a_device_that_is_never_done_does_not_keep_a_window_open(device: SimpleNamespace) -> None:
    taken: list[Closed] = []
    windows = windows_of(taken, Schedule(skip=0, passes=1, every=1000))
    inside = [run_pass(windows) for _ in range(100)]
    assert 0 < inside.count(True) < 40
    assert inside[-1] is False
    windows.finish()


def test_no_window_begins_or_ends_while_a_graph_is_captured(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Closed] = []
    windows = windows_of(taken, Schedule(skip=0, passes=1, every=2))
    FakeEvent.finished = True
    device.capturing = True
    assert [run_pass(windows) for _ in range(4)] == [False] * 4
    assert device.began == []
    device.capturing = False
    # Another thread captures.
    monkeypatch.setattr(CAPTURES, "underway", 1)
    assert run_pass(windows) is False
    monkeypatch.setattr(CAPTURES, "underway", 0)
    assert run_pass(windows)
    windows.finish()


@pytest.mark.parametrize("chosen", [None, "1"])
def test_cupti_is_not_torn_down_between_windows(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TEARDOWN_CUPTI", chosen)
    windows = windows_of([], Schedule(skip=0, passes=1, every=2))
    FakeEvent.finished = True
    assert run_pass(windows)
    assert os.environ["TEARDOWN_CUPTI"] == (chosen or "0")
    windows.finish()
    assert os.environ.get("TEARDOWN_CUPTI") == chosen


def test_passes_that_lost_kernels_are_made_up_for(device: SimpleNamespace) -> None:
    taken: list[Closed] = []
    windows = windows_of(taken, Schedule(skip=0, passes=1, every=1000))
    FakeEvent.finished = True
    run_pass(windows)
    run_pass(windows)
    assert run_pass(windows) is False
    windows.owe(False, 2)
    assert [run_pass(windows) for _ in range(3)] == [True, True, False]
    windows.finish()


def test_it_steps_aside_for_who_has_the_drivers_tracing_and_names_them(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    sink, collector = Sink(), KernelsCollector(Schedule(skip=0))
    collector.start(sink)
    window = collector.window
    assert isinstance(window, Windows)
    window.cuda.add(0)
    assert [run_pass(window) for _ in range(3)] == [False] * 3
    collector.stop()
    assert device.began == []
    (note,) = sink.notes
    assert note.why.startswith("Nsight Systems has got into this process")
    assert note.fix == "Run without it, or read its own recording."
