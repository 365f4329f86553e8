"""The terminal report: the answer first, then the figures, then where they come from, then what was not measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from rich.text import Text

from phaseprof.analyzers.results import Bound, Lever, PhaseFigures, Provenance, Report, RunFacts
from phaseprof.analyzers.windows import WindowsCost
from phaseprof.cli.render import units
from phaseprof.cli.render.advice import advice_section
from phaseprof.cli.render.console import to_text
from phaseprof.cli.render.counters import counters_section
from phaseprof.cli.render.engine import engine_section, goodput_section, interference_section
from phaseprof.cli.render.kernels import kernels_section
from phaseprof.cli.render.layout import (
    MARGIN,
    fold,
    key_of,
    keyed,
    paragraph,
    plain,
    stack,
    to_ascii,
)
from phaseprof.cli.render.operations import (
    mixed_section,
    operations_section,
    two_phases_section,
)
from phaseprof.cli.render.phase_table import BOUND_STYLE, ordered, phase_table
from phaseprof.cli.render.ranks import ranks_section
from phaseprof.cli.render.roofline import Mark, roofline
from phaseprof.cli.render.sweep import sweep_section
from phaseprof.trace.meta import Device

#: Below this many columns nothing is legible; the text is laid out for this width then.
MIN_WIDTH = 48


def render(
    report: Report,
    *,
    width: int = 100,
    color: bool = False,
    unicode: bool = True,
    boxes: bool = True,
) -> str:
    """Lay a report out as text, without a line break at the end.

    Args:
        report: What to show. No figure is computed here; those that are None show as a dash or not at all.
        width: Columns of the terminal. Single words that are wider (paths) are not broken.
        color: Add ANSI colours from the terminal's own palette of sixteen.
        unicode: False for a stream that only takes ASCII.
        boxes: False for a stream that no terminal shows: the roofline is drawn in ASCII then.
    """
    width = max(width, MIN_WIDTH)
    blocks = [
        _head(report, width),
        _damage(report, width),
        _answer(report, width),
        phase_table(report.phases, report.by_batch, report.set_aside, width),
        _latencies(report, width) + aside_lines(report, width),
        sweep_section(report.sweep, width),
        advice_section(report.advice, width, trace=report.facts.trace_path),
        counters_section(report.phases, report.by_batch, report.devices, width),
        kernels_section(report.phases, report.by_batch, report.unattributed, width),
        [
            *engine_section(report.engine, width),
            *interference_section(report.interference, width),
            *goodput_section(report.goodput, width),
        ],
        operations_section(report.operations, width),
        [*mixed_section(report.mixed, width), *two_phases_section(report.two_phases, width)],
        ranks_section(report.ranks, width),
        _roofline(report, width, unicode and boxes),
        _evidence(report, width),
        foot_lines(report, width),
    ]
    text = to_text(stack(blocks), width, color=color)
    return text if unicode else to_ascii(text)


def _head(report: Report, width: int) -> list[Text]:
    facts = report.facts
    head = " · ".join(["phaseprof", *subject(report)])
    lines = [Text(line) for line in fold(head, width, hang=MARGIN, apart=" · ")]
    lines[0].highlight_words(["phaseprof"], style="bold")
    if facts.model:
        for line in lines:
            line.highlight_regex(re.escape(facts.model), style="bold")
    return lines


def subject(report: Report) -> list[str]:
    """What the report is about, in a few words each: the model, the engine, the device, ranks, the workload."""
    facts = report.facts
    ranks = f"{facts.ranks} ranks" if facts.ranks > 1 else ""
    parts = [facts.model, facts.engine, _device(facts), ranks, _workload(report)]
    return [part for part in parts if part]


def _device(facts: RunFacts) -> str:
    device = facts.device
    if device is None:
        return _dtype(facts)
    parts = [_device_name(device)]
    if device.threads is not None:
        parts.append(units.counted(device.threads, "thread"))
    return ", ".join(part for part in (*parts, _dtype(facts)) if part)


def _dtype(facts: RunFacts) -> str:
    if facts.weight_bits is None:
        return facts.dtype
    return f"{facts.dtype}, weights of {facts.weight_bits:.1f} bits"


def _device_name(device: Device) -> str:
    """The name without trade marks; a CPU is called one."""
    if device.kind != "cpu":
        return device.name
    name = re.sub(r"\((?:R|TM|r|tm)\)|\bCPU\b|\bProcessor\b|@.*$", " ", device.name)
    name = " ".join(name.split())
    return f"CPU {name}" if name else "CPU"


def _workload(report: Report) -> str:
    """What was run: as `phaseprof profile` set it, else what the requests add up to."""
    requests, facts = report.requests, report.facts.workload
    if not requests.count:
        return ""
    parts = [units.counted(requests.count, "request")]
    prompts, news = _sizes(facts.get("prompt_tokens")), _sizes(facts.get("new_tokens"))
    if prompts and news:
        parts.append(f"{prompts} prompt + {news} new tokens")
    else:
        prompt, output = requests.prompt_tokens, requests.output_tokens
        parts.append(f"{units.count(prompt)} prompt + {units.count(output)} output tokens in all")
    batches = facts.get("batch")
    if isinstance(batches, (list, tuple)) and batches:
        parts.append("batch " + ", ".join(str(each) for each in batches))
    return ", ".join(parts)


def _sizes(value: object) -> str:
    """One size of a sweep or several; empty if it is neither."""
    if isinstance(value, int):
        return units.count(value)
    if isinstance(value, (list, tuple)):
        return "/".join(units.count(each) for each in value)
    return ""


def _damage(report: Report, width: int) -> list[Text]:
    if not report.damage:
        return []
    warning = "! This trace is not whole. What could be read is below."
    lines = paragraph(warning, width, paint=plain("bold yellow"))
    for sentence in report.damage:
        lines += paragraph(sentence, width, indent=MARGIN + 2, paint=plain("yellow"))
    return lines


def _answer(report: Report, width: int) -> list[Text]:
    lines: list[Text] = []
    for sentence in report.answer:
        lines += paragraph(sentence, width, paint=_with_bounds)
    return lines


def _with_bounds(line: str) -> Text:
    """Colour the names of the classes: ``bandwidth-bound``, ``bound by overhead or latency``."""
    text = Text(line)
    for bound in Bound:
        if bound is not Bound.UNKNOWN:
            name = re.escape(bound.value)
            text.highlight_regex(
                rf"\b(?:{name}-bound|bound by {name})\b", style=f"bold {BOUND_STYLE[bound]}"
            )
    return text


def aside_lines(report: Report, width: int) -> list[Text]:
    """Volumes that are zero in a plain run: one line each, only where they are not."""
    lines: list[Text] = []
    for name, meaning, get in _ASIDES:
        found = [(f, get(f)) for f in ordered(report.phases)]
        shares = [f"{f.phase.value} {value}" for f, value in found if value]
        if shares:
            lines += keyed(name, [f"{', '.join(shares)} {meaning}"], width)
    return lines


def _tokens(value: int | None) -> str:
    return units.count(value) if value else ""


def _time(value: float | None) -> str:
    return units.duration(value) if value else ""


_ASIDES: tuple[tuple[str, str, Callable[[PhaseFigures], str]], ...] = (
    (
        "Padding",
        "slots, computed and thrown away (in FLOPs, not in tokens)",
        lambda f: _tokens(f.padding_tokens),
    ),
    (
        "Recomputed",
        "tokens, at positions that had been computed before (in tokens)",
        lambda f: _tokens(f.recomputed_tokens),
    ),
    (
        "Cached",
        "prompt tokens, found in the cache and not computed (not in tokens)",
        lambda f: _tokens(f.cached_tokens),
    ),
    (
        "Between passes",
        "on the host: sampling, stop checks (not in time)",
        lambda f: _time(f.between_ms),
    ),
)


def _latencies(report: Report, width: int) -> list[Text]:
    """Queue, TTFT, TPOT and ITL under each other, so that percentiles compare down and across."""
    requests = report.requests
    if not requests.count:
        return keyed("Requests", ["none that count: no TTFT, TPOT or ITL"], width)
    rows = [
        (name, percentiles, unit)
        for name, percentiles, unit in (
            ("Queue", report.engine.queue_ms if report.engine else None, "request"),
            ("TTFT", requests.ttft_ms, "request"),
            ("TPOT", requests.tpot_ms, "request"),
            ("ITL", requests.itl_ms, "gap"),
        )
        if percentiles is not None
    ]
    lines: list[Text] = []
    if rows:
        cells = [[units.latency(value) for value in (p.p50, p.p90, p.p99)] for _, p, _ in rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        counts = [units.counted(percentiles.count, unit) for _, percentiles, unit in rows]
        for (name, _, _), row, count in zip(rows, cells, counts, strict=True):
            line = key_of(name)
            for title, cell, cell_width in zip(("p50", "p90", "p99"), row, widths, strict=True):
                line.append(f"{title} ", style="dim").append(f"{cell:>{cell_width}}  ")
            if len(line) + 1 + max(map(len, counts)) <= width:
                line.append(f" {count}", style="dim")
            lines.append(line)
    odd = [
        f"{units.count(number)} {what}"
        for number, what in (
            (requests.unfinished, "with no end in the trace"),
            (requests.aborted, "aborted or failed"),
        )
        if number
    ]
    if odd:
        total = units.counted(requests.count, "request")
        lines += paragraph(f"Of {total}: {', '.join(odd)}.", width, paint=plain("yellow"))
    return lines


def _roofline(report: Report, width: int, unicode: bool) -> list[Text]:
    if report.ceilings is None:
        return []
    marks = [
        Mark(f.phase.value, f.intensity, f.tflops, f"bold {BOUND_STYLE[f.bound]}")
        for f in ordered(report.phases)
        if f.intensity is not None and f.tflops is not None
    ]
    drawing = roofline(report.ceilings, marks, width=width - MARGIN, unicode=unicode)
    return [Text(" " * MARGIN) + line for line in drawing]


def _evidence(report: Report, width: int) -> list[Text]:
    """Why each class: how sure, and the reasons with where their figures come from."""
    lines: list[Text] = []
    for figures in ordered(report.phases):
        verdict = figures.verdict
        reasons = [f"{each.text} ({each.provenance.value})" for each in verdict.evidence]
        if reasons:
            head = f"{verdict.bound.value}, {verdict.confidence.value} confidence"
            style = plain(BOUND_STYLE[verdict.bound])
            lines += keyed(f"Why {figures.phase.value}", [head], width, paint=style)
            lines += keyed("", reasons, width, paint=_with_origin)
            if verdict.remedy and not _is_said(verdict.lever, report.answer):
                lines += keyed("", [f"→ {verdict.remedy}"], width, paint=plain("bold"))
    return lines


def _is_said(lever: Lever | None, answer: Iterable[str]) -> bool:
    """Whether the answer names this lever already."""
    return lever is not None and any(f"First lever: {lever.name}." in said for said in answer)


def _with_origin(line: str) -> Text:
    """Set the provenance at the end of a reason back."""
    text = Text(line)
    text.highlight_regex(r"\((?:" + "|".join(Provenance) + r")\)$", style="dim")
    return text


def foot_lines(report: Report, width: int) -> list[Text]:
    """What was not measured, where figures come from, what the profiler took, and where the trace lies."""
    facts = report.facts
    lines: list[Text] = []
    missing = [
        _sentence(f"{each.what}: {each.why}") + (f" → {each.fix}" if each.fix else "")
        for each in report.not_measured
    ]
    lines += keyed("Not measured", missing, width)
    sources = " · ".join(f"{figure}: {source}" for figure, source in report.provenance)
    lines += keyed("Provenance", [sources], width)
    if facts.models:
        lines += keyed("Also seen", [", ".join(facts.models)], width)
    cost = report.own_cost
    own = (
        "not known: the trace has no end"
        if facts.incomplete
        else "none: another profiler recorded it"
    )
    if cost is not None:
        own = (
            f"{units.microseconds(cost.hook_us_per_pass)} a pass, {units.percent(cost.share)} of the time; "
            f"{units.duration(cost.writer_cpu_ms)} CPU in the writer thread"
        )
        if cost.sampler_cpu_ms:
            own += f", {units.duration(cost.sampler_cpu_ms)} in the sampling thread"
        if cost.windows is not None:
            own += f"; {_windows(cost.windows)}"
    lines += keyed("Own cost", [own], width)
    if facts.trace_path:
        lines += keyed("Trace", [f"{units.size(facts.trace_bytes)} in {facts.trace_path}"], width)
    return lines


def _windows(cost: WindowsCost) -> str:
    """What the windows of a profiler took, apart from the rest: no timing figure has any of it."""
    text = (
        f"{units.counted(cost.windows, 'window')} of a profiler took {units.duration(cost.between_ms)} between "
        f"passes and {units.duration(cost.read_ms)} CPU to read"
    )
    if cost.slowdown is not None:
        text += f", and the {units.counted(cost.passes, 'pass')} inside took {cost.slowdown:.2f}x as long"
    return text


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."
