"""What an analysis yields: frozen figures with their provenance, ready to be laid out by a renderer.

A figure that is not known is None, and `Report.not_measured` says why. Shares are fractions (0.55), never percent.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phaseprof.errors import NotMeasured
from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings, Device

if TYPE_CHECKING:
    from phaseprof.analyzers.advice import Advice
    from phaseprof.analyzers.bound import Question
    from phaseprof.analyzers.counters.counter_results import DeviceState, PhaseCounters
    from phaseprof.analyzers.kernels.kernel_results import KernelFigures, Unattributed
    from phaseprof.analyzers.serving import EngineFigures, Goodput, Interference
    from phaseprof.analyzers.steps.mixed_split import MixedSplit
    from phaseprof.analyzers.steps.op_results import StepFloor
    from phaseprof.analyzers.sweeping.sweep_results import Sweep
    from phaseprof.analyzers.two_phases import Fact
    from phaseprof.analyzers.what_if.measured import Measured
    from phaseprof.analyzers.windows import WindowsCost


class Bound(enum.StrEnum):
    """What the time of a phase went on."""

    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"
    COMMUNICATION = "communication"
    #: The device is idle: launches, host code, the scheduler.
    OVERHEAD = "overhead"
    #: The device is busy, but near no roof.
    LATENCY = "latency"
    #: Not near a roof, and nothing says whether the device was busy.
    OVERHEAD_OR_LATENCY = "overhead or latency"
    #: No roof or no work figure is known.
    UNKNOWN = "unknown"


class Roof(enum.StrEnum):
    """The two roofs of a roofline."""

    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"


class Confidence(enum.StrEnum):
    """How sure a verdict is; `PhaseFigures.evidence` says why."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


