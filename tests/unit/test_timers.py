"""Device timers, with a stand-in for `torch.cuda` whose events happen when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from phaseprof.timers import (
    Captures,
    CudaEventTimer,
    Span,
    SpreadTimer,
    finished,
    timer_of,
    together,
)

#: The device that is timed; the thread's current one is another.
DEVICE = 1
#: A stream: its device and its name.
Stream = tuple[int, str]


class Event:
    """An event of the stand-in device. What torch refuses, it refuses (`CUDAEvent.h`)."""

    def __init__(self, cuda: Cuda, enable_timing: bool) -> None:
        assert enable_timing
        self._cuda = cuda
        self._device: int | None = None
        #: When it happened on the device, ms; None while it is queued.
        self.at_ms: float | None = None
        self.on_query: Callable[[], None] | None = None

    def record(self, stream: Stream) -> None:
        assert stream not in self._cuda.captured, "an event was recorded into a graph"
        self._cuda.check()
        if self._device is None:
            self._device = stream[0]
        if self._device != stream[0]:
            raise RuntimeError("Event device does not match recording stream's device")
        self.at_ms = None
        self._cuda.queued.setdefault(stream, []).append(self)

    def query(self) -> bool:
        assert not self._cuda.captured, "an event was asked during a capture, which breaks it"
        self._cuda.check()
        happened = self.at_ms is not None
        hook, self.on_query = self.on_query, None
        if hook is not None:
            hook()
        return happened

    def synchronize(self) -> None:
        assert not self._cuda.captured, "an event was waited for during a capture, which breaks it"
        self._cuda.check()
        self._cuda.synchronized += 1
        for stream, queue in self._cuda.queued.items():
            if self in queue:
                self._cuda.run(queue.index(self) + 1, stream=stream)
                return

    def elapsed_time(self, end: Event) -> float:
        if self._device != end._device:
            raise RuntimeError("CUDA error: invalid resource handle")
        if self.at_ms is None or end.at_ms is None:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end.at_ms - self.at_ms


class Cuda:
    """Streams on which nothing happens before `run`."""

    def __init__(self) -> None:
        self.at_device = 0
        #: Streams that are being captured.
        self.captured: set[Stream] = set()
        #: The current stream of each device.
        self.streams: dict[int, Stream] = {n: (n, "default") for n in range(3)}
        self.queued: dict[Stream, list[Event]] = {}
        self.made: list[Event] = []
        self.synchronized = 0
        self.now_ms = 10.0
        self.lost = False

    @property
    def stream(self) -> str:
        return self.streams[DEVICE][1]

    @stream.setter
    def stream(self, name: str) -> None:
        self.streams[DEVICE] = (DEVICE, name)

    @property
    def capturing(self) -> bool:
        return bool(self.captured)

    @capturing.setter
    def capturing(self, begins: bool) -> None:
        self.captured = {self.streams[DEVICE]} if begins else set()

    def is_current_stream_capturing(self) -> bool:
        """Of the current device alone, as torch does it."""
        return self.streams[self.at_device] in self.captured

    def current_device(self) -> int:
        return self.at_device

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.at_device = self.at_device, index
        try:
            yield
        finally:
            self.at_device = before

    def current_stream(self, device: int) -> Stream:
        return self.streams[device]

    def Event(self, *, enable_timing: bool) -> Event:
        event = Event(self, enable_timing)
        self.made.append(event)
        return event

    def check(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel")

    def run(self, events: int, step_ms: float = 1.5, stream: Stream = (DEVICE, "default")) -> None:
        """Let the next events of a stream happen, ``step_ms`` one after another."""
        for _ in range(events):
            self.now_ms += step_ms
            self.queued[stream].pop(0).at_ms = self.now_ms


@pytest.fixture
def cuda() -> Cuda:
    return Cuda()


@pytest.fixture
def captures() -> Captures:
    return Captures()


@pytest.fixture
def timer(cuda: Cuda, captures: Captures) -> CudaEventTimer:
    return CudaEventTimer(cuda, DEVICE, captures)


def times(spans: list[Span | None]) -> list[int | None]:
    """The device time of each pass that has a span."""
    return [span.device_ns for span in spans if span is not None]


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


def test_no_pass_pays_for_all_that_a_device_has_caught_up_with(
    cuda: Cuda, timer: CudaEventTimer
) -> None:
    """A few are resolved at each begin, more than one, so that the line gets shorter."""
    spans = [timer.end(timer.begin()) for _ in range(20)]
    cuda.run(40)
    timer.begin()
    assert times(spans) == [1_500_000] * 8 + [None] * 12
    timer.begin()
    timer.begin()
    assert times(spans) == [1_500_000] * 20


# --- captures -------------------------------------------------------------------------------------


def test_nothing_is_recorded_while_a_graph_is_captured(cuda: Cuda, timer: CudaEventTimer) -> None:
    open_span = timer.end(timer.begin())
    cuda.run(2)
    cuda.capturing = True
    # The stand-in fails the test if it is touched now.
    span = timer.end(timer.begin())
    assert span is not None and (span.captured, span.lost, span.device_ns) == (True, True, None)
    mark = timer.begin()
    cuda.capturing = False
    after = timer.end(mark)
    assert after is not None and after.captured and after.lost
    assert open_span is not None and open_span.device_ns is None and not open_span.captured
    timer.begin()
    assert open_span.device_ns == 1_500_000
    assert timer.failure is None


def test_a_capture_of_the_timed_device_is_seen_from_another(
    cuda: Cuda, timer: CudaEventTimer
) -> None:
    """torch answers for the current device: here that is device 0, while device 1 is captured, or the reverse."""
    for captured, current in ((DEVICE, 0), (0, 0), (DEVICE, DEVICE)):
        cuda.captured, cuda.at_device = {(captured, "default")}, current
        span = timer.end(timer.begin())
        assert span is not None and span.captured
        assert cuda.at_device == current
    assert cuda.made == []


def test_a_capture_that_begins_inside_a_pass(cuda: Cuda, timer: CudaEventTimer) -> None:
    mark = timer.begin()
    cuda.capturing = True
    inside = timer.end(mark)
    assert inside is not None and inside.captured and inside.lost
    cuda.capturing = False
    span = timer.end(timer.begin())
    cuda.run(3, step_ms=2.0)
    timer.finish()
    assert span is not None and span.device_ns == 2_000_000


def test_a_pass_that_captures_and_replays_has_a_time_and_says_so(
    cuda: Cuda, timer: CudaEventTimer, captures: Captures
) -> None:
    """As torch.compile does it in its mode reduce-overhead: the capture begins and ends inside of the pass."""
    before = timer.end(timer.begin())
    mark = timer.begin()
    captures.begun += 1
    span = timer.end(mark)
    after = timer.end(timer.begin())
    timer.finish()
    assert [each is not None and each.captured for each in (before, span, after)] == [
        False,
        True,
        False,
    ]
    assert times([before, span, after]) == [1_500_000] * 3


def test_a_capture_on_another_thread_is_not_broken(
    cuda: Cuda, timer: CudaEventTimer, captures: Captures
) -> None:
    """Its stream is not this thread's: passes are timed, but no event is asked before it has ended."""
    first = timer.end(timer.begin())
    cuda.run(2)
    captures.underway = captures.begun = 1
    cuda.captured = {(DEVICE, "of another thread")}
    second = timer.end(timer.begin())
    assert times([first, second]) == [None, None]
    captures.underway, cuda.captured = 0, set()
    cuda.run(2)
    timer.begin()
    assert times([first, second]) == [1_500_000, 1_500_000]


