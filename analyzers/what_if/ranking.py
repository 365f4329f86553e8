"""Which changes are worth trying on a run: all sensible ones, worked out and ranked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from phaseprof.analyzers.what_if.apply import evaluate
from phaseprof.analyzers.what_if.changes import (
    Batch,
    Change,
    Chunk,
    Graphs,
    KvCache,
    KvFormat,
    KvHeads,
    Mla,
    OtherDevice,
    Setting,
    Speculate,
    Speculation,
    TensorParallel,
    WeightFormat,
    Weights,
    together,
)
from phaseprof.analyzers.what_if.limits import is_same, refused
from phaseprof.analyzers.what_if.measured import Measured, PartKind, PhaseStep
from phaseprof.analyzers.what_if.results import Outcome, Refused, WhatIf
from phaseprof.analyzers.what_if.work import has_latents, kv_heads
from phaseprof.analyzers.wording import data, number, percent
from phaseprof.errors import PhaseprofError
from phaseprof.phases import Phase

#: A change that gains less even at best, or likely gains hardly anything, cannot help: repeats differ by as much.
HELPS, _LIKELY_HELPS = 1.03, 1.01
#: Larger batches that are tried, the boldest first; each doubling has to bring so much.
_BATCHES = (8, 4, 2)
_DOUBLING = 1.25
_DRAFTS = 4
#: Another structure of attention is only worth a thought where keys and values take this part of a step.
_KV_HEAVY = 0.3
#: A phase with less of the time is said to be the reason why a change of it gains nothing.
_LITTLE = 0.25


def ranked(measured: Measured) -> WhatIf:
    """All sensible changes of a run.

    Raises:
        PhaseprofError: If too little is known of the run.
    """
    _check(measured)
    outcomes, hopeless = [], []
    for change in sensible(measured):
        found = _try(measured, change)
        if isinstance(found, Refused):
            hopeless.append(found)
        elif found.cannot:
            hopeless.append(Refused(found.title, found.cannot))
        else:
            outcomes.append(found)
    return WhatIf(
        measured=evaluate(measured, Setting(), "as measured"),
        outcomes=tuple(sorted(outcomes, key=lambda outcome: -outcome.gain.value)),
        hopeless=tuple(hopeless),
        generates=measured.generates,
        sequences=_sequences(measured),
        of_sweep=measured.of_sweep,
    )


def asked(measured: Measured, changes: Sequence[Change]) -> WhatIf:
    """The changes that were asked for: each alone, and all together.

    Raises:
        PhaseprofError: If too little is known of the run.
    """
    _check(measured)
    setting = together(changes)
    outcomes, hopeless, possible = [], [], []
    for change in changes:
        why = None if is_same(measured, change) else refused(measured, change, setting)
        if why is not None:
            hopeless.append(why)
            continue
        possible.append(change)
        outcomes.append(_one(measured, change))
    combined = None
    if len(possible) > 1:
        combined = evaluate(measured, _effective(measured, possible), "all together")
    return WhatIf(
        measured=evaluate(measured, Setting(), "as measured"),
        outcomes=tuple(outcomes),
        hopeless=tuple(hopeless),
        combined=combined,
        generates=measured.generates,
        sequences=_sequences(measured),
        of_sweep=measured.of_sweep,
    )


def _sequences(measured: Measured) -> float | None:
    decode = measured.step(Phase.DECODE)
    return None if decode is None else decode.sequences


def _check(measured: Measured) -> None:
    if measured.missing:
        raise PhaseprofError(
            f"what a change would do cannot be worked out: {measured.missing}.",
            f"{measured.fix[:1].upper()}{measured.fix[1:]}." if measured.fix else "",
        )


def _effective(measured: Measured, changes: Sequence[Change]) -> Setting:
    """The setting without what the run has already."""
    return together(change for change in changes if not is_same(measured, change))


def _one(measured: Measured, change: Change) -> Outcome:
    if is_same(measured, change):
        same = evaluate(measured, Setting(), change.title)
        return replace(same, cannot="that is what the run has")
    return evaluate(measured, change.to(Setting()), change.title)


def _try(measured: Measured, change: Change) -> Outcome | Refused:
    why = refused(measured, change)
    if why is not None:
        return why
    outcome = _one(measured, change)
    if isinstance(change, Chunk):
        return outcome
    if outcome.fits is False:
        assert outcome.memory_bytes is not None and measured.hardware.memory_bytes is not None
        room = (
            f"{data(outcome.memory_bytes)} do not fit into {data(measured.hardware.memory_bytes)}"
        )
        return replace(outcome, cannot=room)
    hopeless = outcome.gain.high < HELPS or outcome.gain.value < _LIKELY_HELPS
    if not outcome.cannot and hopeless:
        return replace(outcome, cannot=_why_not(measured, change, outcome))
    return outcome


def sensible(measured: Measured) -> Iterator[Change]:
    """The changes that are tried when none is asked for. What another device would do is only worked out if asked."""
    yield from (Weights(form) for form in WeightFormat)
    yield KvCache(KvFormat.FP8 if measured.hardware.kind != "cpu" else KvFormat.INT8)
    yield from _batch(measured)
    yield Graphs()
    if measured.generates:
        yield Speculate(Speculation(_DRAFTS))
    mixed = measured.step(Phase.MIXED)
    if mixed is not None and mixed.prefill_tokens >= 2:
        yield Chunk(max(round(mixed.prefill_tokens / 2), 1))
    if measured.hardware.kind != "cpu":
        yield TensorParallel(2 * measured.ranks)
    if kv_share(measured) >= _KV_HEAVY and not has_latents(measured.cost):
        heads = kv_heads(measured.cost)
        if heads > 1 and heads % 4 == 0:
            yield KvHeads(heads // 4)
        yield Mla()


def _batch(measured: Measured) -> Iterator[Change]:
    """The largest batch of which each doubling still pays and that fits; the next one, if none does, to say why."""
    decode = measured.step(Phase.DECODE) or measured.step(Phase.MIXED)
    if decode is None:
        return
    now = max(round(decode.sequences), 1)
    for factor in _BATCHES:
        half = _gain(measured, now * factor // 2) if factor > 2 else 1.0
        whole = _gain(measured, now * factor)
        fits = evaluate(measured, Batch(now * factor).to(Setting())).fits
        if fits is not False and whole / half >= _DOUBLING:
            yield Batch(now * factor)
            return
    yield Batch(now * 2)


def _gain(measured: Measured, sequences: int) -> float:
    return evaluate(measured, Batch(sequences).to(Setting())).gain.value


def main_step(measured: Measured) -> PhaseStep:
    """The phase that a change of decode is judged by: decode, else what has the most time."""
    return measured.step(Phase.DECODE) or measured.largest


def kv_share(measured: Measured) -> float:
    """The part of a decode step that its keys and values need at the memory roof."""
    return _share(measured, main_step(measured), kv=True)


def _share(measured: Measured, step: PhaseStep, *, kv: bool) -> float:
    roofs = measured.basis.ceilings
    if roofs is None or not step.step_s:
        return 0.0
    if kv:
        size = step.of(PartKind.ATTENTION).kv_bytes
    else:
        kinds = (PartKind.MATRICES, PartKind.EXPERTS)
        size = sum(step.of(kind).weight_bytes for kind in kinds)
    return size / roofs.bytes_per_s / step.step_s


def _why_not(measured: Measured, change: Change, outcome: Outcome) -> str:
    """Why a change gains nothing: what it acts on takes too little of the time."""
    step = main_step(measured)
    phase, bound = step.phase.value, step.bound.value
    state = f"{phase} is {bound}-bound" if " " not in bound else f"{phase} is bound by {bound}"
    whole = sum(each.step_s * each.passes for each in measured.steps)
    part = step.step_s * step.passes / whole
    if part < _LITTLE and not isinstance(change, Weights | TensorParallel | OtherDevice):
        state = f"{phase} is {percent(part)} of the time"
    match change:
        case KvCache() | KvHeads() | Mla():
            share = percent(_share(measured, step, kv=True))
            return f"{state}, reading keys and values is {share} of a step"
        case Weights():
            share = percent(_share(measured, step, kv=False))
            return f"{state}, reading the weights is {share} of a step"
        case Batch():
            return f"{state}: more sequences take as much longer"
        case Speculate():
            return f"{state}: verifying drafts costs what they save"
        case TensorParallel():
            return f"{state}: collectives take what the split saves"
        case OtherDevice():
            return f"{state}, and its roofs are no higher"
        case _:
            return f"{state}: at best it gains {number(100 * (outcome.gain.high - 1))} %"
