"""The roofline: how long work takes at a device's two roofs, and what the roofs say of a larger batch.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (CACM 2009). The ratios that people
know are special cases: MFU is the compute time over the time (PaLM, arXiv 2204.02311, appendix B), MBU the memory time
over the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from phaseprof.analyzers.results import Roof
from phaseprof.trace.meta import Ceilings

#: Bytes of one element of the dtypes that models compute in, as torch spells them.
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True, slots=True)
class RoofTimes:
    """The time that work needs at each roof, in seconds.

    Attributes:
        compute_s: FLOPs over the peak.
        memory_s: Bytes over the bandwidth.
    """

    compute_s: float
    memory_s: float

    @property
    def nearest(self) -> Roof:
        """The roof that takes longer."""
        return Roof.COMPUTE if self.compute_s >= self.memory_s else Roof.BANDWIDTH

    @property
    def floor_s(self) -> float:
        """The least time that the work can take: the nearer roof's."""
        return max(self.compute_s, self.memory_s)

    @property
    def closeness(self) -> float:
        """The shorter time over the longer one: 1 on the ridge of the roofline."""
        return min(self.compute_s, self.memory_s) / self.floor_s if self.floor_s else 1.0


def roof_times(*, flops: float, moved_bytes: float, ceilings: Ceilings) -> RoofTimes:
    """How long FLOPs and bytes take at the roofs.

    Args:
        flops: Floating-point operations.
        moved_bytes: Bytes that have to move: weights, and KV read and written.
        ceilings: The roofs.
    """
    return RoofTimes(flops / ceilings.flops_per_s, moved_bytes / ceilings.bytes_per_s)


def batch_cost_ratio(
    *,
    flops: float,
    fixed_bytes: float,
    per_sequence_bytes: float,
    factor: float,
    ceilings: Ceilings,
) -> float:
    """How much longer a step takes when its batch is ``factor`` times as large, by the roofs.

    Weights are read once whatever the batch; FLOPs, KV and lookups grow with it. Reading and computing are added, not
    overlapped, which is the dearer of the two simple models: a real step lies between their maximum and their sum.

    Args:
        flops: FLOPs of a step now.
        fixed_bytes: Bytes of weights that a step reads whole.
        per_sequence_bytes: All other bytes of a step now.
        factor: New batch over the present one.
        ceilings: The roofs.
    """
    now = roof_times(flops=flops, moved_bytes=fixed_bytes + per_sequence_bytes, ceilings=ceilings)
    then = roof_times(
        flops=flops * factor,
        moved_bytes=fixed_bytes + per_sequence_bytes * factor,
        ceilings=ceilings,
    )
    return (then.compute_s + then.memory_s) / (now.compute_s + now.memory_s)
