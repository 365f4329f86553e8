"""A sweep on a terminal: what follows from it, tables of decode and prefill with bars, outliers, what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len
from rich.text import Text

from phaseprof.analyzers.results import Bound
from phaseprof.analyzers.sweeping.sweep_results import (
    CellFigures,
    DecodeSeries,
    Estimate,
    Knee,
    Outlier,
    PhaseOfCell,
    Sweep,
    Turn,
)
from phaseprof.cli.render import units
from phaseprof.cli.render.layout import MARGIN, keyed, paragraph, plain
from phaseprof.cli.render.phase_table import BOUND_STYLE

_GAP = 2
#: A bar is no shorter than that, or it is left out; and no longer.
_LEAST_BAR, _MOST_BAR = 10, 48
#: Outliers that are named.
_NAMED = 5
_LEGEND = "bars: tok/s, dots: in proportion to the batch"
_FULL, _EVEN = "█", "·"
#: The order in which columns go where there is no room: first what the bar and other columns tell.
_DROP_ORDER = ("TPOT", "TTFT", "explained", "±", "gain")


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of a table: its cells, the class, the length of its bar, and the length that it would have if the rate had
    grown with the batch; both of one scale, whatever that is."""

    cells: dict[str, str]
    bound: Bound
    length: float
    even: float | None


def sweep_section(sweep: Sweep | None, width: int) -> list[Text]:
    """The section; nothing without a sweep."""
    if sweep is None:
        return []
    lines: list[Text] = []
    for number, sentence in enumerate(sweep.conclusion):
        lines += keyed("" if number else "Sweep", [sentence], width)
    lines += _decode(sweep, width)
    lines += _prefill(sweep, width)
    last = keyed("Outliers", [*_outliers(sweep.outliers)], width)
    last += keyed("To say more", sweep.missing, width)
    return [*lines, Text(), *last] if last else lines


def _decode(sweep: Sweep, width: int) -> Iterator[Text]:
    series_of = {(series.prompt_tokens, series.new_tokens): series for series in sweep.decode}
    for key, cells in groupby(sweep.cells, lambda cell: (cell.prompt_tokens, cell.new_tokens)):
        known = [(cell, cell.decode) for cell in cells if cell.decode is not None]
        if not known:
            continue
        rows = [
            _Row(
                {
                    "batch": units.count(cell.batch),
                    "step": units.latency(phase.time_ms.median),
                    "±": _spread(phase.time_ms),
                    "TPOT": _median(cell.tpot_ms),
                    "tok/s": units.rate(phase.tokens_per_s),
                    "gain": f"{units.rate(phase.gain)}x",
                    "explained": units.percent(phase.explained),
                },
                phase.bound,
                phase.gain or 1.0,
                phase.even_gain,
            )
            for cell, phase in known
        ]
        title = f"Decode, {units.count(key[0])} prompt + {units.count(key[1])} new tokens"
        yield Text()
        yield from _table(title, rows, width, _LEGEND)
        yield from _below(series_of.get(key), width)


def _prefill(sweep: Sweep, width: int) -> Iterator[Text]:
    seen: dict[tuple[int, int], tuple[CellFigures, PhaseOfCell]] = {}
    for cell in sweep.cells:
        if cell.prefill is not None:
            seen.setdefault((cell.prompt_tokens, cell.batch), (cell, cell.prefill))
    if not seen:
        return
    rows = [
        _Row(
            {
                "prompt": units.count(prompt),
                "batch": units.count(batch),
                "time": units.latency(phase.time_ms.median),
                "±": _spread(phase.time_ms),
                "TTFT": _median(cell.ttft_ms),
                "tok/s": units.rate(phase.tokens_per_s),
                "explained": units.percent(phase.explained),
            },
            phase.bound,
            phase.tokens_per_s,
            None,
        )
        for (prompt, batch), (cell, phase) in sorted(seen.items())
    ]
    yield Text()
    yield from _table("Prefill", rows, width, "bars: tok/s")
    if sweep.prefill is not None:
        notes = [_turned(turn, "tokens a pass") for turn in sweep.prefill.turns]
        if sweep.prefill.rate_flops is not None:
            rate = units.rate(sweep.prefill.rate_flops / 1e12)
            notes.insert(0, f"each further token is computed at {rate} TFLOP/s")
        if sweep.prefill.knee is not None:
            notes.insert(0, _fitted(sweep.prefill.knee, "pass", "tokens"))
        yield from _notes(notes, width)


