"""Errors as a user sees them."""

from __future__ import annotations

from phaseprof.cli.render import errors
from phaseprof.errors import PhaseprofError, TraceError


def test_message_and_remedy_take_a_line_each() -> None:
    error = TraceError("no trace in ./t.", "Run `phaseprof run -o t -- …` first.")
    assert (
        errors.render(error) == "phaseprof: no trace in ./t.\nRun `phaseprof run -o t -- …` first."
    )


def test_no_remedy_no_line() -> None:
    assert errors.render(PhaseprofError("interrupted.")) == "phaseprof: interrupted."


def test_a_message_of_several_lines_becomes_one() -> None:
    error = PhaseprofError("cannot read:\n  bad\tmagic", "Look\nthere.")
    assert errors.render(error) == "phaseprof: cannot read: bad magic\nLook there."


def test_colour_marks_only_the_name() -> None:
    text = errors.render(PhaseprofError("gone.", "Come back."), color=True)
    assert text == "\x1b[1;31mphaseprof:\x1b[0m gone.\nCome back."
