"""`phaseprof report TRACE --html FILE`: the report as a page, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from phaseprof.analyzers.results import Report
from phaseprof.analyzers.viewing.details import DETAILS_LEAN, build_details
from phaseprof.cli.render.html.page import render_html
from phaseprof.errors import TraceError
from phaseprof.trace.reader import open_trace


def write_page(trace: Path, report: Report, target: Path, *, show: bool = False) -> str:
    """Write the page of a trace.

    Args:
        trace: The trace's folder.
        report: Its report.
        target: The file; one that is there is replaced.
        show: Open it in the browser.

    Returns:
        What is to be said: where it lies, and that no browser was found, if one was wanted.

    Raises:
        TraceError: If the trace cannot be read, or the page cannot be written.
    """
    details = build_details(open_trace(trace, lean=DETAILS_LEAN), report)
    page = render_html(report, details)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            # A path or a name may hold bytes that could not be decoded.
            partial.write_text(page, encoding="utf-8", errors="replace")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise TraceError(
            f"{target} cannot be written: {error.strerror or error}.", "Give another --html FILE."
        ) from error
    if show and not _opened(target):
        return f"{target} (no browser was found to open it)"
    return str(target)


def _opened(target: Path) -> bool:
    import webbrowser

    return webbrowser.open(target.resolve().as_uri())
