"""The ranks of a trace: which of them share every pass, the figures of each, and how far apart they are.

Ranks over which the layers of a model are split make each pass together. It is in the trace once for each of them and
happened once: tokens, requests and time are then taken from one rank of each such group, its leader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, int_column
from phaseprof.analyzers.passes import Primary, sort_passes
from phaseprof.analyzers.phases import Basis, phase_figures
from phaseprof.analyzers.results import Parallelism, PhaseFigures, RankFigures, RanksReport, Skew
from phaseprof.analyzers.skew import Steps, measure_skew, steps_by_rank
from phaseprof.errors import NotMeasured
from phaseprof.phases import Phase
from phaseprof.trace.columns import to_column
from phaseprof.trace.meta import ProcessMeta
from phaseprof.trace.reader import Trace


def groups_of(trace: Trace, model_id: str) -> tuple[tuple[int, ...], ...]:
    """The ranks that have passes, those that make each pass together in one group, its leader first.

    The leader is the one with the most passes: of ranks that were killed the one that came furthest.
    """
    counts = {
        row["values"]: row["counts"]
        for row in pc.value_counts(int_column(trace.passes, "rank")).to_pylist()
    }
    groups: list[tuple[int, ...]] = []
    for rank in sorted(counts):
        if any(rank in group for group in groups):
            continue
        together = {rank, *_tensor_ranks(trace.metas, rank, model_id)} & set(counts)
        groups.append(tuple(sorted(together, key=lambda each: (-counts[each], each))))
    return tuple(groups)


def _tensor_ranks(metas: Sequence[ProcessMeta], rank: int, model_id: str) -> tuple[int, ...]:
    for meta in metas:
        for model in meta.models:
            if meta.rank == rank and model.model_id == model_id and model.tensor_ranks:
                return model.tensor_ranks
    return ()


def counted_once(trace: Trace, groups: Sequence[Sequence[int]]) -> Trace:
    """The trace with the rows of the leaders alone; the trace itself if each rank is one."""
    if all(len(group) == 1 for group in groups):
        return trace
    leaders = [group[0] for group in groups]
    # An engine's core has the requests alone, beside the first of its workers.
    asked = set(int_column(trace.requests, "rank").unique().to_pylist())
    serving = [next((rank for rank in group if rank in asked), group[0]) for group in groups]
    tables = {
        name: rows.filter(
            pc.is_in(int_column(rows, "rank"), value_set=to_column(ranks, pa.int64()))
        )
        for name, rows, ranks in (
            ("passes", trace.passes, leaders),
            ("requests", trace.requests, serving),
            ("kernels", trace.kernels, leaders),
        )
    }
    return replace(trace, **tables)


def analyze_ranks(
    trace: Trace, primary: Primary, groups: Sequence[Sequence[int]]
) -> RanksReport | None:
    """The figures of each rank and the skew between them; None for a trace of one rank.

    Args:
        trace: The trace, with the rows of all ranks.
        primary: The model that the report is about.
        groups: As `groups_of` gives them.
    """
    ranks = sorted(rank for group in groups for rank in group)
    if len(ranks) < 2:
        return None
    figures = {rank: _figures(trace, primary, rank) for rank in ranks}
    steps = steps_by_rank(trace.passes, trace.metas, primary)
    leaders = [figures[group[0]] for group in groups]
    return RanksReport(
        ranks=tuple(figures.values()),
        groups=tuple(tuple(sorted(group)) for group in groups),
        leaders=tuple(group[0] for group in groups),
        world_size=max((meta.world_size or 0 for meta in trace.metas), default=0) or None,
        missing=_missing(trace.metas, ranks),
        hosts=tuple(dict.fromkeys(each.host for each in figures.values() if each.host)),
        output_tokens_per_s=_sum([each.output_tokens_per_s for each in leaders]),
        skews=tuple(_skews(groups, steps)),
    )


def _skews(groups: Sequence[Sequence[int]], steps: dict[int, Steps]) -> Iterator[Skew]:
    """Within each group, and between the groups."""
    for group in groups:
        members = [steps[rank] for rank in sorted(group) if rank in steps]
        if len(group) > 1 and len(members) == len(group):
            skew = measure_skew(Parallelism.TENSOR, members)
            if skew is not None:
                yield skew
    leaders = [steps[group[0]] for group in groups if group[0] in steps]
    if len(groups) > 1 and len(leaders) == len(groups):
        skew = measure_skew(Parallelism.DATA, leaders)
        if skew is not None:
            yield skew


def _figures(trace: Trace, primary: Primary, rank: int) -> RankFigures:
    number = to_column([rank], pa.int64())[0]
    passes = trace.passes.filter(pc.equal(int_column(trace.passes, "rank"), number))
    kernels = trace.kernels.filter(pc.equal(int_column(trace.kernels, "rank"), number))
    phases, _ = phase_figures(sort_passes(passes, primary, None), kernels, Basis())
    metas = sorted(
        (meta for meta in trace.metas if meta.rank == rank and meta.models),
        key=lambda meta: meta.started_ns,
    )
    all_phases = list(phases.values())
    span_ms = sum(each.span_ms for each in all_phases)
    between_ms = _sum([each.between_ms for each in all_phases])
    decode_tokens = sum(each.decode_tokens for each in all_phases)
    whole_s = (span_ms + (between_ms or 0.0)) / 1e3
    host = metas[-1].host if metas else None
    return RankFigures(
        rank=rank,
        host="" if host is None else host.name,
        processes=len(metas),
        restarts=max((meta.restart or 0 for meta in metas), default=0),
        ended=bool(metas) and metas[-1].complete,
        passes=sum(each.passes for each in all_phases),
        tokens=sum(each.tokens for each in all_phases),
        span_ms=span_ms,
        between_ms=between_ms,
        busy_ms=_busy_ms(all_phases),
        prefill_ms_p50=_median(phases, Phase.PREFILL),
        decode_ms_p50=_median(phases, Phase.DECODE),
        output_tokens_per_s=decode_tokens / whole_s if decode_tokens and whole_s else None,
        clock_drift_ms=_drift_ms(metas),
        exposed_comm_share=_exposed_comm_share(all_phases),
    )


def _exposed_comm_share(phases: Sequence[PhaseFigures]) -> float | None:
    """Over the profiled passes of all phases; None if no collective ran in them."""
    found = [each.kernels for each in phases if each.kernels is not None]
    span_ms = sum(each.span_ms for each in found)
    if not span_ms or not any(each.collective_ms for each in found):
        return None
    return min(sum(each.exposed_collective_ms for each in found) / span_ms, 1.0)


def _median(phases: dict[str, PhaseFigures], phase: Phase) -> float | None:
    figures = phases.get(phase.value)
    return None if figures is None else figures.pass_ms_p50


def _busy_ms(phases: Sequence[PhaseFigures]) -> float | None:
    """Of all phases, or of none: a part of them would read as idle time."""
    busy = [each.busy_ms for each in phases]
    return None if not busy or None in busy else _sum(busy)


def _sum(values: Sequence[float | None]) -> float | None:
    """The sum of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _drift_ms(metas: Sequence[ProcessMeta]) -> float | None:
    """How far the Unix clock moved against the monotonic one from the begin to the end of the rank's last process."""
    if not metas or len(metas[-1].clock) < 2:
        return None
    first, last = metas[-1].clock[0], metas[-1].clock[-1]
    return ((last.unix_ns - first.unix_ns) - (last.monotonic_ns - first.monotonic_ns)) / 1e6


