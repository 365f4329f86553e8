"""Errors of the model, by class: relative, of the modelled time against the measured one."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from efficiency_kit.tables import AttentionPoint, GemmPoint, Part
from phaseprof.analyzers.efficiency.parameters import Spread

P = TypeVar("P", GemmPoint, AttentionPoint)
#: A class with fewer points, or of fewer sizes, in the part that gives the intervals gets none of its own.
FEWEST = 40
FEWEST_SIZES = 16
#: The tables repeat to this: what lies nearer to a bound is neither inside nor outside.
REPEATS = 0.02


@dataclass(frozen=True, slots=True)
class Judged(Generic[P]):
    """A point with its modelled time."""

    point: P
    modelled_s: float

    @property
    def error(self) -> float:
        """Relative; positive where the model is too slow."""
        return self.modelled_s / self.point.seconds - 1


def held(judged: Iterable[Judged[P]]) -> list[Judged[P]]:
    """Those that the fit did not see."""
    return [each for each in judged if each.point.part is not Part.FIT]


def summary(judged: Sequence[Judged[P]]) -> dict[str, float | int]:
    """Median and 90th percentile of the absolute error, and the median of the signed one."""
    sizes = sorted(abs(each.error) for each in judged)
    return {
        "points": len(judged),
        "median": round(statistics.median(sizes), 4),
        "p90": round(quantile(sizes, 0.9), 4),
        "bias": round(statistics.median(each.error for each in judged), 4),
    }


def by(
    judged: Iterable[Judged[P]], name: Callable[[Judged[P]], str]
) -> dict[str, dict[str, float | int]]:
    """Summaries by class, in the order of their names' first points."""
    groups: dict[str, list[Judged[P]]] = defaultdict(list)
    for each in judged:
        groups[name(each)].append(each)
    return {key: summary(groups[key]) for key in groups}


def spreads(
    judged: Sequence[Judged[P]], names: Callable[[Judged[P]], Sequence[str]]
) -> dict[str, Spread]:
    """Intervals from the part that is for them; errors from the whole held half.

    Args:
        judged: All points.
        names: Every class that a point is in.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    errors: dict[str, list[float]] = defaultdict(list)
    sizes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for each in held(judged):
        for name in names(each):
            errors[name].append(abs(each.error))
            if each.point.part is Part.INTERVALS:
                ratios[name].append(each.point.seconds / each.modelled_s)
                sizes[name].add(each.point.sizes)
    return {
        name: Spread(
            low=round(quantile(sorted(ratios[name]), 0.05) / (1 + REPEATS), 3),
            high=round(quantile(sorted(ratios[name]), 0.95) * (1 + REPEATS), 3),
            median_error=round(statistics.median(errors[name]), 4),
            points=len(errors[name]),
        )
        for name in sorted(errors)
        if len(ratios[name]) >= FEWEST and len(sizes[name]) >= FEWEST_SIZES
    }


def coverage(
    judged: Iterable[Judged[P]],
    spread_of: Callable[[Judged[P]], Spread],
    name: Callable[[Judged[P]], str],
) -> Mapping[str, dict[str, float | int]]:
    """Which share of the checking part lies inside its interval, by class."""
    inside: dict[str, list[bool]] = defaultdict(list)
    for each in judged:
        if each.point.part is Part.CHECK:
            spread = spread_of(each)
            ratio = each.point.seconds / each.modelled_s
            for key in (name(each), "all"):
                inside[key].append(spread.low <= ratio <= spread.high)
    return {
        key: {"points": len(found), "inside": round(sum(found) / len(found), 3)}
        for key, found in sorted(inside.items())
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted numbers, between two of them linearly."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
