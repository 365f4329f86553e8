"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phaseprof.collectors import known

#: `-o TRACE`.
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="TRACE",
        help="Folder for the trace, new or empty. Default: ./phaseprof-<local time>.",
        show_default=False,
    ),
]

#: `--collect NAMES`.
Collect = Annotated[
    str | None, typer.Option(metavar="NAMES", help=known.help_text(), show_default=False)
]

#: `--json`.
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]

#: `--width COLUMNS`, of commands whose text is laid out for it.
Width = Annotated[
    int | None,
    typer.Option(
        metavar="COLUMNS",
        min=48,
        help="Columns of the text. Default: the terminal's, at most 160; 100 in a file or a pipe.",
        show_default=False,
    ),
]
