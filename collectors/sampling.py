"""Collectors that read counters a few times a second: what one of them has to bring, and what it gets for it.

A collector brings a function that opens a device and yields a `Sampler`. Everything else is done here: the thread, the
schedule, one process a device, the values that are not believed, the rows on their way to the recorder, and what is
said when it does not work.

Turns lie on multiples of the period on the monotonic clock, so that they do not drift and those of all collectors fall
together. A turn that comes late keeps its true times, and turns that were missed are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from phaseprof.collectors.base import Availability, failure
from phaseprof.collectors.sampler_thread import SamplerThread
from phaseprof.errors import NotMeasured
from phaseprof.evidence import EvidenceSink, PassWindow
from phaseprof.metrics import Metric, is_possible, valid_range
from phaseprof.records import Sample
from phaseprof.trace.meta import Device

log = logging.getLogger("phaseprof")

#: Counters that need two readings at least 100 ms apart get them although a thread never wakes on the nanosecond.
PERIOD_NS = 110_000_000
#: Rows wait so long before they are handed over together: a table of few rows costs as much as one of many.
HAND_OVER_NS = 440_000_000
#: More rows do not wait.
MAX_ROWS = 4096
#: A device that another process samples is asked for again: that process may have ended.
AGAIN_NS = 5_000_000_000
#: After so long a reading counts as hanging; opening a device may start a process to look first.
SAMPLE_PATIENCE_S = 5.0
OPEN_PATIENCE_S = 30.0

#: For the common case, in which every value is believed.
_RANGES = {metric.value: valid_range(metric) for metric in Metric}


class CannotSample(Exception):
    """A counter or a device cannot be read, for a reason that is known. Raised by samplers; it never goes further.

    Args:
        why: The reason, as a clause without capital and full stop.
        fix: What would help, in one line; empty if nothing would.
    """

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.fix = fix


class Sampler(Protocol):
    """Reads the counters of one device. All its methods are called on one thread, which is not the workload's."""

    def sample(self) -> Sequence[Sample]:
        """Read once. Times are Unix ns on the sink's clock, and windows end when the reading was taken. Empty if there
        is nothing yet, for example before a second reading.

        Raises:
            CannotSample: If it cannot be read any more. Nothing else should be raised.
        """
        ...

    def close(self) -> None:
        """Let go of the device. Called once, also after a failure."""
        ...


#: Opens a device. Metrics that it lacks are said to the sink by the opener.
#: It raises CannotSample if the device cannot be read at all.
Opens = Callable[[Device, EvidenceSink], Sampler]


def is_cuda(device: Device) -> bool:
    """Whether it is a device that NVIDIA's driver knows."""
    return device.kind == "cuda"


class SampledCollector:
    """A `phaseprof.collectors.base.Collector` that samples each device it watches.

    Args:
        name, what: As in `Collector`.
        opens: Opens a device; called on the sampling thread.
        probe: As in `Collector`.
        watches: Which devices it samples.
        nothing: Why there may be nothing to watch, and what would help: said if it was asked for by name and models ran
            on other devices only.
        of_process: What it reads is of the process rather than of a device: it is read once, in each process.
        period_ns: Time between readings, best a multiple of `PERIOD_NS`.
    """

    def __init__(
        self,
        name: str,
        what: str,
        opens: Opens,
        probe: Callable[[], Availability],
        *,
        watches: Callable[[Device], bool] = is_cuda,
        nothing: CannotSample | None = None,
        of_process: bool = False,
        period_ns: int = PERIOD_NS,
    ) -> None:
        self.name = name
        self.what = what
        self.window: PassWindow | None = None
        #: Whether it was asked for by name; set before it starts.
        self.asked = False
        self.period_ns = period_ns
        #: Shared by the collectors of a session; set before it starts, else it has one of its own.
        self.thread = SamplerThread()
        self._opens = opens
        self._probe = probe
        self._watches = watches
        self._nothing = nothing or CannotSample("no model ran on a CUDA device")
        self.of_process = of_process
        self._sink: EvidenceSink | None = None
        self._seen = 0
        self._watched = 0
        self._impossible: set[str] = set()

    def probe(self) -> Availability:
        """Whether it works on this machine."""
        return self._probe()

    def start(self, sink: EvidenceSink) -> None:
        """Wait for a device."""
        self._sink = sink

    def device_seen(self, device: Device) -> None:
        """Sample it from now on, on the sampling thread."""
        self._seen += 1
        if self._sink is None or not self._watches(device) or (self.of_process and self._watched):
            return
        self._watched += 1
        self.thread.add(SamplingTask(self, device, self._sink))

    def stop(self) -> None:
        """Take the last samples and let go of the devices."""
        self.thread.end(self)
        if self.asked and self._seen and not self._watched and self._sink is not None:
            self._sink.note(NotMeasured(self.what, self._nothing.why, self._nothing.fix))

    def open(self, device: Device, sink: EvidenceSink) -> Sampler:
        """Open a device.

        Raises:
            CannotSample: If it cannot be sampled.
        """
        return self._opens(device, sink)

    def believed(self, rows: Sequence[Sample], sink: EvidenceSink) -> Sequence[Sample]:
        """The rows without those whose value the metric cannot have, which are said once a metric."""
        for row in rows:
            least, greatest = _RANGES[row.metric]
            # False for what is no number, too.
            if not least <= row.value <= greatest:
                break
        else:
            return rows
        kept = []
        for row in rows:
            if is_possible(Metric(row.metric), row.value):
                kept.append(row)
            elif row.metric not in self._impossible:
                self._impossible.add(row.metric)
                sink.note(
                    NotMeasured(
                        f"{Metric(row.metric).value} at some moments",
                        f"the collector {self.name} was given values that cannot be true (the first: {row.value:g})",
                    )
                )
        return kept


