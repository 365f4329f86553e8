"""A sweep over sizes of prompt, output and batch: where batching stops helping, and what prefill does. Pure.

The time of a decode step of b sequences is fitted by ``a + m b``, over the medians of the cells of one length, with
the least sum of squares of relative errors; without the smallest batch, where only that is off the line. Throughput
is then ``b / (a + m b)``: in proportion to the batch as long as m b is small against a, at most 1 / m. The two
asymptotes b / a and 1 / m meet at the knee, b = a / m, where what the sequences add has grown to the fixed cost, and
throughput is half of the most that it can be. Where the line misses the cells, the knee is found without it
(`halfway`). The interval of the knee is that of resampled repeats (`resample`).

Prefill is treated alike, with the tokens of the passes that compute the prompts of a call in the place of the batch;
where FLOPs are known, each size counts as the tokens that its FLOPs would be at the shortest prompt, so that the square
in attention does not look like a cost of its own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from phaseprof.analyzers.passes import Primary
from phaseprof.analyzers.phases import Basis
from phaseprof.analyzers.results import Bound
from phaseprof.analyzers.sweeping.sweep_cells import MeasuredCell, cell_figures, measure_cells
from phaseprof.analyzers.sweeping.sweep_outliers import outliers
from phaseprof.analyzers.sweeping.sweep_results import (
    CellFigures,
    DecodeRoofs,
    DecodeSeries,
    Knee,
    Place,
    PrefillSeries,
    Sweep,
    Turn,
)
from phaseprof.analyzers.sweeping.sweep_roofs import decode_roofs, prefill_ridge
from phaseprof.analyzers.sweeping.sweep_stats import LEAST_SIZES, Line, fit, halfway, resample
from phaseprof.analyzers.sweeping.sweep_words import conclude, lacking
from phaseprof.trace.reader import Trace

#: A line that misses a cell by more describes the cells no more.
_MISFIT = 0.15
#: The ends of an interval that is so wide say nothing.
_OPEN = 3.0


def analyze_sweep(trace: Trace, primary: Primary, basis: Basis) -> Sweep | None:
    """The sweep of a trace; None if `phaseprof profile` has not run several sizes.

    Args:
        trace: With the passes of several ranks counted once.
        primary: The model that the report is about.
        basis: What its passes are held against.
    """
    if trace.calls.num_rows == 0:
        return None
    cells = measure_cells(trace.calls, trace.passes, trace.requests, trace.kernels, primary, basis)
    workload = [meta.workload for meta in trace.metas if meta.workload]
    if max(map(_planned_cells, workload), default=1) < 2 or not cells:
        return None
    repeats = max((_number(facts.get("repeats")) for facts in workload), default=0)
    figures = _with_gains([cell_figures(cell, repeats) for cell in cells])
    decode = tuple(_decode(cells, figures, basis))
    prefill = _prefill(cells, figures, basis)
    return Sweep(
        cells=figures,
        decode=decode,
        prefill=prefill,
        outliers=outliers(cells, trace.samples),
        conclusion=conclude(decode, prefill, figures),
        missing=tuple(lacking(figures, decode, prefill, workload[0])),
    )


def _planned_cells(facts: Mapping[str, object]) -> int:
    """The combinations that a run was to have."""
    return math.prod(
        len(sizes) if isinstance(sizes := facts.get(name), list | tuple) else 1
        for name in ("prompt_tokens", "new_tokens", "batch")
    )


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _with_gains(cells: Sequence[CellFigures]) -> tuple[CellFigures, ...]:
    """The cells, with the gain of each over the smallest batch of its length that has decoded."""
    smallest: dict[tuple[int, int], tuple[int, float]] = {}
    gained = []
    for cell in cells:
        if (phase := cell.decode) is not None:
            batch, rate = smallest.setdefault(
                (cell.prompt_tokens, cell.new_tokens), (cell.batch, phase.tokens_per_s)
            )
            gain, even = phase.tokens_per_s / rate, cell.batch / batch
            cell = replace(cell, decode=replace(phase, gain=gain, even_gain=even))
        gained.append(cell)
    return tuple(gained)


# --- decode ---------------------------------------------------------------------------------------


def _decode(
    cells: Sequence[MeasuredCell], figures: Sequence[CellFigures], basis: Basis
) -> Iterator[DecodeSeries]:
    pairs = [pair for pair in zip(cells, figures, strict=True) if pair[1].decode is not None]
    for (prompt, new), group in groupby(pairs, lambda pair: pair[0].size[:2]):
        series = list(group)
        phases = [figure.decode for _, figure in series if figure.decode is not None]
        batches = [cell.size.batch for cell, _ in series]
        repeats = [
            [step for each in cell.repeats if (step := each.step_ms) is not None]
            for cell, _ in series
        ]
        yield DecodeSeries(
            prompt_tokens=prompt,
            new_tokens=new,
            batches=tuple(batches),
            knee=knee_of(batches, repeats),
            roofs=_roofs(basis, prompt, new),
            bounds=tuple(phase.bound for phase in phases),
            turns=_turns(batches, [phase.bound for phase in phases]),
            gain=phases[-1].tokens_per_s / phases[0].tokens_per_s,
            slowdown=phases[-1].time_ms.median / phases[0].time_ms.median,
        )


def _roofs(basis: Basis, prompt: int, new: int) -> DecodeRoofs | None:
    if basis.cost is None or basis.ceilings is None:
        return None
    # The steps of an output have from `prompt` to `prompt + new - 2` tokens before them.
    return decode_roofs(basis.cost, basis.ceilings, prompt + max(new - 2, 0) // 2)


def _turns(sizes: Sequence[int], bounds: Sequence[Bound]) -> tuple[Turn, ...]:
    # Of several cells of one size the first, whose prompts are shorter.
    first: dict[int, Bound] = {}
    for size, bound in zip(sizes, bounds, strict=True):
        first.setdefault(size, bound)
    cells = first.items()
    return tuple(
        Turn(before, after, low, high)
        for (low, before), (high, after) in pairwise(cells)
        if before is not after
    )


# --- prefill --------------------------------------------------------------------------------------


def _prefill(
    cells: Sequence[MeasuredCell], figures: Sequence[CellFigures], basis: Basis
) -> PrefillSeries | None:
    # Outputs of several lengths have the same prompts.
    repeats: dict[tuple[int, int], list[float]] = {}
    known: dict[tuple[int, int], CellFigures] = {}
    for cell, figure in zip(cells, figures, strict=True):
        if figure.prefill is not None:
            key = (cell.size.batch * cell.size.prompt_tokens, cell.size.prompt_tokens)
            times = [ms for each in cell.repeats if (ms := each.prefill_ms) is not None]
            repeats.setdefault(key, []).extend(times)
            known.setdefault(key, figure)
    if not known:
        return None
    order = sorted(known)
    phases = [phase for key in order if (phase := known[key].prefill) is not None]
    medians = [statistics.median(repeats[key]) for key in order]
    rates = [tokens / ms * 1e3 for (tokens, _), ms in zip(order, medians, strict=True)]
    best = max(range(len(order)), key=rates.__getitem__)
    flops = [phase.flops for phase in phases]
    each_flops = flops[0] / order[0][0] if flops[0] is not None else None
    sizes = [
        float(tokens) if amount is None or not each_flops else amount / each_flops
        for (tokens, _), amount in zip(order, flops, strict=True)
    ]
    knee = knee_of(sizes, [repeats[key] for key in order])
    rate = None
    if knee is not None and knee.by_line and knee.each_ms > 0 and each_flops:
        rate = each_flops / knee.each_ms * 1e3
    ridge = None
    if basis.cost is not None and basis.ceilings is not None:
        ridge = prefill_ridge(basis.cost, basis.ceilings)
    return PrefillSeries(
        tokens=tuple(tokens for tokens, _ in order),
        knee=knee,
        ridge=ridge,
        turns=_turns([tokens for tokens, _ in order], [phase.bound for phase in phases]),
        best_tokens_per_s=rates[best],
        best_tokens=order[best][0],
        rate_flops=rate,
    )


# --- the knee -------------------------------------------------------------------------------------


def knee_of(sizes: Sequence[float], repeats: Sequence[Sequence[float]]) -> Knee | None:
    """Where the time of a pass turns from its fixed cost to the cost of what is added.

    Args:
        sizes: Batches or tokens.
        repeats: The times of the repeats at each size, in ms.

    Returns:
        None for fewer than three different sizes.
    """
    merged: dict[float, list[float]] = {}
    for size, times in zip(sizes, repeats, strict=True):
        merged.setdefault(size, []).extend(times)
    order = sorted(merged)
    if len(order) < LEAST_SIZES:
        return None
    cells = [merged[size] for size in order]
    medians = [statistics.median(cell) for cell in cells]
    line, begin = _line(order, medians)
    by_line = line.misfit <= _MISFIT

    def find(values: list[float]) -> float:
        return fit(order[begin:], values[begin:]).knee if by_line else halfway(order, values)

    at = find(medians)
    # One repeat says nothing of how sure it is.
    told = min(map(len, cells)) > 1
    low, high = resample(cells, find) if told else (math.inf, math.inf)
    return Knee(
        place=_place(at, low, high, order) if told else Place.OPEN,
        at=at if math.isfinite(at) else None,
        low=low if math.isfinite(low) else None,
        high=high if math.isfinite(high) else None,
        fixed_ms=max(line.fixed, 0.0),
        each_ms=_each(line),
        misfit=line.misfit,
        by_line=by_line,
        begin=order[begin],
        aside=medians[0] / (line.fixed + line.each * order[0]) - 1 if begin else None,
    )


def _line(sizes: Sequence[float], values: Sequence[float]) -> tuple[Line, int]:
    """The line through all sizes; where it misses one, that through all but the smallest, if that misses none: a pass
    of one row has kernels of its own (products of a matrix and a vector), which are no measure for the others.

    Returns:
        The line, and where the sizes begin that it goes through.
    """
    whole = fit(sizes, values)
    if whole.misfit > _MISFIT and len(sizes) > LEAST_SIZES:
        rest = fit(sizes[1:], values[1:])
        if rest.misfit <= _MISFIT:
            return rest, 1
    return whole, 0


def _each(line: Line) -> float:
    return max(line.each, 0.0)


def _place(at: float, low: float, high: float, sizes: Sequence[float]) -> Place:
    """Where a knee lies, as far as its interval tells."""
    if low > sizes[-1]:
        return Place.BEYOND if math.isfinite(at) else Place.NOWHERE
    if high <= sizes[0]:
        return Place.BELOW
    if high > _OPEN * max(low, sizes[0]):
        return Place.OPEN
    if at > sizes[-1]:
        return Place.BEYOND
    return Place.BELOW if at <= sizes[0] else Place.INSIDE
