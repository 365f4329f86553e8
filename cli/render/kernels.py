"""Where the busy time goes: a row a phase, a column a class of kernels, and what collectives and launches cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rich.cells import cell_len
from rich.text import Text

from phaseprof.analyzers.kernels.kernel_results import KernelClass, KernelFigures, Unattributed
from phaseprof.analyzers.results import PhaseFigures
from phaseprof.cli.render import units
from phaseprof.cli.render.layout import MARGIN, keyed, paragraph, plain
from phaseprof.cli.render.phase_table import ordered

#: How the classes are called in the table.
TITLES: Mapping[KernelClass, str] = {
    KernelClass.GEMM: "GEMM",
    KernelClass.MOE: "MoE",
    KernelClass.KV_WRITE: "KV write",
    KernelClass.QUANTIZATION: "quantize",
}
_GAP = 2
_REST = "rest"
_CORES = "tensor cores"
_CALLS = "a pass"
#: A class with less than this in every phase is part of the rest.
_SMALL = 0.01
#: Above this, "at least" stands before a share that leaves out kernels whose name does not tell.
_UNSURE = 0.01
#: A kernel with less is not worth its name.
_LONG = 0.10
#: What stands beside a kernel's name on its line: margin, key, phase and share.
_NAME_ROOM = 34


@dataclass(frozen=True, slots=True)
class _Row:
    """The kernels of a phase, or of its passes with one batch (nested)."""

    label: str
    kernels: KernelFigures
    nested: bool = False


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cells: tuple[str, ...]

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.title, *self.cells)))


def kernels_section(
    phases: Mapping[str, PhaseFigures],
    by_batch: Mapping[int, Mapping[str, PhaseFigures]],
    unattributed: Unattributed | None,
    width: int,
) -> list[Text]:
    """The table and the lines below it; nothing where no kernel was recorded."""
    rows = list(_rows(phases, by_batch))
    if not rows:
        return []
    whole = [row for row in rows if not row.nested]
    return [
        *_table(rows, width),
        *_source(whole, width),
        *_aside("Longest", partial(_longest, room=width - _NAME_ROOM), whole, width),
        *_aside("Collectives", _collectives, whole, width),
        *_aside("Launches", _launches, whole, width),
        *_aside("Copies", _copies, whole, width),
        *_between(unattributed, whole, width),
    ]


def _rows(
    phases: Mapping[str, PhaseFigures], by_batch: Mapping[int, Mapping[str, PhaseFigures]]
) -> Iterator[_Row]:
    for figures in ordered(phases):
        if figures.kernels is None:
            continue
        yield _Row(figures.phase.value, figures.kernels)
        for batch in sorted(by_batch):
            nested = by_batch[batch].get(figures.phase.value)
            if nested is not None and nested.kernels is not None:
                yield _Row(f"  batch {batch}", nested.kernels, nested=True)


def _table(rows: Sequence[_Row], width: int) -> list[Text]:
    kind = "operators" if rows[0].kernels.on_cpu else "kernels"
    label_width = max(cell_len(text) for text in (kind, *(row.label for row in rows)))
    columns = _fitting(rows, width - MARGIN - label_width)
    head = Text(" " * MARGIN + kind.ljust(label_width), style="dim")
    for column in columns:
        head.append(" " * _GAP + column.title.rjust(column.width))
    lines = [head]
    for place, row in enumerate(rows):
        line = Text(" " * MARGIN)
        line.append(row.label.ljust(label_width), style="dim" if row.nested else "bold")
        most = _title(row.kernels.classes[0].kernel_class)
        for column in columns:
            style = {most: "bold", _CORES: "cyan"}.get(column.title, "")
            line.append(" " * _GAP).append(column.cells[place].rjust(column.width), style=style)
        lines.append(line)
    return lines


def _fitting(rows: Sequence[_Row], room: int) -> list[_Column]:
    """As many classes as there is room for, those with the most time first, and what is left of them as the rest."""
    classes = _by_time(rows)
    cores = _cores(rows)
    calls = [_Column(_CALLS, tuple(units.mean(_whole(row)) for row in rows))]
    for shown in range(len(classes), 0, -1):
        columns = [*(_share(each, rows) for each in classes[:shown])]
        if len(classes) > shown or _leaves_some(rows, classes):
            columns.append(_rest(rows, classes[:shown]))
        # Tensor cores stay to the last; the number of kernels goes when there is no room for three classes.
        lead = calls if shown > 2 or len(classes) == shown else []
        columns = [*lead, *columns, *cores]
        if sum(_GAP + column.width for column in columns) <= room:
            return columns
    return [_share(classes[0], rows)]


def _whole(row: _Row) -> float:
    """Kernels a pass; to the nearest where there are many."""
    calls = row.kernels.kernels_per_pass
    return calls if calls < 10 else float(round(calls))


def _by_time(rows: Sequence[_Row]) -> list[KernelClass]:
    """The classes worth a column, by their share summed over the phases."""
    found: dict[KernelClass, list[float]] = {}
    for row in rows:
        for each in row.kernels.classes:
            found.setdefault(each.kernel_class, []).append(0.0 if row.nested else each.share)
    kept = {name: sum(shares) for name, shares in found.items() if max(shares) >= _SMALL}
    return sorted(kept, key=lambda name: (-kept[name], name)) or list(found)[:1]


def _share(kernel_class: KernelClass, rows: Sequence[_Row]) -> _Column:
    return _Column(
        _title(kernel_class), tuple(_percent(row.kernels.of(kernel_class)) for row in rows)
    )


def _title(kernel_class: KernelClass) -> str:
    return TITLES.get(kernel_class, kernel_class.value)


def _percent(share: float) -> str:
    return units.percent(share) if share else units.DASH


def _leaves_some(rows: Sequence[_Row], classes: Sequence[KernelClass]) -> bool:
    return any(row.kernels.rest(classes) > 0 for row in rows)


def _rest(rows: Sequence[_Row], shown: Sequence[KernelClass]) -> _Column:
    return _Column(
        _REST,
        tuple(_percent(row.kernels.rest(shown)) for row in rows),
    )


def _cores(rows: Sequence[_Row]) -> list[_Column]:
    """The share of busy time in kernels that use tensor cores; none on a CPU."""
    if any(row.kernels.tensor_core_share is None for row in rows):
        return []
    return [_Column(_CORES, tuple(_on_cores(row.kernels) for row in rows))]


def _on_cores(kernels: KernelFigures) -> str:
    sure = units.percent(kernels.tensor_core_share)
    return f"≥ {sure}" if (kernels.tensor_core_unknown_share or 0.0) > _UNSURE else sure


def _source(rows: Sequence[_Row], width: int) -> list[Text]:
    """What the shares are of."""
    listed = [f"{units.count(row.kernels.passes)} {row.label}" for row in rows]
    named = listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
    noun = "pass" if [row.kernels.passes for row in rows] == [1] else "passes"
    text = f"Shares of busy time in {named} {noun} under a profiler, by name (docs/kernels.md)."
    return paragraph(text, width, paint=plain("dim"))


def _aside(
    name: str, say: Callable[[KernelFigures], str], rows: Sequence[_Row], width: int
) -> list[Text]:
    """One line a phase that has something to say."""
    said = [f"{row.label}: {text}" for row in rows if (text := say(row.kernels))]
    return keyed(name, said, width)


def _longest(kernels: KernelFigures, room: int) -> str:
    longest = kernels.longest
    # On a CPU a class is often one operator, which then would say the same again.
    if longest is None or longest[1] < _LONG or kernels.on_cpu:
        return ""
    name, share = longest
    shown = name if cell_len(name) <= room else f"{name[: room - 1]}…"
    return f"{shown}, {units.percent(share)}"


def _collectives(kernels: KernelFigures) -> str:
    if not kernels.collective_ms:
        return ""
    return (
        f"{units.percent(kernels.exposed_comm_share)} of the time exposed (nothing else ran), "
        f"{units.duration(kernels.exposed_collective_ms)} of {units.duration(kernels.collective_ms)}"
    )


def _launches(kernels: KernelFigures) -> str:
    delay = kernels.launch_delay_ms
    if delay is None:
        return ""
    text = f"begin {units.latency(delay.p50)} after their launch (p50), {units.latency(delay.p90)} (p90)"
    if not kernels.graph_kernels:
        return text
    return f"{text}; {units.count(kernels.graph_kernels)} of {units.count(kernels.kernels)} kernels by graphs"


def _between(found: Unattributed | None, rows: Sequence[_Row], width: int) -> list[Text]:
    """What was launched between passes. What has no launch stands under "Not measured"."""
    if found is None or not found.between:
        return []
    noun = "operator" if rows[0].kernels.on_cpu else "kernel"
    text = (
        f"{units.counted(found.between, noun)} between passes (sampling, checks), "
        f"{units.duration(found.between_ms)}"
    )
    return keyed("Of no pass", [text], width)


def _copies(kernels: KernelFigures) -> str:
    if not kernels.copies:
        return ""
    return f"{units.count(kernels.copies)} by memcpy and memset, {units.duration(kernels.copy_ms)}"
