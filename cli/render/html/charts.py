"""Where the marks of a chart stand: figures of the report brought to the coordinates of a picture, and nothing else.

Each chart is a frozen object that `templates/charts.html` draws as SVG. Coordinates are in units of the picture, which
is scaled to the width that the page has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phaseprof.cli.render import units

#: A character of the labels; the rooms of labels are reckoned with it.
CHARACTER = 7.4


@dataclass(frozen=True, slots=True)
class Tick:
    """A label on an axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Frame:
    """The frame of a chart, and the labels of its axes.

    Attributes:
        width, height: Of the picture. left, right, top, bottom: Edges of the plot in it.
        x_ticks, y_ticks: Labels. x_title, y_title: What the axes show.
    """

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    x_title: str
    y_title: str


def pair(at: tuple[float, float]) -> str:
    """A corner, as SVG takes it."""
    return f"{at[0]:.1f},{at[1]:.1f}"


# --- bars -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar: where it begins, how long it is (both of 100), its colour and its figures in words."""

    begin: float
    length: float
    kind: str
    tip: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of parts; `label` says of what."""

    label: str
    parts: tuple[Part, ...]


def bar(label: str, shares: Iterable[tuple[float, str, str]]) -> Bar:
    """A bar of shares (fractions of 1), each with its kind and its figures in words."""
    parts, begin = [], 0.0
    for share, kind, tip in shares:
        parts.append(Part(begin, share * 100, kind, tip))
        begin += share * 100
    return Bar(label, tuple(parts))


# --- histograms -----------------------------------------------------------------------------------

_SMALL_WIDTH, _SMALL_HEIGHT = 440.0, 220.0
_SMALL_LEFT, _SMALL_RIGHT, _SMALL_TOP, _SMALL_BOTTOM = 66.0, 36.0, 30.0, 40.0
#: What stands above the columns of a histogram: a line for each percentile.
_MARKERS, _MARKER = 58.0, 15.0


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a histogram: its box, and its figures in words."""

    x: float
    y: float
    width: float
    height: float
    tip: str


@dataclass(frozen=True, slots=True)
class Marker:
    """A value on the x axis with a name: a percentile. Its label stands at the height `y`."""

    x: float
    y: float
    label: str
    anchor: str


@dataclass(frozen=True, slots=True)
class HistogramChart:
    """A histogram with markers."""

    frame: Frame
    columns: tuple[Column, ...]
    markers: tuple[Marker, ...]


def histogram_chart(
    edges: Sequence[float],
    counts: Sequence[int],
    *,
    logarithmic: bool,
    markers: Sequence[tuple[str, float]],
    noun: str,
) -> HistogramChart:
    """Columns over an axis of milliseconds.

    Args:
        edges: Of the bins, one more than counts; equal ones for a single value.
        counts: Values in each.
        logarithmic: Whether the axis is.
        markers: Names and values to be marked.
        noun: What is counted.
    """
    left, right = _SMALL_LEFT, _SMALL_WIDTH - _SMALL_RIGHT
    top, bottom = _MARKERS, _SMALL_HEIGHT - _SMALL_BOTTOM
    low, high = edges[0], edges[-1]
    if low == high:
        low, high, logarithmic = low * 0.9, high * 1.1, False
        edges = (low + (high - low) * 0.45, low + (high - low) * 0.55)

    def at(value: float) -> float:
        if logarithmic:
            return left + math.log(value / low) / math.log(high / low) * (right - left)
        return left + (value - low) / (high - low) * (right - left)

    most = max(counts)
    columns = []
    for early, late, count in zip(edges, edges[1:], counts, strict=False):
        height = count / most * (bottom - top)
        tip = f"{units.latency(early)} to {units.latency(late)}: {units.counted(count, noun)}"
        columns.append(Column(at(early), bottom - height, at(late) - at(early), height, tip))
    ticks = _ticks(low, high, logarithmic)
    frame = Frame(
        *(_SMALL_WIDTH, _SMALL_HEIGHT, left, right, top, bottom),
        x_ticks=tuple(_apart([Tick(at(value), units.latency(value)) for value in ticks])),
        y_ticks=(Tick(bottom, "0"), Tick(top, units.count(most))),
        x_title="",
        y_title="",
    )
    marked = []
    for row, (name, value) in enumerate(markers):
        x = min(max(at(value), left), right)
        anchor = "start" if x < (left + right) / 2 else "end"
        y = (row + 1) * _MARKER
        marked.append(Marker(x, y, f"{name} {units.latency(value)}", anchor))
    return HistogramChart(frame, tuple(columns), tuple(marked))