def _missing(metas: Sequence[ProcessMeta], ranks: Sequence[int]) -> tuple[int, ...]:
    world_size = max((meta.world_size or 0 for meta in metas), default=0)
    return tuple(rank for rank in range(world_size) if rank not in set(ranks))


def not_measured(trace: Trace, ranks: RanksReport | None) -> Iterator[NotMeasured]:
    """What is missing of the ranks: those without a pass, and times between hosts."""
    present = (
        [each.rank for each in ranks.ranks]
        if ranks is not None
        else column(trace.passes, "rank").unique().to_pylist()
    )
    world_size = max((meta.world_size or 0 for meta in trace.metas), default=0)
    missing = _missing(trace.metas, present)
    if missing:
        yield NotMeasured(
            f"{_named(missing)} of {world_size}",
            "no pass of theirs is in the trace: they made none, were killed before their first, or do not run under "
            "phaseprof"
            if len(missing) > 1
            else "no pass of it is in the trace: it made none, was killed before its first, or does not run under "
            "phaseprof",
        )
    if ranks is None:
        return
    if any(skew.start_ms is None for skew in ranks.skews):
        where = " and ".join(ranks.hosts) if 1 < len(ranks.hosts) < 4 else "its hosts"
        yield NotMeasured(
            "how far apart ranks begin a step",
            f"the clocks of {where} are not known to agree, and nothing in the trace tells by how much they differ; "
            "durations are compared instead"
            if len(ranks.hosts) > 1
            else "the trace does not say that their clocks are one; durations are compared instead",
        )
    if not ranks.skews:
        yield NotMeasured(
            "skew between ranks",
            "they did not run the same sequence of steps, so that no step of one corresponds to one of another",
        )


def _named(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 1 and 3``, ``12 ranks``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 4:
        return f"{len(ranks)} ranks"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
