"""What bounds a phase: one class, how sure it is, and the reasons in words.

The order of the questions (DESIGN: Bound), with the thresholds of `phaseprof.analyzers.thresholds`:

1. no work or no roofs: ``unknown`` (``overhead`` if the device was seen idle: no roof could explain that time);
2. exposed collectives take more than either roof needs, and more than the idle time: ``communication``;
3. the nearer roof explains enough of the time: ``compute`` or ``bandwidth``;
4. whether the device was busy is not known: ``overhead or latency``;
5. the larger part of the unexplained time is idle: ``overhead``; else ``latency``.

Hardware counters are heard afterwards, as a second witness (`phaseprof.analyzers.witness`).
"""

from __future__ import annotations

from dataclasses import dataclass

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.case import Case
from phaseprof.analyzers.doubts import doubt_passes, doubt_roofs, doubt_threshold, explain_excess
from phaseprof.analyzers.hearing import hear
from phaseprof.analyzers.remedies import Circumstances, lever, wider_dtype_hint
from phaseprof.analyzers.results import (
    Bound,
    Confidence,
    Lever,
    Provenance,
    Roof,
    Verdict,
)
from phaseprof.analyzers.roofline import RoofTimes, roof_times
from phaseprof.analyzers.witness import Claim, Witness
from phaseprof.analyzers.wording import (
    byte_rate,
    count,
    data,
    duration,
    flop_rate,
    percent,
    sentence,
    work,
)
from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings

_NOTHING_KNOWN = Circumstances()


def classify(
    *,
    time_s: float,
    flops: float | None,
    bytes: float | None,
    ceilings: Ceilings | None,
    busy_share: float | None,
    phase: Phase,
    exposed_comm_share: float | None = None,
    circumstances: Circumstances = _NOTHING_KNOWN,
    witness: Witness | None = None,
) -> Verdict:
    """Class a phase.

    Args:
        time_s: Time of its passes, in seconds.
        flops: FLOPs of these passes; None if not known.
        bytes: Bytes that had to move: weights, KV read and written; None if not known.
        ceilings: Roofs of the device for the dtype; None if not known.
        busy_share: Share of the time in which the device worked; None if not seen.
        phase: Which phase, for the wording and the remedy.
        exposed_comm_share: Share of the time in collectives that overlap with nothing; None if not seen.
        circumstances: What else is known.
        witness: What hardware counters say of it; None without any.
    """
    case = Case(
        time_s,
        flops,
        bytes,
        ceilings,
        busy_share,
        exposed_comm_share,
        phase,
        circumstances,
        witness,
    )
    reason = _why_no_roofline(case)
    if reason:
        return _without_roofline(case, reason)
    assert flops is not None and bytes is not None and ceilings is not None
    return _with_roofline(
        case, roof_times(flops=flops, moved_bytes=bytes, ceilings=ceilings), ceilings
    )


@dataclass(frozen=True, slots=True)
class Question:
    """What `classify` is asked of a phase, kept so that a second witness can be heard later.

    Attributes: the arguments of `classify`.
    """

    time_s: float
    flops: float | None
    bytes: float | None
    ceilings: Ceilings | None
    busy_share: float | None
    phase: Phase
    exposed_comm_share: float | None
    circumstances: Circumstances

    def answer(self, witness: Witness | None = None) -> Verdict:
        """The verdict.

        Args:
            witness: What hardware counters say of the phase.
        """
        return classify(
            time_s=self.time_s,
            flops=self.flops,
            bytes=self.bytes,
            ceilings=self.ceilings,
            busy_share=self.busy_share,
            phase=self.phase,
            exposed_comm_share=self.exposed_comm_share,
            circumstances=self.circumstances,
            witness=witness,
        )


def _why_no_roofline(case: Case) -> str:
    """Why the time cannot be held against roofs; empty if it can."""
    if case.time_s <= 0:
        return "no time was recorded"
    if case.flops is None or case.moved_bytes is None:
        return case.known.no_work or "FLOPs and bytes of these passes are not known"
    if case.flops <= 0 and case.moved_bytes <= 0:
        return "these passes did no counted work"
    roofs = case.ceilings
    if roofs is None or roofs.flops_per_s <= 0 or roofs.bytes_per_s <= 0:
        return case.known.no_roofs or "the roofs of this device are not known"
    return ""


