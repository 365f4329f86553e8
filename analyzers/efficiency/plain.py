"""A plain roofline: what is known of a device to which nothing was fitted, a CPU above all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from phaseprof.analyzers.efficiency.attention import moved_bytes
from phaseprof.analyzers.efficiency.formulas import joined
from phaseprof.analyzers.efficiency.parameters import Spread
from phaseprof.analyzers.roofline import DTYPE_BYTES
from phaseprof.work.count import Reach
from phaseprof.work.ops import AttentionShape, GemmShape

#: Computing and memory overlap, but not on the ridge itself.
_OVERLAP = 4.0
#: Nothing says how near to its roofs a device comes that was not measured: from the roofline to four times it.
UNKNOWN = Spread(low=0.9, high=4.0, median_error=0.0, points=0)


@dataclass(frozen=True, slots=True)
class Plain:
    """The roofs, and how far from them the device was measured to be.

    Attributes:
        flops_per_s: Peak by dtype, as torch spells it.
        dtype: Whose peak serves for dtypes that are not in it.
        bytes_per_s: Bandwidth.
        compute_factor, memory_factor: By which its roof is missed; 1 where nothing was measured.
        fixed_s: Cost of a call.
        spread: 90 % interval.
    """

    flops_per_s: Mapping[str, float]
    dtype: str
    bytes_per_s: float
    compute_factor: float = 1.0
    memory_factor: float = 1.0
    fixed_s: float = 0.0
    spread: Spread = UNKNOWN

    def gemm_s(self, shape: GemmShape, dtype: str) -> float:
        """Seconds of a product."""
        size = DTYPE_BYTES.get(dtype, 2)
        moved = shape.weight_bytes + shape.m * (shape.n + shape.k) * size
        return self._seconds(shape.flops, moved * shape.groups, dtype)

    def attention_s(self, shape: AttentionShape, dtype: str) -> float:
        """Seconds of one layer's attention, by its exact pairs."""
        reach = Reach(shape.window_tokens, None, shape.causal)
        pairs = sum(reach.pairs(row.past, row.query) * row.sequences for row in shape.rows)
        heads = shape.qk_head_dim + shape.v_head_dim
        return self._seconds(2 * heads * shape.query_heads * pairs, moved_bytes(shape), dtype)

    def streaming_s(self, moved: float) -> float:
        """Seconds of a call that hardly computes."""
        return self.fixed_s + moved / self.bytes_per_s * self.memory_factor

    def adapted(self, compute: float, memory: float, fixed_s: float | None) -> Plain:
        """With the factors multiplied, and another fixed cost where one is given."""
        return replace(
            self,
            compute_factor=self.compute_factor * compute,
            memory_factor=self.memory_factor * memory,
            fixed_s=self.fixed_s if fixed_s is None else fixed_s,
        )

    def _seconds(self, flops: float, moved: float, dtype: str) -> float:
        peak = self.flops_per_s.get(dtype, self.flops_per_s[self.dtype])
        compute_s = flops / peak * self.compute_factor
        memory_s = moved / self.bytes_per_s * self.memory_factor
        return joined(compute_s, memory_s, _OVERLAP) + self.fixed_s
