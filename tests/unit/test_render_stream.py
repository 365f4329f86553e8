"""What a stream takes: width, colour and characters."""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Iterator
from typing import TextIO

import pytest

from phaseprof.cli.render import stream


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    """A real pseudo-terminal of 90 columns."""
    leader, follower = pty.openpty()
    os.set_blocking(leader, False)
    with os.fdopen(follower, "w", encoding="utf-8") as file:
        resize(file, 90)
        yield file
    os.close(leader)


def resize(file: TextIO, columns: int) -> None:
    import fcntl
    import struct
    import termios

    fcntl.ioctl(file.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def test_a_terminal_gives_its_width_up_to_a_limit(terminal: TextIO) -> None:
    assert stream.width_of(terminal) == 90
    resize(terminal, 300)
    assert stream.width_of(terminal) == 160
    resize(terminal, 0)
    assert stream.width_of(terminal) == 100


def test_what_is_no_terminal_has_a_hundred_columns_and_no_colour() -> None:
    assert stream.width_of(io.StringIO()) == 100
    assert not stream.takes_color(io.StringIO())


def test_the_environment_overrules_the_terminal(
    terminal: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stream.takes_color(terminal)
    monkeypatch.setenv("TERM", "dumb")
    assert not stream.takes_color(terminal)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert stream.takes_color(terminal)
    assert stream.takes_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not stream.takes_color(terminal)


@pytest.mark.parametrize(
    ("encoding", "takes"), [("utf-8", True), ("UTF8", True), ("ascii", False), ("latin-1", False)]
)
def test_unicode_needs_an_encoding_that_has_it(encoding: str, takes: bool) -> None:
    assert stream.takes_unicode(io.TextIOWrapper(io.BytesIO(), encoding=encoding)) is takes


def test_a_stream_in_memory_takes_everything() -> None:
    assert stream.takes_unicode(io.StringIO())