def _without_roofline(case: Case, reason: str) -> Verdict:
    idle = case.idle_share
    if case.time_s > 0 and idle is not None and idle >= thresholds.IDLE_WITHOUT_ROOFS.value:
        _say_busy(case)
        case.say(
            f"{reason}; but no roof can explain time in which the device is idle",
            Provenance.MODELLED,
        )
        case.confidence = Confidence.MEDIUM
        bound = _heard(case, Bound.OVERHEAD, None)
        return _settle(case, bound, None, _lever(case, bound))
    case.say(reason, Provenance.COUNTED)
    if case.busy_share is not None:
        _say_busy(case)
    bound = Bound.UNKNOWN if case.time_s <= 0 else _heard(case, Bound.UNKNOWN, None)
    if bound is not Bound.UNKNOWN:
        return _settle(case, bound, None, _lever(case, bound))
    case.confidence = Confidence.LOW
    first = None
    if case.flops and case.ceilings is None:
        first = Lever("the roofs of this device", "`phaseprof calibrate` measures them")
    return _settle(case, Bound.UNKNOWN, None, first)


def _with_roofline(case: Case, roofs: RoofTimes, ceilings: Ceilings) -> Verdict:
    explained = roofs.floor_s / case.time_s
    modelled = _bound(case, roofs, explained)
    _say_roofs(case, roofs, ceilings, explained)
    bound = _heard(case, modelled, roofs)
    _say_communication(case, explained)
    _say_idle(case, bound, explained)
    if explained > 1:
        explain_excess(case, roofs, ceilings)
    doubt_roofs(case, roofs, ceilings, modelled)
    if bound is modelled:
        doubt_threshold(case, ceilings, explained)
    doubt_passes(case)
    first = _lever(case, bound, roofs, ceilings)
    return _settle(case, bound, (roofs.nearest, explained), first)


def _heard(case: Case, bound: Bound, roofs: RoofTimes | None) -> Bound:
    """Hear the second witness. Returns the class that is left."""
    if case.witness is None:
        return bound
    claim = Claim(
        bound, case.time_s, case.flops, case.moved_bytes, roofs, case.ceilings, case.busy_share
    )
    case.hearing = hearing = hear(claim, case.witness)
    case.evidence += hearing.evidence
    for finding in hearing.findings:
        if finding.cap is None:
            case.say(finding.text, Provenance.MEASURED)
        else:
            case.doubt(finding.cap, finding.text, Provenance.MEASURED)
    return bound if hearing.bound is None else hearing.bound


def _lever(
    case: Case, bound: Bound, roofs: RoofTimes | None = None, ceilings: Ceilings | None = None
) -> Lever | None:
    ruling = case.hearing.ruling
    if ruling is not None and ruling.lever is not None:
        return ruling.lever
    hint = ""
    if bound is Bound.LATENCY and ceilings is not None:
        hint = _dtype_hint(case, ceilings)
    return lever(bound, case.phase, case.known, roofs=roofs, ceilings=ceilings, dtype_hint=hint)


def _bound(case: Case, roofs: RoofTimes, explained: float) -> Bound:
    comm = case.comm_share or 0.0
    idle = case.idle_share
    takes_most = comm > explained and comm >= (idle or 0.0)
    if takes_most and comm >= thresholds.EXPOSED_COMMUNICATION.value:
        return Bound.COMMUNICATION
    if explained >= thresholds.ENOUGH_EXPLAINED.value:
        return Bound.COMPUTE if roofs.nearest is Roof.COMPUTE else Bound.BANDWIDTH
    if idle is None or _timeline_incomplete(case, explained):
        return Bound.OVERHEAD_OR_LATENCY
    if idle >= thresholds.IDLE_OF_UNEXPLAINED.value * (1 - explained):
        return Bound.OVERHEAD
    return Bound.LATENCY


def _timeline_incomplete(case: Case, explained: float) -> bool:
    """Whether the device seems to have worked for less time than its work needs at the roofs."""
    if case.busy_share is None:
        return False
    return case.busy_share < thresholds.TIMELINE_COVERAGE.value * min(explained, 1.0)


