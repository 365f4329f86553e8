"""Figures as functions of the units of a run: ratios of sums, percentiles, and means at equal batch sizes.

Each has a value, says how far each unit moves it, and can be worked out again for any draw of blocks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import as_float, nearest_ranks, scalar
from phaseprof.analyzers.comparing.resampling import (
    Draw,
    Draws,
    Spread,
    spread,
    weighted,
)

#: Bins to a factor of e: a percentile of a draw is good to 0.05 %.
_BINS = 2_000
#: Bins that the percentile of a draw is looked for in.
_NEAR = 128
#: Nothing is told from less than a nanosecond.
_LEAST_MS = 1e-6
#: Values that have to lie beyond a percentile for its error to be known.
BEYOND = 3
#: Below so many values the error of a median is that of the mean, which grows faster as values become few.
FEW_VALUES = 6

_OfDraw = Callable[[Draw], float | None]
_Blocks = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A sum over another one: time per pass, tokens per second.

    Attributes:
        above, below: Sums of each unit. scale: The ratio times this is the figure.
    """

    above: tuple[float, ...]
    below: tuple[float, ...]
    scale: float = 1.0

    @property
    def value(self) -> float | None:
        """None if nothing was summed."""
        below = math.fsum(self.below)
        return self.scale * math.fsum(self.above) / below if below else None

    def spread(self, draws: Draws) -> Spread | None:
        """Over the units that have a part of it."""
        pairs = [(a, b) for a, b in zip(self.above, self.below, strict=True) if b]
        whole, total = math.fsum(b for _, b in pairs), math.fsum(a for a, _ in pairs)
        if not whole or not total:
            return None
        influence = [a / total - b / whole for a, b in pairs]

        def drawn(blocks: _Blocks) -> _OfDraw:
            above = [sum(a for a, _ in pairs[i:j]) for i, j in blocks]
            below = [sum(b for _, b in pairs[i:j]) for i, j in blocks]

            def of_draw(draw: Draw) -> float | None:
                whole = weighted(draw, below)
                return weighted(draw, above) / whole if whole else None

            return of_draw

        return spread(draws, influence, drawn)


@dataclass(frozen=True, slots=True)
class Distribution:
    """The values of a latency in ms.

    Attributes:
        p50, p90, p99: Nearest ranks; None without values. count: Values.
        mean: Their mean, as a ratio.
        bins: Of each unit, how many values lie in each bin.
    """

    p50: float | None
    p90: float | None
    p99: float | None
    count: int
    mean: Ratio
    bins: tuple[Mapping[int, int], ...]

    @classmethod
    def of(cls, values_ns: pa.Array, units: Sequence[tuple[int, int]]) -> Distribution:
        """Of a column of times in ns, null where there is none, and where the values of each unit lie in it."""
        ms = pc.multiply(as_float(values_ns), scalar(1e-6, pa.float64()))
        p50, p90, p99 = nearest_ranks(ms, 0.50, 0.90, 0.99) or (None, None, None)
        floor = pc.max_element_wise(ms, scalar(_LEAST_MS, pa.float64()), skip_nulls=False)
        codes = pc.cast(
            pc.floor(pc.multiply(pc.ln(floor), scalar(float(_BINS), pa.float64()))), pa.int64()
        )
        parts = [(ms.slice(i, j - i), codes.slice(i, j - i)) for i, j in units]
        return cls(
            p50,
            p90,
            p99,
            count=len(ms) - ms.null_count,
            mean=Ratio(
                tuple(pc.sum(part).as_py() or 0.0 for part, _ in parts),
                tuple(float(len(part) - part.null_count) for part, _ in parts),
            ),
            bins=tuple(_counts(part) for _, part in parts),
        )

    def percentile(self, share: float) -> float | None:
        """One of the three."""
        return {0.50: self.p50, 0.90: self.p90, 0.99: self.p99}[share]

    def needed(self, share: float) -> int:
        """Values that a percentile needs for its error to be known."""
        return math.ceil(BEYOND / (1 - share) - 1e-9)

    def spread(self, share: float, draws: Draws) -> Spread | None:
        """Of a percentile; None where too few values lie beyond it."""
        if share == 0.50 and self.count < FEW_VALUES:
            return self.mean.spread(draws)
        if self.count < self.needed(share):
            return None
        counted = [part for part in self.bins if part]
        pooled: dict[int, int] = {}
        for part in counted:
            for edge, n in part.items():
                pooled[edge] = pooled.get(edge, 0) + n
        edges = sorted(pooled)
        up_to = list(accumulate(pooled[edge] for edge in edges))
        middle = edges[bisect_left(up_to, _rank(share, self.count))]
        # The percentile lies where the sum of these crosses zero (Woodruff 1952).
        below = [sum(n for edge, n in part.items() if edge <= middle) for part in counted]
        true_share = sum(below) / self.count
        sizes = [sum(part.values()) for part in counted]
        influence = [under - true_share * n for under, n in zip(below, sizes, strict=True)]

        def drawn(blocks: _Blocks) -> _OfDraw:
            near = _near(edges, up_to, middle, [sum(influence[i:j]) for i, j in blocks])
            # Of each of these edges, how many values of each block lie in its bin or below it.
            sums = list(zip(*(_cumulated(counted[i:j], near) for i, j in blocks), strict=True))
            whole = [sum(sizes[i:j]) for i, j in blocks]

            def of_draw(draw: Draw) -> float | None:
                wanted = _rank(share, round(weighted(draw, whole)))
                low, high = 0, len(near) - 1
                while low < high:
                    centre = (low + high) // 2
                    if weighted(draw, sums[centre]) >= wanted:
                        high = centre
                    else:
                        low = centre + 1
                return math.exp((near[low] + 0.5) / _BINS)

            return of_draw

        return spread(draws, influence, drawn)


