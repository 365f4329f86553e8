"""Names from traces as text: nothing in them speaks to the terminal."""

from __future__ import annotations

from rich.text import Text
from traces import Timeline, meta, model

from phaseprof.analyzers.report import build_report
from phaseprof.cli.render.console import to_text
from phaseprof.cli.render.terminal import render

#: Sets a title, clears the screen, rings, goes back.
HOSTILE = "name\x1b]0;title\x07\x1b[2J\x9b31m\r\x08end"


def test_control_characters_are_shown_as_such() -> None:
    text = to_text([Text(HOSTILE)], 80, color=False)
    # Bells and returns are gone already when a line is made.
    assert text == "name\ufffd]0;title\ufffd[2J\ufffd31mend"


def test_colours_are_ours_alone() -> None:
    text = to_text([Text(HOSTILE, style="bold")], 80, color=True)
    assert text.startswith("\x1b[1mname\ufffd")
    assert text.count("\x1b") == 2


def test_a_report_of_a_hostile_name_holds_no_control_character() -> None:
    timeline = Timeline()
    for _ in range(4):
        timeline.add("decode", 10, gflop=1, gb=1)
    report = build_report(timeline.trace(meta(models=(model(name=HOSTILE),), command=(HOSTILE,))))
    text = render(report)
    assert "name\ufffd]0;title" in text
    assert not set(text) & {"\x1b", "\x07", "\x9b", "\r", "\x08"}
