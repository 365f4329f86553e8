"""When torch.profiler runs: bounded windows over whole passes, begun and ended between them.

A window is open over the first passes of each kind after the warm-up, and again every so many passes: kinds are passes
that compute several tokens for some sequence, and those that compute one. It begins before a pass while no other one
runs, and ends after a pass, or before one that it is not meant for. On a GPU it ends once the device has finished the
work of its passes, which is asked and never waited for; passes until then are inside as well.

A window is ended early when it may hold too much: what it holds cannot be asked, but an event takes some time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phaseprof.clock import read_pair
from phaseprof.collectors import kineto
from phaseprof.timers import CAPTURES
from phaseprof.trace.meta import ClockPair

#: The profiler takes so long for an event at least: how many a pass can have had.
_EVENT_NS = 2_000
#: Passes that a window stays open for while the device has not finished.
_MOST_LATE = 16
#: A window over which nothing happens is ended after so long.
_IDLE_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which passes are looked at. Those that compute several tokens for some sequence, the wide ones, are fewer, and
    each is another request's first: they come in shorter rows, and these more often.

    Attributes:
        skip: Passes of each kind that come first: warm-up.
        passes, wide_passes: Passes of a kind in a row.
        every, wide_every: Passes of a kind from the begin of one such row to the next.
        most_windows: Windows in all.
        most_events: Events that one may hold; it is ended when it might.
        most_ns: How long one may be open.
    """

    skip: int = 1
    passes: int = 4
    every: int = 512
    wide_passes: int = 2
    wide_every: int = 64
    most_windows: int = 128
    most_events: int = 200_000
    most_ns: int = 10_000_000_000

    def due(self, number: int, *, wide: bool) -> bool:
        """Whether the pass of that number, of its kind and from 0, is looked at."""
        passes, every = (self.wide_passes, self.wide_every) if wide else (self.passes, self.every)
        return number >= self.skip and (number - self.skip) % every < passes


@dataclass(slots=True)
class SeenPass:
    """A pass inside of a window.

    Attributes:
        thread_id: Native id of its thread.
        wide: Its kind.
        start_ns, end_ns: Monotonic clock.
        whole: The window was open from its begin to its end.
    """

    thread_id: int
    wide: bool
    start_ns: int
    end_ns: int = 0
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Closed:
    """A window that has ended.

    Attributes:
        results: Kineto's.
        clock: Both clocks when it ended: kineto's times are those of the system's clock then.
        passes: Those inside of it.
        warmup: It was there to warm up the profiler.
    """

    results: Any
    clock: ClockPair
    passes: tuple[SeenPass, ...]
    warmup: bool


@dataclass(slots=True)
class WindowCost:
    """What the windows took on the workload's threads, and what they saw."""

    windows: int = 0
    passes: int = 0
    start_ns: int = 0
    stop_ns: int = 0


@dataclass(slots=True)
class _Open:
    """The window that is open."""

    session: kineto.KinetoSession
    ident: int
    since_ns: int
    warmup: bool
    passes: list[SeenPass] = field(default_factory=list)
    #: Upper bound of the events in it.
    events: float = 0.0
    #: Is asked whether the device has finished; None before it is to end.
    fence: list[Any] | None = None
    late: int = 0
    idle_since_ns: int = 0


