"""A sweep on the page: each size in the table, and its step time with its interval against the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from html_pages import Dom
from traces import healthy

from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.results import Bound
from phaseprof.analyzers.sweeping.sweep_results import (
    CellFigures,
    DecodeSeries,
    Estimate,
    PhaseOfCell,
    Sweep,
)
from phaseprof.analyzers.viewing.details import build_details
from phaseprof.cli.render.html.page import render_html
from phaseprof.cli.render.html.sweep import sweep_of


def cell(batch: int, ms: float, low: float, high: float) -> CellFigures:
    time = Estimate(ms, low, high, 0.9, 0.1, 5)
    decode = PhaseOfCell(time, batch / ms * 1e3, Bound.BANDWIDTH, 0.6, None, batch)
    return CellFigures(128, 32, batch, 5, 4, decode, None, None, None)


SWEEP = Sweep(
    cells=(cell(1, 10, 9, 11), cell(4, 20, 20, 20), cell(16, 40, 30, 50)),
    decode=(
        DecodeSeries(
            prompt_tokens=128,
            new_tokens=32,
            batches=(1, 4, 16),
            knee=None,
            roofs=None,
            bounds=(Bound.BANDWIDTH,) * 3,
            turns=(),
            gain=4.0,
            slowdown=4.0,
        ),
    ),
    prefill=None,
    outliers=(),
    conclusion=("Batching helps up to 16.",),
    missing=("Run more sizes.",),
)


def test_step_time_and_throughput_stand_over_the_batch() -> None:
    view = sweep_of(SWEEP)
    assert view is not None
    time, rate = (plot.chart for plot in view.plots)
    first, middle, last = time.lines[0].dots
    # Batches 1, 4 and 16 are as far apart as each other; 50 ms is the upper edge, 0 the lower one.
    assert middle.x - first.x == pytest.approx(last.x - middle.x)
    edge, ground = time.frame.top, time.frame.bottom
    assert first.y == pytest.approx(ground - (ground - edge) * 10 / 50)
    assert last.high_y == pytest.approx(edge) and last.low_y > last.y > last.high_y
    assert middle.low_y == middle.y == middle.high_y
    assert [tick.label for tick in time.frame.x_ticks] == ["1", "4", "16"]
    # 100, 200 and 400 tokens/s.
    assert rate.lines[0].dots[0].y == pytest.approx(ground - (ground - edge) / 4)
    assert "batch 4: 20.0 ms, bandwidth" in middle.tip


def test_every_size_has_a_row_and_a_conclusion_is_said() -> None:
    trace = healthy().trace()
    report = replace(build_report(trace), sweep=SWEEP)
    dom = Dom(render_html(report, build_details(trace, report)))
    for text in (
        "Batching helps up to 16.",
        "Run more sizes.",
        "40.0 ms (30.0 ms to 50.0 ms)",
        "4 of 5 repeats",
        "Throughput, 128 prompt + 32 new tokens",
    ):
        assert text in dom.text
    assert len([e for e in dom.named("line") if "interval" in str(e.attributes.get("class"))]) == 2


def test_without_sizes_there_is_no_section() -> None:
    assert sweep_of(None) is None
    assert sweep_of(replace(SWEEP, cells=())) is None
    one = sweep_of(replace(SWEEP, cells=SWEEP.cells[:1]))
    assert one is not None and one.plots == ()
