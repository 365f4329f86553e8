"""The figures of each phase: tokens, time, work, rates, and what bounds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.bound import Question
from phaseprof.analyzers.columns import nearest_ranks
from phaseprof.analyzers.kernels.breakdown import Breakdown, breakdown
from phaseprof.analyzers.kernels.busy import busy_per_pass
from phaseprof.analyzers.kernels.kernel_results import KernelFigures
from phaseprof.analyzers.passes import Group, SortedPasses, phase_named
from phaseprof.analyzers.remedies import Circumstances
from phaseprof.analyzers.results import PhaseFigures
from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings
from phaseprof.work.cost import ModelCost


@dataclass(frozen=True, slots=True)
class Basis:
    """What the figures of a phase are held against.

    Attributes:
        cost: Structure of the model; None if not known.
        ceilings: Roofs for the model's device and dtype; None if not known.
        other_roofs: Roofs of the device for other dtypes.
        device_kind: ``cpu`` or ``cuda``; empty if not recorded.
        no_work: Why FLOPs and bytes are not known.
        no_roofs: Why no roof is known.
    """

    cost: ModelCost | None = None
    ceilings: Ceilings | None = None
    other_roofs: tuple[Ceilings, ...] = ()
    device_kind: str = ""
    no_work: str = ""
    no_roofs: str = ""


@dataclass(frozen=True, slots=True)
class Busy:
    """How long the device worked in profiled passes of one kind, and how long these took."""

    passes: int = 0
    busy_ns: int = 0
    span_ns: int = 0

    def __add__(self, other: Busy) -> Busy:
        return Busy(
            self.passes + other.passes, self.busy_ns + other.busy_ns, self.span_ns + other.span_ns
        )

    @property
    def share(self) -> float | None:
        """Busy over span; None without profiled passes."""
        return self.busy_ns / self.span_ns if self.span_ns else None


def phase_figures(
    sorted_passes: SortedPasses,
    kernels: pa.Table,
    basis: Basis,
    found: Breakdown | None = None,
) -> tuple[dict[str, PhaseFigures], dict[int, dict[str, PhaseFigures]]]:
    """The steady-state figures by phase, and by number of sequences where one phase ran with several.

    Args:
        sorted_passes: The passes of the primary model.
        kernels: The `kernels` table.
        basis: Cost and roofs.
        found: The kernels of its profiled passes, where that is known already.

    Returns:
        Figures by phase value, and figures by batch and phase value (empty for one batch). Shares are of the time of
        all phases, and of all phases of the batch.
    """
    busy = _busy(sorted_passes.profiled, kernels, basis.device_kind)
    found = found or breakdown(sorted_passes.profiled, kernels, basis.device_kind)
    steady, cold = sorted_passes.steady, sorted_passes.cold
    by_phase: dict[Phase, Group] = {}
    busy_by_phase: dict[Phase, Busy] = {}
    for (phase, _), group in steady.items():
        by_phase[phase] = by_phase.get(phase, Group()) + group
    for (phase, _), seen in busy.items():
        busy_by_phase[phase] = busy_by_phase.get(phase, Busy()) + seen
    whole_ns = sum(group.span_ns for group in by_phase.values())
    phases = {
        phase.value: _figures(
            phase,
            by_phase[phase],
            whole_ns,
            busy_by_phase.get(phase, Busy()),
            cold.get(phase, 0),
            basis,
            None if found is None else found.figures(phase),
        )
        for phase in Phase
        if phase in by_phase
    }
    if len(steady) == len(by_phase):
        return phases, {}
    by_batch: dict[int, dict[str, PhaseFigures]] = {}
    for batch in sorted({n for _, n in steady}):
        of_batch = {phase: group for (phase, n), group in steady.items() if n == batch}
        batch_ns = sum(group.span_ns for group in of_batch.values())
        by_batch[batch] = {
            phase.value: _figures(
                phase,
                of_batch[phase],
                batch_ns,
                busy.get((phase, batch), Busy()),
                0,
                basis,
                None if found is None else found.figures(phase, batch),
            )
            for phase in Phase
            if phase in of_batch
        }
    return phases, by_batch


def _figures(
    phase: Phase,
    group: Group,
    whole_ns: int,
    busy: Busy,
    cold: int,
    basis: Basis,
    kernels: KernelFigures | None,
) -> PhaseFigures:
    seconds = group.span_ns / 1e9
    known_s = group.known_span_ns / 1e9
    known = group.flops_known > 0 and known_s > 0
    flops = group.flops if known else None
    moved = group.moved_bytes if known else None
    roofs = basis.ceilings
    spans_ms = [
        ns / 1e6 for ns in nearest_ranks(pa.chunked_array(group.spans_ns), 0.50, 0.90, 0.99)
    ]
    tokens = group.prefill_tokens + group.decode_tokens
    weight_share = group.weight_bytes / moved if moved else None
    attention_share = _attention_flop_share(group, basis.cost)
    busy_share = None if busy.share is None else min(busy.share, 1.0)
    question = Question(
        time_s=known_s if known else seconds,
        flops=flops,
        bytes=moved,
        ceilings=roofs,
        busy_share=busy_share,
        phase=phase,
        exposed_comm_share=_exposed_comm_share(kernels),
        circumstances=Circumstances(
            passes=group.flops_known if known else group.passes,
            cold_passes=cold,
            profiled_passes=busy.passes or None,
            pass_spread=_spread(group),
            known_share=group.known_span_ns / group.span_ns if known and group.span_ns else 1.0,
            sequences_per_pass=group.sequences / group.passes,
            tokens_per_pass=tokens / group.passes,
            weight_byte_share=weight_share,
            attention_flop_share=attention_share,
            recomputed_share=group.recomputed_tokens / tokens if tokens else 0.0,
            device_kind=basis.device_kind,
            kernels=kernels,
            other_roofs=basis.other_roofs,
            no_work=basis.no_work,
            no_roofs=basis.no_roofs,
        ),
    )
    verdict = question.answer()
    # Roofs that cannot be divided by are no roofs; `classify` has said so.
    usable = roofs is not None and verdict.explained is not None
    return PhaseFigures(
        phase=phase,
        passes=group.passes,
        sequences_per_pass=group.sequences / group.passes,
        prefill_tokens=group.prefill_tokens,
        decode_tokens=group.decode_tokens,
        padding_tokens=group.padding_tokens if group.padding_tokens_known == group.passes else None,
        recomputed_tokens=group.recomputed_tokens,
        cached_tokens=group.cached_tokens,
        tokens=tokens,
        span_ms=group.span_ns / 1e6,
        pass_ms_p50=spans_ms[0],
        pass_ms_p90=spans_ms[1],
        pass_ms_p99=spans_ms[2],
        between_ms=group.gap_ns / 1e6 if group.gap_ns_known else None,
        busy_ms=None if busy_share is None else busy_share * group.span_ns / 1e6,
        share=group.span_ns / whole_ns if whole_ns else 0.0,
        prompt_tokens_per_s=_rate(group.prefill_tokens, seconds),
        output_tokens_per_s=_rate(group.decode_tokens, seconds),
        flops=flops,
        weight_bytes=group.weight_bytes if known else None,
        kv_read_bytes=group.kv_read_bytes if known else None,
        kv_write_bytes=group.kv_write_bytes if known else None,
        tflops=None if flops is None else flops / known_s / 1e12,
        gb_per_s=None if moved is None else moved / known_s / 1e9,
        intensity=flops / moved if flops is not None and moved else None,
        mfu=flops / known_s / roofs.flops_per_s if usable and roofs and flops is not None else None,
        mbu=moved / known_s / roofs.bytes_per_s if usable and roofs and moved is not None else None,
        weight_byte_share=weight_share,
        attention_flop_share=attention_share,
        verdict=verdict,
        question=question,
        kernels=kernels,
    )


def _exposed_comm_share(kernels: KernelFigures | None) -> float | None:
    """The share for the verdict; None where no collective ran: on one device there is nothing to say about them."""
    if kernels is None or not kernels.collective_ms:
        return None
    return kernels.exposed_comm_share


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens and seconds else None


def _spread(group: Group) -> float | None:
    """90th percentile over median of the passes' time, each over its own roof time."""
    values = pa.chunked_array(group.slowness)
    if len(values) - values.null_count < 2:
        return None
    median, slow = nearest_ranks(values, 0.50, 0.90)
    return slow / median if median else None


