"""The live view of a run that is being recorded: throughput, phases and their bounds, latencies, and the queue."""

from __future__ import annotations

from rich.text import Text

from phaseprof.analyzers.results import Percentiles, PhaseFigures
from phaseprof.analyzers.viewing.live import LiveView
from phaseprof.cli.render import units
from phaseprof.cli.render.engine import course
from phaseprof.cli.render.layout import MARGIN, key_of, keyed, paragraph, plain, stack
from phaseprof.cli.render.phase_table import BOUND_STYLE, ordered

#: A run without a pass for so long is said to be idle.
_IDLE_S = 2.0


def live_lines(view: LiveView, name: str, width: int) -> list[Text]:
    """Lay a view out.

    Args:
        view: The moment.
        name: What the trace is called.
        width: Columns.
    """
    return stack([_head(view, name, width), _rates(view, width), _phases(view), _requests(view)])


def live_line(view: LiveView) -> str:
    """The same on one line, for a stream that is no terminal."""
    parts = [
        f"{units.rate(view.output_tokens_per_s)} output tokens/s",
        f"{units.rate(view.prompt_tokens_per_s)} prompt tokens/s",
        *(f"{each.phase.value} {each.bound.value}" for each in view.phases),
    ]
    if view.running is not None and view.waiting is not None:
        parts.append(f"{units.count(view.running)} running, {units.count(view.waiting)} waiting")
    if view.ttft_ms is not None:
        parts.append(f"TTFT p50 {units.latency(view.ttft_ms.p50)}")
    if view.tpot_ms is not None:
        parts.append(f"TPOT p50 {units.latency(view.tpot_ms.p50)}")
    return " · ".join(parts)


def _head(view: LiveView, name: str, width: int) -> list[Text]:
    facts = view.facts
    parts = ["phaseprof", facts.model if facts is not None else name]
    if facts is not None:
        parts += [facts.engine, facts.device.name if facts.device is not None else ""]
    parts.append(_state(view))
    head = " · ".join(part for part in parts if part)
    lines = paragraph(head, width, indent=0)
    lines[0].highlight_words(["phaseprof"], style="bold")
    for sentence in view.damage:
        lines += paragraph(sentence, width, indent=MARGIN, paint=plain("yellow"))
    return lines


def _state(view: LiveView) -> str:
    if view.ended:
        return "ended"
    if view.idle_s is None:
        return "no pass yet"
    if view.idle_s >= _IDLE_S:
        return f"no pass for {units.duration(view.idle_s * 1e3)}"
    return "recording"


def _rates(view: LiveView, width: int) -> list[Text]:
    text = (
        f"{units.rate(view.output_tokens_per_s)} output and {units.rate(view.prompt_tokens_per_s)} prompt tokens/s in "
        f"the last {units.duration(view.window_s * 1e3)}"
    )
    lines = keyed("Throughput", [text], width)
    most = max(view.course, default=0.0)
    if most and MARGIN + len(view.course) < width:
        lines.append(key_of("").append(course(view.course, most), style="cyan"))
    return lines


def _phases(view: LiveView) -> list[Text]:
    figures = ordered({each.phase.value: each for each in view.phases})
    if not figures:
        return []
    head: tuple[str, ...] = ("phase", "passes", "share", "p50", "p90", "MFU", "MBU", "bound")
    rows = [head, *map(_phase, figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for place, row in enumerate(rows):
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        line = Text(" " * MARGIN).append(
            first.strip().ljust(widths[0]), "dim" if not place else "bold"
        )
        for cell in rest[:-1]:
            line.append("  " + cell, "dim" if not place else "")
        bound = "dim" if not place else BOUND_STYLE[figures[place - 1].bound]
        lines.append(line.append("  " + row[-1], bound))
    return lines


def _phase(figures: PhaseFigures) -> tuple[str, ...]:
    return (
        figures.phase.value,
        units.count(figures.passes),
        units.percent(figures.share),
        units.duration(figures.pass_ms_p50),
        units.duration(figures.pass_ms_p90),
        units.DASH if figures.mfu is None else units.percent(figures.mfu),
        units.DASH if figures.mbu is None else units.percent(figures.mbu),
        figures.bound.value,
    )


def _requests(view: LiveView) -> list[Text]:
    lines = []
    told = f"{units.count(view.finished)} ended, {units.count(view.open)} open"
    if view.running is not None and view.waiting is not None:
        told = (
            f"{units.count(view.running)} running, {units.count(view.waiting)} waiting, "
            f"{units.count(view.finished)} ended"
        )
    lines.append(key_of("Requests").append(told))
    if view.kv_usage is not None:
        lines.append(key_of("KV cache").append(units.percent(view.kv_usage)))
    for name, found in (("TTFT", view.ttft_ms), ("TPOT", view.tpot_ms)):
        if found is not None:
            lines.append(key_of(name).append(_percentiles(found)))
    return lines


def _percentiles(found: Percentiles) -> str:
    return "  ".join(
        f"{name} {units.latency(value)}"
        for name, value in (("p50", found.p50), ("p90", found.p90), ("p99", found.p99))
    )
