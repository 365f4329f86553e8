"""`phaseprof report TRACE`: what a trace says, as text or as JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="The folder that profile or run wrote.", show_default=False
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of text.")
    ] = False,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="LIMITS",
            help="Objectives of a request, for the goodput: ttft=500ms,tpot=50ms (also e2e, queue).",
            show_default=False,
        ),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            metavar="COLUMNS",
            min=48,
            help="Columns of the text. Default: the terminal's, at most 120; 100 in a file or a pipe.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show what a trace says: the bound of each phase, its figures, latencies, and what was not measured.

    Only the report goes to stdout. A trace that is damaged or still being written is read as far as it is whole.
    """
    import pyarrow as pa

    from phaseprof.analyzers.goodput import parse_objectives
    from phaseprof.api import load_report

    # It gives back at once what is freed: a tenth less memory on a long trace. This process is ours alone.
    pa.set_memory_pool(pa.system_memory_pool())
    objectives = () if slo is None else parse_objectives(slo)
    loaded = load_report(trace, objectives=objectives)
    if as_json:
        import json

        from phaseprof.analyzers.as_json import to_json

        print(json.dumps(to_json(loaded), indent=2, allow_nan=False))
    else:
        from phaseprof.cli.render.stream import render_for

        print(render_for(loaded, sys.stdout, width=width))
