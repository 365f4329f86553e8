"""Small systems of linear equations, in plain Python: fits of a handful of coefficients need no more."""

from __future__ import annotations

from collections.abc import Sequence


def solve(
    matrix: Sequence[Sequence[float]], right: Sequence[float], *, least_pivot: float = 0.0
) -> list[float] | None:
    """Gauss-Jordan elimination with pivots by rows.

    Args:
        matrix: Square. right: One value a row.
        least_pivot: The size below which a pivot says that columns are not told apart.

    Returns:
        The solution; None if the matrix is singular by that measure.
    """
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for step in range(size):
        pivot = max(range(step, size), key=lambda place: abs(rows[place][step]))
        head = rows[pivot][step]
        if head == 0 or abs(head) < least_pivot:
            return None
        rows[step], rows[pivot] = rows[pivot], rows[step]
        rows[step] = [value / head for value in rows[step]]
        for place in range(size):
            factor = rows[place][step]
            if place != step and factor:
                rows[place] = [a - factor * b for a, b in zip(rows[place], rows[step], strict=True)]
    return [row[size] for row in rows]
