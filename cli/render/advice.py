"""The advice of a report on a terminal: what to change and what it gains, one line each, and what cannot help."""

from __future__ import annotations

from rich.text import Text

from phaseprof.analyzers.advice import Advice
from phaseprof.analyzers.results import Bound
from phaseprof.cli.render.layout import keyed, plain
from phaseprof.cli.render.phase_table import BOUND_STYLE


def advice_section(advice: Advice | None, width: int, *, trace: str = "") -> list[Text]:
    """The section; nothing where no advice was worked out.

    Args:
        advice: What to show.
        width: Columns.
        trace: The trace's path, for the command that shows the arithmetic; empty leaves that out.
    """
    if advice is None:
        return []
    lines: list[Text] = []
    for place, line in enumerate(advice.lines):
        lines += keyed("" if place else "Advice", [line], width, paint=_painted(line))
    if advice.cannot:
        cannot = [f"Cannot help: {advice.cannot}."]
        lines += keyed("" if lines else "Advice", cannot, width, paint=plain("dim"))
    if advice.about and lines:
        lines += keyed("", [f"All of it {advice.about}."], width, paint=plain("dim"))
    if advice.missing:
        lines += keyed("Advice", [f"{advice.missing[:1].upper()}{advice.missing[1:]}."], width)
    if trace and advice.what_if is not None and (advice.lines or advice.cannot):
        command = f"The arithmetic: phaseprof what-if {trace} --explain"
        lines += keyed("", [command], width, paint=plain("dim"))
    return lines


def _painted(line: str) -> _Painted:
    return _Painted(line.partition(":")[0])


class _Painted:
    """Sets the title of a change in bold, on the first of its lines, and colours classes."""

    def __init__(self, title: str) -> None:
        self._title = title

    def __call__(self, line: str) -> Text:
        text = Text(line)
        if line.startswith(self._title):
            text.stylize("bold", 0, len(self._title))
        for bound in Bound:
            if bound is not Bound.UNKNOWN:
                name = bound.value
                text.highlight_words([f"{name}-bound", f"bound by {name}"], BOUND_STYLE[bound])
        return text
