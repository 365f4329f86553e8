"""Small systems of equations, solved exactly: symmetric positive definite ones, and least squares between bounds.

For the handful of unknowns of a run (its phases and the time between them) plain Python is quick enough, and needs no
package.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

Vector = list[float]
Matrix = list[list[float]]

#: Bounds are met to this share of the largest value.
_SLACK = 1e-9


class Singular(ArithmeticError):
    """The equations do not determine the unknowns."""


def inverse(matrix: Sequence[Sequence[float]]) -> Matrix:
    """The inverse of a symmetric positive definite matrix, by Cholesky's decomposition.

    Raises:
        Singular: If it is not positive definite to working precision.
    """
    n = len(matrix)
    lower = [[0.0] * n for _ in range(n)]
    largest = max((matrix[i][i] for i in range(n)), default=0.0)
    for i in range(n):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            if i == j:
                if rest <= largest * 1e-13:
                    raise Singular
                lower[i][i] = math.sqrt(rest)
            else:
                lower[i][j] = rest / lower[j][j]
    columns = []
    for unit in range(n):
        x = [1.0 if i == unit else 0.0 for i in range(n)]
        for i in range(n):
            x[i] = (x[i] - sum(lower[i][k] * x[k] for k in range(i))) / lower[i][i]
        for i in reversed(range(n)):
            x[i] = (x[i] - sum(lower[k][i] * x[k] for k in range(i + 1, n))) / lower[i][i]
        columns.append(x)
    return columns


def times(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> Vector:
    """The product of a matrix and a vector."""
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def bounded(
    matrix: Sequence[Sequence[float]],
    right: Sequence[float],
    least: Sequence[float],
    greatest: Sequence[float],
) -> Vector:
    """The x between bounds that minimises ``x'Ax - 2b'x`` for a positive definite A: least squares from its normal
    equations.

    The problem is strictly convex: a point that meets the conditions of Karush, Kuhn and Tucker is the solution. It is
    first sought by putting what is outside to its bound and letting go what pulls inwards, one at a time. That may go
    round in circles; then every set of unknowns that may stand at a bound is tried, the smallest first. Bounds may be
    infinite.

    Raises:
        Singular: If A is not positive definite.
    """
    n = len(right)
    at: dict[int, float] = {}
    for _ in range(4 * n + 4):
        x = _solved(matrix, right, at)
        outside = {i: max(least[i] - x[i], x[i] - greatest[i]) for i in range(n) if i not in at}
        worst = max(outside, key=outside.__getitem__, default=None)
        if worst is not None and outside[worst] > _SLACK * max(1.0, *map(abs, x)):
            at[worst] = least[worst] if x[worst] < least[worst] else greatest[worst]
            continue
        pulls = {i: _pull(matrix, right, x, i, at[i] == least[i]) for i in at}
        worst = max(pulls, key=pulls.__getitem__, default=None)
        if worst is None or pulls[worst] <= _SLACK * max(1.0, *map(abs, right)):
            return x
        del at[worst]
    for fixed in range(n + 1):
        for places in itertools.combinations(range(n), fixed):
            for values in itertools.product(*((least[i], greatest[i]) for i in places)):
                if any(math.isinf(value) for value in values):
                    continue
                at = dict(zip(places, values, strict=True))
                x = _solved(matrix, right, at)
                if _is_optimal(matrix, right, least, greatest, x, at):
                    return x
    raise Singular


def _solved(
    matrix: Sequence[Sequence[float]], right: Sequence[float], at: Mapping[int, float]
) -> Vector:
    """The minimum with some unknowns held."""
    n = len(right)
    free = [i for i in range(n) if i not in at]
    x = [at.get(i, 0.0) for i in range(n)]
    if free:
        inner = [right[i] - sum(matrix[i][j] * value for j, value in at.items()) for i in free]
        solve = inverse([[matrix[i][j] for j in free] for i in free])
        for i, value in zip(free, times(solve, inner), strict=True):
            x[i] = value
    return x


def _pull(
    matrix: Sequence[Sequence[float]],
    right: Sequence[float],
    x: Sequence[float],
    i: int,
    at_least: bool,
) -> float:
    """How strongly an unknown at a bound is drawn inwards."""
    slope = sum(a * b for a, b in zip(matrix[i], x, strict=True)) - right[i]
    return -slope if at_least else slope


def _is_optimal(
    matrix: Sequence[Sequence[float]],
    right: Sequence[float],
    least: Sequence[float],
    greatest: Sequence[float],
    x: Vector,
    at: Mapping[int, float],
) -> bool:
    slack = _SLACK * max(1.0, *map(abs, x))
    inside = all(
        least[i] - slack <= x[i] <= greatest[i] + slack for i in range(len(x)) if i not in at
    )
    limit = _SLACK * max(1.0, *map(abs, right))
    return inside and all(
        _pull(matrix, right, x, i, value == least[i]) <= limit for i, value in at.items()
    )


#: Two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def t95(freedom: float) -> float:
    """The two-sided 95 % quantile of Student's t; between whole degrees of freedom, by their reciprocals.

    Above ten by the expansion of Cornish and Fisher, which is good to 0.001 there. Infinite below one.
    """
    if freedom < 1:
        return math.inf
    if freedom < 10:
        below = math.floor(freedom)
        part = (1 / below - 1 / freedom) / (1 / below - 1 / (below + 1))
        return _T95[below - 1] + part * (_T95[below] - _T95[below - 1])
    z = 1.959964
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
