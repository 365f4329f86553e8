"""A comparison as Markdown for a pull request: verdict and rules in sight, figures and surroundings folded away.

Names come from traces: every character that Markdown or HTML would take for its own is escaped.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from phaseprof.analyzers.comparing.results import Call, Comparison, Delta, Outcome
from phaseprof.analyzers.results import Report
from phaseprof.cli.render import comparison_cells as cells
from phaseprof.cli.render import units

_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+\-.!|~$^:@])")
_MARK = {
    Outcome.KEPT: "✅",
    Outcome.BREACH: "❌",
    Outcome.NOT_CERTAIN: "⚠️",
    Outcome.NOT_JUDGED: "⚠️",
}
#: The first line, by which a workflow finds its own comment again.
MARKER = "<!-- phaseprof compare -->"


def render_markdown(
    comparisons: Sequence[Comparison], reports: Sequence[Report], *, failed: bool
) -> str:
    """The text of a comment, with a line break at its end.

    Args:
        comparisons: Each against the first trace.
        reports: Those of all traces, the first one first.
        failed: Whether the command fails.
    """
    names = cells.names_of(reports).of
    lines = [MARKER, ""]
    if failed:
        lines += ["**A rule was broken.**", ""]
    for found, name in zip(comparisons, names[1:], strict=True):
        lines += _one(found, (names[0], name))
    return "\n".join(lines).rstrip("\n") + "\n"


def escaped(text: str) -> str:
    """Text that stays text, on one line: no markup, no link, no mention, no tag."""
    one_line = " ".join(text.split())
    quoted = html.escape(one_line, quote=False)
    # The entities that were just made keep their & and ;.
    parts = re.split(r"(&(?:amp|lt|gt);)", quoted)
    return "".join(
        part if place % 2 else _SPECIAL.sub(_entity, part) for place, part in enumerate(parts)
    )


def _entity(found: re.Match[str]) -> str:
    # As a number: a backslash before it would show inside of HTML, and "@name" would still call somebody.
    char = found[0]
    return char if char in "-.()+:!" and not _starts_markup(found) else f"&#{ord(char)};"


def _starts_markup(found: re.Match[str]) -> bool:
    """Whether a harmless sign stands where it begins a list, an image or an address."""
    text, at = found.string, found.start()
    before, after = text[:at].strip(), text[at + 1 : at + 2]
    return (
        not before
        or (found[0] == ":" and after == "/")
        or (found[0] == "!" and after == "[")
        or (found[0] in ".)" and before.isdigit() and after in ("", " "))
        or (found[0] == "." and text[:at].lower().endswith("www"))
    )


def _one(found: Comparison, names: tuple[str, str]) -> Iterator[str]:
    yield f"### phaseprof: {escaped(names[1])} against {escaped(names[0])}"
    yield ""
    for reason in found.reasons:
        yield f"> ⚠️ **{escaped(reason)}**"
        yield ""
    if found.verdict:
        yield f"**{escaped(found.verdict[0])}**"
        yield ""
        yield from (f"- {escaped(sentence)}" for sentence in found.verdict[1:])
        yield ""
    if found.judged:
        yield "| | rule | outcome | figures |"
        yield "|---|---|---|---|"
        for each in found.judged:
            yield (
                f"| {_MARK[each.outcome]} | {escaped(each.rule)} | {each.outcome.value} | {escaped(each.text)} |"
            )
        yield ""
    yield from _table(cells.rows(found, everything=False), names)
    yield from _folded("Every figure", _table(cells.rows(found, everything=True), names))
    yield from _folded("What was not the same", _differences(found, names))
    yield from _folded("How sure this is", _method(found))


def _folded(title: str, lines: Iterator[str]) -> Iterator[str]:
    body = list(lines)
    if body:
        yield from ("<details>", f"<summary>{html.escape(title)}</summary>", "")
        yield from body
        yield from ("</details>", "")


def _table(shown: Sequence[Delta], names: tuple[str, str]) -> Iterator[str]:
    if not shown:
        return
    yield f"| | {escaped(names[0])} | {escaped(names[1])} | change | 95 % interval | |"
    yield "|---|---:|---:|---:|---:|---|"
    for name, deltas in cells.grouped(shown).items():
        for delta in deltas:
            metric = delta.metric
            strong = "**" if delta.call in (Call.WORSE, Call.BETTER) else ""
            change = cells.change(delta.change)
            yield (
                f"| {escaped(name)}: {escaped(cells.label(metric))} | {cells.value(metric, delta.a.value)} | "
                f"{cells.value(metric, delta.b.value)} | {strong}{change}{strong} | "
                f"{cells.interval(delta) or units.DASH} | {delta.call.value} |"
            )
    yield ""


def _differences(found: Comparison, names: tuple[str, str]) -> Iterator[str]:
    if not found.differences:
        yield "Nothing that was recorded."
        yield ""
        return
    yield f"| | {escaped(names[0])} | {escaped(names[1])} |"
    yield "|---|---|---|"
    for each in found.differences:
        yield f"| {escaped(each.what)} | {_told(each.a)} | {_told(each.b)} |"
    yield ""


def _told(text: str) -> str:
    return escaped(text) or "not recorded"


def _method(found: Comparison) -> Iterator[str]:
    yield from (f"- {escaped(note)}" for note in found.notes)
    yield f"- {escaped(found.method.text)}"
    yield ""
