"""`phaseprof export TRACE`: a trace in the formats of other tools."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from phaseprof.analyzers.viewing.viewer_tracks import Entry
    from phaseprof.cli.render.progress import TerminalProgress
    from phaseprof.trace.reader import Trace

#: Entries between two changes of the progress bar.
_OFTEN = 20_000


class Format(enum.StrEnum):
    """What a trace can be exported to."""

    PERFETTO = "perfetto"
    CHROME = "chrome"
    CSV = "csv"


_ENDINGS = {Format.PERFETTO: ".pftrace", Format.CHROME: ".chrome.json", Format.CSV: "-csv"}


def export(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="The folder that profile, run or import wrote.",
            show_default=False,
        ),
    ],
    to: Annotated[
        Format,
        typer.Option(
            help="perfetto: a timeline for ui.perfetto.dev. chrome: the same as JSON. csv: the tables, a file each.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where to write; for csv a folder. Default: beside the trace, with its name.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace what is there.")] = False,
) -> None:
    """Write a trace for another tool: passes, requests and kernels on tracks, counters, a process for each rank.

    A trace is Parquet: DuckDB, pandas and polars read it as it is, without an export.
    """
    from phaseprof.cli.render.progress import TerminalProgress
    from phaseprof.errors import TraceError, UsageError
    from phaseprof.trace.reader import open_trace

    opened = open_trace(trace)
    target = output if output is not None else Path(f"{trace.resolve()}{_ENDINGS[to]}")
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists already.", "Give another -o, or --overwrite.")
    try:
        with TerminalProgress() as progress:
            if to is Format.CSV:
                _csv(opened, target)
            else:
                _timeline(opened, to, target, progress)
    except OSError as error:
        raise TraceError(
            f"{target} cannot be written: {error.strerror or error}.", "Give another -o."
        ) from error
    for sentence in opened.damage:
        print(f"! {sentence}")
    print(f"{_told(opened)}\n{target}")


def _csv(trace: Trace, target: Path) -> None:
    from phaseprof.cli.render.csv_tables import write_csv

    target.mkdir(parents=True, exist_ok=True)
    write_csv(trace, target)


def _timeline(trace: Trace, to: Format, target: Path, progress: TerminalProgress) -> None:
    """Write to a temporary name first: a reader never finds half a file."""
    from phaseprof.analyzers.viewing.viewer_tracks import rows_of, viewer_tracks
    from phaseprof.cli.render.chrome import write_chrome
    from phaseprof.cli.render.perfetto import write_perfetto

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    entries = _watched(viewer_tracks(trace), rows_of(trace), progress)
    try:
        with partial.open("wb") as file:
            if to is Format.PERFETTO:
                write_perfetto(entries, file)
            else:
                write_chrome(entries, file, min((m.started_ns for m in trace.metas), default=0))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _watched(entries: Iterator[Entry], total: int, progress: TerminalProgress) -> Iterator[Entry]:
    for number, entry in enumerate(entries):
        if number % _OFTEN == 0:
            progress("Writing", min(number, total), max(total, 1))
        yield entry


def _told(trace: Trace) -> str:
    """How much there was of each."""
    from phaseprof.analyzers.wording import count

    parts = [
        count(table.num_rows, noun)
        for noun, table in (
            ("pass", trace.passes),
            ("request", trace.requests),
            ("kernel", trace.kernels),
            ("sample", trace.samples),
        )
        if table.num_rows
    ]
    return ", ".join(parts) or "an empty trace"
