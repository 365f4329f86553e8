"""A comparison on a terminal: what changed first, then the rules, the figures, and what was not the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from phaseprof.analyzers.comparing.results import (
    Call,
    Comparison,
    Delta,
    Judged,
    KernelChange,
    Outcome,
)
from phaseprof.analyzers.results import Report
from phaseprof.cli.render import comparison_cells as cells
from phaseprof.cli.render import units
from phaseprof.cli.render.console import to_text
from phaseprof.cli.render.layout import (
    MARGIN,
    fold,
    keyed,
    paragraph,
    plain,
    stack,
    to_ascii,
)

MIN_WIDTH = 48
_STYLE = {
    Call.BETTER: "green",
    Call.WORSE: "red",
    Call.CHANGED: "magenta",
    Call.UNCHANGED: "",
    Call.UNSURE: "yellow",
    Call.NOT_COMPARED: "dim",
}
_OUTCOME_STYLE = {
    Outcome.KEPT: "green",
    Outcome.BREACH: "bold red",
    Outcome.NOT_CERTAIN: "yellow",
    Outcome.NOT_JUDGED: "yellow",
}
#: Kernels that take less than this more or less are not shown.
_LITTLE = 0.01
#: Of each phase so many classes of kernels are shown.
_CLASSES = 5
_GAP = 2
#: Columns of the letter that stands for a trace.
_LETTER = 3
#: From here on there is room for what a figure rests on.
_WIDE = 110


@dataclass(frozen=True, slots=True)
class _Cell:
    text: str
    style: str = ""


def render(
    comparisons: Sequence[Comparison],
    reports: Sequence[Report],
    *,
    width: int = 100,
    color: bool = False,
    unicode: bool = True,
    everything: bool = False,
    rules_from: str = "",
) -> str:
    """Lay comparisons out as text, without a line break at the end.

    Args:
        comparisons: Each against the first trace.
        reports: Those of all traces, the first one first.
        width: Columns of the terminal. Single words that are wider (paths) are not broken.
        color: Add ANSI colours from the terminal's own palette of sixteen.
        unicode: False for a stream that only takes ASCII.
        everything: Every figure that is known, also of each batch size.
        rules_from: The file that rules come from, if one does.
    """
    width = max(width, MIN_WIDTH)
    names = cells.names_of(reports).of
    blocks = [_head(names, reports, width)]
    if len(comparisons) == 1:
        only = comparisons[0]
        blocks += [
            _reasons(only, width),
            _verdict(only, width),
            _rules(only.judged, width, rules_from),
            _table(only, names, width, everything),
            _kernels(only.kernels, names, width, everything),
        ]
    else:
        for place, (other, name) in enumerate(zip(comparisons, names[1:], strict=True), 1):
            title = f"{_letter(place)}  {name} against {names[0]}"
            blocks.append(
                [
                    *[Text(line, style="bold") for line in fold(title, width, hang=_LETTER)],
                    *_reasons(other, width),
                    *_verdict(other, width),
                    *_rules(other.judged, width, rules_from),
                ]
            )
        blocks.append(_side_by_side(comparisons, names, width, everything))
    for other, name in zip(comparisons, names[1:], strict=True):
        blocks.append(_foot(other, (names[0], name), width, several=len(comparisons) > 1))
    text = to_text(stack(blocks), width, color=color)
    return text if unicode else to_ascii(text)


def _head(names: Sequence[str], reports: Sequence[Report], width: int) -> list[Text]:
    lines = [Text.assemble(("phaseprof compare", "bold"))]
    for place, (name, report) in enumerate(zip(names, reports, strict=True)):
        facts = report.facts
        device = None if facts.device is None else facts.device.name
        requests = units.counted(report.requests.count, "request")
        parts = [facts.model, facts.engine, device, facts.dtype, requests]
        text = " · ".join([name, *(part for part in parts if part)])
        key = _letter(place)
        folded = fold(text, width - MARGIN - _LETTER, apart=" · ")
        for line in folded:
            shown = key if line is folded[0] else ""
            lines.append(Text(" " * MARGIN + shown.ljust(_LETTER) + line))
    return lines


def _letter(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else str(place + 1)


def _reasons(found: Comparison, width: int) -> list[Text]:
    lines: list[Text] = []
    for reason in found.reasons:
        lines += paragraph(f"! {reason}", width, paint=plain("bold yellow"))
    return lines


def _verdict(found: Comparison, width: int) -> list[Text]:
    lines: list[Text] = []
    for place, sentence in enumerate(found.verdict):
        lines += paragraph(sentence, width, paint=plain("bold" if place == 0 else ""))
    return lines


def _rules(judged: Sequence[Judged], width: int, source: str) -> list[Text]:
    lines: list[Text] = []
    for each in judged:
        style = plain(_OUTCOME_STYLE[each.outcome])
        text = f"{each.outcome.value}: {each.rule}: {each.text}"
        lines += keyed("" if lines else "Rules", [text], width, paint=style)
    if lines and source:
        lines += keyed("", [f"rules of {source}"], width, paint=plain("dim"))
    return lines


# --- tables ---------------------------------------------------------------------------------------


def _table(found: Comparison, names: Sequence[str], width: int, everything: bool) -> list[Text]:
    """One row a figure: both values, the change, its interval, and what is said of it."""
    shown = cells.rows(found, everything=everything)
    if not shown:
        return []
    wide = width >= _WIDE
    heads = ["", _short(names[0]), _short(names[1]), "change", "95 % interval", ""]
    if wide:
        heads += ["values", "blocks"]
    body: list[list[_Cell]] = []
    for name, deltas in cells.grouped(shown).items():
        body.append([_Cell(name, "bold")])
        body += [_row(delta, wide) for delta in deltas]
    lines = _laid_out(heads, body, width, words=5)
    unsure = {delta.call for delta in shown} & {Call.UNSURE}
    if unsure:
        lines += paragraph(
            "? not certain: the noise is larger than the change, or not known",
            width,
            paint=plain("dim"),
        )
    return lines


def _row(delta: Delta, wide: bool) -> list[_Cell]:
    metric, style = delta.metric, _STYLE[delta.call]
    row = [
        _Cell(f"  {cells.label(metric)}"),
        _Cell(cells.value(metric, delta.a.value)),
        _Cell(cells.value(metric, delta.b.value)),
        _Cell(cells.change(delta.change), style),
        _Cell(cells.interval(delta)),
        _Cell(cells.word(delta.call), style),
    ]
    if wide:
        blocks = [str(each.blocks) if each.blocks else units.DASH for each in (delta.a, delta.b)]
        values = [units.count(each.count) for each in (delta.a, delta.b)]
        row += [_Cell(" / ".join(values), "dim"), _Cell(" / ".join(blocks), "dim")]
    return row


def _kernels(
    kernels: Sequence[KernelChange], names: Sequence[str], width: int, everything: bool
) -> list[Text]:
    body: list[list[_Cell]] = []
    for phase in dict.fromkeys(each.phase for each in kernels):
        own = [each for each in kernels if each.phase == phase]
        if not everything:
            own = [each for each in own if abs(each.b_ms - each.a_ms) >= _LITTLE * each.a_ms]
        if own:
            body.append([_Cell(phase, "bold")])
        for each in own if everything else own[:_CLASSES]:
            moved = each.b_ms - each.a_ms
            part = f"{units.percent(each.part)} of the {'growth' if moved > 0 else 'decline'}"
            body.append(
                [
                    _Cell(f"  {each.kernel_class}"),
                    _Cell(units.duration(each.a_ms)),
                    _Cell(units.duration(each.b_ms)),
                    _Cell(part if moved else "", "dim"),
                ]
            )
    if not body:
        return []
    heads = ["kernels, a pass", _short(names[0]), _short(names[1]), ""]
    return _laid_out(heads, body, width, words=3)


def _side_by_side(
    comparisons: Sequence[Comparison], names: Sequence[str], width: int, everything: bool
) -> list[Text]:
    """One row a figure and one column a trace; as many traces at once as there is room for."""
    first = comparisons[0]
    keys = [
        delta.metric
        for delta in first.deltas
        if any(
            (own := each.delta(delta.metric.path)) is not None
            and own in cells.rows(each, everything=everything)
            for each in comparisons
        )
    ]
    at_once = max((width - 40) // 24, 1)
    lines: list[Text] = []
    for begin in range(0, len(comparisons), at_once):
        part = comparisons[begin : begin + at_once]
        heads = ["", _short(names[0]), *(_short(n) for n in names[1 + begin : 1 + begin + at_once])]
        body: list[list[_Cell]] = []
        last = ""
        for metric in keys:
            if cells.group(metric) != last:
                last = cells.group(metric)
                body.append([_Cell(last, "bold")])
            row = [_Cell(f"  {cells.label(metric)}")]
            base = next((d.a.value for e in part if (d := e.delta(metric.path))), None)
            row.append(_Cell(cells.value(metric, base)))
            row += [_beside(each.delta(metric.path)) for each in part]
            body.append(row)
        lines += (
            [Text(), *_laid_out(heads, body, width)] if lines else _laid_out(heads, body, width)
        )
    legend = "* certain · ? not certain · no mark: unchanged, or not compared"
    return lines + paragraph(legend, width, paint=plain("dim"))


def _beside(delta: Delta | None) -> _Cell:
    if delta is None:
        return _Cell(units.DASH, "dim")
    mark = {Call.UNSURE: "?", Call.UNCHANGED: " ", Call.NOT_COMPARED: " "}.get(delta.call, "*")
    own = cells.value(delta.metric, delta.b.value)
    text = own if delta.change is None else f"{own} {cells.change(delta.change):>8}"
    return _Cell(f"{text} {mark}", _STYLE[delta.call])


def _laid_out(
    heads: Sequence[str], body: Sequence[Sequence[_Cell]], width: int, words: int | None = None
) -> list[Text]:
    """Columns under each other: the first one and that of words to the left, the others to the right. Columns at the
    end go where there is no room."""
    full = [row for row in body if len(row) > 1]
    columns = len(heads)
    widths = [
        max([cell_len(heads[n]), *(cell_len(row[n].text) for row in full)]) for n in range(columns)
    ]
    widths[0] = max(widths[0], *(cell_len(row[0].text) for row in body))
    least = min(4, len(heads) - 1)
    while columns > least and MARGIN + sum(widths[:columns]) + _GAP * (columns - 1) > width:
        columns -= 1
    lines = []
    head = Text(" " * MARGIN)
    for n in range(columns):
        head.append(_padded(heads[n], widths[n], left=n == 0), style="dim")
        head.append(" " * _GAP)
    if any(heads[1:]):
        lines.append(head)
    for row in body:
        line = Text(" " * MARGIN)
        for n, cell in enumerate(row[:columns]):
            line.append(_padded(cell.text, widths[n], left=n in (0, words)), style=cell.style)
            line.append(" " * _GAP)
        lines.append(line)
    return lines


def _padded(text: str, width: int, *, left: bool) -> str:
    space = " " * max(width - cell_len(text), 0)
    return text + space if left else space + text


def _short(name: str, limit: int = 18) -> str:
    return name if len(name) <= limit else f"…{name[1 - limit :]}"


# --- foot -----------------------------------------------------------------------------------------


def _foot(found: Comparison, names: tuple[str, str], width: int, *, several: bool) -> list[Text]:
    lines: list[Text] = []
    if several:
        lines += [
            Text(" " * MARGIN + line, style="bold") for line in fold(names[1], width - MARGIN)
        ]
    changes = [
        f"{each.what}: {each.a or 'not recorded'} → {each.b or 'not recorded'}"
        for each in found.differences
    ]
    lines += keyed("Not the same", changes or ["nothing that was recorded"], width)
    classes = [
        f"{each.phase}: {each.a.value}"
        + (f" → {each.b.value}" if each.a is not each.b else " in both")
        for each in found.bounds
    ]
    lines += keyed("Bound by", [", ".join(classes)] if classes else [], width)
    lines += keyed("Note", found.notes, width)
    lines += keyed("Method", [found.method.text], width, paint=plain("dim"))
    return lines
