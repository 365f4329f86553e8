"""Whether a setting fits into a device: weights, and keys and values at the contexts that were measured."""

from __future__ import annotations

from phaseprof.analyzers.what_if.changes import Setting
from phaseprof.analyzers.what_if.measured import Measured, PartKind, PhaseStep
from phaseprof.analyzers.what_if.work import changed, factors
from phaseprof.phases import Phase


def memory_bytes(measured: Measured, setting: Setting) -> float:
    """Bytes of one device.

    Weights are counted whole, all experts with them. Of keys and values a step reads what the cache holds, so that the
    largest phase says what that is; sequences that wait, and the room that an engine sets aside, are not in it.

    Args:
        measured: The run.
        setting: What is different.
    """
    cost = measured.cost
    step = _cached(measured)
    by = factors(measured, setting, step)
    experts = sum(
        each.layers * (each.experts if each.held is None else each.held) * each.expert_bytes
        for each in cost.experts
    )
    packable = cost.body_weight_bytes + experts
    rest = cost.parameter_bytes - packable
    weights = (rest * by.dtype + packable * by.weights) / by.ranks
    held = sum(
        part.kv_bytes
        for part in changed(step.parts, by)
        if part.kind in (PartKind.ATTENTION, PartKind.STATES)
    )
    return weights + held


def _cached(measured: Measured) -> PhaseStep:
    return measured.step(Phase.DECODE) or measured.step(Phase.MIXED) or measured.largest
