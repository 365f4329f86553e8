"""Off the hot path: a queue that hooks append to, and a thread that settles events and writes the trace.

The thread wakes a few times a second, so that it costs next to nothing while little happens, and lets the workload's
threads have the interpreter every half millisecond while much does. It flushes before a second is over. When the trace
cannot be written any more (a full disk, a vanished folder), recording stops with one warning and the workload goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from phaseprof.attribution import PassWindow, join
from phaseprof.clock import Clock
from phaseprof.errors import NotMeasured
from phaseprof.events import PASSES, Event, PassSeen, RawPass
from phaseprof.process import ProcessPlace, first_pass_id
from phaseprof.records import Call, Kernel, Sample
from phaseprof.schema import CALLS, KERNELS, SAMPLES
from phaseprof.settling.settler import Settler
from phaseprof.trace.meta import ProcessMeta
from phaseprof.trace.writer import TraceWriter, to_arrow
from phaseprof.vllm.events import StepRan

log = logging.getLogger("phaseprof")

DRAIN_S = 0.25
#: With the time to write, a kill loses less than a second.
FLUSH_S = 0.5
#: Kernels wait so long for their passes: a step whose tokens are awaited is settled when they are there.
SETTLE_S = 1.0
#: Passes that kernels may still come for.
MAX_WINDOWS = 4096
#: Events that may wait. At a pass a millisecond that is three minutes in which the thread got no time at all.
MAX_WAITING = 200_000
#: More than these are not caught up with: passes are shed until so many wait, but no event that tells what passes are.
SHED_ABOVE, SHED_TO = 150_000, 100_000
#: Events that are settled at a stretch (half a millisecond), and how long the others then have the interpreter.
STRETCH = 16
#: Requests of an engine's step that take as long as another event.
STEP_WEIGHT = 8
PAUSE_S = 0.0001
#: After so long there is no time left to pause: the machine is busy, or more has come than can be settled politely.
POLITE_S = 0.1
#: Rows take more memory than events: of a long queue some are flushed before the next are settled.
PENDING_ROWS = 4096


class Recorder:
    """Settles and writes the events of one process.

    Args:
        path: The trace's folder.
        place: Its place in its job; a rank that becomes known late is followed.
        host: `Host.token` of its host.
        clock: Its clock.
        meta: Gives the current meta of the process; called on the recorder's thread.
        note: Told of what could not be recorded.
        passes_seen: Gives how many passes the hooks have handed over.
    """

    def __init__(
        self,
        path: Path,
        *,
        place: ProcessPlace,
        host: str,
        clock: Clock,
        meta: Callable[[], ProcessMeta],
        note: Callable[[NotMeasured], None],
        passes_seen: Callable[[], int],
    ) -> None:
        self._path = path
        self._place = place
        self._host = host
        self._clock = clock
        self._meta = meta
        self._note = note
        self._passes_seen = passes_seen
        # Full, it loses its oldest events: the workload must not be held up, nor its memory fill.
        self._queue: deque[Event | RawPass] = deque(maxlen=MAX_WAITING)
        #: When they came, and kernels; the passes that were flagged `profiled`, by their ids.
        self._kernels: deque[tuple[float, Sequence[Kernel]]] = deque()
        self._windows: dict[int, PassWindow] = {}
        self._samples: deque[Sequence[Sample]] = deque()
        self._calls: deque[Call] = deque()
        self._meta_due = threading.Event()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._flush_due = threading.Event()
        self._flushed = threading.Event()
        self._passes = 0
        self._broken = False
        self._flushed_at = time.monotonic()
        self._starting = threading.Lock()
        self._writer: TraceWriter | None = None
        self._thread: threading.Thread | None = None
        self.cpu_ns = 0

    def start(self) -> None:
        """Make the trace and begin to write. A recorder that was not started begins with its first event, so that a
        forked child that runs no model leaves no file.

        Raises:
            TraceError: If the trace cannot be written.
        """
        with self._starting:
            if self._thread is not None:
                return
            pid = os.getpid()
            rank = self._place.now().rank
            self._writer = TraceWriter(self._path, rank=rank, pid=pid, host=self._host)
            self._settler = Settler(
                self._writer,
                offset_ns=self._clock.offset_ns,
                process=f"{self._host}.p{pid}",
                first_pass_id=first_pass_id(rank, pid, self._host),
            )
            self.write_meta()
            self._thread = threading.Thread(
                target=self._run, name="phaseprof-recorder", daemon=True
            )
            self._thread.start()

    def write_meta(self) -> None:
        """Write the meta file now; before the thread runs, or after `close`."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._follow_rank(self._writer)
                self._writer.write_meta(self._meta())

    def put_kernels(self, rows: Sequence[Kernel]) -> None:
        """Add kernels of passes that were flagged `profiled`; the thread joins them once those are settled."""
        self._kernels.append((time.monotonic(), rows))

    def put_samples(self, rows: Sequence[Sample]) -> None:
        """Add counter samples."""
        self._samples.append(rows)

    def put_call(self, row: Call) -> None:
        """Add a call of the workload that has ended."""
        self._calls.append(row)

    @property
    def emit(self) -> Callable[[Event | RawPass], None]:
        """What takes events: safe to call from any thread, costs an append. Before `start` it starts the recorder."""
        return self._queue.append if self._thread is not None else self._emit_and_start

    def _emit_and_start(self, event: Event | RawPass) -> None:
        if self._thread is None:
            self.start()
        self._queue.append(event)

    def meta_changed(self) -> None:
        """The meta file is to be written again soon."""
        self._meta_due.set()

    def sync(self, timeout_s: float = 10.0) -> None:
        """Wait until what was emitted so far is on disk."""
        if self._thread is not None and self._thread.is_alive():
            self._flushed.clear()
            self._flush_due.set()
            self._wake.set()
            self._flushed.wait(timeout_s)

    def close(self) -> None:
        """Settle and write what waits, merge the parts, and end the thread."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(DRAIN_S)
            self._wake.clear()
            if not self._stop.is_set():
                self._guard(self._step)
        self._guard(self._last_step)
        self.cpu_ns = time.thread_time_ns()

    def _step(self) -> None:
        asked = self._flush_due.is_set()
        self._drain()
        now = time.monotonic()
        if asked or now - self._flushed_at >= FLUSH_S - DRAIN_S / 2:
            self._flush_due.clear()
            self._flushed_at = now
            self._put_evidence(whole=asked)
            writer = self._open_writer()
            self._follow_rank(writer)
            writer.flush()
            if self._meta_due.is_set():
                self._meta_due.clear()
                writer.write_meta(self._meta())
            if asked:
                self._flushed.set()
        self._merge()

    def _merge(self) -> None:
        """Go on with a merge until it is time to drain the queue."""
        writer = self._open_writer()
        begun = time.monotonic()
        while (
            not self._wake.is_set() and time.monotonic() - begun < DRAIN_S and writer.merge_step()
        ):
            pass

    def _last_step(self) -> None:
        while self._queue:
            self._drain()
        self._settler.finish(time.perf_counter_ns())
        if self._settler.padding_unread:
            self._note(
                NotMeasured(
                    "padding of some passes",
                    "their mask, or the ids that show which rows of a batch have ended, lies on the device, and "
                    "reading it would make the device wait",
                )
            )
        if self._settler.passes_unseen:
            self._note(
                NotMeasured(
                    "the passes of some generate calls",
                    "the calls computed their prompt, and no pass was seen: something calls the model around its class",
                    "please report it with how the model was loaded and wrapped",
                )
            )
        if self._settler.packed_seen:
            self._note(
                NotMeasured(
                    "some passes of continuous batching",
                    "they packed several requests into one row, and their scheduler did not tell which ones",
                    "see what else is not measured; a manager of transformers 5.0 to 5.24 tells it",
                )
            )
        dropped = self._passes_seen() - self._passes
        if dropped > 0:
            self._note(
                NotMeasured(
                    f"{dropped} passes",
                    "they came faster than they could be settled and written",
                    "leave the recorder a core, and write the trace to a faster disk",
                )
            )
        self._put_evidence(whole=True)
        self._follow_rank(self._open_writer())
        self._open_writer().close()

    def _follow_rank(self, writer: TraceWriter) -> None:
        rank = self._place.now().rank
        if rank != writer.rank:
            writer.move_to(rank)
            self._meta_due.set()

    def _put_evidence(self, *, whole: bool) -> None:
        """Hand samples and kernels to the writer; kernels that may wait do so until their passes are settled."""
        while self._samples:
            rows = self._samples.popleft()
            self._open_writer().put_rows("samples", to_arrow(rows, SAMPLES.arrow))
        if self._calls:
            ended = [self._calls.popleft() for _ in range(len(self._calls))]
            self._open_writer().put_rows("calls", to_arrow(ended, CALLS.arrow))
        if not self._kernels:
            return
        # The passes came before their kernels.
        self._drain()
        for window in self._settler.take_profiled():
            self._windows[window.pass_id] = window
        while self._kernels:
            came, kernels = self._kernels[0]
            if not whole and time.monotonic() - came < SETTLE_S:
                return
            self._kernels.popleft()
            joined = join(kernels, tuple(self._windows.values()))
            self._open_writer().put_rows("kernels", to_arrow(joined, KERNELS.arrow))
            while len(self._windows) > MAX_WINDOWS:
                del self._windows[next(iter(self._windows))]

    def _open_writer(self) -> TraceWriter:
        assert self._writer is not None
        return self._writer

    def _drain(self) -> None:
        """Settle what waits. What comes meanwhile waits for the next time, so that flushes are never put off."""
        queue, writer = self._queue, self._open_writer()
        waiting = len(queue)
        polite_until = time.monotonic() + POLITE_S
        shed = waiting - SHED_TO if waiting > SHED_ABOVE else 0
        weight = 0
        for number in range(1, waiting + 1):
            taken = queue.popleft()
            if type(taken) is tuple and shed > 0:
                shed -= 1
                continue
            self._settle(taken)
            # A step of an engine is as much work as its requests are, a pass as little as any event.
            weight += 1 if type(taken) is not StepRan else 1 + len(taken.scheduled) // STEP_WEIGHT
            if weight >= STRETCH and time.monotonic() < polite_until:
                weight = 0
                time.sleep(PAUSE_S)
            if number % PENDING_ROWS == 0 and writer.pending_rows >= PENDING_ROWS:
                writer.flush()
        self._settler.poll()

    def _settle(self, taken: Event | RawPass) -> None:
        name = type(taken).__name__
        try:
            # A named event is a tuple as well, of a class of its own.
            event: Event = PassSeen._make(taken) if type(taken) is tuple else taken  # type: ignore[assignment]
            name = type(event).__name__
            self._passes += isinstance(event, PASSES)
            self._settler.handle(event)
        except Exception as error:
            log.debug("an event could not be settled", exc_info=True)
            self._note(
                NotMeasured(
                    f"some {name} events",
                    f"they could not be settled ({type(error).__name__}: {error})",
                    "please report it; PHASEPROF_DEBUG=1 shows where",
                )
            )

    def _guard(self, step: Callable[[], None]) -> None:
        if self._broken:
            for waiting in (self._queue, self._samples, self._kernels, self._calls):
                waiting.clear()
            # Nobody has to wait for what will not be written.
            self._flushed.set()
            return
        try:
            step()
        except Exception as error:
            self._broken = True
            self._queue.clear()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            log.warning(
                "phaseprof: recording stopped, the workload goes on: %s cannot be written (%s)",
                self._path,
                reason,
            )
            self._note(
                NotMeasured("the rest of the run", f"the trace could not be written: {reason}")
            )
