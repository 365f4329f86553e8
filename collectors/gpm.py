"""The collector `gpm`: how busy the SMs, the tensor cores and the memory of a GPU are, from NVML's GPM.

GPM needs no root and no profiling lock, and Hopper or newer. It yields averages between two samples that lie more than
100 ms apart, which is longer than most passes: an analyzer has to tell the phases in a window apart. All of it but the
traffic is per cycle of a clock, so that the clocks are read beside it.

A driver that counts cycles since it was loaded (metrics 248 to 260) gives exact differences; they stand beside the
averages, with the source ``gpm.counters``, once the two have been seen to agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phaseprof.collectors.base import Availability
from phaseprof.collectors.gpm_metrics import (
    AVERAGES,
    COUNTERS,
    ELAPSED,
    Average,
    Counter,
)
from phaseprof.collectors.gpm_probe import Look, Looking
from phaseprof.collectors.gpm_reader import Answers, GpmReader
from phaseprof.collectors.nvml import Driver, NvmlError, NvmlState, ask_nvml
from phaseprof.collectors.nvml_devices import Gpu, find
from phaseprof.collectors.sampling import CannotSample, SampledCollector
from phaseprof.errors import NotMeasured
from phaseprof.evidence import EvidenceSink
from phaseprof.metrics import Metric
from phaseprof.records import Sample
from phaseprof.trace.meta import Device

WHAT = "SM, tensor-core and memory activity of the GPU (GPM)"
#: Two samples that lie closer together give errors or nonsense; a turn that comes too early is left out.
LEAST_NS = 100_000_000
#: Failures in a row, for reasons that may pass, after which it is given up.
FAILURES = 20
#: A counter that differs from the average of the same window by more than this does not count what it is taken for.
#: An average may be a little older than its sample, so that it is compared over some windows together.
AGREE_WITHIN = 0.05
AGREE_OVER = 10

_HZ_PER_MHZ = 1e6


@dataclass(slots=True)
class _Clock:
    """A clock that is read beside the counters: its number (nvmlClockType_t), how often, and when next."""

    number: int
    metric: Metric
    every_ns: int
    due_ns: int = 0


class GpmSampler:
    """Samples one device: a `phaseprof.collectors.sampling.Sampler`.

    Args:
        device: A CUDA device.
        sink: Where it is said what is missing; its clock gives the times.

    Raises:
        CannotSample: If the device has no GPM, or the driver does not give it.
    """

    def __init__(self, device: Device, sink: EvidenceSink) -> None:
        self._clock = sink.clock
        self._device = device.uuid or device.key
        self._sink = sink
        self._begin_ns: int | None = None
        self._failures = 0
        self._clocks_left = [
            _Clock(1, Metric.SM_CLOCK, 0),
            # It hardly ever changes.
            _Clock(2, Metric.MEMORY_CLOCK, 1_000_000_000),
        ]
        self._averages: Sequence[Average] = ()
        self._numbers: tuple[int, ...] = ()
        self._counters = _Counters(frozenset())
        self._reader: GpmReader | None = None
        try:
            self._driver = Driver()
        except NvmlError as error:
            raise CannotSample(error.why, error.fix) from error
        try:
            self._gpu = find(self._driver, device)
        except NvmlError as error:
            self._driver.close()
            raise CannotSample(error.why, error.fix) from error
        self._name = self._gpu.name or device.name
        self._looking: Looking | None = Looking(self._gpu.uuid)

    def sample(self) -> Sequence[Sample]:
        """The metrics since the last sample, if that lies far enough back. At first nothing, until another process has
        found that GPM works.

        Raises:
            CannotSample: If it does not, or the driver does not answer any more.
        """
        if self._reader is None:
            self._reader = self._found()
            return () if self._reader is None else self._sample(self._reader)
        return self._sample(self._reader)

    def _found(self) -> GpmReader | None:
        """What reads, once it is known to work."""
        found = self._looking.answer() if self._looking is not None else None
        if found is None:
            return None
        refusal = refused(found, self._name, self._gpu.instance is not None)
        if refusal is not None:
            raise refusal
        self._averages = [a for a in AVERAGES if a.number in found.present]
        self._numbers = tuple(average.number for average in self._averages)
        self._counters = _Counters(found.present)
        if not self._averages:
            raise CannotSample(f"the driver gives no metric of GPM for {self._name}")
        self._say_missing(found)
        try:
            return GpmReader(self._driver, self._gpu)
        except NvmlError as error:
            raise CannotSample(error.why, error.fix) from error

    def _sample(self, reader: GpmReader) -> Sequence[Sample]:
        now = self._clock.now_unix_ns()
        if self._begin_ns is not None and now - self._begin_ns < LEAST_NS:
            return ()
        try:
            reader.take()
            end = (now + self._clock.now_unix_ns()) // 2
            if self._begin_ns is None:
                reader.turn()
                self._begin_ns = end
                return ()
            rows = self._rows(reader, self._begin_ns, end)
        except NvmlError as error:
            self._failures += 1
            if error.state.lasting or self._failures >= FAILURES:
                raise CannotSample(f"{error.why}: {self._name}", error.fix) from error
            # The older sample stays: the next window is longer.
            return ()
        self._failures = 0
        reader.turn()
        self._begin_ns = end
        return rows

    def close(self) -> None:
        """Free the samples and close NVML."""
        if self._looking is not None:
            self._looking.end()
        if self._reader is not None:
            self._reader.close()
        self._driver.close()

    def _rows(self, reader: GpmReader, begin: int, end: int) -> list[Sample]:
        answers = reader.between((*self._numbers, *self._counters.numbers))
        if not any(number in answers.values for number in self._numbers):
            states = answers.states.values()
            raise NvmlError(next(iter(states), NvmlState.NO_DATA), "nvmlGpmMetricsGet")
        averages = {
            average.metric: answers.values[average.number] * average.unit
            for average in self._averages
            if average.number in answers.values
        }
        exact = self._counters.shares(answers, averages)
        rows = [
            Sample(begin, end, self._device, "gpm", metric, value)
            for metric, value in averages.items()
        ]
        rows += [
            Sample(begin, end, self._device, "gpm.counters", metric, value)
            for metric, value in exact.items()
        ]
        rows += [
            Sample(begin, end, self._device, "gpm", metric, value)
            for metric, value in self._clocks(end)
        ]
        for metric in self._counters.take_doubted():
            self._sink.note(
                NotMeasured(
                    f"exact {metric.value}",
                    "the driver's counter of cycles does not agree with its average, which is recorded alone",
                )
            )
        return rows

    def _clocks(self, now: int) -> list[tuple[Metric, float]]:
        found = []
        for clock in self._clocks_left[:]:
            if now < clock.due_ns:
                continue
            try:
                mhz = self._driver.ask("nvmlDeviceGetClockInfo", self._gpu.whole, clock.number)
            except NvmlError as error:
                if error.state.lasting:
                    # The collector `nvml` says so; here they are beside the point.
                    self._clocks_left.remove(clock)
            else:
                clock.due_ns = now + clock.every_ns
                found.append((clock.metric, float(mhz) * _HZ_PER_MHZ))
        return found

    def _say_missing(self, found: Look) -> None:
        """Say which averages there are not. A GPU without NVLink has no traffic on it, and nothing is missing then."""
        missing: dict[NvmlState, list[str]] = {}
        for average in AVERAGES:
            state = (found.metrics or {}).get(average.number, NvmlState.NOT_SUPPORTED)
            is_nvlink = average.metric in (Metric.NVLINK_RX, Metric.NVLINK_TX)
            if average.number not in found.present and not is_nvlink:
                missing.setdefault(state, []).append(average.metric.value)
        for state, metrics in missing.items():
            named = f"{', '.join(metrics)} of {self._name}"
            self._sink.note(NotMeasured(named, state.value, state.remedy))


class _Counters:
    """The counters of cycles: the last reading of each, and which of them agree with the averages."""

    def __init__(self, present: frozenset[int]) -> None:
        ours = [counter for counter in COUNTERS if counter.number in present]
        self._ours: list[Counter] = ours if ELAPSED in present else []
        self._last: Mapping[int, float] = {}
        self._differences: dict[Metric, list[float]] = {c.metric: [] for c in self._ours}
        self._doubted: list[Metric] = []

    @property
    def numbers(self) -> list[int]:
        """What is to be asked for."""
        return [ELAPSED, *(counter.number for counter in self._ours)] if self._ours else []

    def shares(self, answers: Answers, averages: Mapping[Metric, float]) -> Mapping[Metric, float]:
        """The metrics since the last reading, of those counters that are known to agree with the averages."""
        now, before = answers.values, self._last
        self._last = now
        found: dict[Metric, float] = {}
        passed = now.get(ELAPSED, 0.0) - before.get(ELAPSED, float("inf"))
        for counter in tuple(self._ours):
            if passed <= 0 or counter.number not in now or counter.number not in before:
                continue
            share = (now[counter.number] - before[counter.number]) / passed
            if self._agrees(counter, share, averages.get(counter.metric)):
                found[counter.metric] = share
        return found

    def take_doubted(self) -> list[Metric]:
        """The counters that were given up since the last call."""
        doubted, self._doubted = self._doubted, []
        return doubted

    def _agrees(self, counter: Counter, share: float, average: float | None) -> bool:
        """Whether a counter counts what it is taken for: known once it has been compared over some windows."""
        compared = self._differences[counter.metric]
        if len(compared) < AGREE_OVER:
            if average is not None:
                compared.append(share - average)
            if len(compared) < AGREE_OVER:
                return False
            if abs(sum(compared) / AGREE_OVER) > AGREE_WITHIN:
                self._ours.remove(counter)
                self._doubted.append(counter.metric)
                return False
        return True


def refused(found: Look, name: str, is_instance: bool) -> CannotSample | None:
    """Why a device is not sampled, from what was found in another process; None if it can be.

    Args:
        found: What was found.
        name: What the device is called.
        is_instance: Whether it is a MIG instance.
    """
    if found.state is NvmlState.AVAILABLE:
        if found.spoils:
            return CannotSample(
                "with this driver, asking for GPM leaves other questions of the process unanswered",
                "Update the NVIDIA driver.",
            )
        return None
    if found.older:
        return CannotSample(f"GPM needs a GPU of the Hopper generation or newer, not a {name}")
    if found.state is NvmlState.NOT_SUPPORTED:
        if is_instance:
            return CannotSample(
                f"the driver gives no GPM for a MIG instance of {name}",
                "Profile on a whole GPU, or update the NVIDIA driver.",
            )
        return CannotSample(f"the driver gives no GPM for {name}", "Update the NVIDIA driver.")
    state = found.state
    detail = f" ({found.detail})" if found.detail else ""
    return CannotSample(f"{state.value}{detail}", state.remedy)


def probe() -> Availability:
    """Whether the first GPU has GPM. Which one a model will run on is not known yet."""
    answer = ask_nvml()
    if answer.state is not NvmlState.AVAILABLE:
        return Availability(False, answer.error or answer.state.value, answer.state.remedy)
    if not answer.gpus:
        return Availability(False, f"driver {answer.driver} has no GPU")
    try:
        with Driver() as driver:
            gpu = first_gpu(driver)
    except NvmlError as error:
        return Availability(False, error.why, error.fix)
    found = Looking(gpu.uuid).wait()
    refusal = refused(found, gpu.name, gpu.instance is not None)
    if refusal is not None:
        return Availability(False, refusal.why, refusal.fix)
    return Availability(True, f"{len(found.present)} metrics on {gpu.name}")


def first_gpu(driver: Driver) -> Gpu:
    """The device that torch calls ``cuda:0``.

    Raises:
        NvmlError: If it cannot be told.
    """
    return find(driver, Device("", "cuda", 0, None, None, None, ""))


def gpm_collector() -> SampledCollector:
    """The collector, for one session."""
    return SampledCollector("gpm", WHAT, GpmSampler, probe)
