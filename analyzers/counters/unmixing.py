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
- bounds: a value outside of what is possible is moved to the bound, and its error grows by the way that it moved;
- pauses and the time between passes: solved for, and put at what is expected of them; where the answers exclude each
  other, the error covers both.

Pure Python: a few thousand windows and at most a dozen labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import mul
from typing import NamedTuple

from phaseprof.analyzers.counters.choosing import choices_of, narrowest, together
from phaseprof.analyzers.counters.device_time import BETWEEN, IDLE
from phaseprof.analyzers.counters.solved import Errors, Scale, Solved
from phaseprof.analyzers.counters.solving import (
    Matrix,
    Singular,
    Vector,
    bounded,
    inverse,
    t95,
    times,
)
from phaseprof.analyzers.counters.weights import Weights

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
#: Offsets that are tried at most: that of clocks further apart is not found.
_MOST_OFFSETS = 40
#: Mean and standard deviation that are expected of a phase before anything was sampled, in spans.
_OPEN = (0.5, 0.5)
#: Share of a value's information that may be an artefact of jitter.
_MOST_JITTER = 0.35
#: Short and long passes are solved apart where that moves a mean by more, in spans.
_ALIKE = 0.003
#: What is left inside each of two kinds of passes of the way that telling them apart has moved the mean.
_LEFT_UNLIKE = 0.25
_Z95 = 1.959964


def unmix(
    weights: Weights,
    values: Sequence[float],
    scale: Scale,
    offsets_ns: Sequence[int],
    *,
    gaps_known: bool = True,
) -> Mapping[int, Solved]:
    """Solve for the value of each coarse label.

    Args:
        weights: Shares of the labels in the windows.
        values: One a window, in the counter's unit.
        scale: What values are possible.
        offsets_ns: Offsets between the clocks that are tried, ascending, 0 among them.
        gaps_known: Where no pass is placed the device runs none, so that what is expected of that time holds.

    Returns:
        By number of the coarse label; those without time in the windows are left out.
    """
    y = [value / scale.span for value in values]
    present = [label for label, column in enumerate(weights.coarse(0)) if sum(column) > 1e-3]
    if not present:
        return {}
    choices = choices_of(present, gaps_known)
    found: dict[int, list[Solved]] = {}

    def solve(*, fine: bool) -> None:
        # Of idle time a single pause may tell, or nothing at all, and the time between passes may be a fixed share of
        # a phase's: then what is expected of them says more.
        for labels in choices:
            for label, each in _Equations(weights, y, scale, labels, fine=fine).solve(offsets_ns):
                found.setdefault(label, []).append(each)

    solve(fine=False)
    if any(narrowest(answers).parts.unlike > _ALIKE for answers in found.values()):
        solve(fine=True)
    return {label: together(answers, scale) for label, answers in found.items()}


class _Fit(NamedTuple):
    """Least squares with the priors, for one offset.

    Attributes:
        y: Values of the windows. columns: Shares of the unknowns in them.
        matrix, right: The normal equations. inverse: Of the matrix.
        values: The unknowns. residual: Sum of the squares that are left.
        mixes: A row a label: how its value is made of the unknowns.
    """

    y: list[float]
    columns: list[list[float]]
    matrix: Matrix
    right: Vector
    inverse: Matrix
    values: Vector
    residual: float
    mixes: Matrix

    @property
    def labels(self) -> Vector:
        """The values of the labels."""
        return times(self.mixes, self.values)