class Provenance(enum.StrEnum):
    """Where a figure comes from."""

    MEASURED = "measured"
    COUNTED = "counted"
    MODELLED = "modelled"
    DATASHEET = "datasheet"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One reason for a verdict, as a sentence with its figures in it, and where they come from."""

    text: str
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class Lever:
    """One thing to do.

    Attributes:
        name: What to change, as a noun: ``batch``.
        how: Why and how, as a clause without capital and full stop.
    """

    name: str
    how: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The bound of a phase.

    Attributes:
        bound: The class.
        confidence: How sure.
        nearest_roof: The roof that would take longer; None without work or ceilings.
        explained: max(t_compute, t_memory) / time; None without work or ceilings.
        evidence: The reasons, strongest first.
        remedy: What to try first, one sentence; empty when nothing is bound.
        lever: The same in its two parts.
        excess: Why a share of a roof is above 100 %, as sentences; empty when none is. Whoever shows such a share
            shows this with it.
        doubt: The reason that lowers the confidence most, as a sentence; empty when it is high.
        ruling: What hardware counters showed, as a clause, where the class is theirs; else empty.
    """

    bound: Bound
    confidence: Confidence
    nearest_roof: Roof | None
    explained: float | None
    evidence: tuple[Evidence, ...]
    remedy: str
    lever: Lever | None = None
    excess: str = ""
    doubt: str = ""
    ruling: str = ""


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """The steady-state figures of one phase (warm-up, compile and profiled passes are not in them).

    Attributes:
        phase: Which.
        passes: Passes counted.
        sequences_per_pass: Mean batch.
        prefill_tokens, decode_tokens, padding_tokens, recomputed_tokens, cached_tokens: Sums.
        tokens: prefill_tokens + decode_tokens.
        span_ms: Time of the passes, summed.
        pass_ms_p50, pass_ms_p90, pass_ms_p99: Time of one pass.
        between_ms: Time on the host between the passes of one request loop (sampling, stop checks), summed.
        busy_ms: Time in which the device worked, summed; None without a collector that sees it.
        share: span_ms / span_ms of all phases.
        prompt_tokens_per_s: Prefill tokens over the span; None for a phase without them.
        output_tokens_per_s: Decode tokens over the span; None for a phase without them.
        flops, weight_bytes, kv_read_bytes, kv_write_bytes: Sums in closed form; None if the model is not covered.
        tflops: Achieved TFLOP/s.
        gb_per_s: Bytes that had to move (weights, KV read and written) over the span, in 1e9 bytes/s.
        intensity: FLOPs per byte.
        mfu: flops / span / peak. mbu: bytes / span / bandwidth.
        weight_byte_share: weight_bytes over all bytes.
        attention_flop_share: FLOPs of attention pairs over all FLOPs.
        verdict: The class and why.
        counters: What hardware counters say; None if none were sampled.
        question: What the verdict answers; not a figure, and not stored in a report.
        kernels: What ran in its profiled passes, by class of kernel; None without any.
    """

    phase: Phase
    passes: int
    sequences_per_pass: float
    prefill_tokens: int
    decode_tokens: int
    padding_tokens: int | None
    recomputed_tokens: int
    cached_tokens: int
    tokens: int
    span_ms: float
    pass_ms_p50: float
    pass_ms_p90: float
    pass_ms_p99: float
    between_ms: float | None
    busy_ms: float | None
    share: float
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    flops: int | None
    weight_bytes: int | None
    kv_read_bytes: int | None
    kv_write_bytes: int | None
    tflops: float | None
    gb_per_s: float | None
    intensity: float | None
    mfu: float | None
    mbu: float | None
    weight_byte_share: float | None
    attention_flop_share: float | None
    verdict: Verdict
    counters: PhaseCounters | None = None
    question: Question | None = field(default=None, repr=False, compare=False)
    kernels: KernelFigures | None = None

    @property
    def bound(self) -> Bound:
        """Short for ``verdict.bound``."""
        return self.verdict.bound


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Nearest-rank percentiles of one latency in ms, and how many values they come from."""

    count: int
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """Latencies over the requests that are not warm-up.

    Attributes:
        count: Requests counted. unfinished: Those of them with no end in the trace. aborted: Those aborted, or ended by
            an error.
        prompt_tokens, output_tokens: Sums.
        ttft_ms, tpot_ms, itl_ms: None where no request has one.
    """

    count: int
    unfinished: int
    aborted: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None


@dataclass(frozen=True, slots=True)
class SetAside:
    """Passes that are not in the steady-state figures, by reason: a `Warmup` value, `profiled`, `error`."""

    reason: str
    passes: int
    span_ms: float


@dataclass(frozen=True, slots=True)
class OwnCost:
    """What the profiler took: per pass in us, and as a share of the time of all passes; CPU time of the threads that
    write and that sample counters; and what the windows of a profiler took, if there were any."""

    hook_us_per_pass: float
    share: float
    writer_cpu_ms: float
    windows: WindowsCost | None = None
    sampler_cpu_ms: float = 0.0


class Parallelism(enum.StrEnum):
    """How ranks work together."""

    #: The layers of a model are split over them: they make each pass together.
    TENSOR = "tensor-parallel"
    #: Each makes passes of its own.
    DATA = "data-parallel"


@dataclass(frozen=True, slots=True)
class RankFigures:
    """The steady-state figures of one rank.

    Attributes:
        rank: Which. host: Name of its host; empty if not recorded.
        processes: Processes that ran as this rank. restarts: How often torchrun restarted it.
        ended: Whether the end of its last process is in the trace.
        passes: Passes counted. tokens: Prefill and decode tokens.
        span_ms: Time of the passes. between_ms: Time on the host between the passes of one request loop.
        busy_ms: Time in which the device worked; None without a collector that sees it.
        prefill_ms_p50, decode_ms_p50: Time of one pass.
        output_tokens_per_s: Decode tokens over the passes of all phases and the time between them; None without any.
        clock_drift_ms: How far the Unix clock moved against the monotonic one while it ran; None if it did not end.
        exposed_comm_share: Share of its profiled passes in which collectives ran and nothing else; None without them.
    """

    rank: int
    host: str
    processes: int
    restarts: int
    ended: bool
    passes: int
    tokens: int
    span_ms: float
    between_ms: float | None
    busy_ms: float | None
    prefill_ms_p50: float | None
    decode_ms_p50: float | None
    output_tokens_per_s: float | None
    clock_drift_ms: float | None
    exposed_comm_share: float | None = None


@dataclass(frozen=True, slots=True)
class Laggard:
    """The rank that costs the most time.

    Attributes:
        rank: Which. last_share: Share of the steps in which it is last (begins last, or takes longest), and no other
            with it.
        lost_ms: Where the ranks wait for each other in every step, what it is behind the one before it, summed over
            the steps in which it is last; else what its passes take more in all than those of the next one.
        lost_share: That over the time of the steps, each by its longest pass; or of its own passes.
    """

    rank: int
    last_share: float
    lost_ms: float
    lost_share: float


@dataclass(frozen=True, slots=True)
class Skew:
    """How far apart ranks are in the steps that all of them made.

    Attributes:
        kind: How they work together. ranks: Which. steps: Steps compared.
        start_ms: From the first begin of a step to the last; None where their clocks do not compare.
        duration_ms: From the shortest pass of a step to the longest.
        by_start: The laggard of a tensor-parallel model was found by its begin; else by its passes being shortest.
        laggard: The rank that costs the most time.
    """

    kind: Parallelism
    ranks: tuple[int, ...]
    steps: int
    start_ms: Percentiles | None
    duration_ms: Percentiles
    by_start: bool
    laggard: Laggard


@dataclass(frozen=True, slots=True)
class RanksReport:
    """The ranks of a trace.

    Attributes:
        ranks: The figures of each, by rank.
        groups: Ranks that make each pass together; a rank that makes its own is a group of one.
        leaders: The rank of each group that the figures of the report are taken from.
        world_size: Processes of the job; None if not known. missing: Ranks of which the trace has no pass.
        hosts: Names of the hosts.
        output_tokens_per_s: Sum over the groups; None without generated tokens.
        skews: Within the groups, and between them.
    """

    ranks: tuple[RankFigures, ...]
    groups: tuple[tuple[int, ...], ...]
    leaders: tuple[int, ...]
    world_size: int | None
    missing: tuple[int, ...]
    hosts: tuple[str, ...]
    output_tokens_per_s: float | None
    skews: tuple[Skew, ...]

    @property
    def kinds(self) -> tuple[Parallelism, ...]:
        """How the ranks work together: one way, or groups of one that work in the other."""
        found = []
        if len(self.groups) > 1:
            found.append(Parallelism.DATA)
        if any(len(group) > 1 for group in self.groups):
            found.append(Parallelism.TENSOR)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What was profiled, for the head line.

    Attributes:
        model: Name of the model with the most time. model_class: Its class.
        engine: ``transformers 5.24.0``.
        device: Its device; None if not recorded. dtype: The dtype that it computes in.
        weight_bits: Bits that each of its weights takes, where they are packed; else None.
        command: The profiled command line.
        ranks: Ranks in the trace. processes: Processes in it. incomplete: Processes whose end is missing (killed).
        models: Other models that were seen, by name.
        workload: As in `ProcessMeta.workload`.
        trace_path: Where the trace lies, as given. trace_bytes: Its size on disk.
    """

    model: str
    model_class: str
    engine: str
    device: Device | None
    dtype: str
    command: tuple[str, ...]
    ranks: int
    processes: int
    incomplete: int
    models: tuple[str, ...]
    workload: Mapping[str, object] = field(default_factory=dict)
    trace_path: str = ""
    trace_bytes: int = 0
    weight_bits: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The answer: what `phaseprof report` shows.

    Attributes:
        answer: The answer first: two to four sentences that an engineer would say.
        phases: By phase value (``"prefill"``, ``"decode"``, ``"mixed"``, ``"encode"``, ``"extend"``, ``"other"``),
            only phases that have passes.
        by_batch: The same per number of sequences, where the run has several and none was settled on; else empty.
        requests: Latencies. set_aside: What is not counted. own_cost: None if the trace was cut off before it.
        ceilings: The roofs that were used; None if none is known. facts: What was profiled.
        damage: Parts of the trace that could not be read, one sentence each.
        not_measured: What is missing, why, and what would help.
        ranks: The ranks, if there are several.
        engine: What a serving engine did besides running the model, and its load; None without one.
        interference: Decode time that its requests lost to each other's prefills; None where nothing tells.
        goodput: How many requests met the objectives; None if none were given.
        unattributed: Kernels that belong to no pass; None if there are none.
        provenance: Pairs of (figure, where it comes from) for the foot line.
        devices: The state that sampled devices were in.
        operations: The floor of each phase, operation by operation; empty without work or roofs.
        mixed: Whose time mixed steps are, and the effect of other chunks; None without such steps.
        two_phases: What sets prefill and decode apart, as this run shows it.
        advice: What to change, by what it gains; None if that was not worked out.
        measured: The run as what-if takes it; not a figure, and not stored in a report.
        sweep: How the figures change with the sizes of a sweep; None without one.
    """

    facts: RunFacts
    answer: tuple[str, ...]
    phases: Mapping[str, PhaseFigures]
    by_batch: Mapping[int, Mapping[str, PhaseFigures]]
    requests: RequestFigures
    set_aside: tuple[SetAside, ...]
    own_cost: OwnCost | None
    ceilings: Ceilings | None
    damage: tuple[str, ...]
    not_measured: tuple[NotMeasured, ...]
    provenance: tuple[tuple[str, str], ...]
    ranks: RanksReport | None = None
    engine: EngineFigures | None = None
    interference: Interference | None = None
    goodput: Goodput | None = None
    unattributed: Unattributed | None = None
    devices: tuple[DeviceState, ...] = ()
    operations: Mapping[str, StepFloor] = field(default_factory=dict)
    mixed: MixedSplit | None = None
    two_phases: tuple[Fact, ...] = ()
    sweep: Sweep | None = None
    advice: Advice | None = None
    measured: Measured | None = field(default=None, repr=False, compare=False)
