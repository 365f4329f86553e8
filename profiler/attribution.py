"""Join what ran to the pass that ran it: operators by containment on their thread, kernels by their launch.

On a CPU an operator runs where it is called, so containment on its thread is exact. A kernel of a GPU runs later than
the call that launched it, often when the host is in the middle of another pass, so its own time says nothing: what
counts is where the host was when it launched it. Launch and kernel carry the same correlation id; under a CUDA graph
one launch has many kernels, which all are the launch's. What has no launch in sight belongs to no pass.

Nothing here knows a profiler: what was recorded comes as `Launch` and `DeviceEvent`, from a running process or from a
file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from phaseprof.records import Kernel


@dataclass(frozen=True, slots=True)
class PassWindow:
    """When a pass ran, Unix ns, and on which thread."""

    pass_id: int
    thread_id: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A call of the host that gives a device work.

    Attributes:
        correlation: What its kernels and copies carry as well.
        start_ns: When it was called, Unix ns.
        thread_id: Native id of the host thread; None if it is not known.
        name: As the runtime names it: ``cudaLaunchKernel``.
    """

    correlation: int
    start_ns: int
    thread_id: int | None
    name: str


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """A kernel, a copy or a memset on a device. A span that an annotation left there is none.

    Attributes:
        name: Of the kernel, or of the kind of copy.
        device: As torch names it: ``cuda:0``.
        start_ns: Begin, Unix ns.
        end_ns: End, Unix ns.
        stream: Its stream; None if it is not known.
        correlation: Of its launch; None or 0 if it has none.
    """

    name: str
    device: str
    start_ns: int
    end_ns: int
    stream: int | None
    correlation: int | None


class Launches:
    """Launches by their correlation id; how many kernels each of them had."""

    def __init__(self, launches: Iterable[Launch] = ()) -> None:
        self._launches: dict[int, Launch] = {}
        self._answered: set[int] = set()
        #: Kernels and copies that were linked, and those of them whose launch was not seen.
        self.events = 0
        self.launchless = 0
        for launch in launches:
            self.add(launch)

    def add(self, launch: Launch) -> None:
        """Take note of a launch. A driver call inside of a runtime call has its id: the outer one, which is first,
        stands."""
        self._launches.setdefault(launch.correlation, launch)

    def link(self, events: Iterable[DeviceEvent], *, source: str) -> Iterator[Kernel]:
        """Rows of events, with the time and the thread of their launch.

        Args:
            events: In any order. Their launches must have been added.
            source: The collector, for the rows.
        """
        for event in events:
            launch = self._launches.get(event.correlation) if event.correlation else None
            self.events += 1
            if launch is None:
                self.launchless += 1
            else:
                self._answered.add(launch.correlation)
            yield Kernel(
                name=event.name,
                device=event.device,
                start_ns=event.start_ns,
                end_ns=event.end_ns,
                source=source,
                stream=event.stream,
                thread_id=None if launch is None else launch.thread_id,
                launched_ns=None if launch is None else launch.start_ns,
            )

    def unanswered(self) -> tuple[Launch, ...]:
        """Launches of which no kernel or copy was linked, though each has one: what they launched was lost."""
        return tuple(
            launch
            for correlation, launch in self._launches.items()
            if correlation not in self._answered
        )


def always_has_events(name: str) -> bool:
    """Whether a call of that name always gives the device a kernel: then one without is a loss.

    Launches of kernels and of graphs do, in CUDA and HIP. Copies may be done by the host, and a host function is none.
    """
    return "Launch" in name and "HostFunc" not in name


class PassJoin:
    """Finds the pass of a moment on a thread.

    Passes of one thread overlap where one is awaited while the next one runs (asynchronous scheduling): a moment then
    belongs to the one that began last.

    Args:
        windows: The passes.
    """

    def __init__(self, windows: Iterable[PassWindow]) -> None:
        self._in_order = sorted(windows, key=_start_of)
        #: The latest end among each pass and those that began before it.
        self._ended_by = list(accumulate((window.end_ns for window in self._in_order), max))
        self._by_thread: dict[int, list[PassWindow]] = {}
        for window in self._in_order:
            self._by_thread.setdefault(window.thread_id, []).append(window)

    def on_thread(self, thread_id: int, start_ns: int, end_ns: int) -> PassWindow | None:
        """The pass of that thread that contains a time; None if none does."""
        listed = self._by_thread.get(thread_id, [])
        place = bisect_right(listed, start_ns, key=_start_of)
        if not place:
            return None
        window = listed[place - 1]
        return window if end_ns <= window.end_ns else None

    def by_time(self, start_ns: int, end_ns: int) -> PassWindow | None:
        """The pass that contains a time, on whichever thread; None if there is none, or one on each of several
        threads."""
        found: PassWindow | None = None
        for place in range(bisect_right(self._in_order, start_ns, key=_start_of) - 1, -1, -1):
            if self._ended_by[place] < end_ns:
                break  # so have all before
            window = self._in_order[place]
            if end_ns > window.end_ns:
                continue
            if found is None:
                found = window
            elif found.thread_id != window.thread_id:
                return None
        return found

    def of_operator(self, start_ns: int, end_ns: int, thread_id: int | None) -> PassWindow | None:
        """The pass that ran an operator. One whose thread is not known is joined by time alone, where only one pass can
        be meant."""
        if thread_id is None:
            return self.by_time(start_ns, end_ns)
        return self.on_thread(thread_id, start_ns, end_ns)

    def of_launch(self, launched_ns: int, thread_id: int | None) -> PassWindow | None:
        """The pass that launched a kernel. A thread that runs no passes helps one (autograd's, a pool's): its launches
        are joined by time alone, where only one pass can be meant."""
        if thread_id is not None and thread_id in self._by_thread:
            return self.on_thread(thread_id, launched_ns, launched_ns)
        return self.by_time(launched_ns, launched_ns)

    def of(self, kernel: Kernel) -> PassWindow | None:
        """The pass of a row."""
        if kernel.launched_ns is not None:
            return self.of_launch(kernel.launched_ns, kernel.thread_id)
        if kernel.device.startswith("cpu"):
            return self.of_operator(kernel.start_ns, kernel.end_ns, kernel.thread_id)
        # When it ran says nothing of who launched it.
        return None


def join(kernels: Iterable[Kernel], windows: Iterable[PassWindow]) -> tuple[Kernel, ...]:
    """Give each row the pass that it belongs to; one that belongs to none keeps ``pass_id`` None."""
    passes = PassJoin(windows)
    joined = []
    for kernel in kernels:
        found = passes.of(kernel)
        joined.append(replace(kernel, pass_id=None if found is None else found.pass_id))
    return tuple(joined)


def lost(launches: Launches, windows: Sequence[PassWindow]) -> frozenset[int]:
    """Passes of which kernels were lost: they launched what never came. No figure of theirs is whole."""
    passes = PassJoin(windows)
    found = set()
    for launch in launches.unanswered():
        if always_has_events(launch.name):
            window = passes.of_launch(launch.start_ns, launch.thread_id)
            if window is not None:
                found.add(window.pass_id)
    return frozenset(found)


def _start_of(window: PassWindow) -> int:
    return window.start_ns
