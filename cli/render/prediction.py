"""What `phaseprof predict` shows: a line a batch, what bounds it, whether it fits, and the operations if asked."""

from __future__ import annotations

from collections.abc import Sequence

from phaseprof.analyzers.efficiency.estimate import Estimate
from phaseprof.analyzers.steps.prediction import (
    Memory,
    PhasePrediction,
    Prediction,
    PredictionReport,
    Rate,
)
from phaseprof.analyzers.steps.step_model import Term
from phaseprof.cli.render import units
from phaseprof.cli.render.layout import MARGIN, fold, to_ascii

_SCALES = {"µs": 1e3, "ms": 1.0, "s": 1e-3}
_APART = 3
#: Columns of the first table that are left out where the width asks for it, in turn: the range of the rate, the rate of
#: each request, the memory.
_FIRST_TO_GO = (6, 7, 8)
#: The same of the operations: the range, the roof, calls, bytes, FLOPs, the shape.
_OPERATIONS_TO_GO = (7, 9, 1, 4, 3, 2)
_TIMES = "\N{MULTIPLICATION SIGN}"
#: Left-aligned columns of a table.
_LEFT = frozenset({"bound", "fits", "operation", "shape", "roof"})


def render(
    report: PredictionReport, *, width: int = 100, explain: bool = False, unicode: bool = True
) -> str:
    """Lay a prediction out as text, without a line break at the end.

    Args:
        report: What was predicted.
        width: Columns.
        explain: Show the operations of each phase, too.
        unicode: False for streams that only take ASCII.
    """
    blocks = [
        _head(report, width),
        _table(_fitted(_figures(report), width, _FIRST_TO_GO), width),
        _table(_bounds(report), width),
        _memory(report, width),
    ]
    if explain:
        for prediction in report.predictions:
            for phase in (prediction.prefill, prediction.decode):
                if phase is not None:
                    blocks += _operations(prediction, phase, width)
    blocks.append(_foot(report, width))
    text = "\n\n".join("\n".join(block) for block in blocks if block)
    return text if unicode else to_ascii(text)


def boards(names: Sequence[tuple[str, str]]) -> str:
    """The devices that can be named: short name and title."""
    every = [*names, ("this", "the device of this machine, as calibrated")]
    widest = max(len(name) for name, _ in every)
    return "\n".join(f"{name.ljust(widest)}   {title}" for name, title in every)


def _head(report: PredictionReport, width: int) -> list[str]:
    machine, load = report.machine, report.predictions[0].load
    ranks = f"{machine.ranks} {_TIMES} {report.device}" if machine.ranks > 1 else report.device
    kv = "" if report.kv == report.weights else f", {report.kv} KV cache"
    parts = [
        report.model,
        f"{units.count(report.parameters)} parameters",
        f"{report.weights}{kv}",
        ranks,
        machine.runtime.name,
    ]
    roofs = machine.ceilings
    second = [
        f"{load.prompt_tokens:,} prompt + {load.new_tokens:,} new tokens",
        f"roofs {units.rate(roofs.flops_per_s / 1e12)} TFLOP/s, {units.rate(roofs.bytes_per_s / 1e9)} GB/s "
        f"({roofs.source})",
    ]
    if machine.link is not None:
        second.append(f"{machine.link.name}, {machine.link.bytes_per_s / 1e9:.0f} GB/s each way")
    return [
        *fold(" · ".join(parts), width, hang=MARGIN, apart=" · "),
        *fold(" · ".join(second), width, hang=MARGIN, apart=" · "),
    ]


def _figures(report: PredictionReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("batch", "TTFT", "90 %", "TPOT", "90 %", "tokens/s", "90 %", "each", "memory", "fits")
    ]
    for prediction in report.predictions:
        user = prediction.tokens_per_s_per_user
        memory = prediction.memory
        rows.append(
            (
                f"{prediction.load.batch:,}",
                units.latency(prediction.ttft.seconds * 1e3),
                _range(prediction.ttft),
                units.latency(None if prediction.tpot is None else prediction.tpot.seconds * 1e3),
                "" if prediction.tpot is None else _range(prediction.tpot),
                units.rate(prediction.output_tokens_per_s.value),
                _rates(prediction.output_tokens_per_s),
                units.rate(None if user is None else user.value),
                units.size(memory.needed),
                _fits(memory),
            )
        )
    return rows