class _Equations:
    """The equations of one counter.

    Args:
        weights: Of the windows. y: Values, in spans. scale: Of the counter.
        labels: The coarse labels that are solved for. Where idle time or that between passes is none of them, it has
            the value that is expected of it.
        fine: Short and long passes of a phase are unknowns of their own, of which its value is the mean.
    """

    def __init__(
        self, weights: Weights, y: list[float], scale: Scale, labels: list[int], *, fine: bool
    ) -> None:
        self._weights = weights
        self._y = y
        self._scale = scale
        self._labels = labels
        self._fine = fine
        self._fixed = [label for label in (IDLE, BETWEEN) if label not in labels]
        self._unknowns = [(label, part) for label in labels for part in self._parts_of(label)]
        self._variance = _FIRST_NOISE**2
        freedom = max(len(y) - len(self._unknowns), 1)
        self._variance = max(self._fit(0).residual / freedom, _LEAST_NOISE**2)

    def _parts_of(self, label: int) -> list[int | None]:
        """The fine labels whose values are unknowns; None stands for the coarse label."""
        group = self._weights.groups[label]
        columns = self._weights.fine(0)
        parts: list[int | None] = [part for part in group if sum(columns[part]) > 0]
        return parts if self._fine and len(parts) > 1 else [None]

    def solve(self, offsets_ns: Sequence[int]) -> Iterator[tuple[int, Solved]]:
        fits, best = self._fits(offsets_ns)
        fit = fits[best]
        values, inside = fit.labels, times(fit.mixes, self._inside(fit))
        noise, blocks = _jackknife(fit)
        of_offset = _of_offset(fits, best)
        of_jitter = self._of_jitter(fit, best)
        for i, label in enumerate(self._labels):
            errors = Errors(
                noise=t95(blocks[i] - 1) * noise[i],
                open=_Z95 * self._left_open(fit, i, best),
                offset=of_offset[i],
                jitter=of_jitter[i],
                unlike=self._unlike(label, values[i], best),
                moved=abs(inside[i] - values[i]),
            )
            yield label, self._solved(fit, i, best, inside[i], errors, blocks[i])

    def _fits(self, offsets_ns: Sequence[int]) -> tuple[dict[int, _Fit], int]:
        """The fits for all offsets, and the best one: where it is the last of them, more are tried beyond it."""
        fits = {offset: self._fit(offset) for offset in offsets_ns}
        step = min((b - a for a, b in pairwise(offsets_ns)), default=0)

        def best_of() -> int:
            return min(fits, key=lambda offset: (fits[offset].residual, abs(offset)))

        while True:
            best = best_of()
            beyond = best + step if best > 0 else best - step
            outermost = best in (min(fits), max(fits)) and len(fits) > 1
            if not outermost or len(fits) >= _MOST_OFFSETS or _as_good(fits[0], fits[best]):
                break
            fits[beyond] = self._fit(beyond)
        # Edges that are known better than the steps say between them as well.
        while step > 2 * self._weights.jitter_ns:
            step //= 2
            best = best_of()
            for beside in (best - step, best + step):
                fits[beside] = self._fit(beside)
        return fits, best_of()

    def _solved(
        self, fit: _Fit, i: int, offset_ns: int, value: float, errors: Errors, blocks: float
    ) -> Solved:
        column = self._weights.coarse(offset_ns)[self._labels[i]]
        spread = times(fit.inverse, fit.mixes[i])
        influence = [sum(map(mul, spread, shares)) for shares in zip(*fit.columns, strict=True)]
        pure = sum(h * h for h, share in zip(influence, column, strict=True) if share >= _PURE)
        lengths = [end - start for start, end in self._weights.windows]
        presence = sum(map(mul, column, column)) * sum(map(mul, spread, fit.mixes[i]))
        return Solved(
            value=value * self._scale.span,
            error=errors.whole * self._scale.span,
            parts=errors,
            windows=sum(share >= _HOLDS for share in column),
            seconds=sum(map(mul, column, lengths)) / 1e9,
            blocks=blocks,
            direct=2 * pure > sum(map(mul, influence, influence)),
            apart=1 / presence if presence else 0.0,
            residual=math.sqrt(fit.residual / max(len(fit.y) - len(fit.values), 1)),
        )

    def _prior(self, label: int) -> tuple[float, float]:
        if label == BETWEEN:
            return self._scale.between
        return self._scale.idle if label == IDLE else _OPEN

    def _fit(self, offset_ns: int) -> _Fit:
        return self._fit_unknowns(offset_ns, self._labels, self._unknowns)

    def _fit_unknowns(
        self, offset_ns: int, labels: Sequence[int], unknowns: Sequence[tuple[int, int | None]]
    ) -> _Fit:
        coarse = self._weights.coarse(offset_ns)
        columns, plain = self._weights.products(offset_ns, tuple(unknowns))
        y = self._y
        for label in self._fixed:
            mean = self._prior(label)[0]
            y = [value - share * mean for value, share in zip(y, coarse[label], strict=True)]
        plain_right = [sum(map(mul, column, y)) for column in columns]
        matrix, right = [list(row) for row in plain], list(plain_right)
        for i, (label, _) in enumerate(unknowns):
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
        sums = [sum(column) for column in columns]
        mixes = []
        for label in labels:
            mine = [sums[i] if of == label else 0.0 for i, (of, _) in enumerate(unknowns)]
            whole = sum(mine)
            mixes.append([share / whole if whole else 0.0 for share in mine])
        return _Fit(y, columns, matrix, right, inverted, x, max(residual, 0.0), mixes)

    def _inside(self, fit: _Fit) -> Vector:
        """The unknowns between the bounds that fit best."""
        n, greatest = len(fit.values), self._scale.greatest / self._scale.span
        if all(0 <= value <= greatest for value in fit.values):
            return fit.values
        return bounded(fit.matrix, fit.right, [0.0] * n, [greatest] * n)

    def _left_open(self, fit: _Fit, i: int, offset_ns: int) -> float:
        """What a value would change if what is expected were off by its standard deviation."""
        spread = times(fit.inverse, fit.mixes[i])
        parts = [
            each * self._variance / self._prior(label)[1]
            for each, (label, _) in zip(spread, self._unknowns, strict=True)
        ]
        for fixed in self._fixed:
            share = self._weights.coarse(offset_ns)[fixed]
            shared = [sum(map(mul, column, share)) for column in fit.columns]
            parts.append(sum(map(mul, spread, shared)) * self._prior(fixed)[1])
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
            for coarse, fine in edges:
                apart = [
                    (coarse[label] if part is None else fine[part]) - fit.columns[i][w]
                    for i, (label, part) in enumerate(self._unknowns)
                ]
                for i in range(n):
                    for j in range(n):
                        false[i][j] += variance * apart[i] * apart[j]
        try:
            true = inverse(_minus(fit.matrix, false))
        except Singular:
            return [math.inf] * len(fit.mixes)
        pulled = times(fit.mixes, times(true, times(false, fit.values)))
        found = []
        for mix, size in zip(fit.mixes, pulled, strict=True):
            # The largest part of what is known of any unknown of the label that may be an artefact.
            artefact = max(
                sum(fit.inverse[i][j] * false[j][i] for j in range(n)) if share else 0.0
                for i, share in enumerate(mix)
            )
            found.append(math.inf if artefact > _MOST_JITTER else abs(size))
        return found

    def _unlike(self, label: int, value: float, offset_ns: int) -> float:
        """How far the mean of a phase moves when its short and its long passes are solved apart, or, where they are, a
        part of how far it has moved: what is left of it inside of each kind."""
        parts: list[int | None] = [
            part
            for part in self._weights.groups[label]
            if sum(self._weights.fine(offset_ns)[part]) > 0
        ]
        if len(parts) < 2:
            return 0.0
        other = [None] if self._fine else parts
        unknowns = [
            *((k, None) for k in self._labels if k != label),
            *((label, part) for part in other),
        ]
        moved = abs(self._fit_unknowns(offset_ns, [label], unknowns).labels[0] - value)
        return moved * _LEFT_UNLIKE if self._fine else moved


