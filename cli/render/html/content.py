"""What stands in each section of the page: texts, tables and charts of a report, ready for the templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from phaseprof.analyzers.kernels.kernel_results import KernelClass, KernelFigures
from phaseprof.analyzers.results import PhaseFigures, Report
from phaseprof.analyzers.viewing.parts_of_work import PartOfWork
from phaseprof.cli.render import units
from phaseprof.cli.render.counters import counters_grid, counters_section
from phaseprof.cli.render.grid import Grid, GridRow
from phaseprof.cli.render.html.charts import Bar, bar
from phaseprof.cli.render.html.pairs import WIDE, Pair, pairs
from phaseprof.cli.render.html.roofline import Point, RooflineChart, roofline_chart
from phaseprof.cli.render.kernels import TITLES, kernels_section
from phaseprof.cli.render.operations import (
    OP_TITLES,
    mixed_section,
    operations_section,
    two_phases_section,
)
from phaseprof.cli.render.phase_table import ordered, phase_grid
from phaseprof.cli.render.ranks import ranks_grid, ranks_section
from phaseprof.cli.render.terminal import aside_lines

#: Classes of kernels that have a colour of their own, the most time first.
_CLASS_COLOURS = 7


@dataclass(frozen=True, slots=True)
class Reasons:
    """Why a phase has its class.

    Attributes:
        phase, bound, confidence: As words.
        evidence: Pairs of a reason and where it comes from.
        remedy: What to try first; empty if nothing.
    """

    phase: str
    bound: str
    confidence: str
    evidence: tuple[tuple[str, str], ...]
    remedy: str


@dataclass(frozen=True, slots=True)
class Phases:
    """The section of phases."""

    share: Bar
    grid: Grid
    reasons: tuple[Reasons, ...]
    pairs: Sequence[Pair]


def phases_of(report: Report) -> Phases:
    """Time, figures and class of each phase, and why."""
    return Phases(
        share=bar(
            "time",
            [
                (f.share, f.phase.value, f"{f.phase.value}: {_time_of(f)}")
                for f in ordered(report.phases)
            ],
        ),
        grid=phase_grid(report.phases, report.by_batch, report.set_aside),
        reasons=tuple(_reasons(figures) for figures in ordered(report.phases)),
        pairs=pairs(aside_lines(report, WIDE)),
    )


def _time_of(figures: PhaseFigures) -> str:
    return f"{units.percent(figures.share)} of the time, {units.duration(figures.span_ms)}"


def _reasons(figures: PhaseFigures) -> Reasons:
    verdict = figures.verdict
    return Reasons(
        phase=figures.phase.value,
        bound=verdict.bound.value,
        confidence=verdict.confidence.value,
        evidence=tuple((each.text, each.provenance.value) for each in verdict.evidence),
        remedy=verdict.remedy,
    )


# --- the roofline ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Roofline:
    """The section of the roofline.

    Attributes:
        chart: The picture; None without roofs or work.
        grid: The same points as a table.
        source: Where the roofs come from. parts: Whether there are points of classes of operations.
    """

    chart: RooflineChart | None
    grid: Grid
    source: str
    parts: bool


def roofline_of(report: Report, parts: Sequence[PartOfWork]) -> Roofline:
    """Each phase, batch and class of operations whose work and time are known."""
    points: list[Point] = []
    rows: list[GridRow] = []
    for name, batch, figures in _with_batches(report):
        if figures.intensity is None or figures.tflops is None:
            continue
        label = name if batch is None else f"{name}, batch {batch}"
        cells = _work_cells(figures)
        words = f"{label}: {cells[1]} TFLOP/s, {cells[2]} GB/s, {cells[0]} FLOP/byte"
        if figures.mfu is not None:
            words += f"; MFU {cells[3]}, MBU {cells[4]}"
        words += f"; {figures.bound.value}"
        points.append(
            Point(
                label if batch is None else f"batch {batch}",
                words,
                name,
                figures.intensity,
                figures.tflops,
                minor=batch is not None,
            )
        )
        rows.append(GridRow(label, cells, nested=batch is not None))
    for part in parts:
        title = _title(part.kernel_class)
        label = f"{part.phase.value} {title}"
        noun = units.counted(part.passes, "pass")
        tip = (
            f"{label}: {units.rate(part.tflops)} TFLOP/s in {units.duration(part.busy_ms)} of kernels, "
            f"{units.rate(part.intensity)} FLOP/byte; {noun} under a profiler"
        )
        points.append(Point(title, tip, part.phase.value, part.intensity, part.tflops, minor=True))
        cells = (units.rate(part.intensity), units.rate(part.tflops), "", "", "", "")
        rows.append(GridRow(label, cells, nested=True, note=f"{noun} under a profiler"))
    ceilings = report.ceilings
    return Roofline(
        chart=None if ceilings is None else roofline_chart(ceilings, points),
        grid=Grid("of", ("FLOP/byte", "TFLOP/s", "GB/s", "MFU", "MBU", "bound"), tuple(rows)),
        source=dict(report.provenance).get("roofs", ""),
        parts=bool(parts),
    )


def _work_cells(figures: PhaseFigures) -> tuple[str, ...]:
    return (
        units.rate(figures.intensity),
        units.rate(figures.tflops),
        units.rate(figures.gb_per_s),
        units.percent(figures.mfu),
        units.percent(figures.mbu),
        figures.bound.value,
    )


def _with_batches(report: Report) -> Iterator[tuple[str, int | None, PhaseFigures]]:
    for figures in ordered(report.phases):
        name = figures.phase.value
        yield name, None, figures
        for batch in sorted(report.by_batch):
            if name in report.by_batch[batch]:
                yield name, batch, report.by_batch[batch][name]


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Legend:
    """A colour and what it stands for."""

    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class Kernels:
    """The section of kernels; `noun` is what they are."""

    noun: str
    bars: tuple[Bar, ...]
    legend: tuple[Legend, ...]
    grid: Grid
    pairs: Sequence[Pair]


def kernels_of(report: Report) -> Kernels | None:
    """The classes of kernels of each phase; None where none were recorded."""
    shown = [
        (name if batch is None else f"{name}, batch {batch}", batch, figures.kernels)
        for name, batch, figures in _with_batches(report)
        if figures.kernels is not None
    ]
    if not shown:
        return None
    # A class has the same colour in every bar; those without one share the last.
    most: dict[KernelClass, float] = {}
    for _, batch, kernels in shown:
        for each in kernels.classes if batch is None else ():
            most[each.kernel_class] = max(most.get(each.kernel_class, 0.0), each.share)
    by_share = sorted(most, key=lambda name: (-most[name], name))
    colours = {name: f"class-{place}" for place, name in enumerate(by_share[:_CLASS_COLOURS])}
    legend = [Legend(kind, _title(name)) for name, kind in colours.items()]
    if len(by_share) > _CLASS_COLOURS:
        legend.append(Legend("class-rest", "the rest"))
    return Kernels(
        noun="operators" if shown[0][2].on_cpu else "kernels",
        bars=tuple(_class_bar(label, kernels, colours) for label, _, kernels in shown),
        legend=tuple(legend),
        grid=Grid(
            "phase",
            ("class", "share", "busy", "calls", "tensor cores", "longest", "of its class"),
            tuple(
                row for label, batch, kernels in shown for row in _classes(label, batch, kernels)
            ),
        ),
        pairs=pairs(kernels_section(report.phases, report.by_batch, report.unattributed, WIDE)),
    )


def _class_bar(label: str, kernels: KernelFigures, colours: Mapping[KernelClass, str]) -> Bar:
    return bar(
        label,
        [
            (
                each.share,
                colours.get(each.kernel_class, "class-rest"),
                f"{_title(each.kernel_class)}: {units.percent(each.share)} of busy time, "
                f"{units.duration(each.busy_ms)} in {units.count(each.calls)} calls; longest: {each.longest}",
            )
            for each in kernels.classes
        ],
    )


def _classes(label: str, batch: int | None, kernels: KernelFigures) -> Iterator[GridRow]:
    for place, each in enumerate(kernels.classes):
        yield GridRow(
            label if place == 0 else "",
            (
                _title(each.kernel_class),
                units.percent(each.share),
                units.duration(each.busy_ms),
                units.count(each.calls),
                units.DASH if kernels.on_cpu else each.tensor_cores.value,
                each.longest,
                units.percent(each.longest_share),
            ),
            nested=batch is not None,
        )


def _title(kernel_class: KernelClass) -> str:
    return TITLES.get(kernel_class, kernel_class.value)


# --- operations, counters, ranks ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Told:
    """A section of a table and of sentences."""

    grid: Grid
    pairs: Sequence[Pair]

    def __bool__(self) -> bool:
        return bool(self.grid) or bool(self.pairs)


def operations_of(report: Report) -> Told:
    """The floor of a pass of each phase by operation; whose time mixed steps are; what sets the phases apart."""
    rows = []
    for phase in ordered(report.phases):
        floor = report.operations.get(phase.phase.value)
        if floor is None:
            continue
        times = units.DASH if floor.distance is None else f"{units.rate(floor.distance)} times"
        rows.append(
            GridRow(
                phase.phase.value,
                (
                    *("a pass", units.DASH, units.DASH, units.duration(floor.floor_ms)),
                    *(units.DASH, units.DASH),
                ),
                note=f"a pass takes {units.duration(floor.pass_ms)}, {times} its floor",
            )
        )
        for op in floor.ops:
            rows.append(
                GridRow(
                    "",
                    (
                        OP_TITLES.get(op.kind, op.kind.value),
                        units.rate(_giga(op.flops)),
                        units.rate(_giga(op.moved_bytes)),
                        units.duration(op.floor_ms),
                        units.percent(op.share),
                        op.roof.value,
                    ),
                    nested=True,
                )
            )
    head = ("operation", "GFLOP", "GB", "floor", "of it", "roof")
    said = [
        *operations_section(report.operations, WIDE),
        *mixed_section(report.mixed, WIDE),
        *two_phases_section(report.two_phases, WIDE),
    ]
    return Told(Grid("phase", head, tuple(rows)), pairs(said))


def _giga(value: float) -> float:
    return value / 1e9


def counters_of(report: Report) -> Told:
    """Hardware counters per phase, and the state of the devices."""
    lines = counters_section(report.phases, report.by_batch, report.devices, WIDE)
    return Told(counters_grid(report.phases, report.by_batch), pairs(lines))


def ranks_of(report: Report) -> Told | None:
    """The ranks; None for one."""
    if report.ranks is None:
        return None
    return Told(ranks_grid(report.ranks), pairs(ranks_section(report.ranks, WIDE)))
