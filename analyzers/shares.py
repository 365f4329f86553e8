"""Shares of a device's resources side by side: as its counters measured them, and as the modelled work needs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.counters.counter_results import CounterFigure
from phaseprof.analyzers.kernels.kernel_results import KernelClass
from phaseprof.analyzers.results import Evidence, Provenance
from phaseprof.analyzers.witness import Claim, Witness
from phaseprof.analyzers.wording import byte_rate, count, joined, percent, sentence

#: Kernels that move more than they compute, and whose bytes are not counted.
_MOVING = frozenset(
    {
        KernelClass.NORM,
        KernelClass.ROPE,
        KernelClass.ACTIVATION,
        KernelClass.ELEMENTWISE,
        KernelClass.REDUCTION,
        KernelClass.INDEXING,
        KernelClass.QUANTIZATION,
        KernelClass.COPY,
    }
)


@dataclass(frozen=True, slots=True)
class Share:
    """A share with its error."""

    value: float
    error: float

    @property
    def low(self) -> float:
        return self.value - self.error

    @property
    def high(self) -> float:
        return self.value + self.error

    @property
    def near_peak(self) -> bool:
        return self.low >= thresholds.MEASURED_ROOF.value

    @property
    def below_peak(self) -> bool:
        return self.high < thresholds.MEASURED_ROOF.value

    def __str__(self) -> str:
        return f"{percent(max(self.value, 0.0))} ±{max(round(self.error * 100), 1)}"


class Shares:
    """Both sides of one phase. A share that is not known, or not sure, is None.

    Attributes:
        sm: SM activity. tensor: Activity of the tensor cores. dram: Share of the peak of the memory interface.
        rate: Bytes/s of memory.
        needs_tensor: Share of the cycles in which the FLOPs keep the tensor cores busy, at the real clock.
        needs_dram: Share of the bandwidth that the bytes take.
        clock_ratio: The median SM clock over that of the compute roof.
    """

    def __init__(self, claim: Claim, witness: Witness) -> None:
        self.claim = claim
        self.state = witness.state
        self.kernels = witness.kernels
        self.counters = counters = witness.counters
        self.sm = _sure(counters.sm_active)
        self.tensor = _sure(counters.tensor_active)
        self.rate = _sure(counters.dram_bytes_per_s)
        self.dram = _sure(counters.dram_active) or self.rate_of_roof
        self.clock_ratio = self._clock_ratio()
        self.needs_tensor = self._needed_tensor()
        self.needs_dram = self._needed_dram()

    @property
    def rate_of_roof(self) -> Share | None:
        """The measured rate over the bandwidth of the roofs."""
        roofs = self.claim.ceilings
        if self.rate is None or roofs is None or roofs.bytes_per_s <= 0:
            return None
        return Share(self.rate.value / roofs.bytes_per_s, self.rate.error / roofs.bytes_per_s)

    def figures(self) -> Iterator[Evidence]:
        parts = []
        if self.sm is not None:
            parts.append(f"SMs active {self.sm}")
        if self.tensor is not None:
            parts.append(f"tensor cores {self.tensor}")
        if self.dram is not None:
            rate = f" ({byte_rate(self.rate.value)})" if self.rate is not None else ""
            parts.append(f"DRAM {self.dram}{rate}")
        if not parts:
            return
        heard = [
            f
            for f in (
                self.counters.sm_active,
                self.counters.tensor_active,
                self.counters.dram_active,
                self.counters.dram_bytes_per_s,
            )
            if f is not None and f.sure is not None
        ]
        windows = count(max(f.windows for f in heard), "window")
        source = heard[0].source
        yield Evidence(
            sentence(f"counters ({source}, {windows}): {joined(parts)}"), Provenance.MEASURED
        )
        needs = []
        if self.needs_tensor is not None and self.tensor is not None:
            needs.append(
                f"the FLOPs keep the tensor cores active for {self.needs_tensor} of the time"
            )
        if self.needs_dram is not None and self.dram is not None:
            assert self.claim.moved_bytes is not None
            rate = byte_rate(self.claim.moved_bytes / self.claim.time_s)
            needs.append(f"the bytes take {self.needs_dram} of the bandwidth ({rate})")
        if needs:
            yield Evidence(sentence(f"by the model {joined(needs)}"), Provenance.MODELLED)

    def by_tensor_kernels(self) -> str:
        """How much of the busy time kernels use the tensor cores, as the end of a sentence; empty if not known."""
        kernels = self.kernels
        if kernels is None or kernels.tensor_core_share is None:
            return ""
        return f"; by their names, kernels with {percent(kernels.tensor_core_share)} of the busy time use tensor cores"

    def by_moving_kernels(self) -> str:
        """How much of it kernels take whose bytes are not counted, likewise."""
        kernels = self.kernels
        if kernels is None or kernels.on_cpu:
            return ""
        share = sum(each.share for each in kernels.classes if each.kernel_class in _MOVING)
        return f"; copies, element-wise kernels and the like take {percent(share)} of the busy time"

    def _clock_ratio(self) -> float | None:
        """The median SM clock over that of the peak."""
        roofs = self.claim.ceilings
        clock = None if self.state is None else self.state.sm_clock_hz
        if roofs is None or not roofs.clock_hz or clock is None or clock.median <= 0:
            return None
        return clock.median / roofs.clock_hz

    def _needed_tensor(self) -> Share | None:
        """Share of the cycles in which the FLOPs keep the tensor cores busy: at the peak, of each cycle."""
        claim, roofs = self.claim, self.claim.ceilings
        if claim.flops is None or roofs is None or roofs.flops_per_s <= 0 or claim.time_s <= 0:
            return None
        if not _on_tensor_cores(roofs.dtype):
            return None
        share = claim.flops / claim.time_s / roofs.flops_per_s / (self.clock_ratio or 1.0)
        return _modelled(share, exact=roofs.source != "measured" and self.clock_ratio is not None)

    def _needed_dram(self) -> Share | None:
        """Share of the bandwidth that the bytes take."""
        claim, roofs = self.claim, self.claim.ceilings
        if claim.moved_bytes is None or roofs is None or claim.time_s <= 0:
            return None
        if roofs.bytes_per_s <= 0:
            return None
        share = claim.moved_bytes / claim.time_s / roofs.bytes_per_s
        # Rates compare as they are; a share of the interface is not one of a roof that a kernel reached.
        return _modelled(share, exact=self.rate is not None or roofs.source != "measured")


def _sure(figure: CounterFigure | None) -> Share | None:
    if figure is None or figure.sure is None:
        return None
    return Share(figure.sure, figure.error or 0.0)


def _modelled(share: float, *, exact: bool) -> Share:
    """A modelled share with the error of counts and roofs."""
    of_it = thresholds.MODEL_ERROR if exact else thresholds.MODEL_ERROR_ROOF
    return Share(share, max(share * of_it.value, thresholds.WITNESS_POINTS.value))


def _on_tensor_cores(dtype: str) -> bool:
    """Whether matmuls in the dtype always run on tensor cores; of float32 a switch of the process decides."""
    return dtype in ("bfloat16", "float16", "int8") or dtype.startswith("float8")
