"""A search for parameters that needs no derivatives: Nelder and Mead, "A simplex method for function minimization"
(The Computer Journal 7, 1965), with the coefficients of Gao and Han (2012) for many parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Point = list[float]


def minimum(
    function: Callable[[Sequence[float]], float],
    start: Sequence[float],
    *,
    step: float,
    evaluations: int,
) -> tuple[Point, float]:
    """The lowest point found, and its value.

    Args:
        function: Of as many numbers as `start` has.
        start: Where to begin.
        step: Size of the first simplex, the same in each direction.
        evaluations: About how often the function may be called.
    """
    size = len(start)
    expand, contract, shrink = 1 + 2 / size, 0.75 - 0.5 / size, 1 - 1 / size
    simplex: list[tuple[float, Point]] = [(function(start), list(start))]
    for place in range(size):
        moved = list(start)
        moved[place] += step
        simplex.append((function(moved), moved))
    used = size + 1
    while used < evaluations:
        simplex.sort(key=lambda each: each[0])
        best, worst = simplex[0], simplex[-1]
        if worst[0] - best[0] < 1e-7 and _extent(simplex) < 1e-3:
            break
        centre = [sum(each[1][i] for each in simplex[:-1]) / size for i in range(size)]

        def at(
            factor: float, centre: Point = centre, worst: Point = worst[1]
        ) -> tuple[float, Point]:
            point = [c + factor * (c - w) for c, w in zip(centre, worst, strict=True)]
            return function(point), point

        reflected = at(1.0)
        used += 1
        if reflected[0] < best[0]:
            expanded = at(expand)
            used += 1
            simplex[-1] = min(reflected, expanded)
        elif reflected[0] < simplex[-2][0]:
            simplex[-1] = reflected
        else:
            contracted = at(contract if reflected[0] < worst[0] else -contract)
            used += 1
            if contracted[0] < min(reflected[0], worst[0]):
                simplex[-1] = contracted
            else:
                for place in range(1, size + 1):
                    point = [
                        b + shrink * (p - b)
                        for b, p in zip(best[1], simplex[place][1], strict=True)
                    ]
                    simplex[place] = (function(point), point)
                used += size
    value, point = min(simplex)
    return point, value


def _extent(simplex: Sequence[tuple[float, Point]]) -> float:
    columns = list(zip(*(point for _, point in simplex), strict=True))
    return float(max(max(column) - min(column) for column in columns))
