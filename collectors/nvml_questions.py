"""What the driver can be asked of a GPU several times a second, in which ways, and what a row of it means.

A question has several ways where drivers differ: the best comes first, and the next is for those without it.
Numbers of fields, clocks and sensors are those of nvml.h; older versions of the bindings lack some names for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phaseprof.clock import Clock
from phaseprof.collectors.nvml import Driver, NvmlError, NvmlState, state_of
from phaseprof.collectors.nvml_devices import Gpu
from phaseprof.metrics import Metric
from phaseprof.records import Sample

SOURCE = "nvml"
SECOND_NS = 1_000_000_000
#: What changes slowly, or costs more. The energy counter is updated every 10 to 100 ms, so over a second or more the
#: ends of a window are known to a tenth of it.
SLOW_NS = SECOND_NS
#: The driver measures for 20 ms in each direction before it answers, and everything else waits.
BLOCKING_NS = 5 * SECOND_NS

_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_SENSOR_GPU = 0
_MEMORY_INFO_V2 = 0x02000028
_ALL_LINKS = 0xFFFFFFFF
_NVLINK_TX_KIB, _NVLINK_RX_KIB = 138, 139
_POWER_AVERAGE_MW, _POWER_INSTANT_MW = 185, 186
_PCIE_TX_BYTES, _PCIE_RX_BYTES = 197, 198
#: `nvmlValueType_t`: the member of the union that holds a field's value.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
#: The newest compute capability whose power reading is of the moment (GA100); later ones give the mean over a second.
_MOMENTARY = (8, 0)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to get an answer.

    Attributes:
        read: Gives rows; takes when this question was answered before, Unix ns. Raises NvmlError.
        every_ns: How often it is worth its cost; 0 for every turn.
    """

    read: Callable[[int], Sequence[Sample]]
    every_ns: int = 0


@dataclass(slots=True)
class Question:
    """Something to be read, in the first of its ways that works.

    Attributes:
        what: What it is, for the list of what was not measured.
        ways: Those that may still work.
        optional: Whether a GPU may well lack it, so that nobody misses it there.
        answered_ns: When it was answered last, Unix ns; None if never.
        failures: How often it failed since then.
    """

    what: str
    ways: list[Way]
    optional: bool = False
    answered_ns: int | None = None
    failures: int = 0


