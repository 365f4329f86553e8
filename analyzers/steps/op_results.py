"""What the roofline of single operations yields."""

from __future__ import annotations

from dataclasses import dataclass

from phaseprof.analyzers.kernels.kernel_results import KernelClass
from phaseprof.analyzers.results import Roof
from phaseprof.work.ops import OpKind


@dataclass(frozen=True, slots=True)
class OpFigures:
    """The operations of one kind in a pass of a phase; means over its passes.

    Attributes:
        kind: What for.
        calls: How often they run in a pass.
        flops: FLOPs. moved_bytes: Weights, keys, values and states.
        compute_ms, memory_ms: Their time at each roof. Of operations of several shapes, sums.
        floor_ms: The least time: each at the roof that takes it longer.
        share: floor_ms over that of all operations.
        roof: The one that takes longer in all.
        rows: Rows of a matrix product (m); None for what is none.
    """

    kind: OpKind
    calls: float
    flops: float
    moved_bytes: float
    compute_ms: float
    memory_ms: float
    floor_ms: float
    share: float
    roof: Roof
    rows: float | None = None

    @property
    def intensity(self) -> float | None:
        """FLOPs a byte."""
        return self.flops / self.moved_bytes if self.moved_bytes else None


@dataclass(frozen=True, slots=True)
class AboveFloor:
    """What a pass takes above its floor, in one class of kernels or idle.

    Attributes:
        kernel_class: Which; None for time in which the device did nothing.
        measured_ms: Time of a pass that goes to it.
        floor_ms: What its operations need at their roofs.
    """

    kernel_class: KernelClass | None
    measured_ms: float
    floor_ms: float

    @property
    def excess_ms(self) -> float:
        """measured_ms - floor_ms; negative where data in a cache beats the memory roof."""
        return self.measured_ms - self.floor_ms


@dataclass(frozen=True, slots=True)
class ModelledTime:
    """A modelled time of a pass.

    Attributes:
        ms: The time. low_ms, high_ms: Its 90 % interval.
        reference: What it rests on.
    """

    ms: float
    low_ms: float
    high_ms: float
    reference: str


@dataclass(frozen=True, slots=True)
class StepFloor:
    """The operations of a phase against their roofs.

    Attributes:
        passes: Passes of the phase that this was worked out from.
        pass_ms: Time of one of them, mean.
        floor_ms: Sum of the operations' floors: they run one after the other, each at its own roof.
        whole_floor_ms: The pass as one: all FLOPs at one roof or all bytes at the other, whichever takes longer. Never
            above floor_ms.
        ops: The operations, the largest floor first.
        above: Where a pass takes more, the most first; empty without a timeline of kernels.
        modelled: What the operations take with kernels as they were measured on this device or one like it, fused and
            without gaps; None where none were.
    """

    passes: int
    pass_ms: float
    floor_ms: float
    whole_floor_ms: float
    ops: tuple[OpFigures, ...]
    above: tuple[AboveFloor, ...] = ()
    modelled: ModelledTime | None = None

    @property
    def distance(self) -> float | None:
        """pass_ms over floor_ms: 1 at the floor."""
        return self.pass_ms / self.floor_ms if self.floor_ms else None
