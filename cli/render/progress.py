"""Progress of long work on a terminal; on anything else nothing is drawn."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console


class TerminalProgress:
    """A spinner for work without an end in sight, a bar for steps that can be counted.

    The spinner draws from a thread of its own. The bar does not: it is drawn when a step begins, so that nothing runs
    beside passes that are being timed.

    Args:
        stream: Where to draw; stderr by default, so that stdout holds the answer alone.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        # Bound now: others may replace sys.stderr for a while.
        self._stream = sys.stderr if stream is None else stream
        self._draws = self._stream.isatty()
        self._live: contextlib.ExitStack | None = None
        self._status: Any = None
        self._bar: Any = None
        self._console: Console | None = None

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def __call__(self, text: str, done: int = 0, total: int = 0) -> None:
        """Show what goes on, as `phaseprof.workload.Progress` describes it."""
        if not self._draws:
            return
        if total:
            self._show_bar(text, done, total)
        else:
            self._show_spinner(text)

    def clear(self) -> None:
        """Take away what is drawn."""
        live, self._live, self._status, self._bar = self._live, None, None, None
        if live is not None:
            live.close()

    def say(self, text: str) -> None:
        """Print a line that stays, on any kind of stream."""
        self.clear()
        print(f"phaseprof: {text}", file=self._stream, flush=True)

    def _show_spinner(self, text: str) -> None:
        if self._status is None:
            self.clear()
            self._live = contextlib.ExitStack()
            self._status = self._live.enter_context(self._rich().status(text))
        self._status.update(f"{text} …")

    def _show_bar(self, text: str, done: int, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        if self._bar is None:
            self.clear()
            self._live = contextlib.ExitStack()
            self._bar = self._live.enter_context(
                Progress(
                    "{task.description}",
                    BarColumn(),
                    MofNCompleteColumn(),
                    TimeRemainingColumn(),
                    console=self._rich(),
                    auto_refresh=False,
                    transient=True,
                )
            )
            self._bar.add_task(text, total=total)
        self._bar.update(self._bar.task_ids[0], description=text, completed=done, total=total)
        self._bar.refresh()

    def _rich(self) -> Console:
        if self._console is None:
            from rich.console import Console

            self._console = Console(file=self._stream)
        return self._console
