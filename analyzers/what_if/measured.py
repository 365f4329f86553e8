"""A measured run taken apart: what each phase's step computes and moves, and what its time goes to.

    step = device at work + device idle + exposed collectives
    device at work = time at the roofs + excess

The time at the roofs is that of a few parts of a step, each at its own roof, one after the other. Idle time and exposed
collectives come from a timeline of kernels; without one the idle time is not known, and the device is taken to work.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.columns import column, named, names, total
from phaseprof.analyzers.passes import Group, Primary, SortedPasses, steady_passes
from phaseprof.analyzers.phases import Basis
from phaseprof.analyzers.results import Bound, PhaseFigures, RequestFigures
from phaseprof.analyzers.what_if.changes import Hardware
from phaseprof.phases import Phase, Role, TagSource
from phaseprof.work.cost import ModelCost


class PartKind(enum.StrEnum):
    """A part of a step whose work changes in its own way."""

    #: All matrices that each token is multiplied with, the output head not counted.
    MATRICES = "matrices"
    HEAD = "output head"
    EXPERTS = "experts"
    ATTENTION = "attention"
    STATES = "states"
    #: Rows of lookup tables.
    TABLES = "tables"


@dataclass(frozen=True, slots=True)
class Part:
    """The work of one part in a mean step.

    Attributes:
        kind: Which.
        flops: FLOPs.
        weight_bytes: Weights that are read. kv_bytes: Keys, values and states, read and written.
    """

    kind: PartKind
    flops: float
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class PhaseStep:
    """The mean step of a phase.

    Attributes:
        phase: Which. passes: Steps of it.
        step_s: Time of a step. between_s: Time on the host to the next one of the same requests.
        idle_s: The part of step_s in which the device does nothing; None without a timeline that is believed.
        comm_s: The part in exposed collectives; 0 without any or without a timeline.
        sequences, prefill_tokens, decode_tokens, drafts, accepted: Of a step, means.
        parts: What it computes and moves; empty if that is not known.
        kernels: Kernels that it launches; None without a timeline. graph_share: Part of them launched by graphs.
        bound: Its class, as measured.
    """

    phase: Phase
    passes: int
    step_s: float
    between_s: float
    idle_s: float | None
    comm_s: float
    sequences: float
    prefill_tokens: float
    decode_tokens: float
    parts: tuple[Part, ...] = ()
    kernels: float | None = None
    graph_share: float = 0.0
    bound: Bound = Bound.UNKNOWN
    drafts: float = 0.0
    accepted: float = 0.0

    @property
    def tokens(self) -> float:
        """Prefill and decode tokens of a step."""
        return self.prefill_tokens + self.decode_tokens

    @property
    def device_s(self) -> float:
        """Time in which the device works on something else than an exposed collective."""
        return max(self.step_s - (self.idle_s or 0.0) - self.comm_s, 0.0)

    @property
    def moved_bytes(self) -> float:
        """Bytes that a step moves."""
        return sum(part.weight_bytes + part.kv_bytes for part in self.parts)

    def of(self, kind: PartKind) -> Part:
        """One part; without work if there is none."""
        return next((part for part in self.parts if part.kind is kind), Part(kind, 0.0))


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured run, as far as what-if needs it.

    Attributes:
        steps: By phase, those with the most time first.
        ttft_ms, tpot_ms: Medians; None where no request has one.
        queue_ms: Median of the time that requests waited in a serving engine; 0 without one.
        prompt_tokens: Mean prompt of a request; 0 without requests.
        basis: Structure of the model and roofs.
        hardware: The device.
        dtype: That the model computes in.
        engine: ``transformers`` or ``vllm``, with its version.
        ranks: Ranks that each layer is split over.
        draft_s: Time of the draft model in a decode step.
        missing: Why nothing can be said; empty if something can. fix: What would help.
        of_sweep: The batch of a sweep that this is of; None for a run without one.
    """

    steps: tuple[PhaseStep, ...]
    ttft_ms: float | None
    tpot_ms: float | None
    queue_ms: float
    prompt_tokens: float
    basis: Basis = field(repr=False)
    hardware: Hardware = field(repr=False)
    dtype: str
    engine: str
    ranks: int = 1
    draft_s: float = 0.0
    missing: str = ""
    fix: str = ""
    of_sweep: int | None = None

    def step(self, phase: Phase) -> PhaseStep | None:
        """The step of a phase; None if the run has none."""
        return next((each for each in self.steps if each.phase is phase), None)

    @property
    def cost(self) -> ModelCost:
        """The structure; only where nothing is missing."""
        assert self.basis.cost is not None
        return self.basis.cost

    @property
    def largest(self) -> PhaseStep:
        """The phase with the most time; only where nothing is missing."""
        return self.steps[0]

    @property
    def generates(self) -> bool:
        """Whether tokens are generated after the first."""
        return any(step.decode_tokens for step in self.steps)


