"""What `phaseprof doctor` shows: one line a finding, its fix below it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.text import Text

from phaseprof.cli.render.console import to_text
from phaseprof.cli.render.layout import fold
from phaseprof.collectors.findings import Finding, Section, State

_STYLES = {State.OK: "green", State.LIMITED: "yellow", State.MISSING: "red"}
_STATE_WIDTH = max(len(state.value) for state in State)


def render(sections: Sequence[Section], *, width: int = 100, color: bool = False) -> str:
    """Lay the findings out as text, without a line break at the end.

    Args:
        sections: From `phaseprof.collectors.environment.inspect`.
        width: Columns; a detail that is longer is folded under its first word.
        color: Add ANSI colours to the states.
    """
    subject_width = max(
        (len(finding.subject) for section in sections for finding in section.findings), default=0
    )
    lines: list[Text] = []
    for section in sections:
        if lines:
            lines.append(Text())
        lines.append(Text(section.title, style="bold"))
        for finding in section.findings:
            lines += _lines(finding, subject_width, width)
    return to_text(lines, width, color=color)


def to_json(sections: Sequence[Section]) -> str:
    """The same as one JSON document."""
    document = {"schema": 1, "sections": [asdict(section) for section in sections]}
    return json.dumps(document, indent=2, ensure_ascii=False)


def _lines(finding: Finding, subject_width: int, width: int) -> list[Text]:
    margin = 2 + _STATE_WIDTH + 2 + subject_width + 2
    # Where the columns leave too little, a line that is too long reads better than a word a line.
    room = max(width - margin, 24)
    details = fold(finding.detail, room) or [""]
    state = Text(finding.state.value.ljust(_STATE_WIDTH), style=_STYLES[finding.state])
    first = Text.assemble("  ", state, f"  {finding.subject.ljust(subject_width)}  ", details[0])
    rest = [*details[1:], *(fold(f"→ {finding.fix}", room, hang=2) if finding.fix else [])]
    lines = [first, *(Text(" " * margin + line) for line in rest)]
    for line in lines:
        line.rstrip()
    return lines