def _bounds(report: PredictionReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("batch", "", "bound", "pass", "floor", "of it", "idle", "communication")
    ]
    for prediction in report.predictions:
        first = f"{prediction.load.batch:,}"
        for phase in (prediction.prefill, prediction.decode):
            if phase is None:
                continue
            rows.append(
                (
                    first,
                    phase.phase.value,
                    phase.bound.value,
                    units.latency(phase.pass_time.seconds * 1e3),
                    units.latency(phase.floor_s * 1e3),
                    units.percent(phase.floor_s / phase.pass_time.seconds),
                    units.percent(phase.idle),
                    units.percent(phase.communication),
                )
            )
            first = ""
    without = [
        place
        for place, title in ((6, "idle"), (7, "communication"))
        if rows[0][place] == title and all(_is_nothing(row[place]) for row in rows[1:])
    ]
    return [tuple(cell for i, cell in enumerate(row) if i not in without) for row in rows]


def _is_nothing(share: str) -> bool:
    """Too little to have a column for."""
    return share in (units.DASH, "0 %", "1 %") or share.startswith(("0.", "<"))


def _fits(memory: Memory) -> str:
    fits = memory.fits
    return units.DASH if fits is None else "yes" if fits else "no"


def _memory(report: PredictionReport, width: int) -> list[str]:
    first = report.predictions[0].memory
    ranks = " a GPU" if report.machine.ranks > 1 else ""
    kv = (
        "KV of a kind whose bytes are not known"
        if first.kv_per_sequence is None
        else f"KV {units.size(first.kv_per_sequence)} a request at its full length"
    )
    sentence = f"Memory{ranks}: weights {units.size(first.weights)}, {kv}"
    if first.capacity is not None:
        sentence += f", reserve {units.size(first.reserve)}, of {units.size(first.capacity)}."
    else:
        sentence += "."
    if first.largest_batch is not None:
        sentence += (
            f" The largest batch of this length that fits is {first.largest_batch:,}."
            if first.largest_batch
            else " Not even a batch of 1 fits."
        )
    lines = fold(sentence, width - MARGIN, hang=MARGIN)
    for prediction in report.predictions:
        if prediction.memory.lacks:
            lines += fold(
                f"Batch {prediction.load.batch:,} does not fit: {prediction.memory.lacks}.",
                width - MARGIN,
                hang=MARGIN,
            )
    return [" " * MARGIN + line for line in lines]


def _operations(prediction: Prediction, phase: PhasePrediction, width: int) -> list[list[str]]:
    """The pass in the middle of a phase, operation by operation."""
    step = phase.step
    rows: list[tuple[str, ...]] = [
        ("operation", "calls", "shape", "FLOPs", "bytes", "floor", "time", "90 %", "share", "roof")
    ]
    whole = step.device.seconds
    for term in step.terms:
        share = term.time.seconds / whole if whole else 0.0
        rows.append(
            (
                _named(term),
                f"{term.calls:,}",
                _shape(term),
                _work(term.flops),
                units.size(term.moved_bytes) if term.moved_bytes else units.DASH,
                units.duration(term.floor_s * 1e3) if term.floor_s else units.DASH,
                units.duration(term.time.seconds * 1e3),
                _range(term.time),
                units.percent(share),
                term.roof.value if term.roof is not None else "",
            )
        )
    which = (
        f"the middle one of {units.counted(phase.passes, 'pass')}"
        if phase.passes > 1
        else "the only pass"
    )
    title = f"{phase.phase.value.capitalize()} at batch {prediction.load.batch:,}, {which}"
    host = (
        f"Device {units.duration(whole * 1e3)}, host {units.duration(step.host.seconds * 1e3)} for "
        f"{_launches(step.launches)}: "
        f"{'the slower of both' if step.runtime.ahead else 'one after the other'}, "
        f"{units.duration(step.step.seconds * 1e3)}."
    )
    references = dict.fromkeys(
        term.time.reference for term in step.terms if term.gemm or term.attention
    )
    foot = fold(host, width - MARGIN, hang=MARGIN)
    for reference in references:
        foot += fold(f"By {reference}.", width - MARGIN, hang=MARGIN)
    table = _table(_fitted(rows, width, _OPERATIONS_TO_GO), width)
    return [[title, "", *table, "", *(" " * MARGIN + line for line in foot)]]