def _near(
    edges: Sequence[int], up_to: Sequence[int], middle: int, moved: Sequence[float]
) -> Sequence[int]:
    """The bins that the percentile of a draw can lie in: those within six standard deviations of how many values lie
    below it, and at most `_NEAR` of them."""
    reach = 6 * math.sqrt(sum(each * each for each in moved) * len(moved) / max(len(moved) - 1, 1))
    at = up_to[bisect_left(edges, middle)]
    first = bisect_left(up_to, at - reach)
    last = min(bisect_left(up_to, at + reach), len(edges) - 1)
    # A draw must find something: the outermost ones stay in where there is little else.
    first, last = max(min(first, last) - 2, 0), min(last + 2, len(edges) - 1)
    n = last - first + 1
    if n <= _NEAR:
        return edges[first : last + 1]
    return [edges[first + (n - 1) * place // (_NEAR - 1)] for place in range(_NEAR)]


@dataclass(frozen=True, slots=True)
class SameBatch:
    """The mean time of a pass, each batch size with the same weight in both traces.

    Attributes:
        means: Time and passes of each batch size, over all units. weights: Of each; they add up to 1.
    """

    means: tuple[Ratio, ...]
    weights: tuple[float, ...]

    @property
    def value(self) -> float | None:
        """The weighted geometric mean, ms."""
        found = [each.value for each in self.means]
        if not found or not all(found):
            return None
        pairs = zip(found, self.weights, strict=True)
        return math.exp(math.fsum(w * math.log(v) for v, w in pairs if v))

    def spread(self, draws: Draws) -> Spread | None:
        """Over all units."""
        wholes = [each.value for each in self.means]
        if not wholes or not all(wholes):
            return None
        influence = [0.0] * len(self.means[0].below)
        for mean, weight in zip(self.means, self.weights, strict=True):
            above, below = math.fsum(mean.above), math.fsum(mean.below)
            for unit, (a, b) in enumerate(zip(mean.above, mean.below, strict=True)):
                influence[unit] += weight * (a / above - b / below)
        used = [u for u in range(len(influence)) if any(each.below[u] for each in self.means)]

        def drawn(blocks: _Blocks) -> _OfDraw:
            above, below = (
                [
                    [sum(getattr(mean, of)[u] for u in used[i:j]) for i, j in blocks]
                    for mean in self.means
                ]
                for of in ("above", "below")
            )

            def of_draw(draw: Draw) -> float | None:
                log = 0.0
                for place, weight in enumerate(self.weights):
                    whole = weighted(draw, below[place])
                    # A draw without a batch size says nothing of it.
                    value = weighted(draw, above[place]) / whole if whole else wholes[place]
                    log += weight * math.log(value or 1.0)
                return math.exp(log)

            return of_draw

        return spread(draws, [influence[u] for u in used], drawn)


Series = Ratio | Distribution | SameBatch


def _rank(share: float, count: int) -> int:
    return max(-(-round(share * 100) * count // 100), 1)


def _counts(codes: pa.Array) -> dict[int, int]:
    found = pc.value_counts(codes.drop_null())
    pairs = zip(found.field("values").to_pylist(), found.field("counts").to_pylist(), strict=True)
    return dict(pairs)


def _cumulated(parts: Sequence[Mapping[int, int]], edges: Sequence[int]) -> list[int]:
    """How many values of these units lie in each bin or below it."""
    sums = [0] * (len(edges) + 1)
    for part in parts:
        for edge, n in part.items():
            sums[bisect_left(edges, edge)] += n
    return list(accumulate(sums[:-1]))
