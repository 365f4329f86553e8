"""Steps that an engine or a user announced in a recording, by ranges with a name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from phaseprof.importing.forms import Span, Step, StepWork
from phaseprof.importing.step_names import (
    FIRST_PART,
    Announced,
    announced,
    as_user_says,
    is_part,
    phase_named,
)
from phaseprof.phases import Phase, Role, TagSource


def steps_announced(
    annotations: Iterable[Span], named: Mapping[str, Phase] | None = None
) -> tuple[Step, ...]:
    """The steps that ranges announce, by begin. Of ranges within one another on a thread the outermost is the step.

    Args:
        annotations: Ranges that users and engines placed.
        named: Phases by names of the user's, as `phase_named` takes them. They go before what names say by themselves.
    """
    given = {} if named is None else named
    known: dict[str, Announced | None] = {}

    def told(name: str) -> Announced | None:
        if name not in known:
            phase = phase_named(name, given)
            known[name] = announced(name) if phase is None else as_user_says(name, phase)
        return known[name]

    wanted = [span for span in annotations if told(span.name) is not None]
    steps = []
    for span in outermost(wanted):
        found = told(span.name)
        if found is not None:
            steps.append(step_of(span, found.work, TagSource.ANNOTATION, role=found.role))
    return _with_drafts(steps)


def steps_of_parts(annotations: Iterable[Span]) -> tuple[Step, ...]:
    """The steps of a vLLM whose worker announced none, from the ranges within them: each begins with the
    preparation of its inputs, and ends with the last part before the next one begins. Their phase is not told."""
    found: list[Step] = []
    last: dict[tuple[int, int], int] = {}
    for span in sorted(filter(lambda span: is_part(span.name), annotations), key=_order):
        thread = span.process, span.thread_id
        if span.name == FIRST_PART:
            last[thread] = len(found)
            work = StepWork(
                Phase.OTHER, unknown="ranges within the step do not say what it computes"
            )
            found.append(step_of(span, work, TagSource.ANNOTATION))
        elif thread in last:
            place = last[thread]
            found[place] = replace(found[place], end_ns=max(found[place].end_ns, span.end_ns))
    return tuple(found)


def outermost(spans: Iterable[Span]) -> list[Span]:
    """The spans that are not within another one of them on their thread, by begin.

    Begins and ends are rounded in some files, so that one span may reach a little into the next: it is cut there.
    What lies more than half in the one before is a part of it.
    """
    found: list[Span] = []
    open_until: dict[tuple[int, int], int] = {}
    for span in sorted(spans, key=_order):
        thread = span.process, span.thread_id
        until = open_until.get(thread)
        if until is not None and span.start_ns < until:
            if span.start_ns + span.end_ns <= 2 * until:
                continue
            span = replace(span, start_ns=until)
        open_until[thread] = span.end_ns
        found.append(span)
    return found


def step_of(
    span: Span, work: StepWork, source: TagSource, *, role: Role = Role.TARGET, name: str = ""
) -> Step:
    """The step that a span is."""
    return Step(span.start_ns, span.end_ns, span.thread_id, source, name or span.name, work, role)


def _order(span: Span) -> tuple[int, int]:
    return span.start_ns, -span.end_ns


def _with_drafts(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Say which steps of a speculative SGLang are the draft model's.

    Where a target verifies, it never decodes: every plain decode is the draft model's. A prefill that follows one of
    the same name on its thread, without a verification between them, is the draft model's own of the same prompts.
    """
    if not any(step.name.startswith(("step[TARGET_VERIFY", "step[VERIFY")) for step in steps):
        return tuple(steps)
    found: list[Step] = []
    before: dict[int | None, Step] = {}
    for step in steps:
        last = before.get(step.thread_id)
        if step.name.startswith("step[DECODE"):
            tokens = step.work.decode_tokens if "g_sq=" in step.name else None
            work = replace(
                step.work, decode_tokens=tokens, context_tokens=None, attention_pairs=None
            )
            step = replace(step, role=Role.DRAFT, work=work)
        elif (
            step.name.startswith("step[EXTEND")
            and last is not None
            and last.name == step.name
            and last.role is Role.TARGET
        ):
            step = replace(step, role=Role.DRAFT)
        before[step.thread_id] = step
        found.append(step)
    return tuple(found)
