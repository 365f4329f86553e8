"""Hardware counters: a row a phase with 95 % errors, what could not be told and why, and the state of the devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from phaseprof.analyzers.counters.counter_results import (
    CounterFigure,
    CounterState,
    DeviceState,
    PhaseCounters,
    Spread,
)
from phaseprof.analyzers.results import PhaseFigures
from phaseprof.cli.render import units
from phaseprof.cli.render.grid import Grid, GridRow
from phaseprof.cli.render.layout import MARGIN, keyed, paragraph, plain, stack
from phaseprof.cli.render.phase_table import ordered

_GAP = 2
#: Columns that go first where there is no room for all.
_DROP_ORDER = ("occupancy", "power", "DRAM GB/s", "energy")


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    get: Callable[[PhaseCounters], CounterFigure | None]
    scale: float
    unit: str


_COLUMNS = (
    _Column("SM", lambda c: c.sm_active, 100.0, " %"),
    _Column("occupancy", lambda c: c.sm_occupancy, 100.0, " %"),
    _Column("tensor", lambda c: c.tensor_active, 100.0, " %"),
    _Column("DRAM", lambda c: c.dram_active, 100.0, " %"),
    _Column("DRAM GB/s", lambda c: c.dram_bytes_per_s, 1e-9, ""),
    _Column("power", lambda c: c.power_w, 1.0, " W"),
    _Column("energy", lambda c: c.energy_j, 1.0, " J"),
    _Column("J/token", lambda c: c.joules_per_token, 1.0, ""),
)


@dataclass(frozen=True, slots=True)
class Row:
    """The counters of a phase, or of its passes with one batch (nested)."""

    label: str
    counters: PhaseCounters
    nested: bool = False


def counters_section(
    phases: Mapping[str, PhaseFigures],
    by_batch: Mapping[int, Mapping[str, PhaseFigures]],
    devices: Sequence[DeviceState],
    width: int,
) -> list[Text]:
    """The counters of a report's phases and the state of its devices; nothing without samples."""
    return lay_out(_rows(phases, by_batch), devices, width)


def counters_grid(
    phases: Mapping[str, PhaseFigures], by_batch: Mapping[int, Mapping[str, PhaseFigures]]
) -> Grid:
    """The same rows with every counter that was sampled."""
    rows = _rows(phases, by_batch)
    columns = [c for c in _COLUMNS if any(c.get(row.counters) is not None for row in rows)]
    return Grid(
        "phase",
        tuple(column.title for column in columns),
        tuple(
            GridRow(
                row.label.strip(),
                tuple(_cell(column.get(row.counters), column) for column in columns),
                nested=row.nested,
            )
            for row in rows
        ),
    )


def _rows(
    phases: Mapping[str, PhaseFigures], by_batch: Mapping[int, Mapping[str, PhaseFigures]]
) -> list[Row]:
    rows = []
    for figures in ordered(phases):
        if figures.counters is None or not _any(figures.counters):
            continue
        rows.append(Row(figures.phase.value, figures.counters))
        for batch in sorted(by_batch):
            nested = by_batch[batch].get(figures.phase.value)
            if nested is not None and nested.counters is not None and _sure(nested.counters):
                rows.append(Row(f"  batch {batch}", nested.counters, nested=True))
    return rows


def lay_out(rows: Sequence[Row], devices: Sequence[DeviceState], width: int) -> list[Text]:
    """The table, its gaps with their reasons, and a few lines a device."""
    below = _insufficient([row for row in rows if not row.nested], width)
    for state in devices:
        below += _device(state, len(devices) > 1, width)
    return stack([_table(rows, width), below])


def _any(counters: PhaseCounters) -> bool:
    return any(column.get(counters) is not None for column in _COLUMNS)


def _sure(counters: PhaseCounters) -> bool:
    figures = [column.get(counters) for column in _COLUMNS]
    return any(figure is not None and figure.sure is not None for figure in figures)


