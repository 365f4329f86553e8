"""Figures as text: scale, digits and the edges between units."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseprof.cli.render import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, units.DASH),
        (0.0, "0"),
        (0.00003, "<0.0001"),
        (0.0001, "0.00010"),
        (0.00526, "0.0053"),
        (0.0999, "0.10"),
        (0.158, "0.158"),
        (0.5003, "0.500"),
        (0.9996, "1.00"),
        (1.4, "1.40"),
        (9.996, "10.0"),
        (18.66, "18.7"),
        (99.96, "100"),
        (682.4, "682"),
        (999.7, "1,000"),
        (12_345.0, "12,300"),
        (1_234_567.0, "1,230,000"),
    ],
)
def test_rate_has_three_digits(value: float | None, text: str) -> None:
    assert units.rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, units.DASH),
        (0, "0"),
        (4096, "4,096"),
        (999_999, "999,999"),
        (1_234_567, "1.23 M"),
        (2_000_000_000, "2.00 G"),
    ],
)
def test_count_is_exact_to_a_million(value: int | None, text: str) -> None:
    assert units.count(value) == text


@pytest.mark.parametrize(
    ("value", "noun", "text"),
    [
        (1, "pass", "1 pass"),
        (2, "pass", "2 passes"),
        (0, "gap", "0 gaps"),
        (1200, "request", "1,200 requests"),
    ],
)
def test_counted_takes_the_plural(value: int, noun: str, text: str) -> None:
    assert units.counted(value, noun) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, units.DASH), (1.0, "1"), (15.98, "16"), (2.67, "2.7"), (1024.0, "1,024")],
)
def test_mean_is_whole_where_it_is(value: float | None, text: str) -> None:
    assert units.mean(value) == text


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (None, units.DASH),
        (0.0, "0 %"),
        (0.00005, "<0.01 %"),
        (0.000113, "0.01 %"),
        (0.00096, "0.1 %"),
        (0.0044, "0.4 %"),
        (0.0094, "0.9 %"),
        (0.0096, "1 %"),
        (0.0199, "2 %"),
        (0.5503, "55 %"),
        (0.994, "99 %"),
        (0.9996, ">99 %"),
        (1.0, "100 %"),
        (1.038, "104 %"),
        (12.5, "1,250 %"),
    ],
)
def test_percent_never_rounds_to_all_or_nothing(fraction: float | None, text: str) -> None:
    assert units.percent(fraction) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, units.DASH),
        (0.0, "0 ms"),
        (0.0004, "<1 µs"),
        (0.00604, "6.0 µs"),
        (0.2504, "250 µs"),
        (0.9996, "1.00 ms"),
        (1.214, "1.21 ms"),
        (53.64, "53.6 ms"),
        (752.1, "752 ms"),
        (999.6, "1.0 s"),
        (6006.0, "6.0 s"),
        (59_960.0, "60.0 s"),
        (119_960.0, "2 min 0 s"),
        (125_400.0, "2 min 5 s"),
        (3_599_900.0, "1 h 0 min"),
        (3_780_000.0, "1 h 3 min"),
    ],
)
def test_duration_takes_the_unit_that_suits(ms: float | None, text: str) -> None:
    assert units.duration(ms) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, units.DASH),
        (1.214, "1.21 ms"),
        (1254.4, "1,254 ms"),
        (9999.6, "10.0 s"),
        (12_480.0, "12.5 s"),
    ],
)
def test_latency_stays_in_ms_to_ten_seconds(ms: float | None, text: str) -> None:
    assert units.latency(ms) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (None, units.DASH),
        (0, "0 B"),
        (999, "999 B"),
        (4_100, "4.1 kB"),
        (41_200, "41 kB"),
        (752_000, "752 kB"),
        (999_600, "1.0 MB"),
        (540_000_000, "540 MB"),
        (150_000_000_000, "150 GB"),
        (3_000_000_000_000_000, "3,000 TB"),
    ],
)
def test_size_is_decimal(n_bytes: int | None, text: str) -> None:
    assert units.size(n_bytes) == text


@pytest.mark.parametrize(
    ("exponent", "text"), [(-7, "1e-7"), (-3, "0.001"), (0, "1"), (1, "10"), (4, "10,000")]
)
def test_tick_is_a_power_of_ten(exponent: int, text: str) -> None:
    assert units.tick(exponent) == text


@given(st.floats(min_value=1e-3, max_value=1e12))
def test_rate_is_right_to_half_a_digit(value: float) -> None:
    shown = float(units.rate(value).replace(",", ""))
    digits = 2 if value < 0.1 else 3
    assert math.isclose(shown, value, rel_tol=0.5000001 * 10 ** (1 - digits))


@given(st.floats(min_value=1e-12, max_value=1e12))
def test_no_positive_figure_looks_like_zero(value: float) -> None:
    for text in (
        units.rate(value),
        units.percent(value),
        units.duration(value),
        units.latency(value),
    ):
        assert text.startswith("<") or any(digit in text for digit in "123456789")
