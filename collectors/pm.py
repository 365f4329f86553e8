"""`pm`: counters of the GPU by CUPTI's PM sampling, every 200 µs, decoded on a thread of its own.

Rows are windows of a millisecond (`pm_windows`), on the clock of the trace (`pm_clock`). After the first minute two
seconds of each twenty are sampled. docs/collect.md says what it needs and costs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from phaseprof.clock import Clock
from phaseprof.collectors import cupti
from phaseprof.collectors.base import Availability
from phaseprof.collectors.cupti import (
    ALL_METRICS,
    BufferOverflow,
    PmRefused,
    PmSampler,
    RawSample,
    Refusal,
)
from phaseprof.collectors.permission import may_profile
from phaseprof.collectors.pm_clock import SampleClock, TimePair, read_pair
from phaseprof.collectors.pm_windows import Bursts, Window, Windows
from phaseprof.errors import NotMeasured
from phaseprof.evidence import EvidenceSink, PassWindow
from phaseprof.metrics import Metric, is_possible
from phaseprof.records import Sample
from phaseprof.trace.meta import Device

log = logging.getLogger("phaseprof")

SOURCE = "pm"
#: A device that another process samples is asked for again: that process may have ended.
AGAIN_S = 5.0
#: How long the end may take.
END_S = 10.0
WHAT = "SM, tensor-core and DRAM counters at 200 µs"


@dataclass(frozen=True, slots=True)
class PmPlan:
    """How often what is done.

    Attributes:
        interval_ns: From one sample to the next.
        window_ns: What a row holds at least.
        decode_s: From one decode to the next.
        whole_s, burst_s, period_s: As in `Bursts`.
        longest_ns: The longest interval that is tried when the GPU's buffer overflows.
    """

    interval_ns: int = 200_000
    window_ns: int = 1_000_000
    decode_s: float = 0.1
    whole_s: float = 60.0
    burst_s: float = 2.0
    period_s: float = 20.0
    longest_ns: int = 1_600_000


class PmCollector:
    """Samples each CUDA device that a model runs on.

    Args:
        plan: How often what is done.

    Attributes:
        cpu_ns: CPU time of its threads, of those that have ended.
    """

    name = SOURCE
    what = WHAT
    window: PassWindow | None = None

    def __init__(self, plan: PmPlan | None = None) -> None:
        self.cpu_ns = 0
        self._plan = plan or PmPlan()
        self._sink: EvidenceSink | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._seen: set[str] = set()

    def probe(self) -> Availability:
        """Without opening a device: that would take its counters from whoever has them."""
        if not cupti.is_installed():
            return _unavailable(cupti.NO_PACKAGE)
        refusal = cupti.old_driver(cupti.driver_cuda_version())
        if refusal is not None:
            return _unavailable(refusal)
        permission = may_profile()
        if permission.allowed is False:
            return Availability(False, permission.detail, permission.fix)
        return Availability(True, f"{WHAT}, by CUPTI")

    def start(self, sink: EvidenceSink) -> None:
        """Wait for a device."""
        self._sink = sink

    def device_seen(self, device: Device) -> None:
        """Begin to sample it, if no other process of the run does."""
        self._seen.add(device.kind)
        sink = self._sink
        if sink is None or device.kind != "cuda":
            return
        run = DeviceRun(device, sink, self._plan, self._stop.wait)

        def sample() -> None:
            run.run()
            self.cpu_ns += time.thread_time_ns()

        thread = threading.Thread(
            target=sample,
            name=f"phaseprof-pm-{device.index}",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """Decode what is left."""
        self._stop.set()
        sink, self._sink = self._sink, None
        for thread in self._threads:
            thread.join(END_S)
        if sink is not None and any(thread.is_alive() for thread in self._threads):
            sink.note(NotMeasured("the last PM samples", f"CUPTI did not end within {END_S:.0f} s"))
        elif sink is not None and self._seen and "cuda" not in self._seen:
            why = Refusal("no model ran on a CUDA device")
            refusal = why if cupti.is_installed() else cupti.NO_PACKAGE
            sink.note(NotMeasured(WHAT, refusal.why, refusal.fix))
        self._threads = []


class DeviceRun:
    """One device from begin to end: what the thread of a device does.

    Args:
        device: A CUDA device.
        sink: Where the rows go.
        plan: How often what is done.
        wait: Waits so many seconds; returns early and True when it is to end.
        monotonic_ns: The clock of the host.
    """

    def __init__(
        self,
        device: Device,
        sink: EvidenceSink,
        plan: PmPlan,
        wait: Callable[[float], bool],
        monotonic_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._device = device
        self._sink = sink
        self._plan = plan
        self._wait = wait
        self._monotonic_ns = monotonic_ns
        self._bursts = Bursts(
            lambda: monotonic_ns() * 1e-9,
            whole_s=plan.whole_s,
            burst_s=plan.burst_s,
            period_s=plan.period_s,
        )
        self._key = device.uuid or device.key
        self._sampler = PmSampler(device.index, plan.interval_ns)
        self._windows = Windows(plan.window_ns)
        self._rows = _Rows(self._key, sink)
        self._clock: SampleClock | None = None
        self._sampling = False
        self._placed = True
        self._overflows = 0
        self._left_out = False

    def run(self) -> None:
        """Sample until the end; what fails is said. While another process of the run samples the device, wait."""
        while not self._sink.sampling_of(self._key):
            if self._wait(AGAIN_S):
                return
        try:
            self._sampler.open()
            self._say_missing()
            self._rows.counters = tuple(counter.metric for counter in self._sampler.counters)
            self._begin()
            while not self._wait(self._plan.decode_s):
                self._step()
            self._end()
        except PmRefused as refused:
            self._note(refused.refusal)
        except Exception as error:
            log.debug("PM sampling failed", exc_info=True)
            self._note(
                Refusal(
                    f"the collector pm failed ({type(error).__name__}: {error})",
                    "please report it; PHASEPROF_DEBUG=1 shows where",
                )
            )
        finally:
            self._sampler.close()
            self._say_end()

    def _begin(self) -> None:
        first = self._pair()
        if self._clock is None:
            self._clock = SampleClock(first, self._monotonic_ns())
        self._sampler.start()
        self._sampling = True

    def _step(self) -> None:
        if self._bursts.on:
            if self._sampling:
                self._drain()
            else:
                self._begin()
        elif self._sampling:
            self._left_out = True
            self._end()

    def _end(self) -> None:
        """Stop, and decode what is left."""
        if not self._sampling:
            return
        self._sampling = False
        self._sampler.stop()
        self._drain(to_the_end=True)
        self._put(self._windows.flush())
        self._windows.pause()

    def _drain(self, *, to_the_end: bool = False) -> None:
        """Decode what there is; of a sampler that is faster than we are no more than a few calls' worth at once."""
        for _ in range(64 if to_the_end else 4):
            try:
                samples, more = self._sampler.decode()
            except BufferOverflow:
                self._overflowed(again=not to_the_end)
                return
            if samples:
                self._take(samples)
            if not more:
                return

    def _take(self, samples: list[RawSample]) -> None:
        assert self._clock is not None
        after_ns = self._monotonic_ns()
        self._placed = self._clock.decoded(
            samples[0].start_ns, samples[-1].end_ns, self._pair(), after_ns
        )
        if self._placed:
            self._put(self._windows.add(samples))

    def _put(self, windows: Iterable[Window]) -> None:
        assert self._clock is not None
        self._rows.put(windows, self._clock, self._sink.clock)

    def _pair(self) -> TimePair | None:
        """None if CUPTI's clock cannot be read."""
        if self._clock is not None and self._clock.by_bounds:
            return None
        try:
            return read_pair(self._sampler.timestamp_ns, self._monotonic_ns)
        except PmRefused:
            return None

    def _overflowed(self, *, again: bool) -> None:
        """Sampling ended by itself: begin again, with a longer interval."""
        self._overflows += 1
        self._put(self._windows.flush())
        self._windows.pause()
        self._sampling = False
        if not again:
            return
        interval_ns = self._sampler.interval_ns * 2
        if interval_ns > self._plan.longest_ns:
            raise PmRefused(
                Refusal(
                    f"the GPU's buffer overflowed {self._overflows} times, at intervals up to "
                    f"{self._sampler.interval_ns // 1000} µs",
                    "leave the process a free core",
                )
            )
        try:
            self._sampler.stop()
        except PmRefused:
            # It may count as stopped by the overflow.
            log.debug("sampling was not running after an overflow", exc_info=True)
        self._sampler.lengthen(interval_ns)
        self._begin()

    def _say_missing(self) -> None:
        have = {counter.metric for counter in self._sampler.counters}
        missing = [metric for metric in ALL_METRICS if metric not in have]
        if missing:
            self._sink.note(
                NotMeasured(
                    f"{', '.join(missing)} by pm",
                    f"{self._device.name} does not sample it in one pass with the rest",
                )
            )

    def _say_end(self) -> None:
        if self._overflows:
            self._sink.note(
                NotMeasured(
                    "some PM samples",
                    f"the GPU's buffer overflowed {self._overflows} times, and the interval was lengthened to "
                    f"{self._sampler.interval_ns // 1000} µs",
                    "leave the process a free core",
                )
            )
        elif self._windows.gaps:
            self._sink.note(
                NotMeasured(
                    "some PM samples",
                    f"samples are missing in {self._windows.gaps} places, {self._windows.lost_ns / 1e6:.1f} ms in all",
                    "leave the process a free core",
                )
            )
        if self._left_out:
            self._sink.note(
                NotMeasured(
                    "PM samples of the whole run",
                    f"after {self._plan.whole_s:.0f} s they are taken {self._plan.burst_s:.0f} s of each "
                    f"{self._plan.period_s:.0f}, so that the trace stays small",
                )
            )
        if not self._placed:
            self._sink.note(
                NotMeasured(WHAT, "the clock of the samples cannot be related to that of the host")
            )
        elif self._clock is not None and self._clock.uncertainty_ns:
            self._sink.note(
                NotMeasured(
                    "exact times of PM samples",
                    "they are on a clock that CUPTI does not give; placed by when they were decoded, to within "
                    f"{self._clock.uncertainty_ns / 1e6:.1f} ms",
                )
            )

    def _note(self, refusal: Refusal) -> None:
        self._sink.note(NotMeasured(WHAT, refusal.why, refusal.fix))


class _Rows:
    """Writes windows as rows; values that no device can have are left out, and that is said once a metric."""

    def __init__(self, key: str, sink: EvidenceSink) -> None:
        self.counters: tuple[Metric, ...] = ()
        self._key = key
        self._sink = sink
        self._said: set[Metric] = set()

    def put(self, windows: Iterable[Window], placed: SampleClock, clock: Clock) -> None:
        rows = []
        for window in windows:
            start_ns = clock.unix_ns(placed.place(window.start_ns))
            end_ns = clock.unix_ns(placed.place(window.end_ns))
            for metric, value in zip(self.counters, window.values, strict=True):
                if is_possible(metric, value):
                    rows.append(Sample(start_ns, end_ns, self._key, SOURCE, metric, value))
                elif metric not in self._said:
                    self._said.add(metric)
                    self._sink.note(
                        NotMeasured(
                            f"some values of {metric} by pm",
                            f"CUPTI gave {value:g}, which no device can have; they are left out",
                        )
                    )
        if rows:
            self._sink.put_samples(rows)


def _unavailable(refusal: Refusal) -> Availability:
    return Availability(False, refusal.why, refusal.fix)


def pm_collector() -> PmCollector:
    """A new collector, at default rates."""
    return PmCollector()
