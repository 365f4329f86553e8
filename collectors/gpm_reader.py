"""Pairs of GPM samples of one device, and the metrics between them: what the probe and the sampler both do."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
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

    def between(self, numbers: Sequence[int]) -> Answers:
        """Metrics between the two samples.

        Args:
            numbers: NVML's numbers of them.

        Raises:
            NvmlError: If the call fails for all of them.
        """
        binding = self._driver.binding
        asked = binding.c_nvmlGpmMetricsGet_t()
        asked.version = binding.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(numbers)
        asked.sample1, asked.sample2 = self._buffers
        for place, number in enumerate(numbers):
            asked.metrics[place].metricId = number
        self._driver.ask("nvmlGpmMetricsGet", asked)
        values, states = {}, {}
        for place, number in enumerate(numbers):
            entry = asked.metrics[place]
            if entry.nvmlReturn == 0:
                values[number] = float(entry.value)
            else:
                states[number] = state_of(int(entry.nvmlReturn))
        return Answers(values, states)

    def close(self) -> None:
        """Free the samples. Never raises."""
        for buffer in self._buffers:
            with contextlib.suppress(NvmlError):
                self._driver.ask("nvmlGpmSampleFree", buffer)
        self._buffers = []
