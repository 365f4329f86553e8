"""Folding, hanging indents and the ASCII form."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from phaseprof.cli.render.layout import fold, keyed, paragraph, stack, to_ascii


def test_lines_after_the_first_hang() -> None:
    assert fold("one two three four", 9, hang=2) == ["one two", "  three", "  four"]


def test_a_number_stays_with_its_unit() -> None:
    assert fold("it took 55 % of 19.1 GB/s here", 14) == ["it took 55 %", "of 19.1 GB/s", "here"]
    assert fold("known to ±4 % or so", 12) == ["known to", "±4 % or so"]
    assert fold("time: host · roofs: measured", 12) == ["time: host ·", "roofs:", "measured"]
    assert fold("a 3 state machine", 5) == ["a 3", "state", "machine"]


def test_a_path_is_not_broken() -> None:
    assert fold("in ./a/long/path now", 8) == ["in", "./a/long/path", "now"]


def test_wide_characters_take_two_cells() -> None:
    assert fold("モデル モデル", 8) == ["モデル", "モデル"]


def test_breaks_only_where_it_may() -> None:
    assert fold("a b · c d · e", 9, hang=2, apart=" · ") == ["a b · c d", "  e"]


@given(st.text(alphabet="ab ·%1", max_size=80), st.integers(10, 40), st.integers(0, 4))
def test_folding_loses_no_word_and_keeps_the_width(text: str, width: int, hang: int) -> None:
    lines = fold(text, width, hang=hang)
    assert " ".join(lines).split() == text.split()
    glued = text.replace("1 %", "1_%").replace(" · ", "_· ")
    longest = max(map(len, glued.split()), default=0)
    if longest + hang <= width:
        assert all(len(line) <= width for line in lines)


def test_values_stand_beside_their_key() -> None:
    lines = [line.plain for line in keyed("Trace", ["one two three", "four"], 28)]
    assert lines == [
        "  Trace           one two",
        "                    three",
        "                  four",
    ]


def test_paragraph_keeps_its_margin() -> None:
    lines = [line.plain for line in paragraph("one two three four", 12)]
    assert lines == ["  one two", "    three", "    four"]


def test_empty_blocks_leave_no_gap() -> None:
    a, b = [Text("a")], [Text("b"), Text("c")]
    assert [line.plain for line in stack([[], a, [], b, []])] == ["a", "", "b", "c"]


def test_ascii_form_has_a_stand_in_for_every_character() -> None:
    assert to_ascii("6 µs · ±4 % – «é» 猫 ≥ 2×") == "6 us | +-4 % - ?e? ? >= 2x"  # noqa: RUF001
