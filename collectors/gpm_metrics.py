"""What GPM measures, by the numbers of nvml.h, and what of it becomes which metric. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from phaseprof.metrics import Metric

_MIB = float(2**20)


@dataclass(frozen=True, slots=True)
class Average:
    """A metric that GPM averages between two samples.

    Attributes:
        number: NVML's number of it.
        metric: Ours.
        unit: What one of NVML's units is in ours: percent and MiB a second become shares and bytes a second.
    """

    number: int
    metric: Metric
    unit: float = 0.01


@dataclass(frozen=True, slots=True)
class Counter:
    """A counter of cycles since the driver was loaded: over the cycles that passed, it is the share of `metric`."""

    number: int
    metric: Metric


AVERAGES = (
    Average(2, Metric.SM_ACTIVE),
    Average(3, Metric.SM_OCCUPANCY),
    Average(4, Metric.INTEGER_ACTIVE),
    Average(5, Metric.TENSOR_ACTIVE),
    Average(7, Metric.TENSOR_HMMA_ACTIVE),
    Average(8, Metric.TENSOR_DMMA_ACTIVE),
    Average(9, Metric.TENSOR_IMMA_ACTIVE),
    Average(10, Metric.DRAM_ACTIVE),
    Average(11, Metric.FP64_ACTIVE),
    Average(12, Metric.FP32_ACTIVE),
    Average(13, Metric.FP16_ACTIVE),
    Average(20, Metric.PCIE_TX, _MIB),
    Average(21, Metric.PCIE_RX, _MIB),
    Average(60, Metric.NVLINK_RX, _MIB),
    Average(61, Metric.NVLINK_TX, _MIB),
)

#: The cycles that passed, over which the others are shares.
ELAPSED = 248
COUNTERS = (
    Counter(249, Metric.SM_ACTIVE),
    Counter(250, Metric.TENSOR_ACTIVE),
    Counter(251, Metric.TENSOR_DMMA_ACTIVE),
    Counter(252, Metric.TENSOR_HMMA_ACTIVE),
    Counter(253, Metric.TENSOR_IMMA_ACTIVE),
    Counter(257, Metric.INTEGER_ACTIVE),
    Counter(258, Metric.FP64_ACTIVE),
    Counter(259, Metric.FP32_ACTIVE),
    Counter(260, Metric.FP16_ACTIVE),
)

#: Asked in two calls: a driver that does not know the newer ones may refuse the whole call.
ASKED: tuple[tuple[int, ...], ...] = (
    tuple(average.number for average in AVERAGES),
    (ELAPSED, *(counter.number for counter in COUNTERS)),
)