def _below(series: DecodeSeries | None, width: int) -> Iterator[Text]:
    """The arithmetic under a table of decode."""
    if series is None:
        return
    notes = []
    if series.knee is not None:
        notes.append(_fitted(series.knee, "step", "batch"))
    if series.roofs is not None:
        roofs = series.roofs
        notes.append(
            f"roofs: {units.duration(roofs.weights_ms)} for the weights, and a sequence "
            f"{units.duration(roofs.kv_ms)} for its KV, {units.duration(roofs.compute_ms)} to compute"
        )
    yield from _notes([*notes, *(_turned(turn, "batch") for turn in series.turns)], width)


def _fitted(knee: Knee, what: str, of: str) -> str:
    line = f"{what} = {units.duration(knee.fixed_ms)} + {of} x {units.duration(knee.each_ms)}"
    more = [f"misfit {units.percent(knee.misfit)}"]
    if knee.by_line and knee.at:
        more.insert(0, f"knee {units.rate(knee.at)}")
    if knee.aside is not None:
        than = "longer" if knee.aside > 0 else "less"
        line += f" from {of} {units.count(round(knee.begin))} on"
        more.append(f"the smallest takes {units.percent(abs(knee.aside))} {than}")
    return f"{line} ({', '.join(more)})"


def _turned(turn: Turn, of: str) -> str:
    sizes = f"{units.count(turn.low)} to {units.count(turn.high)}"
    where = f"{of} {sizes}" if of == "batch" else f"{sizes} {of}"
    return f"{turn.before.value} turns to {turn.after.value} from {where}"


def _notes(notes: Sequence[str], width: int) -> Iterator[Text]:
    if notes:
        yield from paragraph(
            " · ".join(notes), width, indent=MARGIN + 2, hang=0, paint=plain("dim")
        )


def _table(title: str, rows: Sequence[_Row], width: int, legend: str) -> Iterator[Text]:
    """A header, the rows, and a bar for each where there is room: its rate, and dots to where that would be if it had
    grown with the batch."""
    names = [name for name in rows[0].cells if any(row.cells[name] != units.DASH for row in rows)]
    widths = {
        name: max(cell_len(name), *(cell_len(row.cells[name]) for row in rows)) for name in names
    }
    bound_width = max(len("bound"), *(len(row.bound.value) for row in rows))

    def taken() -> int:
        return MARGIN + sum(widths[name] + _GAP for name in names) + _GAP + bound_width

    for name in _DROP_ORDER:
        if taken() + _GAP + _LEAST_BAR <= width:
            break
        if name in names:
            names.remove(name)
    room = min(width - taken() - _GAP, _MOST_BAR)
    heading = Text(" " * MARGIN).append(title, style="bold")
    if room >= _LEAST_BAR and len(heading) + _GAP + len(legend) <= width:
        heading.append(" " * _GAP + legend, style="dim")
    yield heading
    head = " " * MARGIN + "".join(f"{name:>{widths[name] + _GAP}}" for name in names)
    yield Text(f"{head}{' ' * _GAP}bound".rstrip(), style="dim")
    most = max(row.length for row in rows)
    for row in rows:
        line = Text(" " * MARGIN)
        line.append("".join(f"{row.cells[name]:>{widths[name] + _GAP}}" for name in names))
        line.append(" " * _GAP).append(
            f"{row.bound.value:<{bound_width}}", style=BOUND_STYLE[row.bound]
        )
        if room >= _LEAST_BAR:
            line.append(" " * _GAP)
            bar, dots = _bar(row, most, room)
            line.append(bar, style="cyan").append(dots, style="dim")
        line.rstrip()
        yield line


def _bar(row: _Row, most: float, room: int) -> tuple[str, str]:
    """The bar, and the dots from its end to where it would be."""
    length = max(round(row.length / most * room), 1)
    even = 0 if row.even is None else min(round(row.even / most * room), room)
    return _FULL * length, _EVEN * max(even - length, 0)


def _spread(found: Estimate) -> str:
    return units.percent(found.spread) if found.repeats > 1 else units.DASH


def _median(found: Estimate | None) -> str:
    return units.DASH if found is None else units.latency(found.median)


def _outliers(found: Sequence[Outlier]) -> Iterator[str]:
    for each in found[:_NAMED]:
        yield (
            f"{each.figure} of batch {units.count(each.batch)}, {units.count(each.prompt_tokens)} + "
            f"{units.count(each.new_tokens)} tokens, repeat {each.repeat + 1}: {units.latency(each.value_ms)}, "
            f"{units.rate(each.times)} times the median; {each.detail}"
        )
    if len(found) > _NAMED:
        yield f"and {units.counted(len(found) - _NAMED, 'more')}".replace("mores", "more")
