"""What sets prefill and decode apart, where this run shows it, and where it shows the opposite.

Decode gains from batching since a step reads the weights once for all sequences; prefill does not, since one prompt
fills the device already. Verifying drafts computes more for the same reads. Work that is too short for the device is
bound by what launches it. An encoder has no decode at all. Each is said with the run's own figures, or not at all.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, named, names, scalar, total
from phaseprof.analyzers.passes import Primary, steady_passes
from phaseprof.analyzers.results import Bound, PhaseFigures, Provenance
from phaseprof.analyzers.sweeping.sweep_results import Sweep
from phaseprof.analyzers.wording import count, duration, number, percent
from phaseprof.phases import Phase

#: A batch that is so many times as large tells how a phase batches.
_FACTOR = 2.0
#: Of the gain that costless batching would have, decode has to reach this part to be said to batch.
_BATCHES = 0.5
#: Tokens/s that a larger batch changes by no more do not depend on it.
_SAME = 0.25
#: A phase that its nearer roof explains less of, and that is idle, is short of work.
_SHORT = 0.5


_MOVED = ("weight_bytes", "kv_read_bytes", "kv_write_bytes")
_READ = (
    *("model_id", "role", "phase", "warmup", "profiled", "error", "device_ns", "host_ns"),
    *("draft_tokens", "decode_tokens", "flops", *_MOVED),
)


class Topic(enum.StrEnum):
    """What a fact is about."""

    DECODE_BATCHES = "decode and batches"
    PREFILL_BATCHES = "prefill and batches"
    SPECULATION = "speculation"
    SHORT_WORK = "short work"
    ONE_PHASE = "one phase"


@dataclass(frozen=True, slots=True)
class Fact:
    """One of the facts about the two phases, in this run.

    Attributes:
        topic: Which.
        holds: Whether the run shows what is usual.
        text: A sentence or two, with the figures.
        provenance: Where these come from.
    """

    topic: Topic
    holds: bool
    text: str
    provenance: Provenance


def two_phase_facts(
    phases: Mapping[str, PhaseFigures],
    by_batch: Mapping[int, Mapping[str, PhaseFigures]],
    passes: pa.Table,
    primary: Primary,
    requests: int,
    sweep: Sweep | None = None,
) -> tuple[Fact, ...]:
    """The facts that a run shows.

    Args:
        phases: Figures by phase.
        by_batch: The same by number of sequences.
        passes: The `passes` table, for drafts.
        primary: Which model.
        requests: Requests that are known to have ended.
        sweep: The sweep of the run, if it is one.
    """
    return (
        *_one_phase(phases, requests),
        *_decode_batches(_ends(by_batch, sweep, Phase.DECODE)),
        *_prefill_batches(_ends(by_batch, sweep, Phase.PREFILL)),
        *_speculation(passes, primary),
        *_short_work(phases),
    )


@dataclass(frozen=True, slots=True)
class _End:
    """The smallest or the largest batch of a phase.

    Attributes:
        batch: Sequences.
        step_ms: Time of a pass, median. tokens_per_s: Tokens of the phase.
        figures: The phase at that batch.
    """

    batch: int
    step_ms: float
    tokens_per_s: float
    figures: PhaseFigures


def _ends(
    by_batch: Mapping[int, Mapping[str, PhaseFigures]], sweep: Sweep | None, phase: Phase
) -> tuple[_End, _End] | None:
    """The smallest and the largest batch of a phase, if these are far enough apart. A sweep gives them at one length of
    prompt, and as it shows them."""
    of_phase = {n: by_batch[n][phase.value] for n in sorted(by_batch) if phase.value in by_batch[n]}
    if sweep is None:
        found = [_of_batch(n, figures) for n, figures in of_phase.items()]
    else:
        found = list(_of_sweep(sweep, of_phase, phase))
    found = [end for end in found if end.batch and end.step_ms > 0 and end.tokens_per_s > 0]
    if len(found) < 2 or found[-1].batch < _FACTOR * found[0].batch:
        return None
    return found[0], found[-1]


def _of_batch(batch: int, figures: PhaseFigures) -> _End:
    rate = figures.prompt_tokens_per_s or 0.0
    if figures.phase is Phase.DECODE:
        rate = 1e3 * batch / figures.pass_ms_p50 if figures.pass_ms_p50 else 0.0
    return _End(batch, figures.pass_ms_p50, rate, figures)


def _of_sweep(sweep: Sweep, of_phase: Mapping[int, PhaseFigures], phase: Phase) -> Iterator[_End]:
    """The cells of the length with the most batches."""
    lengths = Counter((cell.prompt_tokens, cell.new_tokens) for cell in sweep.cells)
    length = max(sorted(lengths), key=lengths.__getitem__, default=None)
    for cell in sweep.cells:
        found = cell.decode if phase is Phase.DECODE else cell.prefill
        figures = of_phase.get(cell.batch)
        if (cell.prompt_tokens, cell.new_tokens) == length and found and figures:
            yield _End(cell.batch, found.time_ms.median, found.tokens_per_s, figures)


def _decode_batches(ends: tuple[_End, _End] | None) -> Iterator[Fact]:
    if ends is None:
        return
    small, large = ends
    longer = large.step_ms / small.step_ms
    gain = large.tokens_per_s / small.tokens_per_s
    possible = large.batch / small.batch
    took = (
        f"a step of {count(large.batch, 'sequence')} took {number(longer)} times as long as one of {small.batch}, so "
        f"that tokens/s rose {number(gain)}-fold"
    )
    if gain >= _BATCHES * possible:
        why = "A step reads the weights once, whatever the number of sequences"
        share = small.figures.weight_byte_share
        if share is not None:
            why += f"; they are {percent(share)} of the bytes at batch {small.batch}"
        text = f"Decode batches: {took}. {why}."
        yield Fact(Topic.DECODE_BATCHES, True, text, Provenance.MEASURED)
        return
    text = (
        f"Decode batches badly here: {took}, of {number(possible)} that are possible. "
        f"{_why_not(large.figures)}"
    )
    yield Fact(Topic.DECODE_BATCHES, False, text, Provenance.MEASURED)


def _why_not(large: PhaseFigures) -> str:
    """What stands in the way of a larger batch, by the figures of the largest one."""
    share = large.weight_byte_share
    if large.bound is Bound.COMPUTE:
        return "It is compute-bound at that batch already."
    if large.bound is Bound.BANDWIDTH and share is not None and share < 0.5:
        return f"{percent(1 - share)} of the bytes are keys and values at that batch, and each sequence reads its own."
    return f"At that batch it is bound by {large.bound.value}, and not by what all sequences share."


def _prefill_batches(ends: tuple[_End, _End] | None) -> Iterator[Fact]:
    if ends is None:
        return
    small, large = ends
    change = large.tokens_per_s / small.tokens_per_s - 1
    rates = (
        f"{number(small.tokens_per_s)} prompt tokens/s at batch {small.batch}, {number(large.tokens_per_s)} at batch "
        f"{large.batch}"
    )
    if change > _SAME:
        text = (
            f"Prefill batches as well here: {rates}. One prompt of {number(_tokens_each(small.figures))} tokens does "
            "not fill the device."
        )
    elif change < -_SAME:
        text = (
            f"Prefill does not batch: {rates}; a larger batch even costs: look at padding and at the memory that it "
            "takes."
        )
    else:
        text = (
            f"Prefill does not batch: {rates}; a prompt alone has tokens enough to fill the device."
        )
    yield Fact(Topic.PREFILL_BATCHES, abs(change) <= _SAME, text, Provenance.MEASURED)


def _tokens_each(figures: PhaseFigures) -> float:
    sequences = figures.sequences_per_pass * figures.passes
    return figures.prefill_tokens / sequences if sequences else 0.0


def _speculation(passes: pa.Table, primary: Primary) -> Iterator[Fact]:
    """Verify steps: what they compute for one read of the weights."""
    if not total(column(passes, "draft_tokens")):
        return
    steady = steady_passes(passes.select(_READ), primary)
    verify = steady.filter(
        pc.and_(
            named(names(steady, "phase"), Phase.DECODE.value),
            pc.greater(column(steady, "draft_tokens"), scalar(0, pa.int64())),
        )
    )
    if verify.num_rows == 0 or any(verify.column(name).null_count for name in ("flops", *_MOVED)):
        return
    flops = total(column(verify, "flops"))
    moved = sum(total(column(verify, name)) for name in _MOVED)
    tokens = total(column(verify, "decode_tokens"))
    plain = tokens - total(column(verify, "draft_tokens"))
    if not moved or not plain:
        return
    each = tokens / plain
    intensity = flops / moved
    yield Fact(
        Topic.SPECULATION,
        True,
        f"Speculation raises FLOPs per byte: {count(verify.num_rows, 'verify step')} computed {number(each)} tokens a "
        f"sequence for one read of the weights, {number(intensity)} FLOPs a byte, where one token a sequence has "
        f"{number(intensity / each)}.",
        Provenance.MODELLED,
    )


def _short_work(phases: Mapping[str, PhaseFigures]) -> Iterator[Fact]:
    """The phase that is furthest from its roofs, if it is bound by overhead."""
    short = [
        (figures.verdict.explained, figures)
        for figures in phases.values()
        if figures.bound is Bound.OVERHEAD
        and figures.verdict.explained is not None
        and figures.verdict.explained < _SHORT
    ]
    if not short:
        return
    explained, figures = min(short, key=lambda each: each[0])
    needed_s = figures.pass_ms_p50 / 1e3 * explained
    yield Fact(
        Topic.SHORT_WORK,
        True,
        f"Short work is overhead-bound: a {figures.phase.value} pass needs {duration(needed_s)} at the roofs and takes "
        f"{duration(figures.pass_ms_p50 / 1e3)}; less to compute or to read would not make it faster.",
        Provenance.MODELLED,
    )


def _one_phase(phases: Mapping[str, PhaseFigures], requests: int) -> Iterator[Fact]:
    """Runs without decode. A recording of some passes that knows no requests may have missed it."""
    seen = {figures.phase for figures in phases.values()}
    if not seen or seen & {Phase.DECODE, Phase.MIXED, Phase.EXTEND}:
        return
    if Phase.ENCODE in seen and Phase.PREFILL not in seen:
        text = "There is no decode phase: an encoder computes all tokens of its input at once, as a prefill does."
    elif seen == {Phase.OTHER}:
        text = "There is neither prefill nor decode: training and scoring generate nothing."
    elif Phase.PREFILL in seen and requests:
        text = "There is no decode phase: each request ended with the token that its prefill yields, or before."
    else:
        return
    yield Fact(Topic.ONE_PHASE, True, text, Provenance.COUNTED)
