"""Fit a report to the stream that it goes to: its width, whether it takes colour, and which characters."""

from __future__ import annotations

import os
from typing import TextIO

from phaseprof.analyzers.results import Report
from phaseprof.cli.render.terminal import render

#: Where the width is not known (a file, a pipe).
DEFAULT_WIDTH = 100
#: Sentences grow hard to read beyond this; `--width` can ask for more.
MAX_WIDTH = 160


def render_for(report: Report, stream: TextIO, *, width: int | None = None) -> str:
    """The report as text for this stream.

    Args:
        report: What to show.
        stream: Where it will be printed; nothing is written to it.
        width: Columns; None for those of the terminal, 100 if the stream is none.
    """
    text = render(
        report,
        width=width or width_of(stream),
        color=takes_color(stream),
        unicode=takes_unicode(stream),
        boxes=stream.isatty(),
    )
    # A path may hold bytes that its name could not be decoded from: show them, but do not fail on them.
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def width_of(stream: TextIO) -> int:
    """The columns of a terminal, at most :data:`MAX_WIDTH`; :data:`DEFAULT_WIDTH` for another stream."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return DEFAULT_WIDTH
    return min(columns, MAX_WIDTH) if columns > 0 else DEFAULT_WIDTH


def takes_color(stream: TextIO) -> bool:
    """Whether to colour: a terminal that is not dumb, unless NO_COLOR is set; FORCE_COLOR overrules the terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def takes_unicode(stream: TextIO) -> bool:
    """Whether the encoding of the stream can show every character. A stream without one (in memory) can."""
    encoding = getattr(stream, "encoding", None)
    return encoding is None or encoding.lower().startswith("utf")
