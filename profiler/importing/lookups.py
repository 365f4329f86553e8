"""What look-ups of embeddings tell: when a pass began, and of which shape its tokens were.

Only rows of tokens are looked at, ``(sequences, tokens)``, as transformers has them. Engines pack the tokens of all
their requests into one row without a second dimension, which says nothing of prefill and decode.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import replace

from phaseprof.importing.forms import LookedUp, Step, StepWork
from phaseprof.importing.stacks import NO_CACHE, PACKED
from phaseprof.phases import Phase, TagSource


def steps_of_lookups(lookups: Iterable[LookedUp]) -> tuple[Step, ...]:
    """The passes of a recording without calls: from a look-up of tokens to the last matrix product after it.

    Only where generation is to be seen, by rows of one token: else it may be training, or an encoder that reads texts.
    """
    found = [
        each
        for each in sorted(lookups, key=_start_of)
        if len(each.shape) == 2 and 0 not in each.shape and each.end_ns is not None
    ]
    if all(each.shape[1] > 1 for each in found):
        return ()
    steps = []
    for each in found:
        work = _of_shape(each.shape)
        end = each.start_ns if each.end_ns is None else each.end_ns
        name = "a look-up of embeddings, by the shape of its tokens"
        steps.append(Step(each.start_ns, end, each.thread_id, TagSource.INFERRED, name, work))
    return tuple(steps)


def settle_by_lookups(steps: Sequence[Step], lookups: Iterable[LookedUp]) -> tuple[Step, ...]:
    """The steps, with what the shape of the first look-up in each of them tells.

    Rows of several tokens are taken for a prompt, and rows of one for a token that is fed back: which is what shapes
    can say, and is wrong for drafts under verification and for a prompt of one token. Of a step whose phase is known
    they tell the tokens alone, if nothing else did.
    """
    threads: dict[int, list[LookedUp]] = {}
    for lookup in sorted(lookups, key=_start_of):
        threads.setdefault(lookup.thread_id, []).append(lookup)
    found: list[Step] = []
    for step in steps:
        own = threads.get(step.thread_id, []) if step.thread_id is not None else []
        first = bisect.bisect_left(own, step.start_ns, key=_start_of)
        last = bisect.bisect_left(own, step.end_ns, key=_start_of)
        if first < last:
            shape = own[first].shape
            # A range that a user named may hold several passes; a call is one.
            one = last == first + 1 or step.tag_source is TagSource.INFERRED
            step = _with_shape(step, shape, one) if len(shape) == 2 and 0 not in shape else step
        found.append(step)
    return tuple(found)


def _with_shape(step: Step, shape: tuple[int, ...], one: bool) -> Step:
    if step.work.unknown:
        if step.work.unknown == PACKED:
            return step
        work = _of_shape(shape)
        if step.work.unknown == NO_CACHE and work.phase is Phase.PREFILL:
            work = _again(shape)
        return replace(
            step,
            tag_source=TagSource.INFERRED,
            name=f"{step.name}, by the shape of its tokens",
            work=work,
        )
    told = step.work.prefill_tokens, step.work.decode_tokens
    silent = told in ((None, None), (None, 0), (0, None))
    counted = _counted(step.work.phase, shape) if silent and one else None
    return step if counted is None else replace(step, work=counted)


def _of_shape(shape: tuple[int, ...]) -> StepWork:
    phase = Phase.DECODE if shape[1] == 1 else Phase.PREFILL
    return _counted(phase, shape) or StepWork(phase)


def _counted(phase: Phase, shape: tuple[int, ...]) -> StepWork | None:
    """Tokens of rows of a known phase; None where rows of that length are none of it."""
    sequences, length = shape
    tokens = sequences * length
    # Padding is among them, so that tokens are not those of the sequences for certain, if there are several.
    certain = sequences == 1 or length == 1
    if phase is Phase.PREFILL:
        return StepWork(phase, sequences, tokens if certain else None, 0, 0)
    if phase is Phase.DECODE and length == 1:
        return StepWork(phase, 0, 0, sequences, sequences)
    return None


def _again(shape: tuple[int, ...]) -> StepWork:
    """Work without a cache: each sequence is computed again, and one token of it is new. It is counted once."""
    sequences, length = shape
    again = length - 1 if sequences == 1 else None
    return StepWork(Phase.MIXED, None, again, sequences, sequences)


def _start_of(lookup: LookedUp) -> int:
    return lookup.start_ns