def _ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    """Round values within the bounds, three to seven of them."""
    if logarithmic:
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for steps in ((1,), (1, 3), (1, 2, 5)):
            found = [step * 10.0**e for e in exponents for step in steps]
            found = [value for value in found if low <= value <= high]
            if len(found) >= 3:
                return found
        return found or [low, high]
    step = 10.0 ** math.floor(math.log10((high - low) / 2))
    while (high - low) / step > 6:
        step *= 2 if (high - low) / step <= 12 else 2.5
    first = math.ceil(low / step)
    return [place * step for place in range(first, math.floor(high / step) + 1)]


def _apart(ticks: Sequence[Tick]) -> Iterator[Tick]:
    """Those ticks whose labels do not run into the one before."""
    free = -math.inf
    for tick in ticks:
        half = len(tick.label) * CHARACTER / 2
        if tick.at - half >= free:
            yield tick
            free = tick.at + half + CHARACTER


# --- lines ----------------------------------------------------------------------------------------


class Value(NamedTuple):
    """A value to be drawn, with its figures in words and, if it has one, its interval. None breaks the line."""

    x: float
    y: float | None
    tip: str
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Dot:
    """A value of a line, with its figures in words, and where its interval ends; both at `y` without one."""

    x: float
    y: float
    tip: str
    low_y: float
    high_y: float


@dataclass(frozen=True, slots=True)
class Line:
    """A line: its name, its colour, its corners as SVG takes them, one text for each unbroken stretch, and its dots."""

    label: str
    kind: str
    paths: tuple[str, ...]
    dots: tuple[Dot, ...]


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over a common axis."""

    frame: Frame
    lines: tuple[Line, ...]


def line_chart(
    lines: Sequence[tuple[str, str, Sequence[Value]]],
    *,
    x_title: str,
    y_title: str,
    x_labels: Sequence[tuple[float, str]],
    top: float,
    top_label: str,
    logarithmic: bool = False,
) -> LineChart | None:
    """Lines from 0 up to `top`; None where no line has a value.

    Args:
        lines: Name, kind, and the values of each.
        x_title, y_title: What the axes show. x_labels: Values of x that have a label.
        top: The y value of the upper edge. top_label: Its label.
        logarithmic: Whether the x axis is; the y axis never is.
    """
    xs = [value.x for _, _, values in lines for value in values if value.y is not None]
    if not xs or top <= 0:
        return None
    left, right = _SMALL_LEFT, _SMALL_WIDTH - _SMALL_RIGHT
    upper, lower = _SMALL_TOP, _SMALL_HEIGHT - _SMALL_BOTTOM
    scaled = math.log if logarithmic else float
    low, high = scaled(min(xs)), scaled(max(xs))

    def at(x: float) -> float:
        return left + ((scaled(x) - low) / (high - low) if high > low else 0.5) * (right - left)

    drawn = []
    for label, kind, values in lines:
        paths: list[list[str]] = [[]]
        dots = []
        for value in values:
            if value.y is None:
                paths.append([])
                continue
            ends = value.interval or (value.y, value.y)
            here, low_y, high_y = (
                lower - min(y / top, 1.0) * (lower - upper) for y in (value.y, *ends)
            )
            paths[-1].append(pair((at(value.x), here)))
            dots.append(Dot(at(value.x), here, value.tip, low_y, high_y))
        drawn.append(Line(label, kind, tuple(" ".join(p) for p in paths if p), tuple(dots)))
    frame = Frame(
        *(_SMALL_WIDTH, _SMALL_HEIGHT, left, right, upper, lower),
        x_ticks=tuple(_apart([Tick(at(x), label) for x, label in x_labels])),
        y_ticks=(Tick(lower, "0"), Tick(upper, top_label)),
        x_title=x_title,
        y_title=y_title,
    )
    return LineChart(frame, tuple(drawn))
