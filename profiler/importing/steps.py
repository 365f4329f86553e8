"""The steps of a recording, by the best evidence that it has.

In this order: ranges that a user named or an engine placed for each step; ranges within steps; calls of Python
functions; ranges on devices; look-ups of embeddings; kernels. One kind decides for a whole recording, so that no step
is there twice; kinds after it only tell the phase of steps that have none, and whether they disagree. Nothing here
looks at how long anything took.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from phaseprof.importing.annotations import steps_announced, steps_of_parts
from phaseprof.importing.drawn import Drawn, steps_drawn
from phaseprof.importing.forms import LookedUp, Marker, Span, Step
from phaseprof.importing.inferred import settle_by_kernels, steps_of_kernels, wants_marker
from phaseprof.importing.lookups import settle_by_lookups, steps_of_lookups
from phaseprof.importing.stacks import function_kind, steps_of_calls
from phaseprof.importing.step_names import announced, is_part, phase_named
from phaseprof.phases import Phase

__all__ = ["Chosen", "Evidence", "choose", "function_kind", "wants_annotation", "wants_marker"]

#: Gives the markers of a recording, by launch. It takes a while: it is asked only if nothing else helps.
Markers = Callable[[], Sequence[Marker]]


class Evidence(StrEnum):
    """What steps of a recording are known by, best first."""

    ANNOTATIONS = "annotations of steps"
    PARTS = "ranges within steps"
    CALLS = "calls of Python functions"
    DRAWN = "annotations of steps, on a device"
    LOOKUPS = "look-ups of embeddings"
    KERNELS = "kernels"
    NONE = "nothing"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The steps of a recording.

    Attributes:
        steps: By begin.
        evidence: What they are known by.
        why: What that is, in a clause: for `KERNELS` what it rests on, for `NONE` what is missing.
        unknown: How many steps have no phase because it could not be told, by the reason.
        disagreements: Where another kind of evidence says something else, as sentences.
        drawn: The same steps on devices, of a recording without the host: kernels are joined by them.
    """

    steps: tuple[Step, ...]
    evidence: Evidence
    why: str
    unknown: Mapping[str, int]
    disagreements: tuple[str, ...] = ()
    drawn: Drawn | None = None


def choose(
    annotations: Sequence[Span],
    functions: Sequence[Span],
    markers: Markers,
    named: Mapping[str, Phase],
    lookups: Sequence[LookedUp] = (),
    drawn: Sequence[Span] = (),
) -> Chosen:
    """Find the steps of one rank.

    Args:
        annotations: Ranges that users and engines placed.
        functions: Calls of functions that have a `function_kind`.
        markers: Gives kernels that `wants_marker` wants.
        named: Phases of ranges by their names, as the user gives them; ``*`` in a name stands for anything.
        lookups: Look-ups of embeddings with their shapes, where those were recorded.
        drawn: Spans on devices, as `phaseprof.importing.drawn` takes them.
    """
    disagreements: tuple[str, ...] = ()
    on_devices: Drawn | None = None
    steps = steps_announced(annotations, named)
    calls = steps_of_calls(functions)
    evidence, why = Evidence.ANNOTATIONS, "each step was announced by a range"
    if steps:
        disagreements = _differences(steps, calls)
    elif steps := steps_of_parts(annotations):
        evidence, why = (
            Evidence.PARTS,
            "no range announced a step, but there are ranges within them",
        )
        disagreements = _differences(steps, calls)
    elif calls:
        steps, evidence = calls, Evidence.CALLS
        why = "no range announced a step, but calls of functions were recorded"
    elif (on_devices := steps_drawn(drawn, named)).steps:
        steps, evidence = on_devices.steps, Evidence.DRAWN
        why = "each step was announced by a range, which the profiler drew on its device"
    elif steps := steps_of_lookups(lookups):
        evidence = Evidence.LOOKUPS
        why = (
            "no range announced a step, and no calls of functions were recorded: rows of several tokens that are "
            "looked up are taken for prompts"
        )
    else:
        inferred = steps_of_kernels(markers())
        steps, why = inferred.steps, inferred.why
        evidence = Evidence.KERNELS if steps else Evidence.NONE
    if evidence not in (Evidence.DRAWN, Evidence.KERNELS):
        steps = settle_by_lookups(steps, lookups)
        if any(step.work.unknown for step in steps):
            steps = settle_by_kernels(steps, markers())
    unknown = Counter(step.work.unknown for step in steps if step.work.unknown)
    return Chosen(
        tuple(sorted(steps, key=_start_of)),
        evidence,
        why,
        unknown,
        disagreements,
        on_devices if evidence is Evidence.DRAWN else None,
    )


def wants_annotation(named: Mapping[str, Phase]) -> Callable[[str], bool]:
    """Tells whether a range of a name says anything of steps: others, of which there may be millions, are not held.

    Args:
        named: Phases by names of the user's.
    """

    @lru_cache(maxsize=4096)
    def wanted(name: str) -> bool:
        return phase_named(name, named) is not None or announced(name) is not None or is_part(name)

    return wanted


def _differences(steps: Sequence[Step], calls: Sequence[Step]) -> tuple[str, ...]:
    """Where calls of an engine show other steps than its ranges. A range lies around its call, or within it."""
    if not calls:
        return ()
    outside = sum(1 for call in calls if not _covered(call, steps))
    without = sum(1 for step in steps if not _covered(step, calls))
    said = []
    if outside:
        said.append(
            f"{outside:,} of {len(calls):,} calls that make a step ({calls[0].name}) lie in no range of a step, and "
            f"are left out"
        )
    if without:
        said.append(
            f"{without:,} of {len(steps):,} ranges of steps have no call of the engine in them"
        )
    return tuple(said)


def _covered(one: Step, others: Sequence[Step]) -> bool:
    """Whether one overlaps any of the others, which are in order and hardly overlap one another."""
    place = bisect.bisect_left(others, one.end_ns, key=_start_of) - 1
    return place >= 0 and others[place].end_ns > one.start_ns


def _start_of(step: Step) -> int:
    return step.start_ns
