"""Repeats of a cell that lie far from the others, and what was odd about them. Pure."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from phaseprof.analyzers.columns import column, named, names
from phaseprof.analyzers.sweeping.sweep_cells import MeasuredCell, Repeat
from phaseprof.analyzers.sweeping.sweep_results import Oddity, Outlier
from phaseprof.analyzers.sweeping.sweep_stats import far_ones
from phaseprof.analyzers.wording import count, duration, number, percent
from phaseprof.metrics import Metric

#: A clock is lower where it has lost so much of what it is in the other repeats.
_SLOWER_CLOCK = 0.97
#: One pass, or all of them, are named where they account for so much of the excess.
_MOST = 0.5
#: Their cause lies outside of the call, if it is anywhere.
_UNEXPLAINED = (Oddity.THROUGHOUT, Oddity.SOME_PASSES)
#: A pass that took so much longer than in the other repeats is one that was slow.
_SLOW_PASS = 1.1


def outliers(cells: Sequence[MeasuredCell], samples: pa.Table) -> tuple[Outlier, ...]:
    """The repeats far from the others of their cell, the farthest first.

    Args:
        cells: With their repeats.
        samples: The `samples` table, for the clock of a GPU.
    """
    clocks = _Clocks(samples)
    found = [each for cell in cells for each in _of_cell(cell, clocks)]
    found = _with_neighbours(found, cells)
    return tuple(sorted(found, key=lambda each: -abs(each.times - 1)))


def _with_neighbours(found: Sequence[Outlier], cells: Sequence[MeasuredCell]) -> list[Outlier]:
    """Say of slow repeats without another cause that calls beside them were slow as well: then the machine was."""
    calls = sorted(
        (repeat.start_ns, (*cell.size, repeat.number)) for cell in cells for repeat in cell.repeats
    )
    place = {call: number for number, (_, call) in enumerate(calls)}
    slow = {place[_call(each)] for each in found if each.times > 1}
    told = []
    for each in found:
        here = place[_call(each)]
        if each.oddity in _UNEXPLAINED and each.times > 1 and slow & {here - 1, here + 1}:
            detail = (
                f"{each.detail}; so was the call {'before' if here - 1 in slow else 'after'} it"
            )
            each = replace(each, detail=detail)
        told.append(each)
    return told


def _call(each: Outlier) -> tuple[int, int, int, int]:
    return each.prompt_tokens, each.new_tokens, each.batch, each.repeat


def _of_cell(cell: MeasuredCell, clocks: _Clocks) -> Iterator[Outlier]:
    figures: tuple[tuple[str, Callable[[Repeat], float | None]], ...] = (
        ("decode step", lambda each: each.step_ms),
        ("prefill", lambda each: each.prefill_ms),
    )
    for figure, get in figures:
        known = [(each, value) for each in cell.repeats if (value := get(each)) is not None]
        values = [value for _, value in known]
        for place in far_ones(values):
            repeat, value = known[place]
            others = [each for each, _ in known if each is not repeat]
            oddity, detail = _why(cell, repeat, others, figure == "prefill", clocks)
            yield Outlier(
                *cell.size, repeat.number, figure, value, statistics.median(values), oddity, detail
            )


def _why(
    cell: MeasuredCell,
    repeat: Repeat,
    others: Sequence[Repeat],
    prefill: bool,
    clocks: _Clocks,
) -> tuple[Oddity, str]:
    if repeat.compiled:
        return Oddity.COMPILED, "something was compiled in it"
    if not cell.warmups and repeat.start_ns == min(each.start_ns for each in cell.repeats):
        return Oddity.FIRST, "the first of its cell, without a warm-up before it"
    here, there = clocks.of(repeat), clocks.of(*others)
    if here is not None and there is not None and here < _SLOWER_CLOCK * there:
        return (
            Oddity.THROTTLED,
            f"the SM clock was {number(here / 1e6)} MHz, {number(there / 1e6)} MHz in the others",
        )
    if prefill:
        return Oddity.THROUGHOUT, "no mark of a cause in the trace"
    return _which_steps(repeat, others)


def _which_steps(repeat: Repeat, others: Sequence[Repeat]) -> tuple[Oddity, str]:
    """Whether one step was long, or all, or some."""
    usual = statistics.median(step for each in others for step in each.steps_ms)
    steps = repeat.steps_ms
    excess = sum(steps) - usual * len(steps)
    if excess < 0:
        return Oddity.THROUGHOUT, "its steps were shorter than in the others"
    longest = max(steps)
    if len(steps) > 1 and longest - usual >= _MOST * excess:
        return (
            Oddity.ONE_PASS,
            f"one of its {count(len(steps), 'step')} took {duration(longest / 1e3)}, which is "
            f"{percent(min((longest - usual) / excess, 1.0))} of the excess",
        )
    if statistics.median(steps) - usual >= _MOST * excess / len(steps):
        return (
            Oddity.THROUGHOUT,
            "its steps were longer throughout: a lower clock, or a busy machine",
        )
    slow = sum(step > _SLOW_PASS * usual for step in steps)
    return Oddity.SOME_PASSES, f"{slow} of its {count(len(steps), 'step')} took longer"


class _Clocks:
    """The SM clock while calls ran."""

    def __init__(self, samples: pa.Table) -> None:
        rows = samples.filter(named(names(samples, "metric"), Metric.SM_CLOCK))
        columns = [column(rows, name).to_pylist() for name in ("start_ns", "end_ns", "value")]
        found = sorted(
            ((start + end) // 2, value) for start, end, value in zip(*columns, strict=True)
        )
        self._middles = [middle for middle, _ in found]
        self._values = [value for _, value in found]

    def of(self, *repeats: Repeat) -> float | None:
        """The mean over some repeats, in Hz; None if it was not sampled."""
        values: list[float] = []
        for each in repeats:
            begin = bisect_left(self._middles, each.start_ns)
            values += self._values[begin : bisect_right(self._middles, each.end_ns)]
        return statistics.fmean(values) if values else None
