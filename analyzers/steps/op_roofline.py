"""The roofline of each operation: what a pass needs at least, which operation needs it, and where it takes more.

One roofline over a whole pass hides that its operations have roofs of their own: in a prefill of short prompts the
projections compute while attention reads, and in a decode of many sequences it is the other way round. Operations run
one after the other, so that the floor of a pass is the sum of the operations' floors,

    floor = sum over operations of max(FLOPs / peak, bytes / bandwidth)

which is never less than the roofline of the whole pass. Bytes are weights, keys, values and states. Activations are
left out: they may stay in a cache, and a floor has to hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from phaseprof.analyzers.efficiency import Basis, efficiency_for
from phaseprof.analyzers.kernels.kernel_results import KernelClass, KernelFigures
from phaseprof.analyzers.results import PhaseFigures, Roof
from phaseprof.analyzers.roofline import roof_times
from phaseprof.analyzers.steps.op_results import AboveFloor, ModelledTime, OpFigures, StepFloor
from phaseprof.analyzers.steps.pass_rows import PassRows
from phaseprof.analyzers.steps.step_model import GRAPHS, Machine, step_time
from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings, Device
from phaseprof.work.cost import ModelCost
from phaseprof.work.ops import Op, OpKind

#: Passes of a phase whose time is modelled.
_MODELLED = 16
#: The class that the kernels of an operation are in. Where experts have no kernels of their own, they are products.
_CLASSES: Mapping[OpKind, KernelClass] = {
    OpKind.EXPERTS: KernelClass.MOE,
    OpKind.ATTENTION_PREFILL: KernelClass.ATTENTION,
    OpKind.ATTENTION_DECODE: KernelClass.ATTENTION,
    OpKind.STATE: KernelClass.SCAN,
    OpKind.EMBEDDING: KernelClass.EMBEDDING,
    OpKind.NORM: KernelClass.NORM,
}


def step_floors(
    rows: Mapping[Phase, Sequence[PassRows]],
    cost: ModelCost | None,
    ceilings: Ceilings | None,
    phases: Mapping[str, PhaseFigures],
    device: Device | None = None,
) -> dict[str, StepFloor]:
    """The floor of each phase whose work is known; empty without roofs, and for a model whose matrices were not
    recorded one by one.

    Args:
        rows: Passes of each phase.
        cost: Structure of the model.
        ceilings: The roofs.
        phases: The figures of the phases, for their kernels.
        device: For the efficiency of kernels on it; None leaves that out.
    """
    if cost is None or not cost.covered or not cost.matmuls or ceilings is None:
        return {}
    if ceilings.flops_per_s <= 0 or ceilings.bytes_per_s <= 0:
        return {}
    machine = _machine(cost, ceilings, device)
    floors = {}
    for phase, passes in rows.items():
        known = [each for each in passes if each.flops and each.moved_bytes]
        if not known or phase.value not in phases:
            continue
        floor = _floor(known, cost, ceilings)
        if floor is not None:
            above = _above(floor, phases[phase.value])
            modelled = None if machine is None else _modelled(known, cost, machine)
            floors[phase.value] = replace(floor, above=above, modelled=modelled)
    return floors


def _machine(cost: ModelCost, ceilings: Ceilings, device: Device | None) -> Machine | None:
    """The device with the kernels of a serving engine; None where nothing was measured of such kernels."""
    if device is None or device.kind == "cpu":
        return None
    efficiency = efficiency_for(ceilings, device)
    if efficiency.basis is Basis.ROOFLINE:
        return None
    return Machine(efficiency, ceilings, GRAPHS, products=cost.dtype, activations=cost.dtype)


def _modelled(passes: Sequence[PassRows], cost: ModelCost, machine: Machine) -> ModelledTime:
    """The mean over some of the passes."""
    some = passes[:: max(len(passes) // _MODELLED, 1)]
    times = [
        step_time(
            cost, each.prefill, each.decode, machine=machine, logits_tokens=each.logits_tokens
        ).device
        for each in some
    ]
    mean_ms = 1e3 / len(times)
    return ModelledTime(
        ms=sum(time.seconds for time in times) * mean_ms,
        low_ms=sum(time.low for time in times) * mean_ms,
        high_ms=sum(time.high for time in times) * mean_ms,
        reference=times[0].reference,
    )


def _floor(passes: Sequence[PassRows], cost: ModelCost, ceilings: Ceilings) -> StepFloor | None:
    """Of recorded figures, each operation gets the part that the closed form gives it: padding and what the cache
    really holds are in the recorded ones."""
    parts = [(each, _distributed(each, cost)) for each in passes]
    sums: dict[OpKind, OpFigures] = {}
    floor_s = whole_s = 0.0
    for each, ops in parts:
        whole_s += roof_times(
            flops=each.flops or 0, moved_bytes=each.moved_bytes or 0, ceilings=ceilings
        ).floor_s
        for op, flops, moved in ops:
            times = roof_times(flops=flops, moved_bytes=moved, ceilings=ceilings)
            floor_s += times.floor_s
            before = sums.get(op.kind)
            now = OpFigures(
                kind=op.kind,
                calls=op.calls,
                flops=flops,
                moved_bytes=moved,
                compute_ms=times.compute_s * 1e3,
                memory_ms=times.memory_s * 1e3,
                floor_ms=times.floor_s * 1e3,
                share=0.0,
                roof=times.nearest,
                rows=None if op.gemm is None else op.gemm.m * op.calls,
            )
            sums[op.kind] = now if before is None else _sum(before, now)
    if not floor_s:
        return None
    number = len(passes)
    ops_found = [_mean(figures, number, floor_s * 1e3) for figures in sums.values()]
    return StepFloor(
        passes=number,
        pass_ms=sum(each.span_ns for each in passes) / number / 1e6,
        floor_ms=floor_s / number * 1e3,
        whole_floor_ms=whole_s / number * 1e3,
        ops=tuple(sorted(ops_found, key=lambda op: -op.floor_ms)),
    )


def _distributed(each: PassRows, cost: ModelCost) -> list[tuple[Op, float, float]]:
    """Operations with their FLOPs and bytes, which add up to the recorded ones."""
    ops = each.ops(cost)
    flops = sum(op.flops for op in ops)
    moved = sum(op.weight_bytes + (op.kv_bytes or 0) for op in ops)
    more_flops = (each.flops or 0) / flops if flops else 1.0
    more_bytes = (each.moved_bytes or 0) / moved if moved else 1.0
    return [
        (op, op.flops * more_flops, (op.weight_bytes + (op.kv_bytes or 0)) * more_bytes)
        for op in ops
    ]


def _sum(one: OpFigures, other: OpFigures) -> OpFigures:
    compute_ms = one.compute_ms + other.compute_ms
    memory_ms = one.memory_ms + other.memory_ms
    rows = None if one.rows is None or other.rows is None else one.rows + other.rows
    return OpFigures(
        kind=one.kind,
        calls=one.calls + other.calls,
        flops=one.flops + other.flops,
        moved_bytes=one.moved_bytes + other.moved_bytes,
        compute_ms=compute_ms,
        memory_ms=memory_ms,
        floor_ms=one.floor_ms + other.floor_ms,
        share=0.0,
        roof=Roof.COMPUTE if compute_ms >= memory_ms else Roof.BANDWIDTH,
        rows=rows,
    )


def _mean(summed: OpFigures, passes: int, floor_ms: float) -> OpFigures:
    return OpFigures(
        kind=summed.kind,
        calls=summed.calls / passes,
        flops=summed.flops / passes,
        moved_bytes=summed.moved_bytes / passes,
        compute_ms=summed.compute_ms / passes,
        memory_ms=summed.memory_ms / passes,
        floor_ms=summed.floor_ms / passes,
        share=summed.floor_ms / floor_ms,
        roof=summed.roof,
        rows=None if summed.rows is None else summed.rows / summed.calls,
    )


def _above(floor: StepFloor, figures: PhaseFigures) -> tuple[AboveFloor, ...]:
    """The time of a pass by class of kernels and idle, each beside its floor."""
    kernels = figures.kernels
    if kernels is None or figures.busy_ms is None or not figures.span_ms:
        return ()
    busy_ms = floor.pass_ms * figures.busy_ms / figures.span_ms
    floors = _floors_by_class(floor, kernels)
    found = [
        AboveFloor(each.kernel_class, each.share * busy_ms, floors.pop(each.kernel_class, 0.0))
        for each in kernels.classes
    ]
    # Floors of classes that were not seen are not lost: something else did their work.
    found += [AboveFloor(kernel_class, 0.0, ms) for kernel_class, ms in floors.items() if ms]
    idle = AboveFloor(None, max(floor.pass_ms - busy_ms, 0.0), 0.0)
    return tuple(sorted([*found, idle], key=lambda each: -each.excess_ms))


def _floors_by_class(floor: StepFloor, kernels: KernelFigures) -> dict[KernelClass, float]:
    seen = {each.kernel_class for each in kernels.classes}
    floors: dict[KernelClass, float] = {}
    for op in floor.ops:
        kernel_class = _CLASSES.get(op.kind, KernelClass.GEMM)
        if kernel_class is KernelClass.MOE and kernel_class not in seen:
            kernel_class = KernelClass.GEMM
        floors[kernel_class] = floors.get(kernel_class, 0.0) + op.floor_ms
    return floors
