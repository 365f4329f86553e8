"""The value of a counter in each phase, from windows that are longer than the phases.

A window's value is the mean over what ran in it: ``y = sum over the labels of share x value``. Many windows with
different shares determine the values, by least squares. What makes this honest is the error, which is the sum of all
that can go wrong:

- noise of the counter and variation within a phase: by leaving out blocks of windows in turn (the jackknife), which
  sees noise that differs from window to window, neighbours that err together, and single windows that decide alone;
- what the windows leave open: every value also has a weak prior, so that a label which never varies on its own gets the
  prior's width as its error, instead of a singular equation or an arbitrary answer;
- the offset between the clock of the windows and that of the passes: it is solved for, and every offset that fits
  nearly as well adds what it would change;
- jitter of the windows' edges, which pulls the values of phases together: bounded from the shares around the edges;
- passes of one phase that are unlike each other: short and long ones are solved apart, and must give the same mean;
- bounds: a value outside of what is possible is moved to the bound, and its error grows by the way that it moved.

Pure Python: a few thousand windows and at most a dozen labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from typing import NamedTuple

from phaseprof.analyzers.device_time import BETWEEN, IDLE
from phaseprof.analyzers.solving import Matrix, Singular, Vector, bounded, inverse, t95, times
from phaseprof.analyzers.weights import Weights

#: Share of a window from which on it is one of a single label.
_PURE = 0.95
#: Share of a window from which on it counts as one that holds the label.
_HOLDS = 0.05
#: Least standard deviation of a window's value around the fit, in spans: counters read whole percents at best.
_LEAST_NOISE = 0.003
#: The same before a first fit has told it.
_FIRST_NOISE = 0.02
#: Blocks of neighbouring windows for the jackknife.
_BLOCKS = 30
#: Twice the loss of log-likelihood up to which another offset is believed as well (chi-squared, one unknown, 99.7 %).
_AS_GOOD = 9.0
#: Mean and standard deviation that are expected of a phase before anything was sampled, in spans.
_OPEN = (0.5, 0.5)
#: Share of a value's information that may be an artefact of jitter.
_MOST_JITTER = 0.35
_Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class Scale:
    """What values a counter can have.

    Attributes:
        span: The width that its values spread over: 1 for a share.
        greatest: What it cannot exceed.
        idle: Mean and standard deviation that are expected of pauses, in spans: sometimes others work in them.
        between: The same of the short times between passes, in which tokens are sampled.
    """

    span: float
    greatest: float
    idle: tuple[float, float]
    between: tuple[float, float]


#: Of a share of cycles. Sampling a token runs small kernels; the driver and others use a device now and then.
SHARE = Scale(1.0, 1.0, idle=(0.1, 0.25), between=(0.1, 0.15))


@dataclass(frozen=True, slots=True)
class Errors:
    """The parts of an error, each half of a 95 % interval, in the order of this module's text."""

    noise: float
    open: float
    offset: float
    jitter: float
    unlike: float
    moved: float

    @property
    def whole(self) -> float:
        """What is random adds in squares; what pulls to one side adds up."""
        random = math.hypot(self.noise, self.open)
        return random + self.offset + self.jitter + self.unlike + self.moved


@dataclass(frozen=True, slots=True)
class Solved:
    """The value of one label.

    Attributes:
        value: Its mean. error: Half of the 95 % interval; infinite where nothing is known. Both in the counter's unit.
        parts: What the error is made of, in spans.
        windows: Windows that hold some of it. seconds: Its time in all windows.
        blocks: How many parts of the run the value effectively rests on.
        direct: Most of what is known of it comes from windows that hold nothing else.
        apart: Share of its presence in the windows that the other labels do not explain; near 0 if it never varies on
            its own.
        residual: Standard deviation of the windows around the fit, in spans.
    """

    value: float
    error: float
    parts: Errors
    windows: int
    seconds: float
    blocks: float
    direct: bool
    apart: float
    residual: float


def unmix(
    weights: Weights, values: Sequence[float], scale: Scale, offsets_ns: Sequence[int]
) -> Mapping[int, Solved]:
    """Solve for the value of each coarse label.

    Args:
        weights: Shares of the labels in the windows.
        values: One a window, in the counter's unit.
        scale: What values are possible.
        offsets_ns: Offsets between the clocks that are tried, ascending.

    Returns:
        By number of the coarse label; those without time in the windows are left out.
    """
    y = [value / scale.span for value in values]
    present = [label for label, column in enumerate(weights.coarse(0)) if sum(column) > 1e-3]
    if not present:
        return {}
    found = dict(_Equations(weights, y, scale, present, free_idle=True).solve(offsets_ns))
    busy = [label for label in present if label != IDLE]
    if busy and len(busy) < len(present):
        # Of idle time a single pause may tell, or nothing at all: then what is expected of it says more. Either
        # interval holds, so the narrower one is taken.
        expected = dict(_Equations(weights, y, scale, busy, free_idle=False).solve(offsets_ns))
        found |= {k: each for k, each in expected.items() if each.error < found[k].error}
    return found