def _as_good(fit: _Fit, best: _Fit) -> bool:
    """Whether a fit is believed as well as the best one."""
    count = max(len(best.y), 1)
    least = max(best.residual, count * _LEAST_NOISE**2)
    return fit.residual <= least * math.exp(_AS_GOOD / count)


def _of_offset(fits: Mapping[int, _Fit], best: int) -> list[float]:
    """What the offsets that fit nearly as well would change, and half a step beside the best one."""
    chosen = fits[best]
    believed = [fit.labels for fit in fits.values() if _as_good(fit, chosen)]
    offsets = sorted(fits)
    place = offsets.index(best)
    beside = [fits[offset].labels for offset in offsets[max(place - 1, 0) : place + 2]]
    return [
        max(
            *(abs(labels[i] - value) for labels in (chosen.labels, *believed)),
            *(abs(labels[i] - value) / 2 for labels in beside),
        )
        for i, value in enumerate(chosen.labels)
    ]


def _jackknife(fit: _Fit) -> tuple[list[float], list[float]]:
    """The standard error of each label's value by leaving out blocks of windows in turn (Efron and Stein, 1981), and on
    how many blocks of equal weight it effectively rests."""
    count = len(fit.y)
    blocks = max(min(_BLOCKS, count // 4), min(count, 8), 1)
    cuts = [count * block // blocks for block in range(blocks + 1)]
    spreads = [times(fit.inverse, mix) for mix in fit.mixes]
    without: list[Vector] = []
    weights: list[Vector] = []
    for begin, end in pairwise(cuts):
        columns, y = [column[begin:end] for column in fit.columns], fit.y[begin:end]
        inner = [[sum(map(mul, a, b)) for b in columns] for a in columns]
        right = [r - sum(map(mul, a, y)) for a, r in zip(columns, fit.right, strict=True)]
        try:
            values = times(inverse(_minus(fit.matrix, inner)), right)
            without.append(times(fit.mixes, values))
        except Singular:
            without.append([math.inf] * len(spreads))
        # The block's part of the variance that equal noise would give the value.
        weights.append([sum(map(mul, spread, times(inner, spread))) for spread in spreads])
    errors, effective = [], []
    for i in range(len(spreads)):
        found = [each[i] for each in without]
        mean = sum(found) / blocks
        squares = sum((value - mean) ** 2 for value in found) if math.isfinite(mean) else math.inf
        errors.append(math.sqrt(squares * (blocks - 1) / blocks))
        parts = [max(each[i], 0.0) for each in weights]
        of_squares = sum(part * part for part in parts)
        effective.append(sum(parts) ** 2 / of_squares if of_squares else 0.0)
    return errors, effective


def _minus(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> Matrix:
    return [[x - y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]