def _say_roofs(case: Case, roofs: RoofTimes, ceilings: Ceilings, explained: float) -> None:
    assert case.flops is not None and case.moved_bytes is not None
    n = case.passes
    compute = (
        f"{work(case.flops / n)} a {case.noun} take {duration(roofs.compute_s / n)} at "
        f"{flop_rate(ceilings.flops_per_s)}"
    )
    memory = (
        f"{data(case.moved_bytes / n)} a {case.noun} take {duration(roofs.memory_s / n)} at "
        f"{byte_rate(ceilings.bytes_per_s)}"
    )
    first, second = (compute, memory) if roofs.nearest is Roof.COMPUTE else (memory, compute)
    case.say(f"{first}, {second}: the {roofs.nearest} roof is nearer", Provenance.MODELLED)
    case.say(
        f"a {case.noun} took {duration(case.time_s / n)}, of which that roof explains {percent(explained)}",
        Provenance.MEASURED,
    )


def _say_communication(case: Case, explained: float) -> None:
    if case.comm_share is None:
        return
    than = "more" if case.comm_share > explained else "not more"
    case.say(
        f"exposed collectives take {percent(case.comm_share)} of the time, {than} than the nearer roof "
        f"({percent(explained)})",
        Provenance.MEASURED,
    )


def _say_busy(case: Case) -> None:
    assert case.busy_share is not None
    seen = case.known.profiled_passes
    where = f" (kernel timeline of {count(seen, 'pass')})" if seen else ""
    who = "operators ran" if case.known.device_kind == "cpu" else "the device worked"
    case.say(f"{who} {percent(case.busy_share)} of the time{where}", Provenance.MEASURED)


def _say_idle(case: Case, bound: Bound, explained: float) -> None:
    """What is known of the time that no roof explains."""
    if case.busy_share is None:
        if bound is Bound.OVERHEAD_OR_LATENCY:
            case.say(
                "whether the device was idle in the rest (overhead) or busy with slow kernels (latency) was not seen; "
                "a few passes recorded with torch.profiler would tell",
                Provenance.MEASURED,
            )
        return
    _say_busy(case)
    if _timeline_incomplete(case, explained):
        case.doubt(
            Confidence.LOW if case.hearing.ruling is None else Confidence.MEDIUM,
            f"that is less than the {percent(min(explained, 1.0))} that its work needs at the roofs: the kernel "
            "timeline lacks kernels, and its idle time is not believed",
            Provenance.MODELLED,
        )
    elif bound in (Bound.OVERHEAD, Bound.LATENCY):
        slow = max(case.busy_share - explained, 0.0)
        on_cpu = case.known.device_kind == "cpu"
        idle = "lies outside operators" if on_cpu else "is idle"
        case.say(
            f"no roof explains {percent(1 - explained)} of the time: {percent(1 - case.busy_share)} {idle}, and "
            f"{percent(slow)} goes to kernels that are slower than the roofs",
            Provenance.MODELLED,
        )
        if abs((1 - case.busy_share) - slow) < 2 * thresholds.NEAR_ENOUGH_EXPLAINED.value:
            case.doubt(
                Confidence.MEDIUM,
                "idle time and slow kernels weigh about the same: it is nearly a tie of overhead and latency",
                Provenance.MODELLED,
            )


def _dtype_hint(case: Case, ceilings: Ceilings) -> str:
    assert case.flops is not None and case.moved_bytes is not None
    return wider_dtype_hint(
        time_s=case.time_s,
        flops=case.flops,
        moved_bytes=case.moved_bytes,
        ceilings=ceilings,
        other_roofs=case.known.other_roofs,
        phase=case.phase,
        passes=case.passes,
    )


def _settle(
    case: Case, bound: Bound, nearest: tuple[Roof, float] | None, first: Lever | None
) -> Verdict:
    roof, explained = nearest or (None, None)
    ruling = case.hearing.ruling
    return Verdict(
        bound=bound,
        confidence=case.confidence,
        nearest_roof=roof,
        explained=explained,
        evidence=(*case.evidence, *case.doubts),
        remedy="" if first is None else sentence(f"{first.name}: {first.how}"),
        lever=first,
        excess=" ".join(case.excess),
        doubt=case.worst_doubt,
        ruling=ruling.text if ruling is not None else "",
    )
