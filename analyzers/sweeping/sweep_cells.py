"""The cells of a sweep: which passes belong to which call, and what the repeats of a cell took. Pure.

A pass belongs to the call in whose time its middle lies: `phaseprof profile` records when it makes each call and when
that returns, and makes one at a time. Nothing is guessed from lengths.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, groups, named, names
from phaseprof.analyzers.passes import Primary, sort_passes
from phaseprof.analyzers.phases import Basis, phase_figures
from phaseprof.analyzers.results import PhaseFigures
from phaseprof.analyzers.sweeping.sweep_results import CellFigures, Estimate, PhaseOfCell
from phaseprof.analyzers.sweeping.sweep_stats import estimate
from phaseprof.phases import Phase
from phaseprof.records import CallKind, Warmup
from phaseprof.trace.columns import to_column


class Size(NamedTuple):
    """A cell: what is asked of each call."""

    prompt_tokens: int
    new_tokens: int
    batch: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """What one counted call took.

    Attributes:
        number: Its number in its cell, from 0. start_ns, end_ns: When it ran.
        steps_ms: Decode steps of the whole batch, each from its begin to that of the next one; the last is left out,
            unless it is the only one: then it is the time of its pass.
        prefill_ms: Time of the passes that compute its prompts; None if they do not add up to them.
        ttft_ms, tpot_ms: Median over its requests.
        compiled: Something was compiled in it.
    """

    number: int
    start_ns: int
    end_ns: int
    steps_ms: tuple[float, ...]
    prefill_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    compiled: bool

    @property
    def step_ms(self) -> float | None:
        """The mean step: what the call got."""
        return statistics.fmean(self.steps_ms) if self.steps_ms else None


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """A cell with its repeats.

    Attributes:
        size: Which. repeats: In the order of their numbers.
        warmups: Warm-up calls before them.
        figures: By phase value, over the passes of the repeats.
    """

    size: Size
    repeats: tuple[Repeat, ...]
    warmups: int
    figures: Mapping[str, PhaseFigures] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Pass:
    """What is looked at of a pass."""

    place: int
    middle_ns: int
    start_ns: int
    span_ns: int
    phase: str
    sequences: int
    prefill_tokens: int
    warmup: str | None


def measure_cells(
    calls: pa.Table,
    passes: pa.Table,
    requests: pa.Table,
    kernels: pa.Table,
    primary: Primary,
    basis: Basis,
) -> list[MeasuredCell]:
    """The cells that were run, by length and batch.

    Args:
        calls, passes, requests, kernels: Tables of the trace, with the passes of several ranks counted once.
        primary: The model that the report is about.
        basis: What its passes are held against.
    """
    seen = _passes(passes, primary)
    middles = [each.middle_ns for each in seen]
    answered = _answered(requests, primary)
    first_tokens = [at for at, _, _ in answered]
    by_pass = _Kernels(kernels)
    repeats: dict[Size, list[Repeat]] = {}
    warmups: dict[Size, int] = {}
    places: dict[Size, list[int]] = {}
    looked: dict[tuple[int, int], list[int]] = {}
    for call in sorted(calls.to_pylist(), key=lambda row: int(row["start_ns"])):
        size = Size(call["prompt_tokens"], call["new_tokens"], call["sequences"])
        begin = bisect_left(middles, call["start_ns"])
        inside = seen[begin : bisect_right(middles, call["end_ns"])]
        if call["kind"] == CallKind.COUNTED:
            first = bisect_left(first_tokens, call["start_ns"])
            ended = answered[first : bisect_right(first_tokens, call["end_ns"])]
            repeats.setdefault(size, []).append(_repeat(call, size, inside, ended))
            places.setdefault(size, []).extend(each.place for each in inside)
        elif call["kind"] == CallKind.LOOK:
            looked.setdefault((size.prompt_tokens, size.batch), []).extend(
                each.place for each in inside
            )
        elif call["kind"] == CallKind.WARMUP:
            warmups[size] = warmups.get(size, 0) + 1
    cells = []
    for size in sorted(repeats):
        rows = sorted([*places[size], *looked.get((size.prompt_tokens, size.batch), [])])
        found = passes.take(to_column(rows, pa.int64()))
        figures = _figures(found, by_pass.of(found), primary, basis, size.batch)
        # A warm-up call of a long output generates a few tokens only.
        before = sum(
            n
            for other, n in warmups.items()
            if (other.prompt_tokens, other.batch) == (size.prompt_tokens, size.batch)
        )
        numbered = sorted(repeats[size], key=lambda each: each.number)
        cells.append(MeasuredCell(size, tuple(numbered), before, figures))
    return cells


def cell_figures(cell: MeasuredCell, planned: int) -> CellFigures:
    """The figures of a cell.

    Args:
        cell: With one repeat or more.
        planned: Repeats that were asked for.
    """
    size = cell.size
    return CellFigures(
        prompt_tokens=size.prompt_tokens,
        new_tokens=size.new_tokens,
        batch=size.batch,
        planned=planned,
        repeats=len(cell.repeats),
        decode=_phase(
            [each.step_ms for each in cell.repeats], size.batch, cell.figures.get(Phase.DECODE)
        ),
        prefill=_phase(
            [each.prefill_ms for each in cell.repeats],
            size.batch * size.prompt_tokens,
            cell.figures.get(Phase.PREFILL) or cell.figures.get(Phase.MIXED),
        ),
        ttft_ms=_estimate([each.ttft_ms for each in cell.repeats]),
        tpot_ms=_estimate([each.tpot_ms for each in cell.repeats]),
    )


def _estimate(values: Sequence[float | None]) -> Estimate | None:
    known = [value for value in values if value is not None]
    return estimate(known) if known else None


def _phase(
    times_ms: Sequence[float | None], tokens: int, figures: PhaseFigures | None
) -> PhaseOfCell | None:
    time = _estimate(times_ms)
    if time is None or time.median <= 0 or figures is None:
        return None
    computed = figures.prefill_tokens or figures.decode_tokens
    return PhaseOfCell(
        time_ms=time,
        tokens_per_s=tokens / time.median * 1e3,
        bound=figures.bound,
        explained=figures.verdict.explained,
        nearest_roof=figures.verdict.nearest_roof,
        tokens=tokens,
        flops=figures.flops / computed * tokens if figures.flops and computed else None,
    )


def _passes(passes: pa.Table, primary: Primary) -> list[_Pass]:
    """The passes of the primary model, by the middle of their call."""
    mine = pc.and_(
        named(names(passes, "model_id"), primary.model_id),
        named(names(passes, "role"), *primary.roles),
    )
    wanted = pc.and_(mine, pc.is_null(column(passes, "error")))
    places = pc.indices_nonzero(wanted)
    read = [
        column(passes, name).take(places).to_pylist()
        for name in (
            *("start_ns", "end_ns", "host_ns", "device_ns", "phase", "sequences"),
            *("prefill_tokens", "warmup"),
        )
    ]
    found = [
        _Pass(
            place,
            (start + end) // 2,
            start,
            host if device is None else device,
            phase,
            sequences,
            prefill,
            warmup,
        )
        for place, start, end, host, device, phase, sequences, prefill, warmup in zip(
            places.to_pylist(), *read, strict=True
        )
    ]
    return sorted(found, key=lambda each: each.middle_ns)


def _answered(requests: pa.Table, primary: Primary) -> list[tuple[int, float, float | None]]:
    """When each request of the model had its first token, its TTFT and its TPOT in ms; in order."""
    mine = requests.filter(named(names(requests, "model_id"), primary.model_id))
    columns = [column(mine, name).to_pylist() for name in ("arrival_ns", "ttft_ns", "tpot_ns")]
    return sorted(
        (arrival + ttft, ttft / 1e6, None if tpot is None else tpot / 1e6)
        for arrival, ttft, tpot in zip(*columns, strict=True)
        if ttft is not None
    )


def _repeat(
    call: Mapping[str, int],
    size: Size,
    inside: Sequence[_Pass],
    ended: Sequence[tuple[int, float, float | None]],
) -> Repeat:
    steps = sorted(
        (each.start_ns, each.span_ns)
        for each in inside
        if each.phase == Phase.DECODE and each.sequences == size.batch
    )
    begins = [start for start, _ in steps]
    steps_ms = [(after - begin) / 1e6 for begin, after in pairwise(begins)]
    if len(steps) == 1:
        steps_ms = [steps[0][1] / 1e6]
    prompts = [each for each in inside if each.prefill_tokens]
    whole = sum(each.prefill_tokens for each in prompts) == size.prompt_tokens * size.batch
    tpots = [tpot for _, _, tpot in ended if tpot is not None]
    return Repeat(
        number=call["repeat"],
        start_ns=call["start_ns"],
        end_ns=call["end_ns"],
        steps_ms=tuple(steps_ms),
        prefill_ms=sum(each.span_ns for each in prompts) / 1e6 if whole else None,
        ttft_ms=statistics.median(ttft for _, ttft, _ in ended) if ended else None,
        tpot_ms=statistics.median(tpots) if tpots else None,
        compiled=any(each.warmup == Warmup.COMPILE for each in inside),
    )


def _figures(
    passes: pa.Table, kernels: pa.Table, primary: Primary, basis: Basis, batch: int
) -> dict[str, PhaseFigures]:
    """The figures of the passes of a cell, those of the whole batch where an engine made some with a part of it."""
    if passes.num_rows == 0:
        return {}
    sorted_passes = sort_passes(passes, primary, basis.ceilings)
    phases, by_batch = phase_figures(sorted_passes, kernels, basis)
    return {**phases, **by_batch.get(batch, {})}


class _Kernels:
    """The kernels of each pass, found without a look at all of them."""

    def __init__(self, kernels: pa.Table) -> None:
        known = kernels.filter(pc.is_valid(column(kernels, "pass_id")))
        order, runs = groups(column(known, "pass_id"))
        self._rows = known
        self._order = order
        self._runs = {value: (begin, length) for value, begin, length in runs}

    def of(self, passes: pa.Table) -> pa.Table:
        """The kernels of some passes."""
        return self._rows.take(to_column(list(self._places(passes)), pa.int64()))

    def _places(self, passes: pa.Table) -> Iterator[int]:
        if not self._runs:
            return
        for pass_id in column(passes, "pass_id").to_pylist():
            begin, length = self._runs.get(pass_id, (0, 0))
            yield from self._order.slice(begin, length).to_pylist()
