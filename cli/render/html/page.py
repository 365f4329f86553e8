"""The page: the sections of a report in one HTML file.

Nothing is put together as text: jinja2 lays the sections out and escapes all that is put in. What the script reads is
JSON in an element of its own, with `<`, `>`, `&` and `'` as escapes. The page's policy forbids any request and any
script or style but the two that are known here by their hash, so that even text that was not escaped could not run.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from phaseprof.analyzers.results import Report
from phaseprof.analyzers.viewing.details import Details
from phaseprof.analyzers.viewing.timeline import Timeline
from phaseprof.cli.render import units
from phaseprof.cli.render.grid import Grid, GridRow
from phaseprof.cli.render.html import content
from phaseprof.cli.render.html.requests import engine_of, requests_of
from phaseprof.cli.render.html.setting import setting_pairs
from phaseprof.cli.render.html.sweep import sweep_of
from phaseprof.cli.render.html.timeline_data import counter_words, timeline_data
from phaseprof.cli.render.terminal import subject

if TYPE_CHECKING:
    from jinja2 import Environment

_PACKAGE = "phaseprof.cli.render.html"


@dataclass(frozen=True, slots=True)
class _Overview:
    """The timeline without its drawing: sentences, and two tables."""

    note: str
    stretches: Grid
    counters: Grid
    left_out: str


def render_html(report: Report, details: Details) -> str:
    """The report as a page that needs no other file.

    Args:
        report: What to show. No figure is computed here.
        details: What a page shows beside it.
    """
    style, script = _static("report.css"), _static("report.js")
    packed = timeline_data(details.timeline)
    page = environment().get_template("page.html")
    return page.render(
        report=report,
        subject=subject(report),
        title=report.facts.model or "phaseprof",
        advice=report.advice,
        phases=content.phases_of(report),
        roofline=content.roofline_of(report, details.parts),
        kernels=content.kernels_of(report),
        operations=content.operations_of(report),
        counters=content.counters_of(report),
        requests=requests_of(report, details),
        engine=engine_of(report.engine),
        ranks=content.ranks_of(report),
        sweep=sweep_of(report.sweep),
        setting=setting_pairs(report, details.setting),
        timeline=packed,
        legend=[phase.value for phase in details.timeline.phases],
        overview=_overview(details.timeline),
        style=style,
        script=script,
        policy=_policy(style, script),
    )


def _overview(timeline: Timeline) -> _Overview:
    head = [f"{phase.value}" for phase in timeline.phases]
    rates = [track.metric for track in timeline.counters if track.source == "passes"]
    rows = []
    for part in timeline.stretches:
        tokens = {
            "prefill_tokens_per_s": part.prefill_tokens_per_s,
            "decode_tokens_per_s": part.decode_tokens_per_s,
        }
        rows.append(
            GridRow(
                units.duration(part.begin_ms),
                (
                    units.duration(part.end_ms),
                    units.count(part.passes),
                    *(units.duration(ms) for _, ms in part.busy_ms),
                    *(units.rate(tokens[metric]) for metric in rates),
                ),
            )
        )
    names = [counter_words(metric)[0] for metric in rates]
    return _Overview(
        note=_timeline_note(timeline),
        stretches=Grid("from", ("to", "passes", *head, *names), tuple(rows)),
        counters=Grid(
            "counter",
            ("of", "mean", "least", "most", "unit", "windows", "source"),
            tuple(_counter_row(timeline)),
        ),
        left_out=", ".join(timeline.left_out_counters),
    )


def _counter_row(timeline: Timeline) -> list[GridRow]:
    rows = []
    for track in timeline.counters:
        name, scale, unit = counter_words(track.metric)
        shown = (units.rate(value * scale) for value in (track.mean, track.least, track.greatest))
        rows.append(
            GridRow(
                name,
                (track.device, *shown, unit, units.count(track.windows), track.source),
            )
        )
    return rows


def _timeline_note(timeline: Timeline) -> str:
    parts = [
        f"{units.counted(timeline.passes, 'pass')} in {units.duration(timeline.span_us / 1e3)}"
    ]
    if any(lane.rows is None for lane in timeline.lanes):
        shortest = min(lane.levels[-1].bin_us for lane in timeline.lanes if lane.levels)
        parts.append(
            f"too many to be kept one by one: the shortest stretches are of {units.microseconds(shortest)}"
        )
    if timeline.left_out:
        parts.append(f"{units.counted(len(timeline.left_out), 'rank')} more are not drawn")
    return "; ".join(parts)


def _static(name: str) -> str:
    return files(_PACKAGE).joinpath("static", name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def environment() -> Environment:
    """The templates, with everything that is put into them escaped."""
    # It takes 50 ms to import, which other commands need not wait for.
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    return Environment(
        loader=FunctionLoader(
            lambda name: files(_PACKAGE).joinpath("templates", name).read_text(encoding="utf-8")
        ),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