class SamplingTask:
    """The sampling of one device by one collector: a `phaseprof.collectors.sampler_thread.Task`."""

    def __init__(self, owner: SampledCollector, device: Device, sink: EvidenceSink) -> None:
        self.owner = owner
        self.due_ns = 0
        self.ended = False
        self._device = device
        self._key = device.uuid or device.key
        self._sink = sink
        self._sampler: Sampler | None = None
        self._rows: list[Sample] = []
        self._handed_over_ns = 0
        self._left = False

    @property
    def patience_s(self) -> float:
        """Opening may take longer than reading."""
        return OPEN_PATIENCE_S if self._sampler is None else SAMPLE_PATIENCE_S

    def step(self, now_ns: int) -> None:
        """Read the device, or open it if it is not open yet."""
        period = self.owner.period_ns
        self.due_ns = (now_ns // period + 1) * period
        try:
            if self._sampler is None:
                self._open(now_ns)
            else:
                self._read(self._sampler)
        except Exception as error:
            self._step_aside(error)
        if self._left:
            self._close()
        elif now_ns - self._handed_over_ns >= HAND_OVER_NS or len(self._rows) >= MAX_ROWS:
            self._handed_over_ns = now_ns
            self._hand_over()

    def end(self) -> None:
        """Read a last time: a run that is shorter than the period has samples as well."""
        if self._sampler is not None:
            try:
                self._read(self._sampler)
            except Exception as error:
                self._step_aside(error)
        self._close()
        self._hand_over()
        self.ended = True

    def hangs(self, seconds: float) -> None:
        """It has not come back; what it still brings is dropped."""
        self._left = True
        self._hand_over()
        self._sink.note(
            NotMeasured(
                self.owner.what,
                f"the collector {self.owner.name} had no answer for {seconds:.0f} s, and was left alone",
                "see whether `nvidia-smi` hangs as well" if is_cuda(self._device) else "",
            )
        )

    def _open(self, now_ns: int) -> None:
        if self.owner.of_process or self._sink.sampling_of(self._key):
            self._sampler = self.owner.open(self._device, self._sink)
            # A turn of its own, at once: reading has less patience than opening.
            self.due_ns = now_ns
        else:
            self.due_ns = now_ns + AGAIN_NS

    def _read(self, sampler: Sampler) -> None:
        rows = sampler.sample()
        if rows and not self._left:
            self._rows += self.owner.believed(rows, self._sink)

    def _hand_over(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, []
            self._sink.put_samples(rows)

    def _step_aside(self, error: Exception) -> None:
        if not self._left:
            self._sink.note(why_not(self.owner, error))
        self._close()
        self._hand_over()
        self.ended = True

    def _close(self) -> None:
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            try:
                sampler.close()
            except Exception:
                log.debug("a sampler could not be closed", exc_info=True)


def why_not(collector: SampledCollector, error: Exception) -> NotMeasured:
    """What is said of a sampler that stepped aside: its reason, or that it failed."""
    if isinstance(error, CannotSample):
        return NotMeasured(collector.what, error.why, error.fix)
    return failure(collector.name, collector.what, error)
