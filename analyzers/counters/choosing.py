"""Several answers to what a counter is in a phase, by what is taken as known of time without passes; and the one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.counters.device_time import BETWEEN, IDLE
from phaseprof.analyzers.counters.solved import Scale, Solved

#: Parts of the run from which on an answer does not hang on a single moment.
_ENOUGH_BLOCKS = thresholds.COUNTER_BLOCKS.value


def choices_of(present: Sequence[int], gaps_known: bool) -> list[list[int]]:
    """Labels that are solved for: all; without idle time, and without the time between passes, if those are known."""
    choices = [list(present)]
    for left_out in ((IDLE,), (IDLE, BETWEEN)) if gaps_known else ():
        labels = [label for label in present if label not in left_out]
        if labels and labels != choices[-1]:
            choices.append(labels)
    return choices


def narrowest(answers: Sequence[Solved]) -> Solved:
    """The narrowest of those that do not rest on a few moments, if there is one."""
    return min(answers, key=lambda each: (each.blocks < _ENOUGH_BLOCKS, each.error))


def together(answers: Sequence[Solved], scale: Scale) -> Solved:
    """The narrowest answer, since every interval should hold; where another one excludes it, one around both.

    They exclude each other where passes end (or begin) unlike their middle: then the time between passes, which lies
    beside that, is taken to do what the ends of the passes did.
    """
    chosen = narrowest(answers)
    low, high = chosen.value - chosen.error, chosen.value + chosen.error
    for other in answers:
        begin, end = other.value - other.error, other.value + other.error
        if begin > high or end < low:
            low, high = min(low, begin), max(high, end)
    error = (high - low) / 2
    if not chosen.error < error < math.inf:
        return chosen
    apart = (error - chosen.error) / scale.span
    return replace(
        chosen,
        value=(low + high) / 2,
        error=error,
        parts=replace(chosen.parts, apart=apart),
    )