def _launches(number: int) -> str:
    return f"{number:,} launch" + ("" if number == 1 else "es")


def _named(term: Term) -> str:
    return term.what or term.kind.value.replace("_", " ")


def _shape(term: Term) -> str:
    if term.gemm is not None:
        gemm = term.gemm
        groups = f" {_TIMES}{gemm.groups}" if gemm.groups > 1 else ""
        return f"m {gemm.m:,} n {gemm.n:,} k {gemm.k:,}{groups}"
    if term.attention is not None:
        rows = term.attention.rows
        each = rows[0]
        number = sum(row.sequences for row in rows)
        return f"b {number:,} q {each.query:,} past {each.past:,}"
    return ""


def _work(flops: int) -> str:
    if not flops:
        return units.DASH
    for scale, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= scale:
            return f"{units.rate(flops / scale)} {name}"
    return f"{flops:,}"


def _foot(report: PredictionReport, width: int) -> list[str]:
    machine = report.machine
    sentences = [
        "Modelled; the ranges hold 90 % of the outcomes. Not in the times: waiting for other requests, the "
        "engine's scheduler, tokenizing, the network.",
        f"Roofs: {machine.ceilings.reference}.",
        *report.notes,
    ]
    lines: list[str] = []
    for sentence in sentences:
        lines += fold(sentence, width - MARGIN, hang=MARGIN)
    return [" " * MARGIN + line for line in lines]


def _range(estimate: Estimate) -> str:
    """The interval in the unit of the figure."""
    unit = units.latency(estimate.seconds * 1e3).rpartition(" ")[2]
    scale = _SCALES.get(unit, 1e-3)
    low, high = (units.rate(each * 1e3 * scale) for each in (estimate.low, estimate.high))
    return f"{low}\N{EN DASH}{high}"


def _rates(rate: Rate) -> str:
    return f"{units.rate(rate.low)}\N{EN DASH}{units.rate(rate.high)}"


def _table(rows: Sequence[tuple[str, ...]], width: int) -> list[str]:
    """Figures to the right, names to the left; columns move together where the width asks for it."""
    titles = rows[0]
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
    used = [column for column, size in enumerate(widths) if size]
    room = width - MARGIN - sum(widths[column] for column in used)
    apart = max(min(_APART, room // max(len(used) - 1, 1)), 1)
    lines = []
    for row in rows:
        cells = []
        for column in used:
            # The first name of a nameless column of words tells how it is laid out.
            left = titles[column] in _LEFT or (not titles[column] and not _numeric(rows, column))
            cell = row[column]
            cells.append(cell.ljust(widths[column]) if left else cell.rjust(widths[column]))
        lines.append((" " * MARGIN + (" " * apart).join(cells)).rstrip())
    return lines


def _fitted(
    rows: list[tuple[str, ...]], width: int, droppable: Sequence[int]
) -> list[tuple[str, ...]]:
    """The rows without as many of the droppable columns as leaves two spaces between the others."""
    for column in droppable:
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        used = [size for size in widths if size]
        if MARGIN + sum(used) + 2 * (len(used) - 1) <= width:
            break
        rows = [(*row[:column], "", *row[column + 1 :]) for row in rows]
    return rows


def _numeric(rows: Sequence[tuple[str, ...]], column: int) -> bool:
    return any(row[column][:1].isdigit() for row in rows[1:])
