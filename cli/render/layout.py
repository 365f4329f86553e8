"""Lines of text: folding with a hanging indent, key and value, and what an ASCII stream can show."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from rich.cells import cell_len
from rich.text import Text

#: Left margin of everything below the head line.
MARGIN = 2
#: Width of the key column of the foot lines, margin not counted.
KEY_WIDTH = 16

#: Turns a folded line into styled text.
Paint = Callable[[str], Text]

# A number stays on the line of its unit. The stand-in for the space between them is a private-use character of width
# one: a no-break space would count as white space for `str.split`.
_GLUE = "\ue000"
_UNIT = (
    r"(?:%|[µnm]?s|min|h|[kMGT]?B(?:/s)?|[kMGTP]?FLOPs?(?:/s)?|FLOP/(?:B|byte)|tokens?(?:/s)?|tok/s"
    r"|MHz|W|J|°C)(?!\w)"
)
_NUMBER_AND_UNIT = re.compile(rf"(?<=\d) (?={_UNIT})|(?<=±) (?=\d)")
# A separating dot ends its line.
_BEFORE_DOT = re.compile(r" (?=· )")

_ASCII = {
    "·": "|",
    "\N{EN DASH}": "-",
    "—": "-",
    "\N{MINUS SIGN}": "-",
    "…": "...",
    "\N{MULTIPLICATION SIGN}": "x",
    "µ": "u",
    "μ": "u",
    "°": "",
    # Bars of eight heights.
    **dict(zip("▁▂▃▄▅▆▇█", ".:-=+*#@", strict=True)),
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "±": "+-",
    "→": "->",
    "\N{LEFT SINGLE QUOTATION MARK}": "'",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "“": '"',
    "”": '"',
}


def fold(text: str, width: int, *, hang: int = 0, apart: str = " ") -> list[str]:
    """Break a paragraph into lines of at most ``width`` cells; lines after the first are indented by ``hang``.

    Breaks only at ``apart``, and never between a number and its unit. A word that is wider than a line (a path) stands
    on a line of its own, whole, so that it can be copied.
    """
    glued = _NUMBER_AND_UNIT.sub(_GLUE, text)
    if apart == " ":
        glued = _BEFORE_DOT.sub(_GLUE, glued)
    words = [word for word in glued.split(apart) if word.strip()]
    lines: list[str] = []
    line = ""
    for word in words:
        indent = " " * hang if lines else ""
        candidate = f"{line}{apart}{word}" if line else indent + word
        if line and cell_len(candidate) > width:
            lines.append(line)
            candidate = " " * hang + word
        line = candidate
    return [each.replace(_GLUE, " ") for each in [*lines, line] if each.strip()]


def paragraph(
    text: str, width: int, *, indent: int = MARGIN, hang: int = 2, paint: Paint = Text
) -> list[Text]:
    """A sentence or several, at a left margin, with a hanging indent."""
    lines = fold(text, width - indent, hang=hang)
    return [Text(" " * indent) + paint(line) for line in lines]


def key_of(name: str) -> Text:
    """A key in the margin column, padded to where its value begins."""
    return Text.assemble(" " * MARGIN, (name.ljust(KEY_WIDTH), "bold"))


def keyed(name: str, values: Iterable[str], width: int, *, paint: Paint = Text) -> list[Text]:
    """A key in the margin column and paragraphs beside it, hanging under the first word of the value."""
    lines: list[Text] = []
    for value in values:
        for folded in fold(value, width - MARGIN - KEY_WIDTH, hang=2):
            lines.append(key_of("" if lines else name) + paint(folded))
    return lines


def plain(style: str) -> Paint:
    """A :data:`Paint` that gives the whole line one style."""
    return lambda line: Text(line, style=style)


def stack(blocks: Sequence[Sequence[Text]]) -> list[Text]:
    """Blocks under each other with one empty line between; empty blocks leave none."""
    lines: list[Text] = []
    for block in blocks:
        if block:
            lines += [Text(), *block] if lines else block
    return lines


def to_ascii(text: str) -> str:
    """The text with every character outside ASCII replaced by what comes nearest, ``?`` where nothing does."""
    replaced = "".join(_ASCII.get(char, char) for char in text)
    apart = unicodedata.normalize("NFKD", replaced)
    bare = "".join(char for char in apart if not unicodedata.combining(char))
    return bare.encode("ascii", "replace").decode("ascii")
