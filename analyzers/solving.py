"""Small systems of equations, solved exactly: symmetric positive definite ones, and least squares between bounds.

For the handful of unknowns of a run (its phases and the time between them) plain Python is quick enough, and needs no
package.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

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

    Every set of unknowns that may stand at a bound is tried, the smallest sets first, until one meets the conditions of
    Karush, Kuhn and Tucker. The problem is strictly convex: the first that does is the only one. Bounds may be
    infinite.

    Raises:
        Singular: If A is not positive definite.
    """
    n = len(right)
    for fixed in range(n + 1):
        for at in itertools.combinations(range(n), fixed):
            free = [i for i in range(n) if i not in at]
            solve = inverse([[matrix[i][j] for j in free] for i in free]) if free else []
            for values in itertools.product(*((least[i], greatest[i]) for i in at)):
                if any(math.isinf(value) for value in values):
                    continue
                x = [0.0] * n
                for i, value in zip(at, values, strict=True):
                    x[i] = value
                inner = [right[i] - sum(matrix[i][j] * x[j] for j in at) for i in free]
                for i, value in zip(free, times(solve, inner), strict=True):
                    x[i] = value
                if _is_optimal(matrix, right, least, greatest, x, at, free):
                    return x
    raise Singular


def _is_optimal(
    matrix: Sequence[Sequence[float]],
    right: Sequence[float],
    least: Sequence[float],
    greatest: Sequence[float],
    x: Vector,
    at: Sequence[int],
    free: Sequence[int],
) -> bool:
    slack = _SLACK * max(1.0, *(abs(value) for value in x))
    if any(not least[i] - slack <= x[i] <= greatest[i] + slack for i in free):
        return False
    scale = _SLACK * max(1.0, *(abs(value) for value in right))
    for i in at:
        slope = sum(matrix[i][j] * x[j] for j in range(len(x))) - right[i]
        if least[i] < greatest[i] and (slope < -scale if x[i] == least[i] else slope > scale):
            return False
    return True


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
