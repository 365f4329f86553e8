"""The collector `kernels`: what ran during some passes, seen by torch.profiler in bounded windows.

On a GPU: every kernel, copy and memset, with the time and the thread of its launch, by which it is joined to its pass.
On a CPU: the outermost operators. Between them the host runs Python, and the cores wait: an operator that another one
called lies inside of it and is dropped, so that what is left can be laid side by side, and its union is the busy time.
Dispatch inside of an operator counts as busy, so small operators look a little busier than their arithmetic. Code that
torch.compile generated for a CPU runs outside of operators: passes that it takes a good part of have none.

Neither stacks nor shapes are recorded. The passes inside are flagged `profiled`; what the windows cost is told apart.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from phaseprof.attribution import Launches, PassJoin, PassWindow, lost
from phaseprof.collectors.base import Availability
from phaseprof.collectors.kineto_events import (
    DeviceNames,
    OperatorEvent,
    WindowEvents,
    outermost,
    read,
)
from phaseprof.collectors.windows import Closed, Schedule, SeenPass, Windows
from phaseprof.errors import NotMeasured
from phaseprof.evidence import EvidenceSink
from phaseprof.evidence import PassWindow as ToldOfPasses
from phaseprof.records import Kernel
from phaseprof.trace.meta import CollectorCost, Device

log = logging.getLogger("phaseprof")

NAME = "kernels"
SOURCE = "torch.profiler"
WHAT = "kernels, or operators of a CPU, by pass"

#: How often the reader looks after a window that may have been forgotten.
_LOOK_S = 0.5
#: Code of torch.compile that takes no more of a pass than this is taken for an operator: what Python does between its
#: kernels is then a small part of the pass.
_COMPILED_SHARE = 0.1
#: Lost passes that others are looked at for, of each kind.
_MOST_OWED = 8
#: Kernels without a launch that are told of, as a share of all: work from before a window is a small part of it.
_TOLD_SHARE = 0.02


@dataclass(slots=True)
class _Found:
    """What all windows held, for what is said at the end.

    Attributes:
        passes: Whole passes by kind.
        with_kernels: Those of them that had a kernel, or an operator.
        lost: Passes of which kernels were lost.
        compiled: Passes of which code of torch.compile computed a good part, outside of operators.
        kernels, launchless: On devices.
        rows: Handed over.
        read_ns: Time to read and to join.
        refused: Why windows did not open, or gave nothing.
    """

    passes: Counter[bool]
    with_kernels: Counter[bool]
    lost: Counter[bool]
    refused: Counter[str]
    compiled: int = 0
    kernels: int = 0
    launchless: int = 0
    rows: int = 0
    read_ns: int = 0


class KernelsCollector:
    """See the module. A `phaseprof.collectors.base.Collector`.

    Args:
        schedule: Which passes are looked at.
    """

    name = NAME
    what = WHAT

    def __init__(self, schedule: Schedule | None = None) -> None:
        self._windows = Windows(
            schedule or Schedule(), closed=self.window_closed, refused=self._window_refused
        )
        self._found = _Found(Counter(), Counter(), Counter(), Counter())
        self._queue: queue.SimpleQueue[Closed | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._sink: EvidenceSink | None = None
        self._devices: list[str] = []

    @property
    def window(self) -> ToldOfPasses:
        """It is told of every pass."""
        return self._windows

    def probe(self) -> Availability:
        """Needs a torch that has kineto."""
        try:
            import torch.profiler
        except ImportError as error:
            return Availability(False, f"torch cannot be imported: {error}")
        if not torch.profiler.kineto_available():
            return Availability(
                False,
                "this torch was built without kineto, so torch.profiler has no timeline",
                "Install an official torch build: https://pytorch.org/get-started",
            )
        return Availability(
            True, "kernels on a GPU, outermost operators on a CPU, by torch.profiler"
        )

    def start(self, sink: EvidenceSink) -> None:
        """Wait for a model: torch may not be there yet."""
        self._sink = sink

    def device_seen(self, device: Device) -> None:
        """A model runs: look out for other profilers."""
        if device.kind == "cuda":
            self._devices.append(f"cuda:{device.index}")
            self._windows.cuda.add(device.index)
        self._windows.watch()

    def stop(self) -> None:
        """End what is open, read the rest, and say what is missing."""
        self._windows.finish()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        cost, found = self._windows.cost, self._found
        if self._sink is None:
            return
        if cost.windows:
            self._sink.spent(
                CollectorCost(
                    name=NAME,
                    windows=cost.windows,
                    passes=cost.passes,
                    start_ns=cost.start_ns,
                    stop_ns=cost.stop_ns,
                    read_ns=found.read_ns,
                    rows=found.rows,
                )
            )
        for missing in _missing(found, self._windows.cuda):
            self._sink.note(missing)

    # Told by the windows

    def _window_refused(self, why: str) -> None:
        self._found.refused[why] += 1

    def window_closed(self, closed: Closed) -> None:
        """A window has ended: read it on another thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="phaseprof-kernels", daemon=True)
            self._thread.start()
        self._queue.put(closed)

    # On the reader's thread

    def _run(self) -> None:
        while True:
            try:
                closed = self._queue.get(timeout=_LOOK_S)
            except queue.Empty:
                self._windows.look_after()
                continue
            if closed is None:
                return
            began = time.thread_time_ns()
            try:
                self._read(closed)
            except Exception as error:
                log.debug("a window could not be read", exc_info=True)
                self._found.refused[
                    f"what torch.profiler gave could not be read ({type(error).__name__}: {error})"
                ] += 1
            self._found.read_ns += time.thread_time_ns() - began

    def _read(self, closed: Closed) -> None:
        sink = self._sink
        assert sink is not None
        # Kineto's times are of the system's clock, which may have been set since the session began.
        pair = closed.clock
        shift_ns = sink.clock.unix_ns(pair.monotonic_ns) - pair.unix_ns
        names = DeviceNames(self._devices, counts_agents=_is_rocm())
        events = read(closed.results, shift_ns=shift_ns, name_device=names.name, polite=True)
        if closed.passes:
            self._windows.per_pass = max(
                self._windows.per_pass or 0.0, events.count / len(closed.passes)
            )
        if closed.warmup:
            # It was there for the profiler to be warm: what came of it may be a part.
            return
        passes = [
            PassWindow(
                place,
                seen.thread_id,
                sink.clock.unix_ns(seen.start_ns),
                sink.clock.unix_ns(seen.end_ns),
            )
            for place, seen in enumerate(closed.passes)
        ]
        rows = (
            self._kernels(events, passes, closed.passes)
            if events.on_device or self._windows.cuda
            else self._operators(events, passes, closed.passes)
        )
        self._found.rows += len(rows)
        if rows:
            sink.put_kernels(rows)

    def _kernels(
        self, events: WindowEvents, passes: Sequence[PassWindow], seen: Sequence[SeenPass]
    ) -> list[Kernel]:
        found = self._found
        launches = Launches(events.launches)
        rows = list(launches.link(events.device_events, source=SOURCE))
        found.kernels += launches.events
        found.launchless += launches.launchless
        cut = {place for place, one in enumerate(seen) if not one.whole}
        robbed = lost(launches, passes) - cut
        for place in robbed:
            wide = seen[place].wide
            found.lost[wide] += 1
            if found.lost[wide] <= _MOST_OWED:
                self._windows.owe(wide, 1)
        return self._of_whole_passes(rows, passes, seen, cut | robbed)

    def _operators(
        self, events: WindowEvents, passes: Sequence[PassWindow], seen: Sequence[SeenPass]
    ) -> list[Kernel]:
        join = PassJoin(passes)
        cut = {place for place, one in enumerate(seen) if not one.whole}
        in_compiled_ns: Counter[int] = Counter()
        for region in events.compiled:
            window = join.on_thread(region.thread_id, region.start_ns, region.start_ns)
            if window is not None:
                in_compiled_ns[window.pass_id] += region.end_ns - region.start_ns
        compiled = {
            place
            for place, length_ns in in_compiled_ns.items()
            if length_ns > _COMPILED_SHARE * (passes[place].end_ns - passes[place].start_ns)
        }
        self._found.compiled += len(compiled)
        # Of the other passes the regions are taken for operators.
        rows = [_operator_row(each) for each in outermost([*events.operators, *events.compiled])]
        return self._of_whole_passes(rows, passes, seen, cut | compiled)

    def _of_whole_passes(
        self,
        rows: Sequence[Kernel],
        passes: Sequence[PassWindow],
        seen: Sequence[SeenPass],
        left_out: set[int],
    ) -> list[Kernel]:
        """Without the rows of passes of which only a part was seen: the part would be taken for the whole."""
        join = PassJoin(passes)
        kept = []
        with_rows = set()
        for row in rows:
            window = join.of(row)
            if window is None:
                kept.append(row)
            elif window.pass_id not in left_out:
                kept.append(row)
                with_rows.add(window.pass_id)
        for place, one in enumerate(seen):
            if one.whole:
                self._found.passes[one.wide] += 1
                self._found.with_kernels[one.wide] += place in with_rows
        return kept