class _Fit(NamedTuple):
    """Least squares with the priors, for one offset."""

    y: list[float]
    columns: list[list[float]]
    matrix: Matrix
    right: Vector
    inverse: Matrix
    values: Vector
    residual: float


class _Equations:
    """The equations of one counter.

    Args:
        weights: Of the windows. y: Values, in spans. scale: Of the counter.
        present: The labels that are solved for.
        free_idle: Idle time is one of them; else it has the value that is expected of it.
    """

    def __init__(
        self,
        weights: Weights,
        y: list[float],
        scale: Scale,
        present: list[int],
        *,
        free_idle: bool,
    ) -> None:
        self._weights = weights
        self._y = y
        self._scale = scale
        self._labels = present
        self._free_idle = free_idle
        self._variance = _FIRST_NOISE**2
        freedom = max(len(y) - len(present), 1)
        self._variance = max(self._fit(0).residual / freedom, _LEAST_NOISE**2)

    def solve(self, offsets_ns: Sequence[int]) -> Iterator[tuple[int, Solved]]:
        fits = {offset: self._fit(offset) for offset in offsets_ns}
        best = min(fits, key=lambda offset: (fits[offset].residual, abs(offset)))
        fit = fits[best]
        noise, blocks = _jackknife(fit)
        of_offset = _of_offset(fits, best)
        of_jitter = self._of_jitter(fit, best)
        inside = self._inside(fit)
        for i, label in enumerate(self._labels):
            errors = Errors(
                noise=t95(blocks[i] - 1) * noise[i],
                open=_Z95 * self._left_open(fit, i, best),
                offset=of_offset[i],
                jitter=of_jitter[i],
                unlike=self._unlike(label, fit.values[i], best),
                moved=abs(inside[i] - fit.values[i]),
            )
            yield label, self._solved(fit, i, inside[i], errors, blocks[i])

    def _solved(self, fit: _Fit, i: int, value: float, errors: Errors, blocks: float) -> Solved:
        column = fit.columns[i]
        influence = [
            sum(map(mul, fit.inverse[i], shares)) for shares in zip(*fit.columns, strict=True)
        ]
        pure = sum(h * h for h, share in zip(influence, column, strict=True) if share >= _PURE)
        lengths = [end - start for start, end in self._weights.windows]
        presence = sum(map(mul, column, column))
        return Solved(
            value=value * self._scale.span,
            error=errors.whole * self._scale.span,
            parts=errors,
            windows=sum(share >= _HOLDS for share in column),
            seconds=sum(map(mul, column, lengths)) / 1e9,
            blocks=blocks,
            direct=2 * pure > sum(map(mul, influence, influence)),
            apart=1 / (fit.inverse[i][i] * presence) if presence else 0.0,
            residual=math.sqrt(fit.residual / max(len(fit.y) - len(fit.values), 1)),
        )

    def _prior(self, label: int) -> tuple[float, float]:
        if label == BETWEEN:
            return self._scale.between
        return self._scale.idle if label == IDLE else _OPEN

    def _fit(self, offset_ns: int) -> _Fit:
        coarse = self._weights.coarse(offset_ns)
        return self._fit_columns(offset_ns, [coarse[k] for k in self._labels], self._labels)

    def _fit_columns(
        self, offset_ns: int, columns: list[list[float]], labels: Sequence[int]
    ) -> _Fit:
        y = self._y
        if not self._free_idle:
            idle = self._weights.coarse(offset_ns)[IDLE]
            mean = self._scale.idle[0]
            y = [value - share * mean for value, share in zip(y, idle, strict=True)]
        n = len(columns)
        plain = [[0.0] * n for _ in range(n)]
        for i in range(n):
            for j in range(i + 1):
                plain[i][j] = plain[j][i] = sum(map(mul, columns[i], columns[j]))
        plain_right = [sum(map(mul, column, y)) for column in columns]
        matrix, right = [list(row) for row in plain], list(plain_right)
        for i, label in enumerate(labels):
            mean, deviation = self._prior(label)
            matrix[i][i] += self._variance / deviation**2
            right[i] += self._variance / deviation**2 * mean
        inverted = inverse(matrix)
        x = times(inverted, right)
        residual = (
            sum(map(mul, y, y))
            - 2 * sum(map(mul, x, plain_right))
            + sum(map(mul, x, times(plain, x)))
        )
        return _Fit(y, columns, matrix, right, inverted, x, max(residual, 0.0))

    def _inside(self, fit: _Fit) -> Vector:
        """The values between the bounds that fit best."""
        n, greatest = len(fit.values), self._scale.greatest / self._scale.span
        if all(0 <= value <= greatest for value in fit.values):
            return fit.values
        return bounded(fit.matrix, fit.right, [0.0] * n, [greatest] * n)

    def _left_open(self, fit: _Fit, i: int, offset_ns: int) -> float:
        """What a value would change if what is expected were off by its standard deviation."""
        row = fit.inverse[i]
        parts = [
            row[j] * self._variance / self._prior(label)[1] for j, label in enumerate(self._labels)
        ]
        if not self._free_idle:
            idle = self._weights.coarse(offset_ns)[IDLE]
            shared = [sum(map(mul, column, idle)) for column in fit.columns]
            parts.append(sum(map(mul, row, shared)) * self._scale.idle[1])
        size: float = math.hypot(*parts)
        return size

    def _of_jitter(self, fit: _Fit, offset_ns: int) -> list[float]:
        """How far errors of the edges can have pulled each value; infinite where they are too much of what is known.

        Shares with errors of covariance E in the normal matrix A pull the values to ``A^-1 (A - E) x`` (errors in
        variables: Fuller, "Measurement Error Models", 1987, section 2.2).
        """
        n = len(fit.values)
        false = [[0.0] * n for _ in range(n)]
        jitter_ns = self._weights.jitter_ns
        for w, (length_ns, *edges) in enumerate(self._weights.edges(offset_ns)):
            variance = (jitter_ns / length_ns) ** 2
            for shares in edges:
                apart = [shares[k] - fit.columns[i][w] for i, k in enumerate(self._labels)]
                for i in range(n):
                    for j in range(n):
                        false[i][j] += variance * apart[i] * apart[j]
        try:
            true = inverse(_minus(fit.matrix, false))
        except Singular:
            return [math.inf] * n
        pulled = times(true, times(false, fit.values))
        return [
            math.inf
            if sum(fit.inverse[i][j] * false[j][i] for j in range(n)) > _MOST_JITTER
            else abs(pulled[i])
            for i in range(n)
        ]

    def _unlike(self, label: int, value: float, offset_ns: int) -> float:
        """How far the mean of a phase moves when its short and its long passes are solved apart."""
        fine, coarse = self._weights.fine(offset_ns), self._weights.coarse(offset_ns)
        parts = [k for k in self._weights.groups[label] if sum(fine[k]) > 0]
        if len(parts) < 2:
            return 0.0
        others = [k for k in self._labels if k != label]
        columns = [*(coarse[k] for k in others), *(fine[k] for k in parts)]
        fit = self._fit_columns(offset_ns, columns, [*others, *[label] * len(parts)])
        sums = [sum(fine[k]) for k in parts]
        apart: float = abs(sum(map(mul, sums, fit.values[len(others) :])) / sum(sums) - value)
        return apart