def test_a_session_that_ends_during_a_capture_waits_for_nothing(
    cuda: Cuda, timer: CudaEventTimer, captures: Captures
) -> None:
    span = timer.end(timer.begin())
    captures.underway = captures.begun = 1
    cuda.captured = {(DEVICE, "of another thread")}
    timer.finish()
    assert span is not None and span.lost and span.device_ns is None
    assert timer.failure is None


# --- streams --------------------------------------------------------------------------------------


def test_a_pass_is_timed_on_the_stream_that_is_current(cuda: Cuda, timer: CudaEventTimer) -> None:
    cuda.stream = "side"
    span = timer.end(timer.begin())
    cuda.run(2, stream=(DEVICE, "side"))
    timer.begin()
    assert times([span]) == [1_500_000]


def test_a_pass_that_leaves_another_stream_current(cuda: Cuda, timer: CudaEventTimer) -> None:
    """Its end is where its work is. The end may happen before the begin has: then it is not done."""
    cuda.stream = "one"
    mark = timer.begin()
    cuda.stream = "two"
    span = timer.end(mark)
    cuda.run(1, stream=(DEVICE, "two"))
    timer.begin()
    assert span is not None and not span.lost and span.device_ns is None
    cuda.run(1, stream=(DEVICE, "one"))
    timer.begin()
    # It ended before it began: not a time.
    assert span.lost and span.device_ns is None
    assert timer.failure is None

    cuda.stream = "one"
    mark = timer.begin()
    cuda.stream = "two"
    span = timer.end(mark)
    cuda.run(1, step_ms=1.0, stream=(DEVICE, "one"))
    # Behind the two begins from above.
    cuda.run(3, step_ms=1.0, stream=(DEVICE, "two"))
    timer.begin()
    assert times([span]) == [3_000_000]


