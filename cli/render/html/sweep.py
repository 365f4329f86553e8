"""A sweep over sizes: the time of a decode step and the throughput against the batch, and every size as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phaseprof.analyzers.sweeping.sweep_results import CellFigures, Estimate, PhaseOfCell, Sweep
from phaseprof.cli.render import units
from phaseprof.cli.render.grid import Grid, GridRow
from phaseprof.cli.render.html.charts import LineChart, Value, line_chart


@dataclass(frozen=True, slots=True)
class SweepPlot:
    """A chart with its title."""

    title: str
    chart: LineChart


@dataclass(frozen=True, slots=True)
class SweepView:
    """The section of a sweep: what follows from it, charts, and all cells as a table."""

    conclusion: Sequence[str]
    plots: tuple[SweepPlot, ...]
    grid: Grid
    missing: Sequence[str]


def sweep_of(sweep: Sweep | None) -> SweepView | None:
    """The section; None without a sweep."""
    if sweep is None or not sweep.cells:
        return None
    plots = []
    for series in sweep.decode:
        cells = [
            cell
            for cell in sweep.cells
            if (cell.prompt_tokens, cell.new_tokens) == (series.prompt_tokens, series.new_tokens)
        ]
        size = f"{units.count(series.prompt_tokens)} prompt + {units.count(series.new_tokens)} new tokens"
        plots += _plots(size, [(cell, cell.decode) for cell in cells if cell.decode is not None])
    return SweepView(
        conclusion=sweep.conclusion,
        plots=tuple(plots),
        grid=Grid(
            "prompt + new tokens",
            (
                "batch",
                "decode step",
                "output tokens/s",
                "bound",
                "prefill",
                "bound",
                "TTFT",
                "TPOT",
            ),
            tuple(_row(cell) for cell in sweep.cells),
        ),
        missing=sweep.missing,
    )


def _plots(size: str, cells: Sequence[tuple[CellFigures, PhaseOfCell]]) -> list[SweepPlot]:
    if len(cells) < 2:
        return []
    labels = [(float(cell.batch), units.count(cell.batch)) for cell, _ in cells]
    slowest = max(phase.time_ms.high for _, phase in cells)
    fastest = max(phase.tokens_per_s for _, phase in cells)
    time = line_chart(
        [
            (
                "decode step",
                "decode",
                [
                    Value(
                        float(cell.batch),
                        phase.time_ms.median,
                        f"batch {units.count(cell.batch)}: {_estimate(phase.time_ms)}, {phase.bound.value}",
                        (phase.time_ms.low, phase.time_ms.high),
                    )
                    for cell, phase in cells
                ],
            )
        ],
        x_title="batch",
        y_title="time of a decode step",
        x_labels=labels,
        top=slowest,
        top_label=units.latency(slowest),
        logarithmic=True,
    )
    rate = line_chart(
        [
            (
                "output tokens/s",
                "prefill",
                [
                    Value(
                        float(cell.batch),
                        phase.tokens_per_s,
                        f"batch {units.count(cell.batch)}: {units.rate(phase.tokens_per_s)} output tokens/s",
                    )
                    for cell, phase in cells
                ],
            )
        ],
        x_title="batch",
        y_title="output tokens/s",
        x_labels=labels,
        top=fastest,
        top_label=units.rate(fastest),
        logarithmic=True,
    )
    named = ((f"Decode step, {size}", time), (f"Throughput, {size}", rate))
    return [SweepPlot(title, chart) for title, chart in named if chart is not None]


def _row(cell: CellFigures) -> GridRow:
    decode, prefill = cell.decode, cell.prefill
    short = cell.repeats < cell.planned
    return GridRow(
        f"{units.count(cell.prompt_tokens)} + {units.count(cell.new_tokens)}",
        (
            units.count(cell.batch),
            units.DASH if decode is None else _estimate(decode.time_ms),
            units.DASH if decode is None else units.rate(decode.tokens_per_s),
            units.DASH if decode is None else decode.bound.value,
            units.DASH if prefill is None else _estimate(prefill.time_ms),
            units.DASH if prefill is None else prefill.bound.value,
            units.DASH if cell.ttft_ms is None else _estimate(cell.ttft_ms),
            units.DASH if cell.tpot_ms is None else _estimate(cell.tpot_ms),
        ),
        note=f"{cell.repeats} of {cell.planned} repeats" if short else "",
    )


def _estimate(found: Estimate) -> str:
    """``53.4 ms (52.9 ms to 54.1 ms)``."""
    if found.low == found.high:
        return units.latency(found.median)
    return (
        f"{units.latency(found.median)} ({units.latency(found.low)} to {units.latency(found.high)})"
    )