@dataclass(frozen=True, slots=True)
class Facts:
    """What else is known of a run.

    Attributes:
        swept: It had several batches, each for itself: the largest one is taken.
        hardware, dtype, engine, ranks, queue_ms: As in `Measured`.
    """

    hardware: Hardware
    dtype: str
    engine: str
    ranks: int = 1
    queue_ms: float = 0.0
    swept: bool = False


def take_apart(
    phases: Mapping[str, PhaseFigures],
    by_batch: Mapping[int, Mapping[str, PhaseFigures]],
    sorted_passes: SortedPasses,
    requests: RequestFigures,
    basis: Basis,
    facts: Facts,
    passes: pa.Table,
    primary: Primary,
) -> Measured:
    """A run as what-if needs it.

    Args:
        phases, by_batch: Figures by phase, and by number of sequences. sorted_passes: The sums behind them.
        requests: Latencies.
        basis: Structure of the model, and roofs.
        facts: What else is known.
        passes: The `passes` table, for drafts.
        primary: Which model.
    """
    batch = max(by_batch) if by_batch and facts.swept else None
    groups: dict[Phase, Group] = {}
    for (phase, sequences), group in sorted_passes.steady.items():
        if batch is None or sequences == batch:
            groups[phase] = groups.get(phase, Group()) + group
    if batch is not None:
        phases = by_batch[batch]
    drafted = _drafts(passes, primary)
    steps = [
        _step(figures, groups[figures.phase], basis, drafted if name == Phase.DECODE else (0, 0, 0))
        for name, figures in phases.items()
        if figures.phase in groups and figures.span_ms
    ]
    steps.sort(key=lambda step: -step.step_s * step.passes)
    missing, fix = _missing(steps, basis, imported=_is_imported(passes))
    ttft_ms = None if requests.ttft_ms is None else requests.ttft_ms.p50
    tpot_ms = None if requests.tpot_ms is None else requests.tpot_ms.p50
    if batch is not None:
        # Those of requests are of all batches: the steps of this one tell its own.
        ttft_ms, tpot_ms = (_step_ms(steps, phase) for phase in (Phase.PREFILL, Phase.DECODE))
    return Measured(
        steps=tuple(steps),
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        queue_ms=facts.queue_ms,
        prompt_tokens=requests.prompt_tokens / requests.count if requests.count else 0.0,
        basis=basis,
        hardware=facts.hardware,
        dtype=facts.dtype,
        engine=facts.engine,
        ranks=facts.ranks,
        draft_s=_draft_s(passes, primary, drafted[2]),
        missing=missing,
        fix=fix,
        of_sweep=batch,
    )


def _step_ms(steps: list[PhaseStep], phase: Phase) -> float | None:
    """The time of a step, and to the next one, where there is a phase of that name."""
    return next(((s.step_s + s.between_s) * 1e3 for s in steps if s.phase is phase), None)


def _is_imported(passes: pa.Table) -> bool:
    """Whether another profiler recorded the passes: their labels come from its ranges, or are inferred."""
    sources = names(passes, "tag_source")
    return bool(pc.any(named(sources, TagSource.ANNOTATION, TagSource.INFERRED)).as_py())


def _missing(steps: list[PhaseStep], basis: Basis, *, imported: bool) -> tuple[str, str]:
    if not steps:
        return "no steady pass was recorded", "run longer, or without warm-up"
    if basis.no_work:
        fix = "import the recording with `--model-config`, which says what the model is"
        return basis.no_work, fix if imported and basis.cost is None else ""
    if basis.no_roofs or basis.ceilings is None:
        why = basis.no_roofs or "the roofs of this device are not known"
        return why, "`phaseprof calibrate` measures them"
    if basis.ceilings.flops_per_s <= 0 or basis.ceilings.bytes_per_s <= 0:
        return "the roofs of this device are not positive", "`phaseprof calibrate` measures them"
    if not steps[0].parts:
        return f"FLOPs and bytes of {steps[0].phase.value} are not known", ""
    return "", ""


def _step(
    figures: PhaseFigures, group: Group, basis: Basis, drafted: tuple[int, int, int]
) -> PhaseStep:
    number = figures.passes
    step_s = figures.span_ms / number / 1e3
    drafts, accepted, verified = drafted
    kernels = figures.kernels
    busy = None if figures.busy_ms is None else figures.busy_ms / figures.span_ms
    comm = (
        0.0 if kernels is None or not kernels.collective_ms else kernels.exposed_comm_share or 0.0
    )
    if busy is not None and figures.verdict.explained is not None:
        believed = thresholds.TIMELINE_COVERAGE.value * min(figures.verdict.explained, 1.0)
        busy = busy if busy >= believed else None
    # A collective that nothing overlaps with keeps the device busy.
    comm = min(comm, 1.0 if busy is None else busy)
    sequences = figures.sequences_per_pass
    return PhaseStep(
        phase=figures.phase,
        passes=number,
        step_s=step_s,
        between_s=0.0 if figures.between_ms is None else figures.between_ms / number / 1e3,
        idle_s=None if busy is None else (1 - busy) * step_s,
        comm_s=comm * step_s,
        sequences=sequences,
        prefill_tokens=figures.prefill_tokens / number,
        decode_tokens=figures.decode_tokens / number,
        parts=_parts(group, basis.cost),
        kernels=None if kernels is None or kernels.on_cpu else kernels.kernels_per_pass,
        graph_share=kernels.graph_kernels / kernels.kernels if kernels and kernels.kernels else 0.0,
        bound=figures.bound,
        drafts=drafts / verified / sequences if verified else 0.0,
        accepted=accepted / verified / sequences if verified else 0.0,
    )


