"""The steps of a recording, by the best evidence that it has.

What the user names comes first. Nothing here looks at how long anything took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from phaseprof.importing.forms import Marker, Span, Step, StepWork
from phaseprof.phases import Phase, TagSource

#: Gives the markers of a recording, by launch. It takes a while: it is asked only if nothing else helps.
Markers = Callable[[], Sequence[Marker]]


def wants_function(name: str) -> bool:
    """Whether a Python function is one of those by which steps are known."""
    return False


def wants_marker(name: str) -> bool:
    """Whether a kernel is one of those by which steps are known."""
    return False


def find_steps(
    annotations: Sequence[Span],
    functions: Sequence[Span],
    markers: Markers,
    named: Mapping[str, Phase],
) -> tuple[Step, ...]:
    """The steps, by begin.

    Args:
        annotations: Spans that users and engines placed.
        functions: Calls of functions that `wants_function` wants.
        markers: Gives kernels that `wants_marker` wants.
        named: Phases of annotations by their names, as the user gives them; ``*`` in a name stands for anything.
    """
    return tuple(sorted(steps_named(annotations, named), key=_start_of))


def steps_named(annotations: Sequence[Span], named: Mapping[str, Phase]) -> tuple[Step, ...]:
    """The steps that are ranges of the user's. One inside of another of them is a part of it, and no step."""
    found: list[Step] = []
    open_until: dict[tuple[int, int], int] = {}
    phases: dict[str, Phase | None] = {}
    for span in sorted(annotations, key=lambda span: (span.start_ns, -span.end_ns)):
        if span.name not in phases:
            phases[span.name] = _phase_of(span.name, named)
        phase = phases[span.name]
        thread = span.process, span.thread_id
        if phase is None or span.end_ns <= open_until.get(thread, span.end_ns - 1):
            continue
        open_until[thread] = span.end_ns
        found.append(
            Step(
                span.start_ns,
                span.end_ns,
                span.thread_id,
                TagSource.ANNOTATION,
                span.name,
                StepWork(phase),
            )
        )
    return tuple(found)


def _phase_of(name: str, named: Mapping[str, Phase]) -> Phase | None:
    if name in named:
        return named[name]
    return next((phase for given, phase in named.items() if fnmatchcase(name, given)), None)


def _start_of(step: Step) -> int:
    return step.start_ns
