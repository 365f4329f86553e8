"""Device timers, with a stand-in for `torch.cuda` whose events happen when the test says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from phaseprof.timers import CudaEventTimer

#: The device that is timed; the thread's current one is another.
DEVICE = 1


class Event:
    """An event of the stand-in device."""

    def __init__(self, cuda: Cuda, enable_timing: bool) -> None:
        assert enable_timing
        self._cuda = cuda
        #: When it happened on the device, ms; None while it is queued.
        self.at_ms: float | None = None
        self.on_query: Callable[[], None] | None = None

    def record(self, stream: str) -> None:
        assert not self._cuda.capturing, "an event was recorded into a graph"
        self._cuda.check()
        self.at_ms = None
        self._cuda.queued.setdefault(stream, []).append(self)

    def query(self) -> bool:
        assert not self._cuda.capturing, "the device was touched during a capture"
        self._cuda.check()
        happened = self.at_ms is not None
        hook, self.on_query = self.on_query, None
        if hook is not None:
            hook()
        return happened

    def synchronize(self) -> None:
        self._cuda.check()
        self._cuda.synchronized += 1
        for stream, queue in self._cuda.queued.items():
            if self in queue:
                self._cuda.run(queue.index(self) + 1, stream=stream)
                return

    def elapsed_time(self, end: Event) -> float:
        assert self.at_ms is not None and end.at_ms is not None, "the event has not happened"
        return end.at_ms - self.at_ms


class Cuda:
    """Streams on which nothing happens before `run`."""

    def __init__(self) -> None:
        self.capturing = False
        self.stream = "default"
        self.queued: dict[str, list[Event]] = {}
        self.made: list[Event] = []
        self.synchronized = 0
        self.now_ms = 10.0
        self.lost = False

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self, device: int) -> str:
        assert device == DEVICE, "the stream of another device"
        return self.stream

    def Event(self, *, enable_timing: bool) -> Event:
        event = Event(self, enable_timing)
        self.made.append(event)
        return event

    def check(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def run(self, events: int, step_ms: float = 1.5, stream: str = "default") -> None:
        """Let the next events of a stream happen, ``step_ms`` one after another."""
        for _ in range(events):
            self.now_ms += step_ms
            self.queued[stream].pop(0).at_ms = self.now_ms


@pytest.fixture
def cuda() -> Cuda:
    return Cuda()


@pytest.fixture
def timer(cuda: Cuda) -> CudaEventTimer:
    return CudaEventTimer(cuda, DEVICE)


def test_a_pass_is_timed_late(cuda: Cuda, timer: CudaEventTimer) -> None:
    """The device runs behind: its time is known when a later pass begins, not before."""
    first = timer.end(timer.begin())
    assert first is not None and first.device_ns is None
    second = timer.end(timer.begin())
    assert second is not None and first.device_ns is None
    cuda.run(2, step_ms=1.5)
    assert first.device_ns is None
    timer.begin()
    assert first.device_ns == 1_500_000
    assert second.device_ns is None
    cuda.run(2, step_ms=0.25)
    timer.begin()
    assert second.device_ns == 250_000
    assert cuda.synchronized == 0


def test_a_pass_whose_begin_alone_has_happened_is_not_done(
    cuda: Cuda, timer: CudaEventTimer
) -> None:
    span = timer.end(timer.begin())
    cuda.run(1)
    timer.begin()
    assert span is not None and span.device_ns is None


def test_passes_are_resolved_in_order(cuda: Cuda, timer: CudaEventTimer) -> None:
    spans = [timer.end(timer.begin()) for _ in range(4)]
    for done in range(1, 5):
        # A look that finds nothing new leaves the order as it is.
        timer.begin()
        cuda.run(2)
        timer.begin()
        assert [span is not None and span.device_ns is not None for span in spans] == [
            *[True] * done,
            *[False] * (4 - done),
        ]


def test_a_time_is_rounded_to_a_nanosecond(cuda: Cuda, timer: CudaEventTimer) -> None:
    """CUDA gives milliseconds in a float."""
    span = timer.end(timer.begin())
    cuda.run(2, step_ms=0.0007169)
    timer.begin()
    assert span is not None and span.device_ns == 717


def test_events_are_used_again(cuda: Cuda, timer: CudaEventTimer) -> None:
    """A device that keeps up needs two events, whatever the number of passes."""
    spans = []
    for number in range(1, 51):
        spans.append(timer.end(timer.begin()))
        cuda.run(2, step_ms=float(number))
    timer.begin()
    assert len(cuda.made) == 2
    # A span keeps its time when its events are recorded again.
    assert [span.device_ns for span in spans if span] == [n * 1_000_000 for n in range(1, 51)]


def test_a_device_that_lags_needs_more_events(cuda: Cuda, timer: CudaEventTimer) -> None:
    for _ in range(5):
        timer.end(timer.begin())
    assert len(cuda.made) == 10
    cuda.run(10)
    for _ in range(5):
        timer.end(timer.begin())
    assert len(cuda.made) == 10


def test_nothing_is_recorded_while_a_graph_is_captured(cuda: Cuda, timer: CudaEventTimer) -> None:
    open_span = timer.end(timer.begin())
    cuda.run(2)
    cuda.capturing = True
    # The stand-in fails the test if it is touched now.
    mark = timer.begin()
    assert mark is None
    assert timer.end(mark) is None
    mark = timer.begin()
    cuda.capturing = False
    assert timer.end(mark) is None
    assert open_span is not None and open_span.device_ns is None
    timer.begin()
    assert open_span.device_ns == 1_500_000


def test_a_capture_that_begins_inside_a_pass(cuda: Cuda, timer: CudaEventTimer) -> None:
    mark = timer.begin()
    cuda.capturing = True
    assert timer.end(mark) is None
    cuda.capturing = False
    span = timer.end(timer.begin())
    cuda.run(3, step_ms=2.0)
    timer.finish()
    assert span is not None and span.device_ns == 2_000_000


def test_finish_waits_for_what_is_open(cuda: Cuda, timer: CudaEventTimer) -> None:
    spans = [timer.end(timer.begin()) for _ in range(3)]
    assert cuda.synchronized == 0
    timer.finish()
    assert [span.device_ns for span in spans if span] == [1_500_000] * 3
    assert cuda.synchronized > 0


def test_finish_waits_for_every_stream(cuda: Cuda, timer: CudaEventTimer) -> None:
    spans = []
    for stream in ("one", "two", "one"):
        cuda.stream = stream
        spans.append(timer.end(timer.begin()))
    timer.finish()
    assert [span.device_ns for span in spans if span] == [1_500_000] * 3


def test_finish_with_nothing_open_waits_for_nothing(cuda: Cuda, timer: CudaEventTimer) -> None:
    timer.finish()
    timer.end(timer.begin())
    cuda.run(2)
    timer.begin()
    timer.finish()
    assert cuda.synchronized == 0


def test_finish_on_a_lost_device_raises_nothing(cuda: Cuda, timer: CudaEventTimer) -> None:
    span = timer.end(timer.begin())
    cuda.lost = True
    timer.finish()
    assert span is not None and span.device_ns is None
    cuda.lost = False
    timer.finish()
    assert cuda.synchronized == 0


def test_passes_beyond_the_limit_have_no_device_time(
    cuda: Cuda, timer: CudaEventTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A span that nobody will ever resolve would be waited for: such a pass gets none."""
    monkeypatch.setattr(CudaEventTimer, "MAX_OPEN", 3)
    spans = [timer.end(timer.begin()) for _ in range(5)]
    assert [span is not None for span in spans] == [True, True, True, False, False]
    cuda.run(8)
    after = timer.end(timer.begin())
    assert after is not None
    timer.finish()
    assert [span.device_ns for span in [*spans, after] if span] == [1_500_000] * 4


def test_two_threads_do_not_resolve_the_same_pass(cuda: Cuda, timer: CudaEventTimer) -> None:
    """Another thread begins a pass just while this one looks at the oldest open pass."""
    first, second = (timer.end(timer.begin()) for _ in range(2))
    assert first is not None and second is not None
    cuda.run(2)
    first.end.on_query = timer.begin
    timer.begin()
    assert first.device_ns == 1_500_000
    assert second.device_ns is None
    # Those two passes have begun: their events come first.
    cuda.run(2)
    timer.begin()
    assert second.device_ns == 1_500_000