def _attention_flop_share(group: Group, cost: ModelCost | None) -> float | None:
    """What is left of the FLOPs when the matrices and the head are taken off; None if a part is not known."""
    known = (group.flops_known, group.logits_tokens_known, group.padding_tokens_known)
    complete = all(passes == group.passes for passes in known)
    if cost is None or not cost.covered or not complete or not group.flops:
        return None
    computed_tokens = group.prefill_tokens + group.decode_tokens + group.padding_tokens
    matrices = (
        cost.linear_flops_per_token * computed_tokens
        + cost.head_flops_per_token * group.logits_tokens
    )
    return min(max(1 - matrices / group.flops, 0.0), 1.0)


def _busy(
    profiled: pa.Table, kernels: pa.Table, device_kind: str
) -> Mapping[tuple[Phase, int], Busy]:
    """Busy time of profiled passes that have kernels, by phase and number of sequences."""
    if profiled.num_rows == 0 or kernels.num_rows == 0:
        return {}
    per_pass = busy_per_pass(kernels, device_kind=device_kind)
    joined = profiled.join(per_pass, keys=["rank", "pass_id"], join_type="inner")
    # Without device events a pass has the time of its call, which may return long before its kernels have run.
    span = pc.max_element_wise(joined["span_ns"], joined["extent_ns"])
    joined = joined.set_column(joined.schema.get_field_index("span_ns"), "span_ns", span)
    rows = joined.group_by(["phase", "sequences"]).aggregate(
        [([], "count_all"), ("busy_ns", "sum"), ("span_ns", "sum")]
    )
    busy: dict[tuple[Phase, int], Busy] = {}
    for row in rows.to_pylist():
        key = (phase_named(row["phase"]), row["sequences"])
        seen = Busy(row["count_all"], row["busy_ns_sum"], row["span_ns_sum"])
        busy[key] = busy.get(key, Busy()) + seen
    return busy
