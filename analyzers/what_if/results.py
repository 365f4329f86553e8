"""What a what-if yields: figures with intervals, and the arithmetic behind them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from phaseprof.analyzers.results import Bound


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and what it may be: between what the assumptions of docs/what-if.md allow at their best and worst."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Interval:
        """A figure that is known."""
        return cls(value, value, value)

    @classmethod
    def over(cls, value: float, *others: float) -> Interval:
        """A figure, and the range of all of them."""
        return cls(value, min(value, *others), max(value, *others))


class Unit(enum.StrEnum):
    """What a term is measured in."""

    BYTES = "bytes"
    FLOPS = "flops"
    SECONDS = "seconds"
    TOKENS = "tokens"
    TOKENS_PER_S = "tokens_per_s"
    RATIO = "ratio"


@dataclass(frozen=True, slots=True)
class Term:
    """One line of the arithmetic.

    Attributes:
        name: What it is. phase: Of which phase's step; empty for figures of requests.
        before, after: As measured or worked out from what was, and after the change.
        unit: Of both.
        formula: How `after` follows.
    """

    name: str
    phase: str
    before: float
    after: float
    unit: Unit
    formula: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a change, or several, would do.

    Attributes:
        title: Name of the change.
        ttft_ms, tpot_ms: New latencies (the median of those measured, changed as the steps are); None where the run
            has none.
        itl_ms: Time of a step with a chunk of prefill in it, where the chunk is what changes: the tail of the
            inter-token latency; else None.
        tokens_per_s: New output tokens/s over the time of passes and what lies between them; prompt tokens/s for a run
            that generates nothing.
        gain: tokens_per_s over that measured: 1 is no change.
        phase: The phase that `bound` is of: the one whose time changes most.
        bound: What limits that phase afterwards.
        memory_bytes: Weights, and keys and values at the measured contexts, on one device.
        fits: Whether that is less than the device has; None if it is not known.
        terms: The arithmetic.
        notes: What has to be known, one sentence each.
        cannot: Why it cannot be done or would change nothing, one clause; empty where it does something.
    """

    title: str
    ttft_ms: Interval | None
    tpot_ms: Interval | None
    itl_ms: Interval | None
    tokens_per_s: Interval
    gain: Interval
    phase: str
    bound: Bound
    memory_bytes: float | None
    fits: bool | None
    terms: tuple[Term, ...] = ()
    notes: tuple[str, ...] = ()
    cannot: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """A change that cannot be made here.

    Attributes:
        title: Name of the change.
        why: One clause.
        fix: What would make it possible or known, one clause; may be empty.
    """

    title: str
    why: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The run as it was, and what changes would do to it.

    Attributes:
        measured: The run, as an outcome without any change.
        outcomes: What helps, the best first.
        hopeless: What cannot help or be done, each with its reason.
        combined: All that was asked for at once; None unless several changes were.
        generates: Whether tokens_per_s counts output tokens; else it counts those of prompts.
        sequences: Sequences of a decode step as measured, mean; None without decode.
        of_sweep: The batch of a sweep that all of it is of; None for a run without one.
    """

    measured: Outcome
    outcomes: tuple[Outcome, ...]
    hopeless: tuple[Refused, ...]
    combined: Outcome | None = None
    generates: bool = True
    sequences: float | None = None
    of_sweep: int | None = None
