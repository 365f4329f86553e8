"""The counters that `samples` may hold: their names, units and the range outside of which a value is not believed.

Shares are fractions of 1, never percent. A collector that reads percent divides; an analyzer never has to ask.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from types import MappingProxyType


class Metric(enum.StrEnum):
    """What was sampled, with its unit in the name; the value of `samples.metric`."""

    #: Share of SM cycles with at least one warp resident, mean over the SMs.
    SM_ACTIVE = "sm_active_share"
    #: Resident warps over those that fit, mean over the SMs.
    SM_OCCUPANCY = "sm_occupancy_share"
    #: Share of cycles in which a tensor pipe of any type was active.
    TENSOR_ACTIVE = "tensor_active_share"
    #: The same for one type of tensor instruction: 16-bit and FP8, 64-bit, integer.
    TENSOR_HMMA_ACTIVE = "tensor_hmma_active_share"
    TENSOR_DMMA_ACTIVE = "tensor_dmma_active_share"
    TENSOR_IMMA_ACTIVE = "tensor_imma_active_share"
    #: Share of cycles in which the pipe was active.
    FP16_ACTIVE = "fp16_active_share"
    FP32_ACTIVE = "fp32_active_share"
    FP64_ACTIVE = "fp64_active_share"
    INTEGER_ACTIVE = "integer_active_share"
    #: Share of the peak of the device's memory interface.
    DRAM_ACTIVE = "dram_active_share"
    #: Bytes read from and written to device memory a second.
    DRAM_READ = "dram_read_bytes_per_s"
    DRAM_WRITE = "dram_write_bytes_per_s"
    PCIE_TX = "pcie_tx_bytes_per_s"
    PCIE_RX = "pcie_rx_bytes_per_s"
    NVLINK_TX = "nvlink_tx_bytes_per_s"
    NVLINK_RX = "nvlink_rx_bytes_per_s"
    SM_CLOCK = "sm_clock_hz"
    MEMORY_CLOCK = "memory_clock_hz"
    #: Mean over the window, where the driver averages; the moment at its end, where it does not.
    POWER = "power_w"
    #: Energy that the device took in the window.
    ENERGY = "energy_j"
    TEMPERATURE = "temperature_c"
    #: Bits of the driver's clocks-event reasons that were set at the end of the window.
    THROTTLE = "throttle_reasons_bits"
    MEMORY_USED = "memory_used_bytes"
    #: "Some kernel ran": kept because people look for it, never evidence for a bound.
    GPU_UTILIZATION = "gpu_utilization_share"
    #: Of the host: share of all its cores, and of one core by this process.
    HOST_CPU = "host_cpu_share"
    PROCESS_CPU = "process_cpu_cores"
    PROCESS_MEMORY = "process_memory_bytes"


#: Slack for shares: two counters read one after another may pass 1 by a little.
_SHARE = (0.0, 1.05)

#: Least and greatest value that a device of today can honestly have.
_RANGES: Mapping[Metric, tuple[float, float]] = MappingProxyType(
    {
        Metric.SM_CLOCK: (0.0, 10e9),
        Metric.MEMORY_CLOCK: (0.0, 30e9),
        Metric.POWER: (0.0, 5_000.0),
        Metric.TEMPERATURE: (-50.0, 150.0),
        Metric.MEMORY_USED: (0.0, 2e12),
        Metric.PROCESS_MEMORY: (0.0, 1e14),
        Metric.PROCESS_CPU: (0.0, 4_096.0),
        Metric.DRAM_READ: (0.0, 50e12),
        Metric.DRAM_WRITE: (0.0, 50e12),
        Metric.PCIE_TX: (0.0, 1e12),
        Metric.PCIE_RX: (0.0, 1e12),
        Metric.NVLINK_TX: (0.0, 10e12),
        Metric.NVLINK_RX: (0.0, 10e12),
        Metric.ENERGY: (0.0, 1e6),
        Metric.THROTTLE: (0.0, float(2**53)),
    }
)


def valid_range(metric: Metric) -> tuple[float, float]:
    """The least and the greatest value that is believed."""
    return _RANGES.get(metric, _SHARE)


def is_possible(metric: Metric, value: float) -> bool:
    """Whether a value is one that the metric can have."""
    least, greatest = valid_range(metric)
    return math.isfinite(value) and least <= value <= greatest
