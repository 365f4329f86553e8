"""The roofline as a picture: two roofs, and a point for each phase, batch and class of operations, on log-log axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phaseprof.cli.render import units
from phaseprof.cli.render.html.charts import CHARACTER, Frame, Tick, pair
from phaseprof.trace.meta import Ceilings

#: The frame.
_WIDTH, _HEIGHT = 640.0, 380.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 18.0, 24.0, 46.0
#: Decades that stay free beyond the outermost points.
_AROUND_X, _AROUND_Y = (0.45, 0.9), (0.45, 0.35)
_LEAST_DECADES = 2.0


@dataclass(frozen=True, slots=True)
class Point:
    """A point to be placed on the roofline.

    Attributes:
        label: Its name. tip: Its figures in words.
        kind: Names its colour and its shape: a phase.
        intensity: FLOP/byte. tflops: Achieved TFLOP/s.
        minor: One of the parts of a phase (a batch, a class of operations): smaller, and hollow.
    """

    label: str
    tip: str
    kind: str
    intensity: float
    tflops: float
    minor: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """A point in the picture; `anchor` is where its label begins or ends, empty if it found no room."""

    x: float
    y: float
    point: Point
    label_x: float
    label_y: float
    anchor: str


@dataclass(frozen=True, slots=True)
class RooflineChart:
    """The roofs and the points.

    Attributes:
        frame: The frame.
        roof: Corners of the roof, as SVG takes them.
        ridge_x, ridge_y: Where the roofs meet.
        peak_label, slope_label, ridge_label: Figures of the roofs with their provenance.
        slope_x, slope_y, slope_angle: Where the label of the slope stands.
        points: The points.
    """

    frame: Frame
    roof: str
    ridge_x: float
    ridge_y: float
    peak_label: str
    slope_label: str
    ridge_label: str
    slope_x: float
    slope_y: float
    slope_angle: float
    points: tuple[Placed, ...]


def roofline_chart(ceilings: Ceilings, points: Sequence[Point]) -> RooflineChart | None:
    """Place points under the roofs; None without a point or a roof. Both axes are logarithmic.

    Args:
        ceilings: The roofs.
        points: Those that are not positive have no place on such axes and are left out.
    """
    shown = [point for point in points if point.intensity > 0 and point.tflops > 0]
    peak, slope = ceilings.flops_per_s / 1e12, ceilings.bytes_per_s / 1e12
    if not shown or peak <= 0 or slope <= 0:
        return None
    xs = [math.log10(point.intensity) for point in shown] + [math.log10(peak / slope)]
    ys = [math.log10(point.tflops) for point in shown] + [math.log10(peak)]
    x_scale = _Scale.of(min(xs) - _AROUND_X[0], max(xs) + _AROUND_X[1], _LEFT, _WIDTH - _RIGHT)
    y_scale = _Scale.of(min(ys) - _AROUND_Y[0], max(ys) + _AROUND_Y[1], _HEIGHT - _BOTTOM, _TOP)
    frame = Frame(
        *(_WIDTH, _HEIGHT, _LEFT, _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM),
        x_ticks=tuple(x_scale.decades()),
        y_ticks=tuple(y_scale.decades()),
        x_title="arithmetic intensity, FLOP/byte",
        y_title="TFLOP/s",
    )
    ridge_x, ridge_y = x_scale.at(math.log10(peak / slope)), y_scale.at(math.log10(peak))
    # The slope enters the plot at its left edge or at its bottom.
    low_x = max(x_scale.low, y_scale.low - math.log10(slope))
    begin = x_scale.at(low_x), y_scale.at(low_x + math.log10(slope))
    placed = tuple(_placed(shown, x_scale, y_scale, (ridge_x, ridge_y)))
    middle_x, middle_y = (begin[0] + ridge_x) / 2, (begin[1] + ridge_y) / 2
    origin = f", {ceilings.source}"
    spread = "" if ceilings.spread is None else f" ±{units.percent(ceilings.spread)}"
    return RooflineChart(
        frame=frame,
        roof=f"{pair(begin)} {pair((ridge_x, ridge_y))} {pair((frame.right, ridge_y))}",
        ridge_x=ridge_x,
        ridge_y=ridge_y,
        peak_label=f"{units.rate(peak)} TFLOP/s {ceilings.dtype}{origin}{spread}",
        slope_label=f"{units.rate(slope * 1e3)} GB/s{origin}{spread}",
        ridge_label=f"ridge {units.rate(peak / slope)}",
        slope_x=middle_x,
        slope_y=middle_y,
        slope_angle=math.degrees(math.atan2(ridge_y - begin[1], ridge_x - begin[0])),
        points=placed,
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    """From log10 of a value to a coordinate."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def of(cls, low: float, high: float, begin: float, end: float) -> _Scale:
        missing = max(_LEAST_DECADES - (high - low), 0.0)
        return cls(low - missing / 2, high + missing / 2, begin, end)

    def at(self, log: float) -> float:
        return self.begin + (log - self.low) / (self.high - self.low) * (self.end - self.begin)

    def decades(self) -> Iterator[Tick]:
        for exponent in range(math.ceil(self.low), math.floor(self.high) + 1):
            yield Tick(self.at(exponent), units.tick(exponent))


_Box = tuple[float, float, float, float]


def _placed(
    points: Sequence[Point],
    x_scale: _Scale,
    y_scale: _Scale,
    ridge: tuple[float, float],
) -> Iterator[Placed]:
    """The points with the first place for each label that no other label or point has."""
    seats = [
        (x_scale.at(math.log10(point.intensity)), y_scale.at(math.log10(point.tflops)))
        for point in points
    ]
    taken: list[_Box] = [(x - 7, y - 7, x + 7, y + 7) for x, y in seats]
    # The flat roof, and what stands above it.
    taken.append((ridge[0], ridge[1] - 22, x_scale.end, ridge[1] + 2))
    for place, (point, (x, y)) in enumerate(zip(points, seats, strict=True)):
        others = taken[:place] + taken[place + 1 :]
        room = len(point.label) * CHARACTER
        found = ("", x, y)
        for anchor, at_x, at_y in (
            ("start", x + 11, y + 4),
            ("end", x - 11, y + 4),
            ("start", x + 7, y + 18),
            ("start", x + 7, y - 9),
            ("end", x - 7, y + 18),
            ("end", x - 7, y - 9),
            ("start", x + 9, y + 33),
            ("start", x + 9, y - 24),
        ):
            left = at_x if anchor == "start" else at_x - room
            box = (left, at_y - 11, left + room, at_y + 3)
            inside = left >= x_scale.begin + 2 and box[2] <= x_scale.end
            inside = inside and box[1] >= y_scale.end and box[3] <= y_scale.begin
            if inside and not any(_meet(box, other) for other in others):
                found = (anchor, at_x, at_y)
                taken.append(box)
                break
        yield Placed(x, y, point, found[1], found[2], found[0])


def _meet(one: _Box, other: _Box) -> bool:
    apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    return not apart