# --- the end of a session -------------------------------------------------------------------------


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
    assert span is not None and span.device_ns is None and span.lost
    cuda.lost = False
    timer.finish()
    assert cuda.synchronized == 0


@pytest.mark.parametrize("at", ["begin", "end", "resolve"])
def test_a_device_that_fails_raises_nothing_into_a_pass(
    cuda: Cuda, timer: CudaEventTimer, at: str
) -> None:
    """The workload meets the error itself; the timer steps aside and says so at the end."""
    open_span = timer.end(timer.begin())
    mark = timer.begin() if at == "end" else None
    if at == "resolve":
        cuda.run(2)
    cuda.lost = True
    if at == "end":
        assert timer.end(mark) is None
    else:
        assert timer.begin() is None
    assert open_span is not None and open_span.lost and open_span.device_ns is None
    made = len(cuda.made)
    cuda.lost = False
    # It does not begin again: events of before may be of no use any more.
    assert timer.end(timer.begin()) is None
    assert len(cuda.made) == made
    (said,) = finished([timer])
    assert "an illegal memory access" in said.why and "\n" not in said.why
    assert said.fix


def test_timers_that_did_well_say_nothing(cuda: Cuda, timer: CudaEventTimer) -> None:
    span = timer.end(timer.begin())
    assert finished([timer]) == ()
    assert times([span]) == [1_500_000]


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
    cuda.made[1].on_query = timer.begin
    timer.begin()
    assert first.device_ns == 1_500_000
    assert second.device_ns is None
    # Those two passes have begun: their events come first.
    cuda.run(2)
    timer.begin()
    assert second.device_ns == 1_500_000


# --- several devices ------------------------------------------------------------------------------


def test_a_model_on_two_devices_takes_as_long_as_the_longer_one(
    cuda: Cuda, captures: Captures
) -> None:
    """Its layers on device 2 wait for those on device 1, and its output stays there."""
    timers = [CudaEventTimer(cuda, device, captures) for device in (1, 2)]
    spread = together([None, *timers])
    assert isinstance(spread, SpreadTimer)
    span = spread.end(spread.begin())
    assert span is not None
    cuda.run(1, stream=(2, "default"))
    cuda.run(2, step_ms=1.0, stream=(1, "default"))
    spread.begin()
    assert span.device_ns is None and not span.lost
    cuda.run(1, step_ms=3.0, stream=(2, "default"))
    spread.begin()
    assert span.device_ns == 5_000_000
    assert not span.captured


def test_a_device_of_two_that_fails_leaves_no_half_a_time(cuda: Cuda, captures: Captures) -> None:
    timers = [CudaEventTimer(cuda, device, captures) for device in (1, 2)]
    spread = SpreadTimer(timers)
    span = spread.end(spread.begin())
    cuda.run(2, stream=(1, "default"))
    timers[1].failure = RuntimeError("gone")
    timers[1].finish()
    assert span is not None and span.lost
    assert spread.end(spread.begin()) is None
    assert spread.failure is timers[1].failure
    assert [said.why.count("gone") for said in finished(timers)] == [1]


def test_one_device_needs_no_more_than_its_timer(timer: CudaEventTimer) -> None:
    assert together([None, timer]) is timer
    assert together([None]) is None


def test_the_timer_of_a_device(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> None:
    """A device without an index is the current one at that moment."""
    monkeypatch.setitem(__import__("sys").modules, "torch", SimpleNamespace(cuda=cuda))
    assert timer_of(SimpleNamespace(type="cpu", index=None)) is None
    cuda.at_device = 2
    timer: Any = timer_of(SimpleNamespace(type="cuda", index=None))
    cuda.at_device = 0
    timer.end(timer.begin())
    assert list(cuda.queued) == [(2, "default")]
