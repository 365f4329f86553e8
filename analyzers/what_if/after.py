"""A step under another setting, in one case: device, idle time and collectives.

With M the step's time at the roofs before and M' after (docs/what-if.md has the reasons):

    device' = device + g (M' - M) + conversions        1 <= g <= device / M
    step'   = max(step + h (device' - device), device' + collectives)        0 <= h <= 1
    under graphs    step' = device' + gaps between kernels + collectives'

g says how the excess over the roofs changes: not at all (1), or as the work does (device / M). h says how much of
what the device saves is seen, where it waits for the host as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.steps.collectives import LINKS, all_reduce
from phaseprof.analyzers.what_if.changes import Setting
from phaseprof.analyzers.what_if.conversions import (
    Case,
    as_read,
    conversion_s,
    reached_peak,
)
from phaseprof.analyzers.what_if.measured import Measured, PhaseStep
from phaseprof.analyzers.what_if.work import (
    Factors,
    RoofTime,
    at_roofs,
    changed,
    factors,
    roofs_of,
)
from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings
from phaseprof.work.ops import activation_bytes_of

#: Gap between two kernels of a CUDA graph: likely, at best, at worst. NVIDIA measured 3.4 us a kernel of 2.9 us in a
#: graph ("Getting started with CUDA graphs", 2019): half a microsecond; kernels that wait for each other take more.
_GRAPH_GAP_S = (1.0e-6, 0.5e-6, 2.0e-6)
#: The part of the measured idle time that graphs leave: what the host does at the begin and end of a step. A profiler
#: makes launches slower, so that less may be gained than the timeline shows.
_LEFT_BY_GRAPHS = (0.1, 0.0, 0.3)
#: Time on a GPU over its time at the roofs, for work that was measured on a CPU only: likely, at best, at worst.
_OTHER_KIND = (1.6, 1.1, 3.0)
#: What products of r times the rows may take more, or less, than their time at the roofs says, times 1 - 1/r: other
#: kernels are chosen. Chosen so that nine of ten measured products lie within (`benchmarks/what_if_changes.py`).
_OTHER_ROWS = (0.0, -0.13, 0.4)
#: On a CPU products of one row have kernels of their own, and those of several rows move packed weights once more: what
#: a step of one token takes longer when it has several, at most as long as the tokens one by one.
_SEVERAL_ROWS = (1.25, 1.0, 2.5)
#: A step of so many tokens is one of one row.
_ONE_ROW = 1.5
#: What kernels of another device, with roofs r times as high or as low, may take more or less: times 1 - 1/r, at most
#: so much.
_OTHER_DEVICE, _OTHER_DEVICE_MOST = (0.0, -0.65, 0.5), (0.0, 0.3, 0.2)


@dataclass(frozen=True, slots=True)
class StepAfter:
    """A step under another setting, in one case.

    Attributes:
        step: As measured. roofs_before, roofs: Its time at the roofs, before and after.
        device_s, idle_s, comm_s: What a step goes to; idle_s is None where it was not measured.
        converting_s: The part of device_s in changes of format that were not there before.
        step_s: Their sum.
        between_s: Time on the host to the next step.
        follows, seen: g and h of the module.
    """

    step: PhaseStep
    roofs_before: RoofTime
    roofs: RoofTime
    device_s: float
    converting_s: float
    idle_s: float | None
    comm_s: float
    step_s: float
    between_s: float
    follows: float
    seen: float


def step_after(measured: Measured, setting: Setting, step: PhaseStep, case: Case) -> StepAfter:
    """A step under a setting, in one case."""
    roofs_now = measured.basis.ceilings
    assert roofs_now is not None
    by = as_read(measured, setting, factors(measured, setting, step), case)
    device_after = setting.device or measured.hardware
    before = at_roofs(step.parts, roofs_now, on_cpu=measured.hardware.kind == "cpu")
    peak = reached_peak(measured, setting, by.narrow_peak, case)
    after = at_roofs(
        changed(step.parts, by),
        roofs_of(measured, setting),
        peak,
        on_cpu=device_after.kind == "cpu",
    )
    difference = after.floor_s - before.floor_s
    g = _excess_follows(measured, step, before, difference, case)
    converting = conversion_s(measured, setting, step, by, case)
    device = _device_s(measured, setting, step, before, after, g, case)
    device = _with_other_kernels(measured, setting, step, by, device, case) + converting
    comm = _comm_s(measured, setting, step, case)
    h = _seen(measured, step, before, device - step.device_s, case)
    idle = step.idle_s
    if setting.graphs and idle is not None and graphs_apply(step):
        gaps = (step.kernels or 0.0) * _GRAPH_GAP_S[case.value]
        idle = min(idle, gaps + idle * _LEFT_BY_GRAPHS[case.value])
        whole = device + idle + comm
    else:
        whole = step.step_s + h * (device - step.device_s) + (comm - step.comm_s)
        if device > step.device_s or comm > step.comm_s:
            whole = max(whole, device + comm)
    return StepAfter(
        step=step,
        roofs_before=before,
        roofs=after,
        device_s=device,
        converting_s=converting,
        idle_s=None if idle is None else max(whole - device - comm, 0.0),
        comm_s=comm,
        step_s=whole,
        between_s=step.between_s,
        follows=g,
        seen=h,
    )


def graphs_apply(step: PhaseStep) -> bool:
    """Whether graphs are launched for steps of a phase: those of decode, whose shapes repeat."""
    return step.phase is Phase.DECODE


def _excess_follows(
    measured: Measured, step: PhaseStep, before: RoofTime, difference: float, case: Case
) -> float:
    """g: how much the device's time changes for each second at the roofs.

    Where time is saved, the nearer a step is to its roofs, the more its excess is taken to be that of the same work:
    2 - M / device. Where work is added, the excess of a GPU is taken to grow by the geometric mean of both bounds, and
    that of a CPU, whose operators do not wait for launches, as the work does.
    """
    if not before.floor_s or not step.device_s or not difference:
        return 1.0
    nearness = before.floor_s / step.device_s
    if nearness >= 1:
        # Faster than the roofs (a cache, a boost clock): all of it follows the work.
        return 1 / nearness
    saves = difference < 0
    if case is Case.LIKELY:
        if saves:
            return 2 - nearness
        return 1 / nearness if measured.hardware.kind == "cpu" else nearness**-0.5
    # What helps most where time is saved costs most where it is added.
    return 1 / nearness if (case is Case.BEST) == saves else 1.0


def _device_s(
    measured: Measured,
    setting: Setting,
    step: PhaseStep,
    before: RoofTime,
    after: RoofTime,
    g: float,
    case: Case,
) -> float:
    if not step.parts:
        return step.device_s
    other = setting.device
    if other is not None and other.kind != measured.hardware.kind:
        return after.floor_s * _OTHER_KIND[case.value]
    difference = g * (after.floor_s - before.floor_s)
    if case is not Case.LIKELY:
        error = thresholds.MODEL_ERROR.value
        better = (difference < 0) == (case is Case.BEST)
        difference *= 1 + error if better else 1 - error
    if not difference:
        return step.device_s
    # Never below the roofs, nor dearer than if all of the time grew as the work does.
    as_work = step.device_s / before.floor_s * after.floor_s if before.floor_s else 0.0
    device = max(step.device_s + difference, min(as_work, after.floor_s))
    return min(device, as_work) if difference > 0 and before.floor_s else device


def _with_other_kernels(
    measured: Measured,
    setting: Setting,
    step: PhaseStep,
    by: Factors,
    device_s: float,
    case: Case,
) -> float:
    """With what other kernels may take more or less than the ratio of the work says."""
    on_cpu = measured.hardware.kind == "cpu" and (setting.device is None)
    if on_cpu and by.tokens > 1 and step.parts and step.tokens <= _ONE_ROW:
        several_s = device_s * _SEVERAL_ROWS[case.value]
        return max(device_s, min(several_s, step.device_s * by.tokens))
    if by.tokens > 1 and step.parts:
        device_s *= 1 + _OTHER_ROWS[case.value] * (1 - 1 / by.tokens)
    device = setting.device
    if device is not None and device.kind == measured.hardware.kind and step.parts:
        now, then = roofs_now(measured), roofs_of(measured, setting)
        ratios = (now.flops_per_s / then.flops_per_s, now.bytes_per_s / then.bytes_per_s)
        far = max(max(ratio, 1 / ratio) for ratio in ratios)
        more = _OTHER_DEVICE[case.value] * (1 - 1 / far)
        most = _OTHER_DEVICE_MOST[case.value]
        other_s = device_s * (1 + min(max(more, -most), most))
        # Lower roofs make nothing faster.
        device_s = other_s if min(ratios) < 1 else max(other_s, min(device_s, step.device_s))
    return device_s


def roofs_now(measured: Measured) -> Ceilings:
    """The roofs of the run."""
    assert measured.basis.ceilings is not None
    return measured.basis.ceilings


def _seen(
    measured: Measured, step: PhaseStep, before: RoofTime, difference: float, case: Case
) -> float:
    """h: the part of what the device saves that the step gets shorter by.

    On a CPU operators and what lies between them take turns. A GPU may work while the host prepares what comes next:
    where it is idle it may be the host that sets the pace, and then nothing that the device saves is seen.
    """
    if measured.hardware.kind == "cpu" or not step.step_s:
        return 1.0
    if step.idle_s is not None:
        idle = step.idle_s / step.step_s
        likely = 1 - idle
    else:
        # Idle time was not measured: at most what the roofs leave.
        idle = max(1 - before.floor_s / step.step_s, 0.0)
        likely = 1 - idle / 2
    if case is Case.LIKELY:
        return likely
    worst = max(1 - 2 * idle, 0.0)
    return 1.0 if (difference < 0) == (case is Case.BEST) else worst


def _comm_s(measured: Measured, setting: Setting, step: PhaseStep, case: Case) -> float:
    """Time in exposed collectives: as measured, times what the model says of both; modelled where there were none."""
    ranks = setting.ranks
    after = setting
    if ranks is None or ranks == measured.ranks:
        if step.comm_s and measured.ranks > 1:
            now = collectives_s(measured, Setting(), step, measured.ranks, Case.LIKELY)
            then = collectives_s(measured, after, step, measured.ranks, Case.LIKELY)
            return step.comm_s * (then / now if now else 1.0)
        return step.comm_s
    if ranks == 1:
        return 0.0
    then = collectives_s(measured, after, step, ranks, case)
    if measured.ranks > 1 and step.comm_s:
        now = collectives_s(measured, Setting(), step, measured.ranks, case)
        return step.comm_s * then / now if now else step.comm_s
    return then


def collectives_s(
    measured: Measured, setting: Setting, step: PhaseStep, ranks: int, case: Case
) -> float:
    """Two all-reduces of the hidden state in each layer (Megatron-LM, arXiv 1909.08053)."""
    device = setting.device or measured.hardware
    link = LINKS.get(device.board)
    cost = measured.cost
    if link is None or ranks < 2:
        return 0.0
    layers = sum(group.layers for group in cost.attention) or 1
    width = cost.hidden_size or max(
        (group.query_heads * group.qk_head_dim * measured.ranks for group in cost.attention),
        default=0,
    )
    tokens = step.tokens * factors(measured, setting, step).tokens
    size = round(tokens * width * activation_bytes_of(cost.dtype))
    time = all_reduce(size, ranks, link).times(2 * layers)
    return (time.seconds, time.low, time.high)[case.value]
