"""`phaseprof report TRACE --watch`: the live view of a run that is being recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from phaseprof.errors import TraceError

if TYPE_CHECKING:
    from phaseprof.analyzers.viewing.live import LiveView
    from phaseprof.trace.meta import Ceilings
    from phaseprof.trace.reader import Trace

#: Seconds between two looks, and how far back each looks.
EVERY_S = 2.0
WINDOW_S = 30.0
#: The writer flushes at least once a second.
_LATE_NS = 1_500_000_000


def watch(
    path: Path,
    stream: TextIO,
    *,
    width: int | None = None,
    every_s: float = EVERY_S,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show what a run does until it ends. On a terminal the view is drawn anew, elsewhere each look is a line.

    Args:
        path: The trace; it may be that it does not exist yet.
        stream: Where to draw.
        width: Columns; None for those of the terminal.
        every_s: Seconds between two looks.
        sleep: Waits; for tests.

    Raises:
        TraceError: There is something else at the path.
    """
    from rich.console import Console, Group
    from rich.live import Live

    from phaseprof.cli.render.live import live_line, live_lines

    console = Console(file=stream, width=width, highlight=False, legacy_windows=False)
    if not console.is_terminal:
        for view in _views(path, every_s, sleep):
            print(live_line(view), file=stream, flush=True)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for view in _views(path, every_s, sleep):
            live.update(Group(*live_lines(view, path.name, console.width)), refresh=True)


def _views(path: Path, every_s: float, sleep: Callable[[float], None]) -> Iterator[LiveView]:
    """A view a look, the last one of the run's end."""
    ceilings = _Roofs()
    while True:
        view = _look(path, ceilings)
        if view is not None:
            yield view
            if view.ended:
                return
        sleep(every_s)


def _look(path: Path, roofs: _Roofs) -> LiveView | None:
    from phaseprof.analyzers.lean import ENGINE_LEAN
    from phaseprof.analyzers.viewing.live import live_view
    from phaseprof.trace.reader import open_trace

    if not path.exists():
        return None
    window_ns = round(WINDOW_S * 1e9)
    now_ns = time.time_ns()
    try:
        trace = open_trace(path, lean=ENGINE_LEAN, since_ns=now_ns - window_ns - _LATE_NS)
    except TraceError:
        if path.is_dir() and not (path / "passes").exists():
            # It was made a moment ago.
            return None
        raise
    ended = [meta.ended_ns for meta in trace.metas if meta.ended_ns is not None]
    if trace.metas and len(ended) == len(trace.metas):
        # The last seconds of the run, whenever it was.
        now_ns = max(ended)
        trace = open_trace(path, lean=ENGINE_LEAN, since_ns=now_ns - window_ns)
    return live_view(trace, now_ns, window_ns, roofs.of(trace))


class _Roofs:
    """The roofs of the run's device, looked up once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Ceilings | None] = {}

    def of(self, trace: Trace) -> Ceilings | None:
        from phaseprof.analyzers.report import primary_device
        from phaseprof.collectors import ceilings

        device, dtype = primary_device(trace)
        if device is None or not dtype:
            return None
        key = device.key, dtype
        if key not in self._found:
            self._found[key] = ceilings.resolve(device, dtype)
        return self._found[key]
