"""Lines of rich text as plain or coloured text, for whatever stream they go to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from io import StringIO

from rich.console import Console
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def to_text(lines: Iterable[Text], width: int, *, color: bool) -> str:
    """Lay lines out, without a line break at the end.

    Args:
        lines: One a line of the text; longer ones are not broken.
        width: Columns of the terminal.
        color: Add ANSI colours from the terminal's own palette of sixteen.
    """
    stream = StringIO()
    console = Console(
        file=stream,
        width=width,
        color_system="standard" if color else None,
        force_terminal=color,
        no_color=not color,
        highlight=False,
        legacy_windows=False,
    )
    for line in lines:
        line.rstrip()
        # Names come from traces: a control character among them would speak to the terminal.
        line.plain = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", line.plain)
        console.print(line, soft_wrap=True)
    return stream.getvalue().rstrip("\n")
