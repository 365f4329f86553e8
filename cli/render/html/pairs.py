"""Lines of the terminal report as keys and sentences: what is said in words there is said in the same words here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rich.text import Text

from phaseprof.cli.render.layout import KEY_WIDTH, MARGIN

#: So wide that no sentence is folded.
WIDE = 1_000_000
#: A course over time that a terminal shows as bars; a page has charts.
_COURSE = re.compile(r"\s*[▁▂▃▄▅▆▇█ ]+$")


@dataclass(frozen=True, slots=True)
class Pair:
    """A key and what is said under it."""

    key: str
    values: tuple[str, ...]


def pairs(lines: Iterable[Text], *, without: Iterable[str] = ()) -> list[Pair]:
    """The keyed lines among some that were laid out :data:`WIDE`; rows of tables are left out.

    Args:
        lines: Of a section.
        without: Keys that are left out.
    """
    found: dict[str, list[str]] = {}
    key = ""
    for line in lines:
        begin = line.spans[0] if line.spans else None
        if begin is None or (begin.start, begin.end, begin.style) != (
            MARGIN,
            MARGIN + KEY_WIDTH,
            "bold",
        ):
            continue
        text = line.plain
        key = text[MARGIN : MARGIN + KEY_WIDTH].strip() or key
        value = _COURSE.sub("", text[MARGIN + KEY_WIDTH :]).strip()
        found.setdefault(key, []).append(value)
    skipped = set(without)
    return [Pair(key, tuple(values)) for key, values in found.items() if key not in skipped]
