"""`phaseprof report TRACE`: what a trace says, as text or as JSON."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from phaseprof.cli.options import Width
from phaseprof.errors import UsageError


def report(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE…",
            help="The folder that profile, run or import wrote; of several, one report after the other.",
            show_default=False,
        ),
    ],
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON document instead of text; of several, a list."),
    ] = False,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="LIMITS",
            help="Objectives of a request, for the goodput: ttft=500ms,tpot=50ms (also e2e, queue).",
            show_default=False,
        ),
    ] = None,
    width: Width = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write the report as one HTML file that needs no network; its path is printed instead of the text.",
            show_default=False,
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--open", help="Open the HTML report in the browser.")
    ] = False,
    live: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Show a run while it is being recorded: throughput, phases, bounds and the queue of the last 30 s, "
            "every 2 s, until it ends.",
        ),
    ] = False,
) -> None:
    """Show what a trace says: the bound of each phase, its figures, latencies, and what was not measured.

    Only the report goes to stdout. A trace that is damaged or still being written is read as far as it is whole.
    """
    import pyarrow as pa

    from phaseprof.analyzers.goodput import parse_objectives
    from phaseprof.api import load_report

    # It gives back at once what is freed: a tenth less memory on a long trace. This process is ours alone.
    pa.set_memory_pool(pa.system_memory_pool())
    if live:
        from phaseprof.cli.watch import watch

        if as_json or slo is not None or page is not None or show:
            raise UsageError(
                "--watch shows the moment: it takes none of --json, --slo, --html and --open."
            )
        # Ctrl-C is how one stops to watch.
        with contextlib.suppress(KeyboardInterrupt):
            watch(_only(traces, "--watch"), sys.stdout, width=width)
        return
    if show and page is None:
        raise UsageError("--open needs a file to open.", "Add --html FILE.")
    if page is not None and as_json:
        raise UsageError("--html and --json are two reports.", "Ask for one at a time.")
    objectives = () if slo is None else parse_objectives(slo)
    if page is not None:
        from phaseprof.cli.page import write_page

        trace = _only(traces, "--html")
        print(write_page(trace, load_report(trace, objectives=objectives), page, show=show))
        return
    loaded = [load_report(trace, objectives=objectives) for trace in traces]
    if as_json:
        import json

        from phaseprof.analyzers.as_json import to_json

        told = [to_json(each) for each in loaded]
        print(json.dumps(told if len(told) > 1 else told[0], indent=2, allow_nan=False))
        return
    from phaseprof.cli.render.stream import render_for

    print("\n\n".join(render_for(each, sys.stdout, width=width) for each in loaded))


def _only(traces: list[Path], option: str) -> Path:
    """The one trace that an option takes.

    Raises:
        UsageError: If there are several.
    """
    if len(traces) > 1:
        raise UsageError(
            f"{option} takes one trace, and there are {len(traces)}.",
            "Several traces beside each other: phaseprof compare.",
        )
    return traces[0]
