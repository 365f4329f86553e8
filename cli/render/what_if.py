"""What changes would do, on a terminal: the run as measured, a row a change, what cannot help, and the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from phaseprof.analyzers.results import Bound
from phaseprof.analyzers.what_if.results import Interval, Outcome, Refused, Unit, WhatIf
from phaseprof.cli.render import units
from phaseprof.cli.render.console import to_text
from phaseprof.cli.render.layout import MARGIN, fold, keyed, paragraph, plain, stack, to_ascii
from phaseprof.cli.render.phase_table import BOUND_STYLE

#: Between columns, and between the ends of an interval.
_GAP, _TO = "  ", "\N{EN DASH}"
_MIN_WIDTH = 48


@dataclass(frozen=True, slots=True)
class Head:
    """What the run was.

    Attributes:
        subject: Model, engine, device, a few words each.
        trace: Where the trace lies.
    """

    subject: tuple[str, ...]
    trace: str


def render(
    found: WhatIf,
    head: Head,
    *,
    width: int = 100,
    color: bool = False,
    unicode: bool = True,
    explain: bool = False,
) -> str:
    """Lay it out as text, without a line break at the end.

    Args:
        found: What to show; no figure is computed here.
        head: What the run was.
        width: Columns.
        color: Add ANSI colours.
        unicode: False for a stream that only takes ASCII.
        explain: Show the arithmetic of each change.
    """
    width = max(width, _MIN_WIDTH)
    blocks = [
        _head(head, width),
        _measured(found, width),
        _table(found, width),
        _notes(found, width),
        _hopeless(found.hopeless, width),
    ]
    if explain:
        for outcome in _shown(found):
            blocks += list(_explained(outcome, width))
    elif _shown(found):
        command = f"The arithmetic: phaseprof what-if {head.trace} --explain"
        blocks.append(paragraph(command, width, paint=plain("dim")))
    text = to_text(stack(blocks), width, color=color)
    return text if unicode else to_ascii(text)


def _head(head: Head, width: int) -> list[Text]:
    words = " · ".join(["phaseprof what-if", *head.subject])
    lines = [Text(line) for line in fold(words, width, hang=MARGIN, apart=" · ")]
    lines[0].highlight_words(["phaseprof what-if"], style="bold")
    return lines


def _measured(found: WhatIf, width: int) -> list[Text]:
    before = found.measured
    parts = []
    if found.of_sweep is not None:
        parts.append(f"batch {units.count(found.of_sweep)}, the largest of the sweep")
    elif found.sequences is not None and found.sequences > 1:
        parts.append(f"batch {units.mean(found.sequences)}")
    if before.ttft_ms is not None:
        parts.append(f"TTFT {units.latency(before.ttft_ms.value)}")
    if before.tpot_ms is not None:
        parts.append(f"TPOT {units.latency(before.tpot_ms.value)}")
    noun = "output" if found.generates else "prompt"
    parts.append(f"{units.rate(before.tokens_per_s.value)} {noun} tokens/s")
    if before.memory_bytes is not None:
        parts.append(f"{units.size(round(before.memory_bytes))} of weights and KV")
    parts.append(f"{before.phase} is {_bound_words(before.bound)}")
    return keyed("Measured", [", ".join(parts)], width)


def _bound_words(bound: Bound) -> str:
    return f"bound by {bound.value}" if " " in bound.value else f"{bound.value}-bound"


# --- the table ------------------------------------------------------------------------------------


def _shown(found: WhatIf) -> list[Outcome]:
    more = () if found.combined is None else (found.combined,)
    return [*found.outcomes, *more]


def _table(found: WhatIf, width: int) -> list[Text]:
    shown = _shown(found)
    if not shown:
        return []
    tokens = f"{'output' if found.generates else 'prompt'}/s"
    columns: dict[str, list[str]] = {
        "change": [each.title for each in shown],
        "TTFT": [_ms(each.ttft_ms) for each in shown],
        "TPOT": [_ms(each.tpot_ms) for each in shown],
        "ITL tail": [_ms(each.itl_ms) for each in shown],
        tokens: [units.rate(each.tokens_per_s.value) for each in shown],
        "gain": [_times(each.gain) for each in shown],
        "memory": [_size(each) for each in shown],
        "then bound by": [f"{each.phase}: {each.bound.value}" for each in shown],
    }
    columns = {
        name: cells
        for name, cells in columns.items()
        if name in ("change", "gain") or any(cell != units.DASH for cell in cells)
    }
    # What can be read elsewhere goes first where there is no room.
    for name in ("memory", tokens, "TTFT", "then bound by", "ITL tail"):
        if _wide(columns) + MARGIN <= width:
            break
        columns.pop(name, None)
    widths = {name: _width(name, cells) for name, cells in columns.items()}
    lines = [_row({name: name for name in columns}, widths, style="dim")]
    for place, outcome in enumerate(shown):
        cells = {name: values[place] for name, values in columns.items()}
        lines.append(_row(cells, widths, bound=outcome.bound))
    return lines


def _width(name: str, cells: Sequence[str]) -> int:
    return max(cell_len(name), *(cell_len(cell) for cell in cells))


def _wide(columns: dict[str, list[str]]) -> int:
    widths = [_width(name, cells) for name, cells in columns.items()]
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _row(
    cells: dict[str, str], widths: dict[str, int], *, style: str = "", bound: Bound | None = None
) -> Text:
    line = Text(" " * MARGIN, style=style)
    for place, (name, cell) in enumerate(cells.items()):
        left = name in ("change", "then bound by")
        pad = " " * (widths[name] - cell_len(cell))
        shown = cell + pad if left else pad + cell
        if bound is not None and name == "then bound by":
            line.append(_GAP).append(shown, style=BOUND_STYLE[bound])
        elif bound is not None and name == "change":
            line.append(shown, style="bold")
        else:
            line.append((_GAP if place else "") + shown)
    return line


def _ms(value: Interval | None) -> str:
    if value is None:
        return units.DASH
    if value.low == value.high:
        return units.latency(value.value)
    return f"{units.latency(value.value)} ({_bare(value.low)}{_TO}{_bare(value.high)})"


def _bare(ms: float) -> str:
    """Without its unit, where that is ms as well."""
    text = units.latency(ms)
    return text.removesuffix(" ms")


def _times(value: Interval) -> str:
    if value.low == value.high:
        return f"{value.value:.2f}x"
    return f"{value.value:.2f}x ({value.low:.2f}{_TO}{value.high:.2f})"


def _size(outcome: Outcome) -> str:
    if outcome.memory_bytes is None:
        return units.DASH
    text = units.size(round(outcome.memory_bytes))
    return f"{text}: too much" if outcome.fits is False else text


# --- below the table ------------------------------------------------------------------------------


def _notes(found: WhatIf, width: int) -> list[Text]:
    """What has to be known; what is the same of several changes stands once."""
    titles: dict[str, list[str]] = {}
    for outcome in found.outcomes:
        said = list(outcome.notes)
        if outcome.cannot:
            said = [f"{outcome.cannot[:1].upper()}{outcome.cannot[1:]}."]
        if outcome.fits is False:
            said.append("It does not fit into the memory of the device.")
        if said:
            titles.setdefault(" ".join(said), []).append(outcome.title)
    lines: list[Text] = []
    for said_once, of in titles.items():
        lines += paragraph(f"{', '.join(of)}: {said_once}", width)
    if found.outcomes:
        brackets = "In brackets: from the best to the worst of what is not known, meant as 90 % (docs/what-if.md)."
        lines += paragraph(brackets, width, paint=plain("dim"))
    return lines


def _hopeless(refused: Sequence[Refused], width: int) -> list[Text]:
    said = [f"{each.title}: {each.why}{f' → {each.fix}' if each.fix else ''}." for each in refused]
    return keyed("Cannot help", said, width)


# --- the arithmetic -------------------------------------------------------------------------------


def _explained(outcome: Outcome, width: int) -> Iterator[list[Text]]:
    if outcome.cannot or not outcome.terms:
        return
    lines = [Text(" " * MARGIN).append(outcome.title, style="bold")]
    before = [_value(term.before, term.unit) for term in outcome.terms]
    after = [_value(term.after, term.unit) for term in outcome.terms]
    name = max(len(term.name) for term in outcome.terms)
    left, right = max(map(len, before)), max(map(len, after))
    phase = ""
    for term, was, then in zip(outcome.terms, before, after, strict=True):
        if term.phase != phase:
            phase = term.phase
            if phase:
                lines.append(Text(" " * (2 * MARGIN) + f"{phase} step", style="dim"))
        start = (
            f"{' ' * (3 * MARGIN)}{term.name:<{name}}{_GAP}{was:>{left}} → {then:>{right}}{_GAP}"
        )
        for place, folded in enumerate(fold(term.formula, max(width - len(start), 20))):
            head = Text(start if place == 0 else " " * len(start))
            lines.append(head.append(folded, style="dim"))
    yield lines


def _value(value: float, unit: Unit) -> str:
    if unit is Unit.BYTES:
        return units.size(round(value))
    if unit is Unit.SECONDS:
        return units.duration(value * 1e3)
    if unit is Unit.FLOPS:
        return f"{units.rate(value / 1e9)} GFLOP"
    return units.rate(value)
