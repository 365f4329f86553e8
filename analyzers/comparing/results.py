"""What a comparison yields: frozen figures, ready to be laid out. Changes are fractions of the first trace (0.08)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from phaseprof.analyzers.results import Bound


class Unit(enum.StrEnum):
    """What a figure is counted in."""

    MS = "ms"
    TOKENS_PER_S = "tokens/s"
    TFLOPS = "TFLOP/s"
    GB_PER_S = "GB/s"
    SHARE = "share"
    WATT = "W"
    JOULES_PER_TOKEN = "J/token"


class Better(enum.StrEnum):
    """Which way a figure improves."""

    LOWER = "lower"
    HIGHER = "higher"
    #: Neither: a power, a share of a resource that is used.
    NEITHER = "neither"


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a trace.

    Attributes:
        path: Its name in rules and in JSON: ``decode.pass_ms.p50``, ``by_batch.16.decode.mbu``.
        unit: What it is counted in. better: Which way it improves.
        group: ``prefill``, ``decode``, …, or ``requests``. batch: Of a single batch size; else None.
        name: The path without group and batch: ``pass_ms.p50``.
    """

    path: str
    unit: Unit
    better: Better
    group: str
    batch: int | None
    name: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of one trace.

    Attributes:
        value: None if the trace does not have it.
        error: Standard error of its logarithm within the run; None if not known.
        freedom: Degrees of freedom of that.
        blocks: Independent parts of the run that it rests on; 0 where it does not come from them.
        count: Values: passes, requests, tokens.
        lacking: Why value or error is not known, as a clause; empty if both are.
    """

    value: float | None
    error: float | None = None
    freedom: float = 0.0
    blocks: int = 0
    count: int = 0
    lacking: str = ""


class Call(enum.StrEnum):
    """What is said of a change."""

    BETTER = "better"
    WORSE = "worse"
    #: It changed, and neither way is better.
    CHANGED = "changed"
    #: The interval is narrow and holds no change.
    UNCHANGED = "unchanged"
    #: The interval is too wide to say, or not known.
    UNSURE = "not certain"
    #: The two figures answer different questions, or one is not there.
    NOT_COMPARED = "not compared"


@dataclass(frozen=True, slots=True)
class Delta:
    """A figure of both traces and what lies between.

    Attributes:
        metric: Which. a, b: The figures.
        change: b / a - 1; None if one is missing, or too small to divide by.
        low, high: 95 % interval of the change; None if not known.
        call: What is said of it.
        why: Why it is not compared or not certain, as a clause; else empty.
    """

    metric: Metric
    a: Figure
    b: Figure
    change: float | None
    low: float | None
    high: float | None
    call: Call
    why: str = ""

    @property
    def within(self) -> float | None:
        """The change is smaller than this, either way; None if not known."""
        if self.low is None or self.high is None:
            return None
        return max(abs(self.low), abs(self.high))


class Topic(enum.StrEnum):
    """What a difference is about."""

    MODEL = "model"
    WORKLOAD = "workload"
    SOFTWARE = "software"
    MACHINE = "machine"
    SETUP = "setup"
    COMMAND = "command"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same around the two runs; empty text where a trace does not tell."""

    topic: Topic
    what: str
    a: str
    b: str


class Level(enum.StrEnum):
    """How far two traces compare."""

    ALL = "comparable"
    PART = "comparable in part"
    #: Another model: times and latencies are not those of the same work.
    SHARES = "another model"


@dataclass(frozen=True, slots=True)
class BoundChange:
    """The class of a phase in both traces.

    Attributes:
        phase: Which. a, b: The classes. sure: Whether neither rests on low confidence.
        a_explained, b_explained: Share of the time that the nearer roof explains; None if not known.
    """

    phase: str
    a: Bound
    b: Bound
    sure: bool
    a_explained: float | None
    b_explained: float | None


@dataclass(frozen=True, slots=True)
class KernelChange:
    """The time of one class of kernels per pass.

    Attributes:
        phase, kernel_class: Which. a_ms, b_ms: Per profiled pass; 0 where the class is not there.
        part: Its part of the growth of all classes that grew (or of the decline of those that declined).
        a_passes, b_passes: Profiled passes.
    """

    phase: str
    kernel_class: str
    a_ms: float
    b_ms: float
    part: float
    a_passes: int
    b_passes: int


class Outcome(enum.StrEnum):
    """What became of a rule."""

    KEPT = "kept"
    BREACH = "breach"
    #: Beyond the limit, but not beyond the noise; or nothing is known of the noise.
    NOT_CERTAIN = "not certain"
    #: One of the figures is not there, or the two do not compare.
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class Judged:
    """A rule and what became of it.

    Attributes:
        rule: As it was written. outcome: What became of it. delta: The figures.
        text: Why, as a sentence.
    """

    rule: str
    outcome: Outcome
    delta: Delta
    text: str


@dataclass(frozen=True, slots=True)
class Method:
    """How the intervals were made.

    Attributes:
        a_units, b_units: What was drawn, in words: ``8 repeats``.
        run_noise: Standard deviation, as a fraction, by which whole runs of the same thing are taken to differ.
        draws: Draws of the bootstrap.
        text: All of it as sentences.
    """

    a_units: str
    b_units: str
    run_noise: float
    draws: int
    text: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """One trace against another.

    Attributes:
        a, b: Names of the traces.
        level: How far they compare. reasons: Why not further, as sentences.
        verdict: What changed, most important first, as sentences.
        differences: What is not the same around them.
        deltas: All figures that either has. bounds: Phases that both have. kernels: By phase, largest part first.
        judged: The rules. notes: What a reader should know, as sentences.
        method: How the intervals were made.
    """

    a: str
    b: str
    level: Level
    reasons: tuple[str, ...]
    verdict: tuple[str, ...]
    differences: tuple[Difference, ...]
    deltas: tuple[Delta, ...]
    bounds: tuple[BoundChange, ...]
    kernels: tuple[KernelChange, ...]
    judged: tuple[Judged, ...]
    notes: tuple[str, ...]
    method: Method
    _by_path: dict[str, Delta] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._by_path.update({delta.metric.path: delta for delta in self.deltas})

    def delta(self, path: str) -> Delta | None:
        """The figure of a path; None if neither trace has it."""
        return self._by_path.get(path)

    def failed(self, *, strict: bool = False) -> bool:
        """Whether a rule was breached; with ``strict``, or one was not kept for any reason."""
        bad = {Outcome.BREACH, Outcome.NOT_CERTAIN, Outcome.NOT_JUDGED}
        return any(each.outcome in (bad if strict else {Outcome.BREACH}) for each in self.judged)
