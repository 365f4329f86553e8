"""Small systems of equations: against hand-solved ones, and against the conditions that a solution has to meet."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseprof.analyzers.counters.solving import Singular, bounded, inverse, t95, times

FREE = [-math.inf, -math.inf]


def test_the_inverse_of_a_matrix_by_hand() -> None:
    assert inverse([[4.0, 2.0], [2.0, 3.0]]) == [
        pytest.approx([0.375, -0.25]),
        pytest.approx([-0.25, 0.5]),
    ]


@pytest.mark.parametrize("matrix", [[[0.0]], [[1.0, 1.0], [1.0, 1.0]], [[1.0, 2.0], [2.0, 1.0]]])
def test_what_does_not_determine_its_unknowns_is_singular(matrix: list[list[float]]) -> None:
    with pytest.raises(Singular):
        inverse(matrix)


def test_without_bounds_in_the_way_the_equations_hold() -> None:
    # 4x + 2y = 2, 2x + 3y = 5: x = -0.5, y = 2.
    assert bounded([[4, 2], [2, 3]], [2, 5], FREE, [math.inf] * 2) == pytest.approx([-0.5, 2.0])


def test_an_unknown_at_its_bound_leaves_the_rest_to_the_other() -> None:
    # With x at 0, 3y = 5; y may not pass 1 either.
    assert bounded([[4, 2], [2, 3]], [2, 5], [0, 0], [9, 9]) == pytest.approx([0.0, 5 / 3])
    assert bounded([[4, 2], [2, 3]], [2, 5], [0, 0], [1, 1]) == pytest.approx([0.0, 1.0])


@given(
    rows=st.lists(
        st.tuples(*[st.floats(0, 1) for _ in range(3)], st.floats(-2, 2)), min_size=3, max_size=8
    )
)
def test_no_step_inside_the_bounds_improves_the_solution(
    rows: list[tuple[float, float, float, float]],
) -> None:
    matrix = [
        [sum(row[i] * row[j] for row in rows) + (0.01 if i == j else 0.0) for j in range(3)]
        for i in range(3)
    ]
    right = [sum(row[i] * row[3] for row in rows) for i in range(3)]

    def cost(x: list[float]) -> float:
        return sum(a * b for a, b in zip(x, times(matrix, x), strict=True)) - 2 * sum(
            a * b for a, b in zip(right, x, strict=True)
        )

    x = bounded(matrix, right, [0.0] * 3, [1.0] * 3)

    assert all(-1e-9 <= value <= 1 + 1e-9 for value in x)
    for i in range(3):
        for step in (-1e-3, 1e-3):
            moved = list(x)
            moved[i] = min(max(moved[i] + step, 0.0), 1.0)
            assert cost(moved) >= cost(x) - 1e-9


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    # Tables of Student's t, two-sided 95 %.
    [(1, 12.706), (4, 2.776), (9, 2.262), (10, 2.228), (15, 2.131), (29, 2.045), (120, 1.980)],
)
def test_the_quantiles_of_student(freedom: int, quantile: float) -> None:
    assert t95(freedom) == pytest.approx(quantile, abs=0.001)


def test_between_tabled_quantiles_and_without_any() -> None:
    assert t95(3) > t95(3.5) > t95(4)
    assert t95(0.5) == math.inf