class Questions:
    """The questions about one device.

    Args:
        driver: NVML, opened.
        gpu: The device.
        key: Its name in the rows.
        clock: Gives the times of the rows.
    """

    def __init__(self, driver: Driver, gpu: Gpu, key: str, clock: Clock) -> None:
        self._driver = driver
        self._gpu = gpu
        self._key = key
        self._clock = clock

    def all(self) -> list[Question]:
        """What this device can be asked, the most urgent first. Of a MIG instance it is what it shares with its GPU,
        and its memory; the rest is measured for the whole GPU alone."""
        shared = [
            Question("the SM clock", [self._gauge(Metric.SM_CLOCK, _sm_clock, self._gpu.whole)]),
            Question(
                "throttling",
                [
                    self._gauge(Metric.THROTTLE, _asks(name), self._gpu.whole)
                    # The second is the name that drivers before 535 know.
                    for name in (
                        "nvmlDeviceGetCurrentClocksEventReasons",
                        "nvmlDeviceGetCurrentClocksThrottleReasons",
                    )
                ],
            ),
            Question(
                "the memory clock",
                [self._gauge(Metric.MEMORY_CLOCK, _memory_clock, self._gpu.whole, SLOW_NS)],
            ),
            Question(
                "the temperature",
                [
                    self._gauge(
                        Metric.TEMPERATURE, _asks(name, _SENSOR_GPU), self._gpu.whole, SLOW_NS
                    )
                    for name in ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
                ],
            ),
            Question(
                "the used memory",
                [
                    self._gauge(Metric.MEMORY_USED, read, self._gpu.handle, SLOW_NS)
                    # The older one counts what the driver reserves as used.
                    for read in (_memory_v2, _memory)
                ],
            ),
        ]
        return shared if self._gpu.instance is not None else shared + self._of_whole()

    def _of_whole(self) -> list[Question]:
        whole = self._gpu.whole
        return [
            Question("the power", self._power()),
            Question("the energy", [self._energy()]),
            Question(
                "utilization.gpu",
                [self._gauge(Metric.GPU_UTILIZATION, _utilization, whole, SLOW_NS)],
            ),
            Question(
                "NVLink traffic",
                [
                    self._rates(
                        (Metric.NVLINK_TX, _NVLINK_TX_KIB, _ALL_LINKS, 1024.0),
                        (Metric.NVLINK_RX, _NVLINK_RX_KIB, _ALL_LINKS, 1024.0),
                    )
                ],
                optional=True,
            ),
            Question(
                "PCIe traffic",
                [
                    self._rates(
                        (Metric.PCIE_TX, _PCIE_TX_BYTES, 0, 1.0),
                        (Metric.PCIE_RX, _PCIE_RX_BYTES, 0, 1.0),
                    ),
                    Way(self._pcie_throughput, BLOCKING_NS),
                ],
            ),
        ]

    # Ways

    def _gauge(
        self, metric: Metric, read: Callable[[Driver, Any], float], handle: Any, every_ns: int = 0
    ) -> Way:
        """A value of the moment, which stands for the time since the last one."""

        def rows(since_ns: int) -> Sequence[Sample]:
            value = read(self._driver, handle)
            return (self._row(metric, since_ns, self._clock.now_unix_ns(), value),)

        return Way(rows, every_ns)

    def _power(self) -> list[Way]:
        def averaged(read: Callable[[Driver, Any], float]) -> Way:
            def rows(since_ns: int) -> Sequence[Sample]:
                value = read(self._driver, self._gpu.whole)
                now_ns = self._clock.now_unix_ns()
                return (self._row(Metric.POWER, now_ns - SECOND_NS, now_ns, value),)

            return Way(rows, SECOND_NS)

        def usage(driver: Driver, handle: Any) -> float:
            return float(driver.ask("nvmlDeviceGetPowerUsage", handle)) / 1e3

        moment = self._gauge(Metric.POWER, _power_field(_POWER_INSTANT_MW), self._gpu.whole)
        mean = averaged(_power_field(_POWER_AVERAGE_MW))
        # The oldest function gives either, by the architecture.
        oldest = (
            averaged(usage)
            if self._capability() > _MOMENTARY
            else self._gauge(Metric.POWER, usage, self._gpu.whole)
        )
        return [moment, mean, oldest]

    def _capability(self) -> tuple[int, int]:
        try:
            major, minor = self._driver.ask("nvmlDeviceGetCudaComputeCapability", self._gpu.whole)
        except NvmlError:
            # Take it for a new one: the mean of a second is then not taken for the power of a moment.
            return (99, 0)
        return (int(major), int(minor))

    def _energy(self) -> Way:
        last: list[tuple[int, int]] = []

        def rows(since_ns: int) -> Sequence[Sample]:
            millijoules = int(
                self._driver.ask("nvmlDeviceGetTotalEnergyConsumption", self._gpu.whole)
            )
            now_ns = self._clock.now_unix_ns()
            before = last.pop() if last else None
            last.append((now_ns, millijoules))
            # A counter that went back was reset, or one of the two readings is wrong.
            if before is None or millijoules < before[1]:
                return ()
            joules = (millijoules - before[1]) / 1e3
            return (self._row(Metric.ENERGY, before[0], now_ns, joules),)

        return Way(rows, SLOW_NS)

    def _rates(self, *counters: tuple[Metric, int, int, float]) -> Way:
        """Counters of bytes, as a rate since the last reading. Each is a metric, a field, its scope and its unit."""
        last: list[tuple[int, list[int]]] = []

        def rows(since_ns: int) -> Sequence[Sample]:
            counts = _fields(
                self._driver, self._gpu.whole, [(number, scope) for _, number, scope, _ in counters]
            )
            now_ns = self._clock.now_unix_ns()
            before = last.pop() if last else None
            last.append((now_ns, counts))
            if before is None or now_ns <= before[0]:
                return ()
            begin_ns, old = before
            # A counter that wrapped is left out for a window.
            return [
                self._row(
                    metric, begin_ns, now_ns, (new - was) * unit * SECOND_NS / (now_ns - begin_ns)
                )
                for (metric, _, _, unit), new, was in zip(counters, counts, old, strict=True)
                if new >= was
            ]

        return Way(rows, SLOW_NS)

    def _pcie_throughput(self, since_ns: int) -> Sequence[Sample]:
        rows = []
        for counter, metric in enumerate((Metric.PCIE_TX, Metric.PCIE_RX)):
            begin_ns = self._clock.now_unix_ns()
            rate = self._driver.ask("nvmlDeviceGetPcieThroughput", self._gpu.whole, counter)
            rows.append(self._row(metric, begin_ns, self._clock.now_unix_ns(), rate * 1e3))
        return rows

    def _row(self, metric: Metric, begin_ns: int, end_ns: int, value: float) -> Sample:
        return Sample(begin_ns, end_ns, self._key, SOURCE, metric, float(value))


def _asks(function: str, *arguments: Any) -> Callable[[Driver, Any], float]:
    return lambda driver, handle: float(driver.ask(function, handle, *arguments))


def _sm_clock(driver: Driver, handle: Any) -> float:
    return float(driver.ask("nvmlDeviceGetClockInfo", handle, _CLOCK_SM)) * 1e6


def _memory_clock(driver: Driver, handle: Any) -> float:
    return float(driver.ask("nvmlDeviceGetClockInfo", handle, _CLOCK_MEMORY)) * 1e6


def _memory_v2(driver: Driver, handle: Any) -> float:
    return float(driver.ask("nvmlDeviceGetMemoryInfo", handle, version=_MEMORY_INFO_V2).used)


def _memory(driver: Driver, handle: Any) -> float:
    return float(driver.ask("nvmlDeviceGetMemoryInfo", handle).used)


def _utilization(driver: Driver, handle: Any) -> float:
    return float(driver.ask("nvmlDeviceGetUtilizationRates", handle).gpu) / 100


def _power_field(number: int) -> Callable[[Driver, Any], float]:
    return lambda driver, handle: _fields(driver, handle, [(number, 0)])[0] / 1e3


def _fields(driver: Driver, handle: Any, wanted: list[tuple[int, int]]) -> list[int]:
    """The values of fields, each with its scope.

    Raises:
        NvmlError: If one of them has none.
    """
    values = []
    for each in driver.ask("nvmlDeviceGetFieldValues", handle, wanted):
        state = state_of(int(each.nvmlReturn))
        if state is not NvmlState.AVAILABLE:
            raise NvmlError(state, "nvmlDeviceGetFieldValues", f"field {each.fieldId}")
        kind = int(each.valueType)
        if not 0 <= kind < len(_MEMBERS):
            raise NvmlError(NvmlState.FAILED, "nvmlDeviceGetFieldValues", f"type {kind} of a value")
        values.append(int(getattr(each.value, _MEMBERS[kind])))
    return values
