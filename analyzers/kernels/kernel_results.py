"""What the kernels of a phase say: classes of kernels, and the figures of a phase by class.

Shares are fractions (0.55), never percent. On a CPU the outermost operators stand in the place of kernels.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

from phaseprof.analyzers.results import Percentiles


class KernelClass(enum.StrEnum):
    """What a kernel does. `docs/kernels.md` says what belongs to each."""

    #: Products of matrices: projections, MLP, LM head.
    GEMM = "gemm"
    #: Scores, softmax and values in one kernel, prefill or decode.
    ATTENTION = "attention"
    #: Routing, permuting and grouped products of a mixture of experts.
    MOE = "moe"
    #: RMS norm and layer norm, also fused with a residual.
    NORM = "norm"
    #: Rotary position embedding.
    ROPE = "rope"
    #: The MLP's activation and its gate.
    ACTIVATION = "activation"
    #: Anything that computes each element by itself and has no class of its own.
    ELEMENTWISE = "elementwise"
    #: Sums, means, softmax, cumulative sums.
    REDUCTION = "reduction"
    #: Writes of new keys and values into the cache, and moves of its blocks.
    KV_WRITE = "kv_write"
    #: Lookup of token embeddings.
    EMBEDDING = "embedding"
    #: Gather, scatter and fill by index.
    INDEXING = "indexing"
    #: Sort and top-k.
    SORT = "sort"
    #: From logits to a token: penalties, arg-max, random draws, checks of drafts.
    SAMPLING = "sampling"
    #: Change of number format with scales, and back.
    QUANTIZATION = "quantization"
    #: Scans of state-space models, linear attention, and their short convolutions.
    SCAN = "scan"
    #: Other convolutions and pooling: vision and audio towers.
    CONVOLUTION = "convolution"
    #: Between devices: all-reduce, all-gather, send.
    COLLECTIVE = "collective"
    #: Copies that change at most the number format: host and device, concatenations, transposes, fills.
    COPY = "copy"
    #: Views and allocations, which move no data: operators of a CPU only.
    VIEW = "view"
    #: A name that no table knows.
    OTHER = "other"


class TensorCores(enum.StrEnum):
    """Whether a kernel multiplies on tensor (matrix) cores, told by its name."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ClassShare:
    """The kernels of one class in one phase.

    Attributes:
        kernel_class: Which.
        busy_ms: Time of the device that went to them; where kernels overlap, each gets an equal part of the time, so
            that the classes add up to the busy time.
        share: busy_ms over that of all classes.
        calls: Kernels.
        tensor_cores: What holds for most of busy_ms.
        tensor_core_ms: The part of busy_ms in kernels whose name says that they use tensor cores.
        longest: Name of the kernel with the most time in the class, shortened.
        longest_share: Its part of busy_ms, 0 to 1.
    """

    kernel_class: KernelClass
    busy_ms: float
    share: float
    calls: int
    tensor_cores: TensorCores
    tensor_core_ms: float
    longest: str
    longest_share: float


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """What ran on the device in the profiled passes of one phase.

    These passes are not in the other figures of the phase: a profiler slows them. Times are sums over them.

    Attributes:
        on_cpu: Whether these are operators of a CPU, not kernels.
        passes: Profiled passes that have kernels.
        kernels: Their kernels and copies.
        span_ms: Time of these passes.
        busy_ms: Time of a device in which at least one of their kernels ran, summed over devices; time that kernels of
            two passes share is split between these.
        gap_ms: Time in which nothing ran, on any device, between the first and the last kernel of a pass.
        overlap_ms: What the kernels' durations add up to beyond busy_ms.
        classes: By time, longest first.
        tensor_core_share: Part of busy_ms in kernels that by their name use tensor cores; None on a CPU.
        tensor_core_unknown_share: Part of busy_ms in kernels whose name does not tell; None on a CPU.
        collective_ms: Time of the device that went to collectives (as `ClassShare.busy_ms`).
        exposed_collective_ms: Time in which collectives ran and nothing else on their device.
        exposed_comm_share: That over span_ms, at most 1; None if the passes took no time.
        copies: Copies between host and device or on it, that the driver made (memcpy, memset). copy_ms: Their time.
        unclassed_share: Part of busy_ms in kernels of class `other`.
        launch_delay_ms: From the launch on the host to the begin on the device; None where no launch was seen.
        graph_kernels: Kernels that were launched together with others, by one launch of a graph.
        by_word_share: Part of busy_ms whose class rests on a word in the name alone, and no known name.
    """

    on_cpu: bool
    passes: int
    kernels: int
    span_ms: float
    busy_ms: float
    gap_ms: float
    overlap_ms: float
    classes: tuple[ClassShare, ...]
    tensor_core_share: float | None
    tensor_core_unknown_share: float | None
    collective_ms: float
    exposed_collective_ms: float
    exposed_comm_share: float | None
    copies: int
    copy_ms: float
    unclassed_share: float
    launch_delay_ms: Percentiles | None
    graph_kernels: int
    by_word_share: float = 0.0

    @property
    def kernels_per_pass(self) -> float:
        """Mean number of kernels and copies that a pass launches."""
        return self.kernels / self.passes if self.passes else 0.0

    @property
    def longest(self) -> tuple[str, float] | None:
        """The kernel with the most time, by its short name, and its share of busy_ms."""
        if not self.classes:
            return None
        first = max(self.classes, key=lambda each: each.busy_ms * each.longest_share)
        return first.longest, first.share * first.longest_share

    def of(self, kernel_class: KernelClass) -> float:
        """The share of one class of busy_ms; 0 if there is none."""
        return sum(entry.share for entry in self.classes if entry.kernel_class is kernel_class)

    def rest(self, shown: Collection[KernelClass]) -> float:
        """The share of all other classes."""
        return sum(entry.share for entry in self.classes if entry.kernel_class not in shown)


@dataclass(frozen=True, slots=True)
class Unattributed:
    """Kernels of the trace that belong to no pass.

    Attributes:
        between: Kernels whose launch was seen, but outside of every pass: sampling, checks between passes. On a CPU all
            are of this sort. between_ms: Time of their devices that went to them.
        launchless: Kernels whose launch was not seen. launchless_ms: Their time.
        launchless_share: launchless_ms over the time of all kernels in the trace.
    """

    between: int
    between_ms: float
    launchless: int
    launchless_ms: float
    launchless_share: float
