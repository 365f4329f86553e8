"""The roofline of a run on a terminal: two roofs, the ridge, one mark a phase, on log-log axes.

The x axis is arithmetic intensity (FLOP/byte), the y axis achieved TFLOP/s. The drawing is a grid of characters that
is filled in a fixed order: roofs, marks, labels of marks, labels of roofs. A label takes the first of its places that
is free; one that finds none is dropped, and the phase is named in a line below instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from phaseprof.cli.render import units
from phaseprof.trace.meta import Ceilings

_UNIT = "FLOP/byte"
_MAX_COLUMNS = 76
_MIN_COLUMNS = 24
_ROWS = 11
#: Decades that stay free beyond the outermost points, for labels and to show where a roof leads.
_LEFT, _RIGHT, _BELOW, _ABOVE = 0.5, 0.9, 0.35, 0.3
_MIN_DECADES = 2.0


@dataclass(frozen=True, slots=True)
class Mark:
    """One point of the roofline.

    Attributes:
        label: The phase.
        intensity: FLOP/byte.
        tflops: Achieved TFLOP/s.
        style: Of the mark and its label.
    """

    label: str
    intensity: float
    tflops: float
    style: str = ""


@dataclass(frozen=True, slots=True)
class _Glyphs:
    horizontal: str
    vertical: str
    rise: str
    top: str
    axis: str
    y_tick: str
    x_tick: str
    corner: str
    ridge: str
    marks: Mapping[str, str]
    other_mark: str


def _marks(characters: str) -> dict[str, str]:
    """One mark a phase, the same in every report."""
    return dict(zip(("prefill", "decode", "mixed", "extend", "encode"), characters, strict=True))


_UNICODE = _Glyphs("─", "│", "╯", "╭", "│", "┤", "┬", "└", "┊", _marks("●◆■▲▼"), "○")
_ASCII = _Glyphs("-", "|", "+", "+", "|", "+", "+", "+", ":", _marks("o*#^v"), "%")


def roofline(
    ceilings: Ceilings, marks: Sequence[Mark], *, width: int, unicode: bool = True
) -> list[Text]:
    """Draw the roofs and the marks; empty if there is nothing to place or the width is too small.

    Args:
        ceilings: The roofs; both must be positive.
        marks: Points in the order of the table. A log axis has no place for those that are not
            positive: they are left out.
        width: Columns that may be used, all told.
        unicode: False for streams that only take ASCII.
    """
    points = [mark for mark in marks if mark.intensity > 0 and mark.tflops > 0]
    peak_tflops, tb_per_s = ceilings.flops_per_s / 1e12, ceilings.bytes_per_s / 1e12
    if not points or peak_tflops <= 0 or tb_per_s <= 0:
        return []
    scale = _Scale.around(points, peak_tflops, tb_per_s, width)
    if scale.columns < _MIN_COLUMNS:
        return []
    drawing = _Drawing(scale, _UNICODE if unicode else _ASCII, peak_tflops, tb_per_s)
    drawing.draw_roofs()
    unnamed = drawing.place_marks(points)
    drawing.name_roofs(ceilings)
    return drawing.lines(unnamed)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where a point falls: log10 bounds of both axes, and the size of the grid."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    gutter: int
    columns: int
    rows: int

    @classmethod
    def around(
        cls, points: Sequence[Mark], peak_tflops: float, tb_per_s: float, width: int
    ) -> _Scale:
        xs = [math.log10(p.intensity) for p in points] + [math.log10(peak_tflops / tb_per_s)]
        ys = [math.log10(p.tflops) for p in points] + [math.log10(peak_tflops)]
        x_low, x_high = _at_least(min(xs) - _LEFT, max(xs) + _RIGHT)
        y_low, y_high = _at_least(min(ys) - _BELOW, max(ys) + _ABOVE)
        gutter = max((len(units.tick(e)) for e in _decades(y_low, y_high)), default=1)
        columns = min(width - gutter - 2 - len(f" {_UNIT}"), _MAX_COLUMNS)
        return cls(x_low, x_high, y_low, y_high, gutter, columns, _ROWS)

    def column(self, log_x: float) -> int:
        return round((log_x - self.x_low) / (self.x_high - self.x_low) * (self.columns - 1))

    def row(self, log_y: float) -> int:
        """Rows count downwards."""
        return round((self.y_high - log_y) / (self.y_high - self.y_low) * (self.rows - 1))

    def log_x(self, column: int) -> float:
        return self.x_low + column / (self.columns - 1) * (self.x_high - self.x_low)


class _Drawing:
    """The grid, and what has been put on it."""

    def __init__(self, scale: _Scale, glyphs: _Glyphs, peak_tflops: float, tb_per_s: float) -> None:
        self._scale = scale
        self._glyphs = glyphs
        self._log_peak = math.log10(peak_tflops)
        self._log_bandwidth = math.log10(tb_per_s)
        self._cells = [[" "] * scale.columns for _ in range(scale.rows)]
        self._styles = [[""] * scale.columns for _ in range(scale.rows)]
        self._roof_rows: list[int] = []

    def draw_roofs(self) -> None:
        """The memory roof as stairs, the compute roof as a line, and the ridge as a dotted drop."""
        scale, glyphs = self._scale, self._glyphs
        rows = [
            scale.row(min(self._log_bandwidth + scale.log_x(column), self._log_peak))
            for column in range(scale.columns)
        ]
        self._roof_rows = rows
        for column, row in enumerate(rows):
            before = rows[column - 1] if column else row
            if before == row:
                self._put(row, column, glyphs.horizontal)
                continue
            self._put(before, column, glyphs.rise)
            for between in range(row + 1, before):
                self._put(between, column, glyphs.vertical)
            self._put(row, column, glyphs.top)
        ridge = scale.column(self._log_peak - self._log_bandwidth)
        for row in range(rows[ridge] + 1, scale.rows):
            if self._is_free(row, ridge, ridge + 1):
                self._put(row, ridge, glyphs.ridge, "dim")

    def place_marks(self, points: Sequence[Mark]) -> list[tuple[str, Mark]]:
        """Put marks and their labels; return those that found no room for a label, with their glyph."""
        scale, glyphs = self._scale, self._glyphs
        seats: dict[tuple[int, int], list[tuple[str, Mark]]] = {}
        for point in points:
            seat = (scale.row(math.log10(point.tflops)), scale.column(math.log10(point.intensity)))
            glyph = glyphs.marks.get(point.label, glyphs.other_mark)
            seats.setdefault(seat, []).append((glyph, point))
        for (row, column), here in seats.items():
            self._put(row, column, here[0][0], here[0][1].style)
        unnamed: list[tuple[str, Mark]] = []
        for (row, column), here in seats.items():
            label = ", ".join(point.label for _, point in here)
            places = [
                (row + down, start)
                for down in (0, 1, -1)
                for start in (column + 2, column - 1 - len(label))
            ]
            if not self._write_first(places, label, here[0][1].style):
                unnamed += here
        return unnamed

    def name_roofs(self, ceilings: Ceilings) -> None:
        """The figures of both roofs beside them, and of the ridge."""
        scale = self._scale
        ridge = scale.column(self._log_peak - self._log_bandwidth)
        peak = (
            f"{units.rate(ceilings.flops_per_s / 1e12)} TFLOP/s {ceilings.dtype}, {ceilings.source}"
        )
        top = self._roof_rows[-1] - 1
        at_right_end = scale.columns - len(peak)
        self._write_first([(top, at_right_end), (top, max(ridge - len(peak), 0))], peak, "")
        bandwidth = f"{units.rate(ceilings.bytes_per_s / 1e9)} GB/s, {ceilings.source}"
        self._write_first(self._above_the_slope(ridge, len(bandwidth)), bandwidth, "")
        corner = f"ridge {units.rate(ceilings.flops_per_s / ceilings.bytes_per_s)}"
        beside = [
            (row, start)
            for row in range(scale.rows - 1, self._roof_rows[ridge], -1)
            for start in (ridge + 2, ridge - 1 - len(corner))
        ]
        self._write_first(beside, corner, "dim")

    def lines(self, unnamed: Sequence[tuple[str, Mark]]) -> list[Text]:
        """The grid between its axes; below it the phases whose label found no room."""
        scale, glyphs = self._scale, self._glyphs
        ticks = {scale.row(e): units.tick(e) for e in _decades(scale.y_low, scale.y_high)}
        unit = "TFLOP/s"
        lines = [Text(unit.rjust(max(scale.gutter, len(unit))), style="dim")]
        for row in range(scale.rows):
            axis = glyphs.y_tick if row in ticks else glyphs.axis
            line = Text(f"{ticks.get(row, ''):>{scale.gutter}} {axis}", style="dim")
            for cell, style in zip(self._cells[row], self._styles[row], strict=True):
                line.append(cell, style=style or "not dim")
            line.rstrip()
            lines.append(line)
        lines += self._x_axis()
        if unnamed:
            names = [f"{glyph} {mark.label}" for glyph, mark in unnamed]
            indent = " " * (scale.gutter + 2)
            lines += [Text(indent + line) for line in _joined(names, scale.columns + len(_UNIT))]
        return lines

    def _x_axis(self) -> list[Text]:
        scale, glyphs = self._scale, self._glyphs
        axis = [glyphs.horizontal] * scale.columns
        labels = [" "] * (scale.columns + len(_UNIT))
        for exponent in _decades(scale.x_low, scale.x_high):
            column, label = scale.column(exponent), units.tick(exponent)
            axis[column] = glyphs.x_tick
            start = max(column - (len(label) - 1) // 2, 0)
            if all(c == " " for c in labels[max(start - 1, 0) : start + len(label) + 2]):
                labels[start : start + len(label)] = label
        return [
            Text(f"{'':>{scale.gutter}} {glyphs.corner}{''.join(axis)} {_UNIT}", style="dim"),
            Text(" " * (scale.gutter + 2) + "".join(labels).rstrip(), style="dim"),
        ]

    def _above_the_slope(self, ridge: int, length: int) -> Iterator[tuple[int, int]]:
        """Places left of the memory roof, from the middle of the visible slope outwards."""
        inner = [c for c in range(ridge) if 0 <= self._roof_rows[c] < self._scale.rows]
        middle = len(inner) // 2
        for column in sorted(inner, key=lambda c: (abs(c - inner[middle]), c)):
            yield self._roof_rows[column] - 1, column - length - 1

    def _write_first(
        self, places: Iterator[tuple[int, int]] | Sequence[tuple[int, int]], label: str, style: str
    ) -> bool:
        for row, start in places:
            if self._is_free(row, start - 1, start + len(label) + 1) and start > 0:
                for offset, char in enumerate(label):
                    self._put(row, start + offset, char, style)
                return True
        return False

    def _is_free(self, row: int, begin: int, end: int) -> bool:
        """Whether all cells of a stretch are blank; one cell beyond either edge counts as blank."""
        if not 0 <= row < self._scale.rows or begin < -1 or end > self._scale.columns + 1:
            return False
        return all(cell == " " for cell in self._cells[row][max(begin, 0) : end])

    def _put(self, row: int, column: int, char: str, style: str = "") -> None:
        if 0 <= row < self._scale.rows and 0 <= column < self._scale.columns:
            self._cells[row][column] = char
            self._styles[row][column] = style


def _at_least(low: float, high: float) -> tuple[float, float]:
    """The bounds, moved apart evenly to span at least :data:`_MIN_DECADES`."""
    missing = max(_MIN_DECADES - (high - low), 0.0)
    return low - missing / 2, high + missing / 2


def _decades(low: float, high: float) -> range:
    """The exponents of the powers of ten within the bounds."""
    return range(math.ceil(low), math.floor(high) + 1)


def _joined(names: Sequence[str], width: int) -> Iterator[str]:
    """Names side by side, as many in a line as fit."""
    line = ""
    for name in names:
        longer = f"{line}   {name}" if line else name
        if line and len(longer) > width:
            yield line
            longer = name
        line = longer
    yield line