class Windows:
    """Opens and closes windows: a `phaseprof.evidence.PassWindow`.

    Args:
        schedule: Which passes are looked at.
        closed: Takes each window that has ended; called on any thread, and quick.
        refused: Told why a window did not open, or gave nothing; a clause.

    Attributes:
        cuda: Devices of CUDA that models run on, by index; others are not waited for.
        cost: What it took.
        per_pass: Events of a pass, once one was read.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        closed: Callable[[Closed], None],
        refused: Callable[[str], None],
    ) -> None:
        self._schedule = schedule
        self._closed = closed
        self._refused = refused
        # A fork, or another profiler, may come in the middle of ours on the same thread.
        self._lock = threading.RLock()
        #: Passes that run, by thread: how deeply they are nested, and those inside of the window.
        self._depth: dict[int, int] = {}
        self._inside: dict[int, SeenPass] = {}
        self._seen = {True: 0, False: 0}
        self._owed = {True: 0, False: 0}
        self._open: _Open | None = None
        self._held = False
        self._over = False
        self._warm = False
        #: The profiler of a vendor that is in this process; None before it was looked for.
        self._subscriber: str | None = None
        self._neighbours = kineto.Neighbours(self._give_way)
        self._teardown = kineto.Teardown()
        self.cuda: set[int] = set()
        self.cost = WindowCost()
        self.per_pass: float | None = None
        _living.add(self)

    # What the hooks call

    def begins(self, wide: bool, warmup: bool) -> bool:
        """See `PassWindow`."""
        ident = threading.get_ident()
        with self._lock:
            depth = self._depth.get(ident, 0)
            self._depth[ident] = depth + 1
            if depth:
                return self._open is not None
            due = self._due(wide, warmup)
            opened = self._open
            if opened is not None and (not due or self._too_much(opened)):
                self._end(opened, ident)
            if self._open is None and due:
                self._begin()
            opened = self._open
            if opened is None or not _sees(opened, ident):
                return False
            self._inside[ident] = SeenPass(threading.get_native_id(), wide, time.perf_counter_ns())
            self._owed[wide] = max(self._owed[wide] - 1, 0)
            return True

    def ended(self) -> None:
        """See `PassWindow`."""
        ident = threading.get_ident()
        with self._lock:
            depth = self._depth.pop(ident, 1) - 1
            if depth:
                self._depth[ident] = depth
                return
            seen = self._inside.pop(ident, None)
            opened = self._open
            if seen is None or opened is None:
                return
            now = time.perf_counter_ns()
            seen.end_ns = now
            opened.passes.append(seen)
            opened.idle_since_ns = now
            possible = (now - seen.start_ns) / _EVENT_NS
            likely = possible if self.per_pass is None else 2 * self.per_pass
            opened.events += min(possible, likely)
            if opened.fence is not None or opened.warmup or self._is_done(opened):
                self._end(opened, ident)

    def hold(self, on: bool) -> None:
        """See `PassWindow`. Letting go waits up to two seconds for the device to finish."""
        with self._lock:
            self._held = on
            if not on and self._open is not None:
                self._end_for_good(self._open)

    # What the collector calls

    def watch(self) -> None:
        """torch is there: look out for the profilers of others."""
        with self._lock:
            if not self._over:
                self._neighbours.watch()

    def owe(self, wide: bool, passes: int) -> None:
        """Passes were lost: look at as many others."""
        with self._lock:
            self._owed[wide] += passes

    def look_after(self) -> None:
        """End a window over which nothing happens any more. Called now and then on another thread."""
        with self._lock:
            opened = self._open
            if opened is None or self._depth or not opened.session.all_threads or self._held:
                return
            if CAPTURES.underway:
                return
            if time.perf_counter_ns() - max(opened.idle_since_ns, opened.since_ns) > _IDLE_NS:
                self._end_for_good(opened)

    def finish(self) -> None:
        """End what is open, and open no more."""
        with self._lock:
            self._over = True
            self._held = False
            if self._open is not None:
                self._end_for_good(self._open)
            self._neighbours.unwatch()
            self._teardown.restore()
        _living.discard(self)

    # How it decides

    def _due(self, wide: bool, warmup: bool) -> bool:
        if self._held:
            return True
        if warmup or self._over:
            return False
        number = self._seen[wide]
        self._seen[wide] = number + 1
        if self.cuda and not self._warm and self.cost.windows == 0:
            return True
        return self._schedule.due(number, wide=wide) or self._owed[wide] > 0

    def _is_done(self, opened: _Open) -> bool:
        """Whether no pass that may follow is looked at."""
        if self._too_much(opened):
            return True
        if self._held:
            return False
        return not any(
            self._schedule.due(self._seen[wide], wide=wide) or self._owed[wide]
            for wide in (True, False)
        )

    def _too_much(self, opened: _Open) -> bool:
        return (
            opened.events + (self.per_pass or 0) > self._schedule.most_events
            or time.perf_counter_ns() - opened.since_ns > self._schedule.most_ns
        )

    # How it begins and ends

    def _begin(self) -> None:
        if len(self._depth) > 1:
            # A pass of another thread runs, and would be cut.
            return
        if self.cost.windows >= self._schedule.most_windows and not self._held:
            return
        if self._neighbours.running:
            self._refused(
                "another torch.profiler session is running, and there can be one in a process"
            )
            return
        if _captures():
            return
        if self.cuda:
            if self._subscriber is None:
                self._subscriber = kineto.other_subscriber() or ""
            if self._subscriber:
                self._refused(
                    f"{self._subscriber} has got into this process, and CUPTI serves one profiler"
                )
                return
            self._teardown.forbid()
        began = time.perf_counter_ns()
        try:
            session = kineto.start(cuda=_has_cuda())
        except kineto.Refused as refused:
            self._refused(str(refused))
            return
        now = time.perf_counter_ns()
        warmup = bool(self.cuda) and not self._warm and not self._held
        self._warm = True
        self._open = _Open(session, threading.get_ident(), now, warmup)
        self.cost.windows += 1
        self.cost.start_ns += now - began

    def _end(self, opened: _Open, ident: int) -> None:
        """End a window once the device has finished its passes, and no other thread is in the middle of one. Called
        between passes of this thread."""
        if _captures() or not _sees(opened, ident):
            return
        if opened.fence is None:
            opened.fence = self._fence()
        opened.late += 1
        if opened.late <= _MOST_LATE and (self._inside or not _passed(opened.fence)):
            return
        self._close(opened)

    def _end_for_good(self, opened: _Open) -> None:
        """End a window now: at its end the workload has nothing else to do, so that the device can be waited for."""
        fence = opened.fence if opened.fence is not None else self._fence()
        until = time.monotonic() + 2.0
        while not _passed(fence) and time.monotonic() < until:
            time.sleep(0.001)
        self._close(opened)

    def _close(self, opened: _Open) -> None:
        began = time.perf_counter_ns()
        self._open = None
        for seen in self._inside.values():
            # Others still run.
            seen.whole = False
            seen.end_ns = began
            opened.passes.append(seen)
        self._inside.clear()
        self.cost.passes += len(opened.passes)
        try:
            results = kineto.stop(opened.session)
        except kineto.Refused as refused:
            self._refused(str(refused))
            return
        finally:
            self.cost.stop_ns += time.perf_counter_ns() - began
        self._closed(Closed(results, read_pair(), tuple(opened.passes), opened.warmup))

    def _give_way(self) -> None:
        """Somebody else's session is about to begin."""
        with self._lock:
            if self._open is not None:
                self._close(self._open)

    def _fence(self) -> list[Any]:
        """Events behind all that the devices have to do so far, on the streams that are current."""
        cuda = sys.modules["torch"].cuda
        events = []
        try:
            for device in self.cuda:
                event = cuda.Event()
                event.record(cuda.current_stream(device))
                events.append(event)
        except RuntimeError:
            # The device is in a state of error, which the workload has met or will.
            return []
        return events

    # Around a fork

    def before_fork(self) -> None:
        """A session that runs would run on in the child, where nobody ends it."""
        self._lock.acquire()
        if self._open is not None:
            self._close(self._open)

    def after_fork(self) -> None:
        """In the parent."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """The session of the child makes windows of its own."""
        self._neighbours.unwatch()
        self._over = True
        self._lock.release()


def _sees(opened: _Open, ident: int) -> bool:
    """Whether a session sees that thread, and can be ended on it."""
    return opened.session.all_threads or opened.ident == ident


def _passed(fence: list[Any]) -> bool:
    if fence and CAPTURES.underway:
        # A query would break it, from whichever thread.
        return False
    try:
        return all(event.query() for event in fence)
    except RuntimeError:
        return True


def _has_cuda() -> bool:
    cuda = sys.modules["torch"].cuda
    return bool(cuda.is_available() and cuda.is_initialized())


def _captures() -> bool:
    """Whether a CUDA graph is captured, by this thread or another: nothing may be asked of the device then."""
    if CAPTURES.underway:
        return True
    cuda = sys.modules["torch"].cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


_living: weakref.WeakSet[Windows] = weakref.WeakSet()


def _before_fork() -> None:
    for windows in tuple(_living):
        windows.before_fork()


def _after_fork() -> None:
    for windows in tuple(_living):
        windows.after_fork()


def _after_fork_in_child() -> None:
    for windows in tuple(_living):
        windows.after_fork_in_child()
        _living.discard(windows)


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork,
    after_in_child=_after_fork_in_child,
)
