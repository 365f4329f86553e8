"""The terminal roofline: marks and labels stand where they belong, and never on each other."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseprof.cli.render.roofline import Mark, roofline
from phaseprof.trace.meta import Ceilings

PHASES = ("prefill", "decode", "mixed", "extend", "encode", "other")
GLYPHS = dict(zip(PHASES, "●◆■▲▼○", strict=True))


def ceilings(tflops: float, gb_per_s: float) -> Ceilings:
    return Ceilings("d", "float32", tflops * 1e12, gb_per_s * 1e9, "measured", None, None, "")


def draw(tflops: float, gb_per_s: float, marks: list[Mark], width: int = 90) -> list[str]:
    return [line.plain for line in roofline(ceilings(tflops, gb_per_s), marks, width=width)]


def find(lines: list[str], glyph: str) -> tuple[int, int]:
    (place,) = [(r, line.index(glyph)) for r, line in enumerate(lines) if glyph in line]
    return place


def test_both_roofs_the_ridge_and_the_marks_are_named() -> None:
    text = "\n".join(draw(0.264, 19.1, [Mark("prefill", 211, 0.158), Mark("decode", 0.5, 0.0053)]))
    for part in (
        "0.264 TFLOP/s float32, measured",
        "19.1 GB/s, measured",
        "ridge 13.8",
        "● prefill",
        "◆ decode",
        "FLOP/byte",
    ):
        assert part in text


def test_marks_stand_on_their_coordinates() -> None:
    lines = draw(1.0, 10.0, [Mark("prefill", 1000, 1.0), Mark("decode", 10, 0.1)])
    below = lines[-1]
    ticks = lines[-2]
    decode_row, decode_column = find(lines, "◆")
    assert lines[decode_row].lstrip().startswith("0.1 ┤")
    assert ticks[decode_column] == "┬"
    assert below[decode_column : decode_column + 2].strip() in ("10", "0")
    prefill_row, prefill_column = find(lines, "●")
    assert lines[prefill_row].lstrip().startswith("1 ┤")
    assert ticks[prefill_column] == "┬"


def test_a_mark_at_a_tenth_of_the_roof_stands_below_it_and_one_at_the_roof_on_it() -> None:
    marks = [Mark("prefill", 1000, 10.0), Mark("decode", 1.0, 1.0)]
    lines = [line.ljust(90) for line in draw(100.0, 1000.0, marks)]
    row, column = find(lines, "●")
    assert "─" in {line[column] for line in lines[:row]}
    row, column = find(lines, "◆")
    assert not {line[column] for line in lines[1:row]} & set("─╭╯")


def test_marks_in_one_cell_share_a_label() -> None:
    lines = draw(1.0, 10.0, [Mark("prefill", 10.0, 0.01), Mark("mixed", 10.0, 0.01)])
    assert any("● prefill, mixed" in line for line in lines)


def test_a_label_without_room_moves_below_the_axes() -> None:
    crowd = [Mark(name, 10.0 ** (1 + 0.02 * i), 0.01) for i, name in enumerate(PHASES)]
    lines = draw(1.0, 10.0, crowd, width=44)
    drawn = "\n".join(lines)
    for name in PHASES:
        assert drawn.count(name) == 1
    assert any(f"{GLYPHS['mixed']} mixed" in line for line in lines[-2:])
    assert all(len(line) <= 44 for line in lines)


@pytest.mark.parametrize("width", [20, 30])
def test_too_narrow_draws_nothing(width: int) -> None:
    assert draw(1.0, 10.0, [Mark("decode", 1.0, 0.01)], width=width) == []


def test_nothing_to_place_draws_nothing() -> None:
    assert draw(1.0, 10.0, []) == []
    assert draw(1.0, 10.0, [Mark("decode", 0.0, 0.0)]) == []
    assert draw(0.0, 10.0, [Mark("decode", 1.0, 0.1)]) == []


def test_ascii_drawing_is_ascii() -> None:
    marks = [Mark(name, 10.0**i, 0.001 * 3**i) for i, name in enumerate(PHASES)]
    lines = roofline(ceilings(0.264, 19.1), marks, width=90, unicode=False)
    assert lines
    assert all(line.plain.isascii() for line in lines)


def test_phases_in_one_place_are_named_below_within_the_width() -> None:
    lines = draw(1.0, 1e3, [Mark(name, 1.0, 1.0) for name in PHASES[:4]], width=44)
    assert [line.split() for line in lines[-2:]] == [
        ["●", "prefill", "◆", "decode", "■", "mixed"],
        ["▲", "extend"],
    ]


@given(
    peak=st.floats(-3, 3.4),
    ridge=st.floats(-1, 3.5),
    width=st.integers(44, 140),
    points=st.lists(
        st.tuples(st.floats(-4, 5), st.floats(-7, 4)), min_size=1, max_size=len(PHASES)
    ),
)
def test_any_decades_fit_and_no_label_is_broken(
    peak: float, ridge: float, width: int, points: list[tuple[float, float]]
) -> None:
    """Every phase is named exactly once, whole, and every line keeps the width."""
    marks = [Mark(name, 10**x, 10**y) for name, (x, y) in zip(PHASES, points, strict=False)]
    lines = draw(10**peak, 10 ** (peak - ridge) * 1e3, marks, width)
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    for mark in marks:
        assert len(re.findall(rf"(?<!\w){mark.label}(?!\w)", text)) == 1
