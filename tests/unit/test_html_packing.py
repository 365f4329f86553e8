"""Columns of numbers in a page, read back by other code."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from html_pages import Dom
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseprof.cli.render.html.packing import MISSING, Column, Packer

WHOLE = st.integers(0, 2**47)


def read(packer: Packer, column: Column) -> list[int]:
    page = f"<script id=timeline-columns>{packer.text()}</script>"
    entry = {
        "at": column.at,
        "count": column.count,
        "width": column.width,
        "signed": column.signed,
        "summed": column.summed,
    }
    return Dom(page).column(json.loads(json.dumps(entry)))


@settings(deadline=None)
@given(st.lists(WHOLE), st.lists(WHOLE))
def test_whole_numbers_come_back(one: list[int], other: list[int]) -> None:
    packer = Packer()
    first, second = packer.whole(one), packer.whole(other)
    assert read(packer, first) == one
    assert read(packer, second) == other


@settings(deadline=None)
@given(st.lists(st.integers(-(2**46), 2**46)))
def test_numbers_below_zero_come_back(values: list[int]) -> None:
    packer = Packer()
    packer.whole([1, 2, 3])
    column = packer.numbers(pa.array(values, pa.int64()), signed=True)
    assert read(packer, column) == values


def test_running_sums_are_of_what_is_stored() -> None:
    packer = Packer()
    column = packer.numbers(pa.array([5, 1, -2], pa.int64()), signed=True, summed=True)
    assert read(packer, column) == [5, 6, 4]


def test_a_slice_of_an_array_is_not_the_array() -> None:
    packer = Packer()
    column = packer.numbers(pa.array(range(100), pa.int64()).slice(40, 3))
    assert read(packer, column) == [40, 41, 42]


def test_a_column_takes_as_many_bytes_as_its_greatest_value() -> None:
    packer = Packer()
    assert packer.whole([255]).width == 1
    assert packer.whole([256]).width == 2
    assert packer.whole([0, 0]).width == 1
    with pytest.raises(OverflowError):
        packer.whole([2**50])


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e9))))
def test_quantised_values_are_off_by_half_a_step(values: list[float | None]) -> None:
    known = [value for value in values if value is not None]
    least, greatest = min(known, default=0.0), max(known, default=0.0)
    packer = Packer()
    stored = read(packer, packer.quantised(values, least, greatest))
    step = (greatest - least) / (MISSING - 1)
    for value, code in zip(values, stored, strict=True):
        if value is None:
            assert code == MISSING
        else:
            assert code < MISSING
            assert least + code * step == pytest.approx(value, abs=step * 0.51 + 1e-6)
