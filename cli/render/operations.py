"""The floor of each phase, operation by operation, and where its passes take more; whose time mixed steps are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from phaseprof.analyzers.steps.mixed_split import ChunkEffect, MixedSplit
from phaseprof.analyzers.steps.op_results import AboveFloor, StepFloor
from phaseprof.analyzers.two_phases import Fact
from phaseprof.cli.render import units
from phaseprof.cli.render.kernels import TITLES
from phaseprof.cli.render.layout import MARGIN, keyed, plain
from phaseprof.phases import Phase
from phaseprof.work.ops import OpKind

#: How operations are called in the table.
OP_TITLES: Mapping[OpKind, str] = {
    OpKind.GATE_UP: "gate/up",
    OpKind.LM_HEAD: "lm head",
    OpKind.ATTENTION_PREFILL: "attn prefill",
    OpKind.ATTENTION_DECODE: "attn decode",
}
_GAP = 2
#: An operation with less of the floor in every phase is part of the rest.
_SMALL = 0.01
#: Classes that are named beside the largest one.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cells: tuple[str, ...]

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.title, *self.cells)))


def operations_section(operations: Mapping[str, StepFloor], width: int) -> list[Text]:
    """A row a phase: the floor of a pass, how far above it the passes are, and which operations it is made of."""
    rows = [(phase, operations[phase.value]) for phase in Phase if phase.value in operations]
    if not rows:
        return []
    lines = _table(rows, width)
    above = [text for phase, floor in rows if (text := _above(phase, floor))]
    return lines + keyed("Modelled", _modelled(rows), width) + keyed("Above it", above, width)


def _modelled(rows: Sequence[tuple[Phase, StepFloor]]) -> list[str]:
    """What such operations take with kernels as they were measured, with its interval."""
    found = [(phase.value, floor.modelled) for phase, floor in rows if floor.modelled is not None]
    if not found:
        return []
    times = [
        f"{name} {units.duration(each.ms)} ({_range(each.low_ms, each.high_ms)})"
        for name, each in found
    ]
    return [
        f"with fused kernels and no gaps {', '.join(times)}, 90 % interval; {found[0][1].reference}"
    ]


def _table(rows: Sequence[tuple[Phase, StepFloor]], width: int) -> list[Text]:
    label_width = max(map(cell_len, ("floor by op", *(phase.value for phase, _ in rows))))
    columns = _fitting([floor for _, floor in rows], width - MARGIN - label_width)
    head = Text(" " * MARGIN + "floor by op".ljust(label_width), style="dim")
    for column in columns:
        head.append(" " * _GAP + column.title.rjust(column.width))
    lines = [head]
    for place, (phase, floor) in enumerate(rows):
        line = Text(" " * MARGIN).append(phase.value.ljust(label_width), style="bold")
        most = _title(floor.ops[0].kind)
        for column in columns:
            style = "bold" if column.title == most else ""
            line.append(" " * _GAP).append(column.cells[place].rjust(column.width), style=style)
        lines.append(line)
    return lines


def _fitting(floors: Sequence[StepFloor], room: int) -> list[_Column]:
    fixed = [
        _Column("floor", tuple(units.duration(floor.floor_ms) for floor in floors)),
        _Column("a pass", tuple(units.duration(floor.pass_ms) for floor in floors)),
        _Column("times", tuple(_times(floor) for floor in floors)),
    ]
    kinds = _by_share(floors)
    for shown in range(len(kinds), 0, -1):
        columns = [*fixed, *(_share(kind, floors) for kind in kinds[:shown])]
        rest = [
            sum(op.share for op in floor.ops if op.kind not in kinds[:shown]) for floor in floors
        ]
        if max(rest) >= _SMALL / 2:
            columns.append(_Column("rest", tuple(map(units.percent, rest))))
        if sum(_GAP + column.width for column in columns) <= room:
            return columns
    return fixed


def _times(floor: StepFloor) -> str:
    return units.DASH if floor.distance is None else f"{floor.distance:.2g}x"


def _by_share(floors: Sequence[StepFloor]) -> list[OpKind]:
    most: dict[OpKind, float] = {}
    for floor in floors:
        for op in floor.ops:
            most[op.kind] = max(most.get(op.kind, 0.0), op.share)
    return sorted((kind for kind in most if most[kind] >= _SMALL), key=lambda kind: -most[kind])


def _share(kind: OpKind, floors: Sequence[StepFloor]) -> _Column:
    cells = []
    for floor in floors:
        found = [op for op in floor.ops if op.kind is kind]
        cells.append(units.percent(found[0].share) if found else units.DASH)
    return _Column(_title(kind), tuple(cells))


def _title(kind: OpKind) -> str:
    return OP_TITLES.get(kind, kind.value)


def _above(phase: Phase, floor: StepFloor) -> str:
    parts = [_excess(each) for each in floor.above if each.excess_ms > 0][:_NAMED]
    if not parts or floor.pass_ms <= floor.floor_ms:
        return ""
    over = units.duration(floor.pass_ms - floor.floor_ms)
    return f"{phase.value}: {over} a pass; {', '.join(parts)}"


def _excess(each: AboveFloor) -> str:
    if each.kernel_class is None:
        return f"idle {units.duration(each.measured_ms)}"
    name = TITLES.get(each.kernel_class, each.kernel_class.value)
    if not each.floor_ms:
        return f"{name} {units.duration(each.measured_ms)}"
    return (
        f"{name} {units.duration(each.measured_ms)} for a floor of {units.duration(each.floor_ms)}"
    )


def mixed_section(mixed: MixedSplit | None, width: int) -> list[Text]:
    """Whose time mixed steps are, and what chunks of other sizes would do."""
    if mixed is None:
        return []
    text = (
        f"a step takes {units.duration(mixed.step_ms)} for {units.mean(mixed.prefill_tokens)} tokens of prefill and "
        f"{units.mean(mixed.decode_tokens)} of decode; {units.duration(mixed.decode_ms)} of it are decode's "
        f"({_range(mixed.decode_low_ms, mixed.decode_high_ms)}), the rest prefill's (modelled, 90 % interval)"
    )
    lines = keyed("Mixed steps", [text], width)
    if len(mixed.chunks) > 1:
        head = (
            f"of a prompt of {units.count(mixed.prompt_tokens)} tokens, beside the same decode (modelled): "
            "ITL of those that decode, TTFT without waiting"
        )
        lines += keyed("Chunks", [head, *map(_chunk, mixed.chunks)], width)
    return lines


def _chunk(each: ChunkEffect) -> str:
    now = " (now)" if each.present else ""
    return (
        f"{units.count(each.chunk_tokens)} tokens{now}: ITL {units.duration(each.itl_ms)} "
        f"({_range(each.itl_low_ms, each.itl_high_ms)}), TTFT {units.duration(each.ttft_ms)} "
        f"({_range(each.ttft_low_ms, each.ttft_high_ms)})"
    )


def _range(low_ms: float, high_ms: float) -> str:
    return f"{units.duration(low_ms)} to {units.duration(high_ms)}"


def two_phases_section(facts: Iterable[Fact], width: int) -> list[Text]:
    """What sets prefill and decode apart in this run. What is not as usual stands out."""
    lines: list[Text] = []
    for fact in facts:
        text = f"{fact.text} ({fact.provenance.value})"
        paint = plain("") if fact.holds else plain("yellow")
        lines += keyed("" if lines else "Two phases", [text], width, paint=paint)
    return lines
