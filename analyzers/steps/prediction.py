"""Predict what requests would take on a device, from the structure of a model alone.

A batch of requests that arrive at once is prefilled and then decoded together:

    TTFT        = the passes that prefill all prompts of the batch
    TPOT        = the mean decode step, over the lengths that the cache has meanwhile
    output rate = batch x new tokens / (TTFT + (new tokens - 1) TPOT)

each pass as `step_model` has it. Waiting for other requests, tokenizing and the network are no part of it, nor is what
an engine's scheduler adds between steps. Memory holds the weights, the cache at the full length, the activations of
the largest pass, and a reserve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.bound import classify
from phaseprof.analyzers.efficiency.estimate import Estimate, total
from phaseprof.analyzers.results import Bound, Roof
from phaseprof.analyzers.steps.step_model import Machine, StepTime, step_time
from phaseprof.phases import Phase
from phaseprof.work.cost import ModelCost
from phaseprof.work.count import Rows, count
from phaseprof.work.ops import activation_bytes_of

#: Lengths of the cache at which decode steps are worked out: between them their time is nearly linear.
_LENGTHS = 4
#: What a process takes of a GPU's memory before it has a tensor: the CUDA context, libraries and their workspaces.
_CONTEXT_BYTES = 1.0e9
#: Buffers of the collectives, for more than one rank.
_BUFFERS_BYTES = 0.5e9
#: Part of the memory that stays free: fragments, and graphs.
_FREE_SHARE = 0.03
#: Intermediate results of a layer that live at the same time, over inputs and outputs of its widest product.
_LIVE = 2
_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for.

    Attributes:
        batch: Requests that arrive at once and decode together.
        prompt_tokens: Of each.
        new_tokens: That each generates.
        pass_tokens: Prompts are computed in passes of at most so many tokens; None: all in one pass.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    pass_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """What one rank needs of its memory, in bytes.

    Attributes:
        weights: Parameters.
        kv: Keys, values and states of the whole batch at its full length; None if the kind of cache is not covered.
        kv_per_sequence: Of one sequence; None likewise.
        activations: Of the largest pass; modelled.
        reserve: Context, buffers, and a part that stays free; assumed.
        capacity: The memory of the device; None if it is not known.
        largest_batch: The largest batch of this length that fits; 0 if none does, None if that is not known.
    """

    weights: int
    kv: int | None
    kv_per_sequence: int | None
    activations: int
    reserve: int
    capacity: int | None
    largest_batch: int | None

    @property
    def needed(self) -> int:
        """All of it."""
        return self.weights + (self.kv or 0) + self.activations + self.reserve

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None if that is not known."""
        if self.capacity is None or self.kv is None:
            return None
        return self.needed <= self.capacity

    @property
    def lacks(self) -> str:
        """What is too large, as a clause; empty if everything fits or that is not known."""
        if self.fits is not False or self.capacity is None:
            return ""
        if self.weights > self.capacity:
            return "the weights alone do not fit"
        if self.weights + self.reserve + self.activations > self.capacity:
            return "the weights leave too little for activations and the reserve"
        return "the weights fit, the KV cache of this batch does not"


@dataclass(frozen=True, slots=True)
class PhasePrediction:
    """One phase.

    Attributes:
        phase: Prefill or decode.
        passes: How many passes it takes.
        tokens: Tokens of one pass, mean.
        pass_time: Time of one pass, mean.
        floor_s: Its floor, mean: each operation at its own roof.
        flops: Of one pass and rank, mean.
        moved_bytes: Weights, keys and values of one pass and rank, mean.
        bound: What the time goes on, by the rules for measured phases and by what is known beyond (`_bound`).
        roof: The roof that takes longer.
        explained: Time at that roof over the time.
        communication: Share of the time in collectives.
        idle: Share of the time in which the device waits for the host.
        step: The pass that stands for the others: the one in the middle.
    """

    phase: Phase
    passes: int
    tokens: float
    pass_time: Estimate
    floor_s: float
    flops: float
    moved_bytes: float
    bound: Bound
    roof: Roof | None
    explained: float | None
    communication: float
    idle: float
    step: StepTime


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a load takes.

    Attributes:
        load: What was asked for.
        ttft: Seconds to the first token of the last request of the batch.
        tpot: Seconds for each token after the first; None if there is only one.
        whole: Seconds for the batch.
        output_tokens_per_s: Of the batch, over `whole`, with its interval in low and high.
        tokens_per_s_per_user: 1 / TPOT; None without.
        prefill: Its passes.
        decode: Its steps; None if there are none.
        memory: Whether it fits.
    """

    load: Load
    ttft: Estimate
    tpot: Estimate | None
    whole: Estimate
    output_tokens_per_s: Rate
    tokens_per_s_per_user: Rate | None
    prefill: PhasePrediction
    decode: PhasePrediction | None
    memory: Memory


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second with a 90 % interval."""

    value: float
    low: float
    high: float


