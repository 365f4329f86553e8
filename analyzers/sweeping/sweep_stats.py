"""Statistics of repeats: medians with intervals, outliers, and lines through medians. Pure.

The interval of a median is that of two order statistics: it needs no assumption on how times are distributed, which
have a long tail on one side. A repeat is an outlier by the modified z-score of Iglewicz and Hoaglin, "How to detect and
handle outliers" (ASQC, 1993): more than 3.5 times 1.4826 MAD from the median. Outliers are named and kept: a median
does not need them to go.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phaseprof.analyzers.sweeping.sweep_results import Estimate

#: Probability that an interval holds the true value.
COVERAGE = 0.9
#: 1.4826 MAD is the standard deviation of a normal distribution.
_TO_SIGMA = 1.4826
_FAR = 3.5
#: Nearer than that to the median nobody would call it odd, however close the others lie.
_FAR_SHARE = 0.1
#: With fewer repeats none can be told from the others.
_FEW = 4
#: From so many on the interval is that of a normal distribution.
_MANY = 500
_NORMAL_TAIL = 1.645
#: Two sizes are on any line.
LEAST_SIZES = 3
#: Resamples of the repeats.
RESAMPLES = 400


def estimate(values: Sequence[float]) -> Estimate:
    """The median with its interval. Values must not be empty.

    Of n values in order, the k-th from either end hold the median between them with probability
    ``1 - 2 P(Binomial(n, 1/2) < k)``. The largest k whose probability is 90 % or more is taken; below five values
    there is none, and the interval is their range.
    """
    ordered = sorted(values)
    n = len(ordered)
    median = statistics.median(ordered)
    k, coverage = _order(n)
    mad = statistics.median(abs(value - median) for value in ordered)
    return Estimate(median, ordered[k - 1], ordered[n - k], coverage, mad, n)


def _order(n: int) -> tuple[int, float]:
    """Which value from either end, and with what probability the two hold the median between them."""
    if n > _MANY:
        # The binomial distribution is a normal one by then.
        return math.floor(n / 2 - _NORMAL_TAIL * math.sqrt(n) / 2), COVERAGE
    k, tail = 1, 0.5**n
    coverage = 1 - 2 * tail
    while True:
        tail += math.comb(n, k) * 0.5**n
        if 1 - 2 * tail < COVERAGE:
            return k, max(coverage, 0.0)
        k, coverage = k + 1, 1 - 2 * tail


def far_ones(values: Sequence[float]) -> list[int]:
    """Places of the values that lie far from the others."""
    if len(values) < _FEW:
        return []
    median = statistics.median(values)
    mad = statistics.median(abs(value - median) for value in values)
    limit = max(_FAR * _TO_SIGMA * mad, _FAR_SHARE * median)
    return [place for place, value in enumerate(values) if abs(value - median) > limit]


@dataclass(frozen=True, slots=True)
class Line:
    """``fixed + each x size``.

    Attributes:
        misfit: Its largest error at a point, as a share of the point's value.
    """

    fixed: float
    each: float
    misfit: float

    @property
    def knee(self) -> float:
        """The size that adds as much as the fixed part; infinite where nothing is added."""
        if self.each <= 0:
            return math.inf
        return max(self.fixed, 0.0) / self.each


def fit(sizes: Sequence[float], values: Sequence[float]) -> Line:
    """The line with the least sum of squares of relative errors: a millisecond weighs as much in a step of 30 ms as ten
    do in one of 300. Two or more different sizes, and positive values."""
    weights = [1 / value**2 for value in values]
    total = sum(weights)
    x = sum(w * size for w, size in zip(weights, sizes, strict=True)) / total
    y = sum(w * value for w, value in zip(weights, values, strict=True)) / total
    pairs = list(zip(weights, sizes, values, strict=True))
    spread = sum(w * (size - x) ** 2 for w, size, _ in pairs)
    each = sum(w * (size - x) * (value - y) for w, size, value in pairs) / spread
    fixed = y - each * x
    misfit = max(abs((fixed + each * size) / value - 1) for _, size, value in pairs)
    return Line(fixed, each, misfit)


def halfway(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The knee without a line: the size s where ``value(s) (1 + s0 / s) = 2 value(s0)``, s0 the smallest size.

    On a line ``fixed + each x s`` that is s = fixed / each. Values between two sizes are interpolated on logarithmic
    axes. Infinite if the largest size has not come so far, ``s0`` if the second one is past it.

    Args:
        sizes: Ascending, two or more.
        values: One a size.
    """
    first, target = sizes[0], 2 * values[0]
    scores = [value * (1 + first / size) for size, value in zip(sizes, values, strict=True)]
    below = [place for place, score in enumerate(scores) if score <= target * (1 + 1e-9)]
    last = below[-1]
    if last == len(sizes) - 1:
        return math.inf
    if last == 0:
        # Its own score is the target: the crossing is no crossing.
        return first
    low, high = math.log(scores[last]), math.log(scores[last + 1])
    share = (math.log(target) - low) / (high - low)
    return math.exp(
        math.log(sizes[last]) + share * (math.log(sizes[last + 1]) - math.log(sizes[last]))
    )


def resample(
    repeats: Sequence[Sequence[float]], figure: Callable[[list[float]], float], seed: int = 0
) -> tuple[float, float]:
    """The 90 % interval of a figure of the medians of several cells: the 5th and 95th percentile of the figure over
    resamples of the repeats, drawn with replacement within each cell (Efron's bootstrap).

    Args:
        repeats: The repeats of each cell.
        figure: Of the medians.
        seed: Of the draws: a report of a trace is always the same.
    """
    chance = random.Random(seed)
    found = sorted(
        figure([statistics.median(chance.choices(cell, k=len(cell))) for cell in repeats])
        for _ in range(RESAMPLES)
    )
    edge = round((1 - COVERAGE) / 2 * RESAMPLES)
    return found[edge], found[-edge - 1]