def _table(rows: Sequence[Row], width: int) -> list[Text]:
    if not rows:
        return []
    label_width = max(len("counters"), *(cell_len(row.label) for row in rows))
    columns = [
        column for column in _COLUMNS if any(column.get(r.counters) is not None for r in rows)
    ]
    cells = {
        column.title: [_cell(column.get(row.counters), column) for row in rows]
        for column in columns
    }
    widths = {
        column.title: max(cell_len(column.title), *map(cell_len, cells[column.title]))
        for column in columns
    }
    room = width - MARGIN - label_width
    kept = columns
    for title in _DROP_ORDER:
        if sum(_GAP + widths[column.title] for column in kept) <= room:
            break
        kept = [column for column in kept if column.title != title]
    head = Text(" " * MARGIN + "counters".ljust(label_width), style="dim")
    for column in kept:
        head.append(" " * _GAP + column.title.rjust(widths[column.title]))
    lines = [head]
    for index, row in enumerate(rows):
        line = Text(" " * MARGIN)
        line.append(row.label.ljust(label_width), style="dim" if row.nested else "bold")
        for column in kept:
            cell = cells[column.title][index]
            padding = " " * (_GAP + widths[column.title] - cell_len(cell))
            value, sign, error = cell.partition(" ±")
            line.append(padding + value).append(sign + error, style="dim")
        lines.append(line)
    dropped = [column.title for column in columns if column not in kept]
    if dropped:
        note = f"Left out at {width} columns: {', '.join(dropped)}."
        lines += paragraph(note, width, paint=plain("dim"))
    return lines


def _cell(figure: CounterFigure | None, column: _Column) -> str:
    """``91 ±1 %``; a dash for what is not sure."""
    if figure is None or figure.sure is None or figure.error is None:
        return units.DASH
    value, error = figure.sure * column.scale, figure.error * column.scale
    decimals = _decimals(error)
    shown = max(error, 10.0**-decimals)
    return f"{value:,.{decimals}f} ±{shown:,.{decimals}f}{column.unit}"


def _decimals(error: float) -> int:
    """Decimals that show one digit of an error."""
    if error >= 0.95:
        return 0
    return min(max(-math.floor(math.log10(max(error, 1e-9)) + 0.02), 1), 6)


def _insufficient(rows: Sequence[Row], width: int) -> list[Text]:
    """What the samples do not tell, with the reason; counters of a phase that share it in one line."""
    told: list[str] = []
    for row in rows:
        by_reason: dict[str, list[str]] = {}
        for column in _COLUMNS:
            figure = column.get(row.counters)
            if figure is not None and figure.state is CounterState.INSUFFICIENT:
                by_reason.setdefault(figure.reason, []).append(column.title)
        for reason, titles in by_reason.items():
            told.append(f"{row.label} {', '.join(titles)}: {reason}")
    if told:
        told.append("docs/counters.md says what helps against each")
    return keyed("Insufficient", told, width, paint=plain("yellow"))


def _device(state: DeviceState, several: bool, width: int) -> list[Text]:
    facts = []
    if state.sm_clock_hz is not None:
        facts.append(f"SM clock {_spread(state.sm_clock_hz, 1e-6)} MHz")
    if state.memory_clock_hz is not None:
        facts.append(f"memory clock {_spread(state.memory_clock_hz, 1e-6)} MHz")
    if state.temperature_c is not None:
        facts.append(f"{_spread(state.temperature_c, 1.0)} °C")
    if state.power_w is not None:
        facts.append(f"{_spread(state.power_w, 1.0)} W")
    if state.idle_power_w is not None and state.idle_power_w.sure is not None:
        facts.append(f"idle {_cell(state.idle_power_w, _WATT)}")
    if state.memory_used_bytes is not None:
        facts.append(f"{units.size(state.memory_used_bytes)} used")
    named = f"{state.name} {state.index}: " if several else ""
    lines = keyed("Device", [named + ", ".join(facts)], width) if facts else []
    held = [each for each in state.throttle or () if each.slows]
    if held:
        reasons = ", ".join(f"{each.name} {units.percent(each.share)}" for each in held)
        text = f"{named}{reasons} of the time at work"
        lines += keyed("Held down by", [text], width, paint=plain("yellow"))
    elif state.throttle is not None and facts:
        lines += keyed("Held down by", [f"{named}nothing"], width)
    if state.energy is not None:
        style = "" if state.energy.consistent else "yellow"
        lines += keyed("Energy check", [named + state.energy.text], width, paint=plain(style))
    return lines


_WATT = _Column("power", lambda c: c.power_w, 1.0, " W")


def _spread(spread: Spread, scale: float) -> str:
    """``1,755 (1,590 to 1,980)``; one figure where all are the same."""
    least, median, greatest = (
        f"{value * scale:,.0f}" for value in (spread.least, spread.median, spread.greatest)
    )
    return median if least == greatest else f"{median} ({least} to {greatest})"