def predict(
    cost: ModelCost, load: Load, machine: Machine, memory_bytes: int | None = None
) -> Prediction:
    """Predict a load.

    Args:
        cost: What one rank holds, see `step_model.step_time`.
        load: What is asked for.
        machine: What it runs on.
        memory_bytes: Of the device of one rank; None if it is not known.

    Raises:
        ValueError: If the model is not covered.
    """
    prefills = [_prefill_pass(cost, rows, machine) for rows in _prefill_rows(load)]
    ttft = total(step.step for step, _ in prefills)
    prefill = _phase(Phase.PREFILL, prefills, len(prefills), machine)
    decode, tpot, whole, user = None, None, ttft, None
    steps = load.new_tokens - 1
    if steps > 0:
        sampled = [_decode_step(cost, load.batch, past, machine) for past in _lengths(load)]
        decode = _phase(Phase.DECODE, sampled, steps, machine)
        tpot = decode.pass_time
        whole = total([ttft, tpot.times(steps)])
        user = _rate(1, tpot)
    return Prediction(
        load=load,
        ttft=ttft,
        tpot=tpot,
        whole=whole,
        output_tokens_per_s=_rate(load.batch * load.new_tokens, whole),
        tokens_per_s_per_user=user,
        prefill=prefill,
        decode=decode,
        memory=_memory(cost, load, machine, memory_bytes),
    )


def _rate(tokens: int, time: Estimate) -> Rate:
    return Rate(tokens / time.seconds, tokens / time.high, tokens / time.low)


def _prefill_rows(load: Load) -> list[Rows]:
    """The passes that compute the prompts: as many whole prompts as a pass takes, or chunks of one."""
    at_most = load.pass_tokens or load.batch * load.prompt_tokens
    if load.prompt_tokens > at_most:
        chunks = [
            Rows(past, min(at_most, load.prompt_tokens - past), 1)
            for past in range(0, load.prompt_tokens, at_most)
        ]
        return chunks * load.batch
    each = at_most // load.prompt_tokens
    whole, rest = divmod(load.batch, each)
    sizes = [each] * whole + ([rest] if rest else [])
    return [Rows(0, load.prompt_tokens, size) for size in sizes]


def _prefill_pass(cost: ModelCost, rows: Rows, machine: Machine) -> tuple[StepTime, int]:
    # A chunk that is not the last one needs no logits, but engines compute them all the same.
    step = step_time(cost, (rows,), machine=machine, logits_tokens=rows.sequences)
    return step, rows.query * rows.sequences


def _decode_step(cost: ModelCost, batch: int, past: int, machine: Machine) -> tuple[StepTime, int]:
    rows = (Rows(past, 1, batch),)
    return step_time(cost, (), rows, machine=machine, logits_tokens=batch), batch


def _lengths(load: Load) -> list[int]:
    """Lengths of the cache before a step, evenly over the decode steps: the middle of equal parts of them."""
    steps = load.new_tokens - 1
    if steps <= _LENGTHS:
        return [load.prompt_tokens + step for step in range(steps)]
    parts = range(_LENGTHS)
    return [load.prompt_tokens + round((part + 0.5) * steps / _LENGTHS - 0.5) for part in parts]


