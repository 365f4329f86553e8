"""Products of matrices and attention apart: the work and the time of each in the profiled passes of a phase.

The FLOPs of a pass are those of its matrices (per token, and the output head per position that needs logits) and what
attention takes. The bytes of the weights belong to the matrices, those of keys and values that are read to attention.
Their time is that of the kernels of the two classes in the same passes. Models with routed experts, states, a source or
an encoder of their own have no such simple halves and are left out, as are passes of which a figure is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, int_column, named, names, scalar, total
from phaseprof.analyzers.kernels.kernel_results import KernelClass
from phaseprof.analyzers.results import PhaseFigures
from phaseprof.phases import Phase
from phaseprof.work.cost import ModelCost

_I64 = pa.int64()
_NEEDED = (
    *("flops", "weight_bytes", "kv_read_bytes", "padding_tokens", "logits_tokens"),
    *("prefill_tokens", "decode_tokens"),
)
#: Ranks and passes are put into one number: a pass has fewer than this.
_PASSES = 2**40


@dataclass(frozen=True, slots=True)
class PartOfWork:
    """One half of the work of a phase's profiled passes.

    Attributes:
        phase: Which. kernel_class: `gemm` or `attention`.
        passes: Profiled passes.
        flops, moved_bytes: Sums.
        busy_ms: Time of the kernels of that class.
        tflops: FLOPs over that time. intensity: FLOPs per byte.
    """

    phase: Phase
    kernel_class: KernelClass
    passes: int
    flops: int
    moved_bytes: int
    busy_ms: float
    tflops: float
    intensity: float


def parts_of_work(
    passes: pa.Table,
    profiled: pa.Table,
    phases: Mapping[str, PhaseFigures],
    cost: ModelCost | None,
) -> tuple[PartOfWork, ...]:
    """Both halves of each phase that has kernels.

    Args:
        passes: The `passes` table.
        profiled: `SortedPasses.profiled` of the same passes.
        phases: The figures, with their kernels.
        cost: Structure of the model.
    """
    simple = cost is not None and cost.covered and not cost.counted
    if cost is None or not simple or cost.experts or cost.states or cost.cross or cost.encoder:
        return ()
    if profiled.num_rows == 0:
        return ()
    known = _key(passes)
    return tuple(
        part
        for figures in phases.values()
        for part in _of_phase(passes, known, profiled, figures, cost)
    )


def _key(rows: pa.Table) -> pa.Array:
    rank, pass_id = int_column(rows, "rank"), int_column(rows, "pass_id")
    return pc.add(pc.multiply(rank, scalar(_PASSES, _I64)), pass_id)


def _of_phase(
    passes: pa.Table,
    known: pa.Array,
    profiled: pa.Table,
    figures: PhaseFigures,
    cost: ModelCost,
) -> Iterator[PartOfWork]:
    kernels = figures.kernels
    if kernels is None:
        return
    mine = profiled.filter(named(names(profiled, "phase"), figures.phase.value))
    rows = passes.select(_NEEDED).filter(pc.is_in(known, value_set=_key(mine)))
    sums = {name: column(rows, name) for name in _NEEDED}
    # A pass without kernels has no time to hold its work against.
    if rows.num_rows != kernels.passes or any(each.null_count for each in sums.values()):
        return
    tokens = sum(
        total(sums[name]) for name in ("prefill_tokens", "decode_tokens", "padding_tokens")
    )
    matrices = cost.linear_flops_per_token * tokens
    matrices += cost.head_flops_per_token * total(sums["logits_tokens"])
    attention = total(sums["flops"]) - matrices
    halves = (
        (KernelClass.GEMM, matrices, total(sums["weight_bytes"])),
        (KernelClass.ATTENTION, attention, total(sums["kv_read_bytes"])),
    )
    for kernel_class, flops, moved in halves:
        busy_ms = sum(e.busy_ms for e in kernels.classes if e.kernel_class is kernel_class)
        if flops > 0 and moved > 0 and busy_ms > 0:
            yield PartOfWork(
                phase=figures.phase,
                kernel_class=kernel_class,
                passes=kernels.passes,
                flops=flops,
                moved_bytes=moved,
                busy_ms=busy_ms,
                tflops=flops / busy_ms / 1e9,
                intensity=flops / moved,
            )
