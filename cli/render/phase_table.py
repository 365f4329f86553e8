"""The table of phases: one row a phase, columns only where there is a value, and fewer of them on a narrow terminal.

Columns that do not fit go in the order of :data:`_DROP_ORDER`: first what the roofline below the table shows anyway
(intensity, achieved FLOP/s and bytes/s), then the volumes, then the shares of the roofs. The phase, its time and its
bound stay at any width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.text import Text

from phaseprof.analyzers.results import Bound, PhaseFigures, SetAside
from phaseprof.cli.render import units
from phaseprof.cli.render.grid import Grid, GridRow
from phaseprof.cli.render.layout import MARGIN, paragraph, plain
from phaseprof.phases import Phase

#: The order of rows; phases that are not in it follow.
PHASE_ORDER = tuple(
    phase.value
    for phase in (
        Phase.PREFILL,
        Phase.DECODE,
        Phase.MIXED,
        Phase.EXTEND,
        Phase.ENCODE,
        Phase.OTHER,
    )
)

#: Near a roof is calm, time spent elsewhere is yellow.
BOUND_STYLE: Mapping[Bound, str] = {
    Bound.COMPUTE: "green",
    Bound.BANDWIDTH: "cyan",
    Bound.COMMUNICATION: "magenta",
    Bound.OVERHEAD: "yellow",
    Bound.LATENCY: "yellow",
    Bound.OVERHEAD_OR_LATENCY: "yellow",
    Bound.UNKNOWN: "dim",
}

#: Only shown where there is room to spare: TTFT and TPOT say nearly the same.
_EXTRA = "pass p50"

# Spaces before a column; narrow ones tie a share to the figure before it when room is short.
_GAP = 2
_NARROW = 1

_DROP_ORDER = (
    _EXTRA,
    "FLOP/B",
    "TFLOP/s",
    "GB/s",
    "tokens",
    "passes",
    "batch",
    "busy",
    "prompt/s",
    "output/s",
    "tok/s",
    "MFU",
    "MBU",
    "share",
)

# Reason -> row label and what makes the passes unfit for the figures above.
_SET_ASIDE = {
    "requested": ("warm-up", ""),
    "first": ("first", "first of its phase"),
    "compile": ("compile", "compiling"),
    "profiled": ("profiled", "a costly collector ran"),
    "error": ("failed", "ended by an exception"),
}


@dataclass(frozen=True, slots=True)
class _Column:
    """A column: how wide the gap before it is, and the cell of a phase (None: no value)."""

    title: str
    gap: int
    cell: Callable[[PhaseFigures], str | None]


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    figures: PhaseFigures
    nested: bool


def ordered(phases: Mapping[str, PhaseFigures]) -> list[PhaseFigures]:
    """The phases in the order of the table."""
    known = [phases[name] for name in PHASE_ORDER if name in phases]
    return known + [figures for name, figures in phases.items() if name not in PHASE_ORDER]


def phase_table(
    phases: Mapping[str, PhaseFigures],
    by_batch: Mapping[int, Mapping[str, PhaseFigures]],
    set_aside: Sequence[SetAside],
    width: int,
) -> list[Text]:
    """The header, a row a phase with its rows per batch below, and the passes that were set aside."""
    rows = list(_rows(phases, by_batch))
    if not rows and not set_aside:
        return []
    label_width = max(map(cell_len, [*(r.label for r in rows), *map(_aside_label, set_aside)]))
    columns, cells = _with_values(_columns(rows, by_batch), rows)
    widths = {
        column.title: max(
            map(cell_len, [column.title, *cells[column.title], *_aside_cells(column, set_aside)])
        )
        for column in columns
    }
    bound_width = _bound_width(rows)
    fixed_width = MARGIN + label_width + _GAP + bound_width
    columns, dropped = _fitting(columns, widths, width - fixed_width)
    columns = _relaxed(columns, widths, width - fixed_width)

    head = Text(" " * (MARGIN + label_width))
    for column in columns:
        head.append(" " * column.gap + column.title.rjust(widths[column.title]))
    head.append(" " * _GAP + _bound_title(bound_width))
    head.stylize("dim")
    lines = [head] if rows else []
    for index, row in enumerate(rows):
        shown = [(c, cells[c.title][index], widths[c.title]) for c in columns]
        lines.append(_line(row, shown, label_width, bound_width))
    lines += [_aside_line(each, columns, widths, label_width, width) for each in set_aside]
    missed = [title for title in dropped if title != _EXTRA]
    if missed:
        note = f"Left out at {width} columns: {', '.join(missed)}."
        lines += paragraph(note, width, paint=plain("dim"))
    return lines


def phase_grid(
    phases: Mapping[str, PhaseFigures],
    by_batch: Mapping[int, Mapping[str, PhaseFigures]],
    set_aside: Sequence[SetAside],
) -> Grid:
    """The same rows: the class and its explained share, then every column that has a value."""
    rows = list(_rows(phases, by_batch))
    columns, cells = _with_values(_columns(rows, by_batch), rows)
    found = [
        GridRow(
            row.label.strip(),
            (
                row.figures.bound.value,
                units.percent(row.figures.verdict.explained),
                *(cells[column.title][place] for column in columns),
            ),
            nested=row.nested,
        )
        for place, row in enumerate(rows)
    ]
    for each in set_aside:
        aside = [(_aside_cells(column, [each]) or [""])[0] for column in columns]
        _, reason = _SET_ASIDE.get(each.reason, ("", ""))
        note = f"not counted above: {reason}" if reason else "not counted above"
        found.append(GridRow(_aside_label(each), ("", "", *aside), note=note))
    titles = ("bound", "explained", *(column.title for column in columns))
    return Grid("phase", titles, tuple(found))


def _fitting(
    columns: Sequence[_Column], widths: Mapping[str, int], room: int
) -> tuple[list[_Column], list[str]]:
    """The columns that fit into the room, and the titles of those that do not, in the order of the table."""
    kept = list(columns)
    for title in _DROP_ORDER:
        if _total(kept, widths) <= room:
            break
        kept = [column for column in kept if column.title != title]
    return kept, [column.title for column in columns if column not in kept]


def _relaxed(columns: Sequence[_Column], widths: Mapping[str, int], room: int) -> list[_Column]:
    """The columns with the narrow gaps (figure and share of it) widened, if there is room for all of them."""
    relaxed = [replace(column, gap=_GAP) for column in columns]
    return relaxed if _total(relaxed, widths) <= room else list(columns)


def _total(columns: Sequence[_Column], widths: Mapping[str, int]) -> int:
    return sum(column.gap + widths[column.title] for column in columns)


def _rows(
    phases: Mapping[str, PhaseFigures], by_batch: Mapping[int, Mapping[str, PhaseFigures]]
) -> Iterator[_Row]:
    for figures in ordered(phases):
        name = figures.phase.value
        yield _Row(name, figures, nested=False)
        for sequences in sorted(by_batch):
            if name in by_batch[sequences]:
                yield _Row(f"  batch {sequences}", by_batch[sequences][name], nested=True)


def _columns(
    rows: Sequence[_Row], by_batch: Mapping[int, Mapping[str, PhaseFigures]]
) -> list[_Column]:
    """All columns in the order of the table. A pass with prompt and output tokens needs a rate for each."""
    rates = [_Column("tok/s", _GAP, _one_rate)]
    if any(_has_two_rates(row.figures) for row in rows):
        rates = [
            _Column("prompt/s", _GAP, lambda f: _known(units.rate, f.prompt_tokens_per_s)),
            _Column("output/s", _GAP, lambda f: _known(units.rate, f.output_tokens_per_s)),
        ]
    batches = {units.mean(row.figures.sequences_per_pass) for row in rows}
    show_batch = not by_batch and batches != {"1"}
    return [
        *(
            [_Column("batch", _GAP, lambda f: units.mean(f.sequences_per_pass))]
            if show_batch
            else []
        ),
        _Column("passes", _GAP, lambda f: units.count(f.passes)),
        _Column("tokens", _GAP, lambda f: units.count(f.tokens)),
        _Column("time", _GAP, lambda f: units.duration(f.span_ms)),
        _Column("busy", _GAP, lambda f: _known(units.duration, f.busy_ms)),
        _Column("share", _NARROW, lambda f: units.percent(f.share)),
        _Column(_EXTRA, _GAP, lambda f: units.latency(f.pass_ms_p50)),
        *rates,
        _Column("TFLOP/s", _GAP, lambda f: _known(units.rate, f.tflops)),
        _Column("MFU", _NARROW, lambda f: _known(units.percent, f.mfu)),
        _Column("GB/s", _GAP, lambda f: _known(units.rate, f.gb_per_s)),
        _Column("MBU", _NARROW, lambda f: _known(units.percent, f.mbu)),
        _Column("FLOP/B", _GAP, lambda f: _known(units.rate, f.intensity)),
    ]


def _with_values(
    columns: Sequence[_Column], rows: Sequence[_Row]
) -> tuple[list[_Column], dict[str, list[str]]]:
    """The columns in which a row has a value, and their cells with a dash where one has none."""
    kept: list[_Column] = []
    cells: dict[str, list[str]] = {}
    for column in columns:
        values = [column.cell(row.figures) for row in rows]
        if any(value is not None for value in values):
            kept.append(column)
            cells[column.title] = [units.DASH if value is None else value for value in values]
    return kept, cells


def _known(show: Callable[[float | None], str], value: float | None) -> str | None:
    return None if value is None else show(value)


def _has_two_rates(figures: PhaseFigures) -> bool:
    return figures.prompt_tokens_per_s is not None and figures.output_tokens_per_s is not None


def _one_rate(figures: PhaseFigures) -> str | None:
    prompt, output = figures.prompt_tokens_per_s, figures.output_tokens_per_s
    return _known(units.rate, prompt if output is None else output)


def _bound_title(width: int) -> str:
    """``bound`` and, where there is room for a share, ``explained`` at the right end of the same column."""
    room = width - len("bound")
    return "bound" + ("explained".rjust(room) if room > len("explained") else "")


def _bound_width(rows: Sequence[_Row]) -> int:
    """Room for the widest class and, if any row has one, its explained share."""
    verdicts = [row.figures.verdict for row in rows]
    widest = max((len(verdict.bound.value) for verdict in verdicts), default=0)
    shares = [units.percent(v.explained) for v in verdicts if v.explained is not None]
    if not shares:
        return max(widest, len("bound"))
    return max(widest + _GAP + max(map(len, shares)), len("bound explained"))


def _line(
    row: _Row, cells: Sequence[tuple[_Column, str, int]], label_width: int, bound_width: int
) -> Text:
    bound, explained = row.figures.bound, row.figures.verdict.explained
    line = Text(" " * MARGIN)
    line.append(row.label.ljust(label_width), style="dim" if row.nested else "bold")
    for column, cell, width in cells:
        line.append(" " * column.gap + cell.rjust(width))
    line.append(" " * _GAP)
    line.append(bound.value, style=BOUND_STYLE[bound])
    if explained is not None:
        line.append(units.percent(explained).rjust(bound_width - len(bound.value)))
    return line


def _aside_label(each: SetAside) -> str:
    return _SET_ASIDE.get(each.reason, (each.reason, ""))[0]


def _aside_cells(column: _Column, set_aside: Sequence[SetAside]) -> list[str]:
    """The cells of set-aside passes in this column, one each; none where the column does not apply to them."""
    if column.title == "passes":
        return [units.count(each.passes) for each in set_aside]
    if column.title == "time":
        return [units.duration(each.span_ms) for each in set_aside]
    return []


def _aside_line(
    each: SetAside,
    columns: Sequence[_Column],
    widths: Mapping[str, int],
    label_width: int,
    width: int,
) -> Text:
    """Label, passes and time under their columns, then why the passes are not counted."""
    line = " " * MARGIN + _aside_label(each).ljust(label_width)
    for column in columns:
        (cell,) = _aside_cells(column, [each]) or ("",)
        line += " " * column.gap + cell.rjust(widths[column.title])
        if column.title == "time":
            break
    note = "not counted above"
    if all(column.title != "passes" for column in columns):
        note = f"{units.counted(each.passes, 'pass')}, {note}"
    _, reason = _SET_ASIDE.get(each.reason, ("", ""))
    if reason and cell_len(f"{line}  {note}: {reason}") <= width:
        note += f": {reason}"
    return Text(f"{line}  {note}", style="dim")