def _phase(
    phase: Phase, passes: Sequence[tuple[StepTime, int]], number: int, machine: Machine
) -> PhasePrediction:
    steps = [step for step, _ in passes]
    time = total(step.step for step in steps).times(1 / len(steps))
    flops = sum(step.flops for step in steps) / len(steps)
    moved = sum(step.moved_bytes for step in steps) / len(steps)
    device_s = sum(step.device.seconds for step in steps) / len(steps)
    communication = sum(step.communication_s for step in steps) / len(steps) / time.seconds
    busy = min(device_s / time.seconds, 1.0)
    verdict = classify(
        time_s=time.seconds,
        flops=flops,
        bytes=moved,
        ceilings=machine.ceilings,
        busy_share=busy,
        phase=phase,
        exposed_comm_share=communication,
    )
    floor_s = sum(step.floor_s for step in steps) / len(steps)
    return PhasePrediction(
        phase=phase,
        passes=number,
        tokens=sum(tokens for _, tokens in passes) / len(passes),
        pass_time=time,
        floor_s=floor_s,
        flops=flops,
        moved_bytes=moved,
        bound=_bound(verdict.bound, steps, floor_s / time.seconds),
        roof=verdict.nearest_roof,
        explained=verdict.explained,
        communication=communication,
        idle=1 - busy,
        step=steps[len(steps) // 2],
    )


def _bound(bound: Bound, steps: Sequence[StepTime], floor_share: float) -> Bound:
    """The class by the rules for measured phases, with what a measured run does not tell.

    Which of host and device waits for the other is known here: where the host is the slower one, no faster kernel would
    help. And operations have roofs of their own: where one roof for all of a pass explains too little, their floors may
    still explain enough, and the roof that most of that time is spent at is the one.
    """
    if bound is not Bound.LATENCY:
        return bound
    if all(step.runtime.ahead and step.host.seconds > step.device.seconds for step in steps):
        return Bound.OVERHEAD
    if floor_share < thresholds.ENOUGH_EXPLAINED.value:
        return bound
    computing = sum(
        term.floor_s for step in steps for term in step.terms if term.roof is Roof.COMPUTE
    )
    whole = sum(step.floor_s for step in steps)
    return Bound.COMPUTE if 2 * computing >= whole else Bound.BANDWIDTH


def _memory(cost: ModelCost, load: Load, machine: Machine, capacity: int | None) -> Memory:
    each = _kv_of_sequence(cost, load)
    activations = _activation_bytes(cost, load)
    reserve = 0
    if capacity is not None:
        reserve = round(_FREE_SHARE * capacity + _CONTEXT_BYTES)
        reserve += round(_BUFFERS_BYTES) if machine.ranks > 1 else 0
    largest = None
    if capacity is not None and each:
        free = capacity - reserve - activations - cost.parameter_bytes
        largest = max(free // each, 0)
    return Memory(
        weights=cost.parameter_bytes,
        kv=None if each is None else each * load.batch,
        kv_per_sequence=each,
        activations=activations,
        reserve=reserve,
        capacity=capacity,
        largest_batch=largest,
    )


def _kv_of_sequence(cost: ModelCost, load: Load) -> int | None:
    """At its full length: the last token that is generated is never computed."""
    held = load.prompt_tokens + load.new_tokens - 1
    rows = (Rows(held - 1, 1, 1),)
    return count(cost, rows, logits_tokens=1, layout=None).kv_held_bytes


def _activation_bytes(cost: ModelCost, load: Load) -> int:
    tokens = load.batch * load.prompt_tokens
    tokens = max(min(tokens, load.pass_tokens or tokens), load.batch)
    width = activation_bytes_of(cost.dtype)
    body = [matrix for matrix in cost.matmuls if matrix.role != "lm_head"]
    widest = max((m.inputs + m.outputs for m in body), default=4 * cost.hidden_size)
    logits = cost.head_flops_per_token // (2 * cost.hidden_size) if cost.hidden_size else 0
    return _LIVE * tokens * widest * width + load.batch * logits * _LOGIT_BYTES


@dataclass(frozen=True, slots=True)
class PredictionReport:
    """Predictions of several loads for one model on one device.

    Attributes:
        model: What it is called.
        class_name: Class of its module.
        parameters: Of the whole model.
        weights: Format of the weights: a dtype, or ``fp8``, ``int8``, ``int4``.
        kv: Dtype of keys and values.
        device: What the device is called.
        machine: What it was worked out with.
        predictions: One a load, in the order asked for.
        notes: What to know about the figures, a sentence each.
    """

    model: str
    class_name: str
    parameters: int
    weights: str
    kv: str
    device: str
    machine: Machine
    predictions: tuple[Prediction, ...]
    notes: tuple[str, ...] = ()
