"""What a notebook shows for a report: the verdict, the phases, the latencies, in tables of the notebook's own style."""

from __future__ import annotations

from phaseprof.analyzers.results import Report
from phaseprof.cli.render import units
from phaseprof.cli.render.grid import Grid, GridRow
from phaseprof.cli.render.html.page import environment
from phaseprof.cli.render.html.pairs import Pair
from phaseprof.cli.render.phase_table import phase_grid
from phaseprof.cli.render.terminal import subject


def report_cell(report: Report) -> str:
    """The report as a piece of HTML without script or style. All names are escaped.

    Args:
        report: What to show. No figure is computed here.
    """
    lacking = [
        f"{each.what}: {each.why}" + (f" → {each.fix}" if each.fix else "")
        for each in report.not_measured
    ]
    return (
        environment()
        .get_template("cell.html")
        .render(
            title=" · ".join(("phaseprof", *subject(report))),
            damage=report.damage,
            answer=report.answer,
            phases=phase_grid(report.phases, report.by_batch, report.set_aside),
            latencies=_latencies(report),
            missing=[Pair("Not measured", tuple(lacking))] if lacking else [],
        )
    )


def _latencies(report: Report) -> Grid:
    requests = report.requests
    rows = [
        GridRow(name, tuple(units.latency(value) for value in (found.p50, found.p90, found.p99)))
        for name, found in (
            ("TTFT", requests.ttft_ms),
            ("TPOT", requests.tpot_ms),
            ("ITL", requests.itl_ms),
        )
        if found is not None
    ]
    return Grid("", ("p50", "p90", "p99"), tuple(rows))