def _parts(group: Group, cost: ModelCost | None) -> tuple[Part, ...]:
    """The mean step by parts, which add up to what was counted."""
    known = group.flops_known
    if cost is None or not cost.covered or not known or not group.flops:
        return ()
    tokens = (group.prefill_tokens + group.decode_tokens + group.padding_tokens) / group.passes
    logits = group.logits_tokens / group.logits_tokens_known if group.logits_tokens_known else None
    if logits is None:
        logits = group.sequences / group.passes
    sequences = group.sequences / group.passes
    flops, weights = group.flops / known, group.weight_bytes / known
    kv = (group.kv_read_bytes + group.kv_write_bytes) / known
    found = [
        Part(PartKind.MATRICES, cost.linear_flops_per_token * tokens, float(cost.body_weight_bytes))
    ]
    if logits:
        found.append(
            Part(PartKind.HEAD, cost.head_flops_per_token * logits, float(cost.head_weight_bytes))
        )
    looked_up = cost.lookup_bytes_per_token * tokens
    if logits:
        looked_up -= cost.tied_lookup_bytes_per_token * tokens
    if looked_up > 0:
        found.append(Part(PartKind.TABLES, 0.0, looked_up))
    if cost.states:
        size = sum(state.layers * state.state_bytes for state in cost.states) * sequences * 2
        spent = sum(state.layers * state.flops_per_token for state in cost.states) * tokens
        found.append(Part(PartKind.STATES, spent, 0.0, min(float(size), kv)))
    if cost.experts:
        found.append(
            Part(
                PartKind.EXPERTS,
                sum(each.layers * each.flops(round(tokens)) for each in cost.experts),
                expert_bytes(cost, tokens),
            )
        )
    return _adding_up(found, flops, weights, kv)


def expert_bytes(cost: ModelCost, tokens: float) -> float:
    """Bytes of the experts that so many tokens are expected to reach, over all layers."""
    whole = 0.0
    for each in cost.experts:
        here = each.experts if each.held is None else each.held
        reached = here * (1 - (1 - each.top_k / each.experts) ** (tokens * each.sources))
        whole += each.layers * reached * each.expert_bytes
    return whole


def _adding_up(found: list[Part], flops: float, weights: float, kv: float) -> tuple[Part, ...]:
    """Attention has what is left of FLOPs and of keys and values; weights that are left are experts' (as many as were
    reached), else matrices'. Where the closed form has more than was counted, all is scaled down to it."""
    more = sum(part.flops for part in found) / flops
    heavy = sum(part.weight_bytes for part in found) / weights if weights else 1.0
    found = [
        Part(
            part.kind,
            part.flops / max(more, 1.0),
            part.weight_bytes / max(heavy, 1.0),
            part.kv_bytes,
        )
        for part in found
    ]
    rest = max(weights - sum(part.weight_bytes for part in found), 0.0)
    takes = PartKind.EXPERTS if found[-1].kind is PartKind.EXPERTS else PartKind.MATRICES
    found = [
        Part(part.kind, part.flops, part.weight_bytes + rest, part.kv_bytes)
        if part.kind is takes
        else part
        for part in found
    ]
    attention = Part(
        PartKind.ATTENTION,
        max(flops - sum(part.flops for part in found), 0.0),
        0.0,
        max(kv - sum(part.kv_bytes for part in found), 0.0),
    )
    return (*found, attention)


def _drafts(passes: pa.Table, primary: Primary) -> tuple[int, int, int]:
    """Drafted and accepted tokens of steady decode steps that verify some, and how many these are.

    Steps in which nothing was drafted count as well, where drafts are made at all: they are a part of the mean step.
    """
    if not total(column(passes, "draft_tokens")):
        return 0, 0, 0
    steady = steady_passes(passes, primary)
    decode = steady.filter(named(names(steady, "phase"), Phase.DECODE))
    told = decode.filter(pc.is_valid(decode.column("accepted_tokens")))
    drafts = total(column(told, "draft_tokens"))
    return drafts, total(column(told, "accepted_tokens")), told.num_rows if drafts else 0


def _draft_s(passes: pa.Table, primary: Primary, verified: int) -> float:
    """Time of draft models for each decode step."""
    if not verified:
        return 0.0
    drafting = passes.filter(named(names(passes, "role"), Role.DRAFT))
    return total(column(drafting, "host_ns")) / 1e9 / verified
