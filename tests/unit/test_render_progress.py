"""Progress: drawn on a terminal and cleared away, never on another stream; lines that must stay do."""

from __future__ import annotations

import io
import threading

from phaseprof.cli.render.progress import TerminalProgress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_nothing_is_drawn_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with TerminalProgress(stream) as progress:
        progress("Loading")
        progress("Generating", 1, 3)
    assert stream.getvalue() == ""


def test_a_line_that_stays_is_printed_on_any_stream() -> None:
    for stream in (io.StringIO(), Terminal()):
        with TerminalProgress(stream) as progress:
            progress("Loading")
            progress.say("the note")
            progress("Generating", 1, 3)
        assert "phaseprof: the note\n" in stream.getvalue()


def test_a_terminal_shows_what_goes_on() -> None:
    stream = Terminal()
    with TerminalProgress(stream) as progress:
        progress("Loading the model")
        progress("Generating, batch 1", 0, 3)
        progress("Generating, batch 4", 1, 3)
    drawn = stream.getvalue()
    assert "Loading the model" in drawn
    assert "Generating, batch 1" in drawn
    assert "0/3" in drawn and "1/3" in drawn


def test_nothing_runs_beside_counted_steps() -> None:
    before = set(threading.enumerate())
    with TerminalProgress(Terminal()) as progress:
        progress("Loading")
        (spinner,) = set(threading.enumerate()) - before
        progress("Generating", 0, 3)
        spinner.join(timeout=10)  # it was told to end, and does before its next turn
        assert set(threading.enumerate()) <= before
