"""How long the device worked on a pass: the seam between hooks and devices.

A hook calls `begin` and `end` around a pass and hands the span to the recorder; the span is resolved later. Nothing
here waits for a device while the workload runs.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, Protocol


class Span(Protocol):
    """The device time of one pass, known now, later or never."""

    @property
    def device_ns(self) -> int | None:
        """Time between the first and the last device event, in ns; None while it is not known."""
        ...


class DeviceTimer(Protocol):
    """Times passes on one kind of device. All methods are called on the thread that runs the pass.

    A device that computes on the calling thread (a CPU) has no timer: the host time of the call is its time.
    """

    def begin(self) -> Any:
        """Mark the begin of a pass; what is returned is given to `end`."""
        ...

    def end(self, mark: Any) -> Span | None:
        """Mark the end of the pass. None if this device has no time of its own."""
        ...

    def finish(self) -> None:
        """The session ends: resolve what is still open, waiting if need be."""
        ...


class _EventSpan:
    """A pair of CUDA events around a pass."""

    __slots__ = ("begin", "device_ns", "end")

    def __init__(self, begin: Any, end: Any) -> None:
        self.begin = begin
        self.end = end
        self.device_ns: int | None = None


class CudaEventTimer:
    """Times passes with CUDA events on the current stream.

    Events are pooled, and they are resolved by the workload's own thread when a later pass begins and their end has
    already happened (`query`, never `synchronize`): another thread may not touch CUDA while a graph is captured. While
    the current stream is captured no event is recorded. Several threads may share a timer.

    Args:
        cuda: The module `torch.cuda`, or a stand-in with `Event`, `current_stream` and `is_current_stream_capturing`.
        device: Index of the device that is timed, which need not be the thread's current one.
    """

    #: Passes that may be open at once; those beyond it have no device time.
    MAX_OPEN = 4096

    def __init__(self, cuda: Any, device: int) -> None:
        self._cuda = cuda
        self._device = device
        self._pool: list[Any] = []
        self._open: deque[_EventSpan] = deque()

    def begin(self) -> Any:
        """Record the first event; None while capturing."""
        if self._cuda.is_current_stream_capturing():
            return None
        self._resolve()
        event = self._event()
        event.record(self._cuda.current_stream(self._device))
        return event

    def end(self, mark: Any) -> _EventSpan | None:
        """Record the last event. None, where the pass will have no device time."""
        if mark is None or self._cuda.is_current_stream_capturing():
            return None
        if len(self._open) >= self.MAX_OPEN:
            self._pool.append(mark)
            return None
        event = self._event()
        event.record(self._cuda.current_stream(self._device))
        span = _EventSpan(mark, event)
        self._open.append(span)
        return span

    def finish(self) -> None:
        """Wait for the passes that are still open. Called when the session ends, outside any pass."""
        try:
            # Each of them: passes of several threads are on several streams.
            for span in tuple(self._open):
                span.end.synchronize()
            self._resolve()
        except RuntimeError:
            # The device is in a state of error, which the workload has met or will: not for us to raise.
            self._open.clear()

    def _resolve(self) -> None:
        # A span is taken before it is asked, so that no two threads resolve the same one.
        while self._open:
            try:
                span = self._open.popleft()
            except IndexError:
                return
            if not span.end.query():
                self._open.appendleft(span)
                return
            span.device_ns = round(span.begin.elapsed_time(span.end) * 1e6)
            self._pool += (span.begin, span.end)

    def _event(self) -> Any:
        try:
            return self._pool.pop()
        except IndexError:
            return self._cuda.Event(enable_timing=True)


def timer_of(device: Any) -> DeviceTimer | None:
    """The timer for a torch device; None where the host's time is the device's."""
    if device.type != "cuda":
        return None
    cuda = sys.modules["torch"].cuda
    return CudaEventTimer(cuda, cuda.current_device() if device.index is None else device.index)
