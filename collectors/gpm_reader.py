"""Pairs of GPM samples of one device, and the metrics between them: what the probe and the sampler both do."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phaseprof.collectors.nvml import Driver, NvmlError, NvmlState, state_of
from phaseprof.collectors.nvml_devices import Gpu


@dataclass(frozen=True, slots=True)
class Answers:
    """What a call for several metrics answered.

    Attributes:
        values: In NVML's units, by NVML's numbers.
        states: Why there is no value, by NVML's numbers.
    """

    values: Mapping[int, float]
    states: Mapping[int, NvmlState]


class GpmReader:
    """Two samples in turn: each new one makes a pair with the one before.

    Args:
        driver: NVML, opened.
        gpu: The device; of a MIG instance its own counters are read.

    Raises:
        NvmlError: If samples cannot be had.
    """

    def __init__(self, driver: Driver, gpu: Gpu) -> None:
        self._driver = driver
        self._gpu = gpu
        self._buffers: list[Any] = []
        self._calls: dict[tuple[int, ...], _MetricsCall] = {}
        try:
            for _ in range(2):
                self._buffers.append(driver.ask("nvmlGpmSampleAlloc"))
        except NvmlError:
            self.close()
            raise

    def supported(self) -> bool:
        """Whether the device has GPM, as the driver says.

        Raises:
            NvmlError: If it does not say.
        """
        answer = self._driver.ask("nvmlGpmQueryDeviceSupport", self._gpu.whole)
        return bool(answer.isSupportedDevice)

    def take(self) -> None:
        """Take a sample beside the last one, which stays until `turn`.

        Raises:
            NvmlError: If it cannot be taken.
        """
        sample = self._buffers[1]
        if self._gpu.instance is None:
            self._driver.ask("nvmlGpmSampleGet", self._gpu.handle, sample)
        else:
            self._driver.ask("nvmlGpmMigSampleGet", self._gpu.whole, self._gpu.instance, sample)

    def turn(self) -> None:
        """The newer sample is the older one of the next pair."""
        self._buffers.reverse()

    def between(self, numbers: tuple[int, ...]) -> Answers:
        """Metrics between the two samples.

        Args:
            numbers: NVML's numbers of them.

        Raises:
            NvmlError: If the call fails for all of them.
        """
        call = self._calls.get(numbers)
        if call is None:
            call = self._calls[numbers] = _MetricsCall(self._driver.binding, numbers)
        call.asked.sample1, call.asked.sample2 = self._buffers
        self._driver.ask("nvmlGpmMetricsGet", call.asked)
        values, states = {}, {}
        for number, code, value in call.answers():
            if code == 0:
                values[number] = value
            else:
                states[number] = state_of(code)
        return Answers(values, states)

    def close(self) -> None:
        """Free the samples. Never raises."""
        for buffer in self._buffers:
            with contextlib.suppress(NvmlError):
                self._driver.ask("nvmlGpmSampleFree", buffer)
        self._buffers = []


class _MetricsCall:
    """The structure of a call, filled once: nvidia-ml-py's fields are slow to set and to read.

    Args:
        binding: The module nvidia-ml-py.
        numbers: NVML's numbers of the metrics.
    """

    #: `nvmlGpmMetric_t`: number, return code, value, and three names that stay unread.
    _ENTRY = struct.Struct("@IId3P")

    def __init__(self, binding: Any, numbers: Sequence[int]) -> None:
        kind = binding.c_nvmlGpmMetricsGet_t
        self.asked = kind()
        self.asked.version = binding.NVML_GPM_METRICS_GET_VERSION
        self.asked.numMetrics = len(numbers)
        for place, number in enumerate(numbers):
            self.asked.metrics[place].metricId = number
        self._count = len(numbers)
        # Bindings whose structure has grown are read field by field.
        size = ctypes.sizeof(binding.c_nvmlGpmMetric_t)
        begin = kind.metrics.offset
        self._view: memoryview | None = None
        if size == self._ENTRY.size:
            whole = memoryview(self.asked).cast("B")
            self._view = whole[begin : begin + size * self._count]

    def answers(self) -> Iterator[tuple[int, int, float]]:
        """Number, return code and value of each metric."""
        if self._view is not None:
            for number, code, value, *_ in self._ENTRY.iter_unpack(self._view):
                yield number, code, value
            return
        for place in range(self._count):
            entry = self.asked.metrics[place]
            yield int(entry.metricId), int(entry.nvmlReturn), float(entry.value)
