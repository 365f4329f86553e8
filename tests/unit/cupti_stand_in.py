"""A stand-in for cupti-python: the classes and functions that are used of it, on a GPU that follows a script.

Signatures, states and errors are those of `cupti.pm_sampling.Collector` in cupti-python 13.4. Time is simulated.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest


class Result(enum.IntEnum):
    """A few of CUPTI's codes."""

    SUCCESS = 0
    ERROR_INVALID_PARAMETER = 1
    ERROR_NOT_INITIALIZED = 15
    ERROR_INVALID_METRIC_NAME = 17
    ERROR_HARDWARE_BUSY = 26
    ERROR_NOT_SUPPORTED = 27
    ERROR_INSUFFICIENT_PRIVILEGES = 35
    ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED = 39
    ERROR_MIG_DEVICE_NOT_SUPPORTED = 43
    ERROR_UNKNOWN = 999


class cuptiError(Exception):
    """CUPTI's error, as it is called there."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{Result(status).name} ({int(status)})")
        # A plain number, there as well.
        self.status = int(status)


class TriggerMode(enum.IntEnum):
    """What a sample is triggered by."""

    GPU_SYSCLK_INTERVAL = 0
    GPU_TIME_INTERVAL = 1


@dataclass
class Gpu:
    """The scripted device, and the host's clock.

    Attributes:
        metrics: For each metric that the chip has its value over the interval [t0, t1) of the host's clock.
        one_pass: How many of them fit into one pass.
        time_trigger: Whether samples can be triggered by time.
        offset_ns, drift: The device's clock is ``host * (1 + drift) + offset``.
        stamp_offset_ns: What `get_timestamp` is beside the clock of the samples.
        capacity: Samples that the buffer holds.
        fails: What the named call raises.
        host_ns: The host's clock.
    """

    metrics: Mapping[str, Callable[[int, int], float]]
    one_pass: int = 16
    time_trigger: bool = True
    offset_ns: int = 5_000_000_000
    drift: float = 0.0
    stamp_offset_ns: int = 0
    capacity: int = 1_000_000
    fails: dict[str, BaseException] = field(default_factory=dict)
    host_ns: int = 1_000_000_000
    calls: list[str] = field(default_factory=list)
    holder: object = None

    def monotonic_ns(self) -> int:
        """The host's clock; reading it takes 50 ns."""
        self.host_ns += 50
        return self.host_ns

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.host_ns += round(seconds * 1e9)

    def stamp(self, host_ns: int) -> int:
        """The device's clock at a moment of the host's."""
        return round(host_ns * (1.0 + self.drift)) + self.offset_ns

    def call(self, name: str) -> None:
        """A call of CUPTI, which may fail."""
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]


@dataclass(frozen=True)
class Sample:
    """As there."""

    start_timestamp: int
    end_timestamp: int
    metric_values: list[float]


class CounterData:
    """As there: completed samples."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples
        self.num_completed_samples = len(samples)

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._samples)


def collector_class(gpu: Gpu) -> type:
    """`cupti.pm_sampling.Collector` on that device."""

    class Collector:
        def __init__(self, device_index: int = 0) -> None:
            self.device_index = device_index
            self._enabled = False
            self._metrics: list[str] | None = None
            self._interval_ns = 0
            self._running = False
            self._sampled_to = 0
            self._stopped_at = 0

        def enable(self) -> None:
            gpu.call("enable")
            if gpu.holder is not None:
                raise RuntimeError("PM sampling is already enabled on this device.")
            gpu.holder = self
            self._enabled = True

        def configure(
            self,
            *,
            metrics: list[str],
            hardware_buffer_size: int = 512 * 1024 * 1024,
            sampling_interval: int = 10000,
            trigger_mode: TriggerMode = TriggerMode.GPU_TIME_INTERVAL,
        ) -> None:
            self._needs_enabled()
            gpu.call("configure")
            assert hardware_buffer_size > 0
            assert sampling_interval > 0
            if any(metric not in gpu.metrics for metric in metrics):
                raise cuptiError(Result.ERROR_INVALID_PARAMETER)
            by_time = trigger_mode is TriggerMode.GPU_TIME_INTERVAL
            if len(metrics) > gpu.one_pass or (by_time and not gpu.time_trigger):
                raise ValueError("Requested PM sampling configuration is not supported.")
            self._metrics = list(metrics)
            # Of 1.4 GHz.
            self._interval_ns = sampling_interval if by_time else round(sampling_interval / 1.4)

        def start(self) -> None:
            self._needs_enabled()
            gpu.call("start")
            if self._metrics is None:
                raise RuntimeError("Collector is not configured. Call configure() first.")
            if self._running:
                raise RuntimeError("PM Sampling collection has already started")
            self._running = True
            self._sampled_to = gpu.host_ns

        def stop(self) -> None:
            self._needs_enabled()
            gpu.call("stop")
            if not self._running:
                raise RuntimeError("PM Sampling collection has already stopped")
            self._running = False
            self._stopped_at = gpu.host_ns

        def decode(self, max_samples: int = 10000) -> CounterData:
            self._needs_enabled()
            gpu.call("decode")
            assert self._metrics is not None
            until = gpu.host_ns if self._running else self._stopped_at
            waiting = (until - self._sampled_to) // self._interval_ns
            if waiting > gpu.capacity:
                raise MemoryError("Record overflow in the hardware buffer.")
            samples = []
            for _ in range(min(waiting, max_samples)):
                begin, end = self._sampled_to, self._sampled_to + self._interval_ns
                values = [gpu.metrics[name](begin, end) for name in self._metrics]
                samples.append(Sample(gpu.stamp(begin), gpu.stamp(end), values))
                self._sampled_to = end
            return CounterData(samples)

        def disable(self) -> None:
            gpu.call("disable")
            if gpu.holder is self:
                gpu.holder = None
            self._enabled = False

        def _needs_enabled(self) -> None:
            if not self._enabled:
                raise RuntimeError("Collector is not enabled. Call enable() first.")

    return Collector


def install(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import cupti` find it."""
    package = types.ModuleType("cupti")
    package.__path__ = []
    bindings = types.ModuleType("cupti.cupti")
    sampling = types.ModuleType("cupti.pm_sampling")

    def get_timestamp() -> int:
        gpu.call("get_timestamp")
        return gpu.stamp(gpu.host_ns) + gpu.stamp_offset_ns

    vars(bindings).update(Result=Result, cuptiError=cuptiError, get_timestamp=get_timestamp)
    vars(sampling).update(Collector=collector_class(gpu), TriggerMode=TriggerMode)
    vars(package).update(cupti=bindings, pm_sampling=sampling)
    for name, module in (
        ("cupti", package),
        ("cupti.cupti", bindings),
        ("cupti.pm_sampling", sampling),
    ):
        monkeypatch.setitem(sys.modules, name, module)
