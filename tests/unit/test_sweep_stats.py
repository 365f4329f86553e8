"""Medians with intervals, repeats that lie far off, and knees of lines that are known."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseprof.analyzers.sweeping.sweep_stats import estimate, far_ones, fit, halfway, resample


@pytest.mark.parametrize(
    ("n", "low", "high", "coverage"),
    [
        # From tables of the binomial distribution with p = 1/2: 1 - 2 P(X < k).
        (1, 1, 1, 0.0),
        (2, 1, 2, 0.5),
        (4, 1, 4, 0.875),
        (5, 1, 5, 0.9375),
        (8, 2, 7, 1 - 2 * 9 / 256),
        (15, 4, 12, 1 - 2 * 576 / 2**15),
    ],
)
def test_the_interval_of_a_median_is_that_of_two_repeats(
    n: int, low: int, high: int, coverage: float
) -> None:
    values = [float(value) for value in range(1, n + 1)]
    random.Random(n).shuffle(values)
    found = estimate(values)
    assert (found.low, found.high) == (low, high)
    assert found.coverage == pytest.approx(coverage)
    assert found.median == (n + 1) / 2
    assert found.repeats == n


def test_many_repeats_have_the_interval_of_a_normal_distribution() -> None:
    found = estimate([float(value) for value in range(1, 2001)])
    # n/2 -+ 1.645 sqrt(n)/2 = 1000 -+ 36.8
    assert (found.low, found.high) == (963, 1038)


def test_an_interval_holds_the_median_as_often_as_it_says() -> None:
    chance = random.Random(3)
    # Times with a long tail, whose median is e^0.
    held = 0
    for _ in range(1000):
        found = estimate([chance.lognormvariate(0, 0.5) for _ in range(8)])
        held += found.low <= 1.0 <= found.high
    assert 0.90 <= held / 1000 <= 0.96


def test_spread_and_mad() -> None:
    found = estimate([10.0, 11.0, 12.0, 13.0, 30.0])
    assert found.median == 12.0
    assert found.mad == 1.0
    assert found.spread == pytest.approx(10 / 12)


def test_a_repeat_far_from_the_others_is_found() -> None:
    assert far_ones([10.0, 10.1, 9.9, 10.0, 14.0, 10.05]) == [4]
    assert far_ones([10.0, 10.1, 9.9, 10.0, 6.0, 10.05]) == [4]


def test_repeats_that_agree_within_a_tenth_are_not_odd() -> None:
    assert far_ones([10.0, 10.0, 10.0, 10.0, 10.9]) == []


def test_of_three_repeats_none_is_the_odd_one() -> None:
    assert far_ones([10.0, 10.0, 50.0]) == []


def test_repeats_that_scatter_are_not_odd() -> None:
    assert far_ones([8.0, 9.0, 10.0, 11.0, 14.0]) == []


SIZES = (1, 2, 4, 8, 16)


@given(
    fixed=st.floats(0.1, 1000),
    each=st.floats(0.001, 100),
)
def test_a_line_is_found_and_its_knee_is_their_ratio(fixed: float, each: float) -> None:
    line = fit(SIZES, [fixed + each * size for size in SIZES])
    assert line.fixed == pytest.approx(fixed, rel=1e-6, abs=1e-6 * each)
    assert line.each == pytest.approx(each, rel=1e-6, abs=1e-6 * fixed)
    assert line.misfit < 1e-6
    assert line.knee == pytest.approx(fixed / each, rel=1e-4)


def test_errors_are_relative() -> None:
    # 10 % off at the largest size pulls the line no more than 10 % off at the smallest.
    off_large = fit((1, 16), (11.0, 26.0 * 1.1))
    assert off_large.misfit == pytest.approx(0.0)
    three = fit((1, 8, 16), (11.0, 18.0 * 1.1, 26.0))
    assert 0.02 < three.misfit < 0.1


def test_nothing_that_is_added_has_no_knee() -> None:
    assert fit(SIZES, [5.0] * 5).knee == math.inf
    assert fit(SIZES, [5.0, 4.9, 4.8, 4.7, 4.6]).knee == math.inf
    # No fixed part: the knee is at the very begin.
    assert fit(SIZES, [3.0 * size - 1 for size in SIZES]).knee == 0.0


@pytest.mark.parametrize(("fixed", "each"), [(12.0, 3.0), (8.0, 1.0), (100.0, 25.0)])
def test_the_knee_without_a_line_is_that_of_the_line_where_there_is_one(
    fixed: float, each: float
) -> None:
    sizes = sorted({*SIZES, fixed / each})
    found = halfway(sizes, [fixed + each * size for size in sizes])
    assert found == pytest.approx(fixed / each)


def test_steps_that_jump_at_the_second_batch_have_their_knee_after_it() -> None:
    # A step of 10 ms alone, 20 ms from two to eight sequences, 40 ms for sixteen: with s0 = 1 the score of batch 4 is
    # 20 x 1.25 = 25, of 8 it is 22.5, of 16 it is 42.5, and the target 20 is passed after batch 1 already.
    assert halfway(SIZES, [10.0, 20.0, 20.0, 20.0, 40.0]) == 1.0
    # From 10 ms to 12 up to batch 8, and 24 for sixteen: scores 18, 15, 13.5 and 25.5.
    found = halfway(SIZES, [10.0, 12.0, 12.0, 12.0, 24.0])
    share = math.log(20 / 13.5) / math.log(25.5 / 13.5)
    assert found == pytest.approx(8 * 2**share)


def test_a_time_that_does_not_grow_has_no_knee() -> None:
    assert halfway(SIZES, [10.0] * 5) == math.inf


def test_the_interval_of_a_knee_holds_it_and_narrows_with_quiet_repeats() -> None:
    chance = random.Random(1)

    def repeats(noise: float) -> list[list[float]]:
        return [
            [(12 + 3 * size) * chance.lognormvariate(0, noise) for _ in range(8)] for size in SIZES
        ]

    def knee(medians: list[float]) -> float:
        return fit(SIZES, medians).knee

    wide, narrow = resample(repeats(0.10), knee), resample(repeats(0.01), knee)
    assert narrow[0] <= 4.0 <= narrow[1]
    assert wide[1] - wide[0] > 3 * (narrow[1] - narrow[0])
    same = repeats(0.05)
    assert resample(same, knee) == resample(same, knee)
    exact = [[12 + 3.0 * size] * 3 for size in SIZES]
    assert resample(exact, knee) == pytest.approx((4.0, 4.0))