def _of_offset(fits: Mapping[int, _Fit], best: int) -> list[float]:
    """What the offsets that fit nearly as well would change, and half a step beside the best one."""
    chosen = fits[best]
    count = max(len(chosen.y), 1)
    limit = max(chosen.residual, count * _LEAST_NOISE**2) * math.exp(_AS_GOOD / count)
    believed = [fit for fit in fits.values() if fit.residual <= limit]
    offsets = sorted(fits)
    place = offsets.index(best)
    beside = [fits[offset] for offset in offsets[max(place - 1, 0) : place + 2]]
    return [
        max(
            *(abs(fit.values[i] - value) for fit in (chosen, *believed)),
            *(abs(fit.values[i] - value) / 2 for fit in beside),
        )
        for i, value in enumerate(chosen.values)
    ]


def _jackknife(fit: _Fit) -> tuple[list[float], list[float]]:
    """The standard error of each value by leaving out blocks of windows in turn (Efron and Stein, 1981), and on how
    many blocks of equal weight it effectively rests."""
    count, n = len(fit.y), len(fit.values)
    blocks = max(min(_BLOCKS, count // 4), min(count, 8), 1)
    cuts = [count * block // blocks for block in range(blocks + 1)]
    without: list[Vector] = []
    weights: list[Vector] = []
    for begin, end in pairwise(cuts):
        columns, y = [column[begin:end] for column in fit.columns], fit.y[begin:end]
        inner = [[sum(map(mul, a, b)) for b in columns] for a in columns]
        right = [r - sum(map(mul, a, y)) for a, r in zip(columns, fit.right, strict=True)]
        try:
            without.append(times(inverse(_minus(fit.matrix, inner)), right))
        except Singular:
            without.append([math.inf] * n)
        # The block's part of the variance that equal noise would give the value.
        weights.append([sum(map(mul, row, times(inner, row))) for row in fit.inverse])
    errors, effective = [], []
    for i in range(n):
        values = [each[i] for each in without]
        mean = sum(values) / blocks
        squares = sum((value - mean) ** 2 for value in values) if math.isfinite(mean) else math.inf
        errors.append(math.sqrt(squares * (blocks - 1) / blocks))
        parts = [max(each[i], 0.0) for each in weights]
        of_squares = sum(part * part for part in parts)
        effective.append(sum(parts) ** 2 / of_squares if of_squares else 0.0)
    return errors, effective


def _minus(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> Matrix:
    return [[x - y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]