def kernels_collector() -> KernelsCollector:
    """A new collector."""
    return KernelsCollector()


def _operator_row(operator: OperatorEvent) -> Kernel:
    return Kernel(
        name=operator.name,
        device="cpu",
        start_ns=operator.start_ns,
        end_ns=operator.end_ns,
        source=SOURCE,
        thread_id=operator.thread_id,
    )


def _is_rocm() -> bool:
    torch = sys.modules["torch"]
    return getattr(torch.version, "hip", None) is not None


def _missing(found: _Found, cuda: set[int]) -> list[NotMeasured]:
    """What the windows did not see, and why."""
    missing = []
    for why, times in found.refused.items():
        said = why if times == 1 else f"{why} ({times} times)"
        missing.append(NotMeasured(WHAT, said, _remedy(why)))
    whole = found.passes.total()
    if whole and not found.with_kernels.total() and not found.compiled:
        missing.append(_nothing_came(whole, cuda))
    elif cuda:
        missing += [
            NotMeasured(
                f"kernels of {kind}",
                f"torch.profiler was on during {found.passes[wide]} of them and gave no kernel, though a GPU computes "
                "them",
                "Run it again; a longer run is looked at again and again.",
            )
            for wide, kind in (
                (True, "passes that compute several tokens a sequence"),
                (False, "passes that compute one token a sequence"),
            )
            if found.passes[wide] and not found.with_kernels[wide]
        ]
    if found.lost.total():
        missing.append(
            NotMeasured(
                f"kernels of {found.lost.total()} of {whole} profiled passes",
                "they launched kernels that torch.profiler lost; what came of them is left out, as it would be taken "
                "for all",
                "A session that has just begun loses its first kernels on some versions of CUDA and torch: "
                "a longer run has others.",
            )
        )
    if found.launchless > _TOLD_SHARE * found.kernels:
        missing.append(
            NotMeasured(
                f"the pass of {found.launchless} of {found.kernels} kernels",
                "their launch was not seen: they were launched before the window, or it was lost",
            )
        )
    if found.compiled:
        missing.append(
            NotMeasured(
                f"operators of {found.compiled} profiled passes on the CPU",
                "code of torch.compile ran in them, and what it computes lies outside of operators",
                "Run without torch.compile to see the busy time.",
            )
        )
    return missing


def _nothing_came(passes: int, cuda: set[int]) -> NotMeasured:
    if not cuda:
        return NotMeasured(WHAT, f"torch.profiler saw no operator in {passes} passes")
    return NotMeasured(
        WHAT,
        f"torch.profiler saw no kernel in {passes} passes, though a GPU computed them",
        "`phaseprof doctor` says what else uses CUPTI and whether profiling is allowed.",
    )


def _remedy(why: str) -> str:
    if "another torch.profiler" in why:
        return "Leave torch.profiler out of the script while phaseprof runs."
    if "CUPTI serves one profiler" in why:
        return "Run without it, or read its own recording."
    return ""
