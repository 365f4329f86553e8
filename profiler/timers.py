"""How long the device worked on a pass: the seam between hooks and devices.

A hook calls `begin` and `end` around a pass and hands the span to the recorder; the span is resolved later. Nothing
here waits for a device while the workload runs, and nothing here raises into it: a timer whose device fails steps
aside, and says so when the session ends.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from phaseprof.errors import NotMeasured


class Span(Protocol):
    """The device time of one pass, known now, later or never."""

    @property
    def device_ns(self) -> int | None:
        """Time between the first and the last device event, in ns; None while it is not known."""
        ...

    @property
    def lost(self) -> bool:
        """It will never be known."""
        ...

    @property
    def captured(self) -> bool:
        """A graph was captured during the pass, or around it: it was spent on making one."""
        ...


class DeviceTimer(Protocol):
    """Times passes on one kind of device. All methods are called on the thread that runs the pass, and none raises.

    A device that computes on the calling thread (a CPU) has no timer: the host time of the call is its time.
    """

    def begin(self) -> Any:
        """Mark the begin of a pass; what is returned is given to `end`."""
        ...

    def end(self, mark: Any) -> Span | None:
        """Mark the end of the pass. None if it will have no device time."""
        ...

    def finish(self) -> None:
        """The session ends: resolve what is still open, waiting if need be."""
        ...

    @property
    def failure(self) -> Exception | None:
        """What made it step aside."""
        ...


class Captures:
    """Which CUDA graphs are being captured in this process, by whatever thread; `phaseprof.hooks.captures` counts them.

    Attributes:
        underway: Captures that have begun and not ended.
        begun: Captures that have begun so far.
    """

    __slots__ = ("begun", "underway")

    def __init__(self) -> None:
        self.underway = 0
        self.begun = 0


#: Those of this process.
CAPTURES = Captures()


class _Captured:
    """The span of a pass whose work went into a graph: nothing ran on the device."""

    __slots__ = ()

    device_ns: int | None = None
    lost = True
    captured = True


_CAPTURED = _Captured()


class _EventSpan:
    """A pair of CUDA events around a pass."""

    __slots__ = ("begin", "captured", "device_ns", "end", "lost")

    def __init__(self, begin: Any, end: Any, captured: bool) -> None:
        self.begin = begin
        self.end = end
        self.captured = captured
        self.device_ns: int | None = None
        self.lost = False


class CudaEventTimer:
    """Times passes with CUDA events on the timed device's current stream.

    - Events are pooled, and resolved by the workload's own threads when a later pass begins and their end has already
      happened (`query`, never `synchronize`).
    - Each event is recorded on the stream that is current at that moment, where the pass's work is enqueued. What a
      pass leaves on other streams, without making the current one wait for it, is not in its span.
    - While the stream is captured no event is recorded (it would become a node of the graph). While any thread captures
      no event is asked: a query is among the calls that break a capture in CUDA's default mode, from other threads too.
    - A replay of a graph is enqueued on the current stream like a kernel, and lies between the events.
    - A span that cannot be told is lost: events on two streams that do not wait for each other may come out of order,
      and events of a device in a state of error never come.

    Several threads may share a timer.

    Args:
        cuda: The module `torch.cuda`, or a stand-in with `Event`, `current_stream`, `current_device`, `device` and
            `is_current_stream_capturing`.
        device: Index of the device that is timed, which need not be the thread's current one.
        captures: Tells of captures on other threads.
    """

    #: Passes that may be open at once; those beyond it have no device time.
    MAX_OPEN = 4096
    #: Passes that are resolved at one begin, so that no pass pays for all those that a device has caught up with.
    AT_ONCE = 8

    def __init__(self, cuda: Any, device: int, captures: Captures = CAPTURES) -> None:
        self._cuda = cuda
        self._device = device
        self._captures = captures
        # Looked up once: they are called for every pass.
        self._is_capturing = cuda.is_current_stream_capturing
        self._current_device = cuda.current_device
        self._current_stream = cuda.current_stream
        self._pool: list[Any] = []
        self._open: deque[_EventSpan] = deque()
        self.failure: Exception | None = None

    def begin(self) -> Any:
        """Record the first event; None if there is none."""
        if self.failure is not None:
            return None
        try:
            # The first two are the rule, without a call of ours.
            if (
                self._is_capturing() or self._current_device() != self._device
            ) and self._capturing():
                return _CAPTURED
            if self._open and not self._captures.underway:
                self._resolve(self.AT_ONCE)
            event = self._event()
            event.record(self._current_stream(self._device))
        except Exception as error:
            self._step_aside(error)
            return None
        return event, self._captures.begun

    def end(self, mark: Any) -> Span | None:
        """Record the last event. None, where the pass will have no device time."""
        if mark is None or self.failure is not None:
            return None
        if isinstance(mark, _Captured):
            return mark
        begin, captures = mark
        try:
            # The first two are the rule, without a call of ours.
            if (
                self._is_capturing() or self._current_device() != self._device
            ) and self._capturing():
                return _CAPTURED
            if len(self._open) >= self.MAX_OPEN:
                self._pool.append(begin)
                return None
            event = self._event()
            event.record(self._current_stream(self._device))
        except Exception as error:
            self._step_aside(error)
            return None
        span = _EventSpan(begin, event, self._captures.begun != captures)
        self._open.append(span)
        return span

    def finish(self) -> None:
        """Wait for the passes that are still open. Called when the session ends, outside any pass."""
        try:
            if self.failure is None and not self._captures.underway and not self._capturing():
                # Each of them: passes of several threads are on several streams.
                for span in tuple(self._open):
                    span.end.synchronize()
                self._resolve(len(self._open))
        except Exception as error:
            self._step_aside(error)
        self._give_up()

    def _capturing(self) -> bool:
        # torch tells it of the current device's current stream, and that device may be another one.
        if self._is_capturing():
            return True
        if self._current_device() == self._device:
            return False
        with self._cuda.device(self._device):
            return bool(self._is_capturing())

    def _resolve(self, at_most: int) -> None:
        # A span is taken before it is asked, so that no two threads resolve the same one.
        while at_most and self._open:
            at_most -= 1
            try:
                span = self._open.popleft()
            except IndexError:
                return
            try:
                # The begin as well: on another stream it may come after the end.
                if not (span.end.query() and span.begin.query()):
                    self._open.appendleft(span)
                    return
                elapsed_ns = round(span.begin.elapsed_time(span.end) * 1e6)
            except Exception:
                span.lost = True
                raise
            if elapsed_ns > 0:
                span.device_ns = elapsed_ns
            else:
                span.lost = True
            self._pool.append(span.begin)
            self._pool.append(span.end)

    def _step_aside(self, error: Exception) -> None:
        # The device is in a state of error, which the workload has met or will: not for us to raise.
        self.failure = self.failure or error
        self._give_up()

    def _give_up(self) -> None:
        while self._open:
            try:
                self._open.popleft().lost = True
            except IndexError:
                return

    def _event(self) -> Any:
        try:
            return self._pool.pop()
        except IndexError:
            return self._cuda.Event(enable_timing=True)


class _LongestSpan:
    """The spans of one pass on several devices: it took as long as the longest of them."""

    __slots__ = ("_spans",)

    def __init__(self, spans: tuple[Span, ...]) -> None:
        self._spans = spans

    @property
    def device_ns(self) -> int | None:
        times = [span.device_ns for span in self._spans]
        return None if None in times else max(time for time in times if time is not None)

    @property
    def lost(self) -> bool:
        return any(span.lost for span in self._spans)

    @property
    def captured(self) -> bool:
        return any(span.captured for span in self._spans)


class SpreadTimer:
    """Times the passes of a model whose layers lie on several devices, which work one after another.

    Events of two devices do not compare, so that each device has its own pair: from the begin of the pass to the time
    when that device is done with it. The last device's pair holds the waiting for those before it as well, and the
    first one's the way back of the output: the longest is the time of the pass. Where one pass is launched before the
    last one has ended on all devices, that is a lower bound.

    Args:
        timers: Of its devices.
    """

    def __init__(self, timers: Sequence[DeviceTimer]) -> None:
        self._timers = tuple(timers)

    def begin(self) -> Any:
        """Mark the begin on each device."""
        return tuple(timer.begin() for timer in self._timers)

    def end(self, mark: Any) -> Span | None:
        """Mark the end on each. None, if it is not marked on one of them."""
        spans = tuple(timer.end(each) for timer, each in zip(self._timers, mark, strict=True))
        known = tuple(span for span in spans if span is not None)
        return _LongestSpan(known) if len(known) == len(spans) else None

    def finish(self) -> None:
        """Nothing of its own: the timers of its devices are finished by whoever made them."""

    @property
    def failure(self) -> Exception | None:
        """What made one of them step aside."""
        return next((t.failure for t in self._timers if t.failure is not None), None)


def timer_of(device: Any) -> DeviceTimer | None:
    """The timer for a torch device; None where the host's time is the device's."""
    if device.type != "cuda":
        return None
    cuda = sys.modules["torch"].cuda
    return CudaEventTimer(cuda, cuda.current_device() if device.index is None else device.index)


def together(timers: Sequence[DeviceTimer | None]) -> DeviceTimer | None:
    """The timer of a model on the devices of these timers; None if none of them has any."""
    known = [timer for timer in timers if timer is not None]
    return SpreadTimer(known) if len(known) > 1 else next(iter(known), None)


def finished(timers: Iterable[DeviceTimer]) -> tuple[NotMeasured, ...]:
    """Finish timers, and say which have stepped aside."""
    failures = []
    for timer in timers:
        timer.finish()
        if timer.failure is not None:
            failures.append(timer.failure)
    return tuple(
        NotMeasured(
            "device time of passes after an error of the device",
            f"its events could not be used any more ({type(error).__name__}: {_first_line(error)})",
            "the time of these passes is that of the host; look for the error in the workload's own output",
        )
        for error in failures
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
