"""What sets prefill and decode apart, where this run shows it, and where it shows the opposite.

Decode gains from batching since a step reads the weights once for all sequences; prefill does not, since one prompt
fills the device already. Verifying drafts computes more for the same reads. Work that is too short for the device is
bound by what launches it. An encoder has no decode at all. Each is said with the run's own figures, or not at all.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, named, names, scalar, total
from phaseprof.analyzers.passes import Primary, steady_passes
from phaseprof.analyzers.results import Bound, PhaseFigures, Provenance
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
) -> tuple[Fact, ...]:
    """The facts that a run shows.

    Args:
        phases: Figures by phase.
        by_batch: The same by number of sequences.
        passes: The `passes` table, for drafts.
        primary: Which model.
        requests: Requests that are known to have ended.
    """
    return (
        *_one_phase(phases, requests),
        *_decode_batches(by_batch),
        *_prefill_batches(by_batch),
        *_speculation(passes, primary),
        *_short_work(phases),
    )


def _extremes(
    by_batch: Mapping[int, Mapping[str, PhaseFigures]], phase: Phase
) -> tuple[tuple[int, PhaseFigures], tuple[int, PhaseFigures]] | None:
    """The smallest and the largest batch of a phase, if these are far enough apart."""
    found = [(n, by_batch[n][phase.value]) for n in sorted(by_batch) if phase.value in by_batch[n]]
    found = [(n, figures) for n, figures in found if n > 0 and figures.pass_ms_p50 > 0]
    if len(found) < 2 or found[-1][0] < _FACTOR * found[0][0]:
        return None
    return found[0], found[-1]


def _decode_batches(by_batch: Mapping[int, Mapping[str, PhaseFigures]]) -> Iterator[Fact]:
    ends = _extremes(by_batch, Phase.DECODE)
    if ends is None:
        return
    (few, small), (many, large) = ends
    longer = large.pass_ms_p50 / small.pass_ms_p50
    gain = many / few / longer
    took = (
        f"a step of {count(many, 'sequence')} took {number(longer)} times as long as one of {few}, so that tokens/s "
        f"rose {number(gain)}-fold"
    )
    if gain >= _BATCHES * many / few:
        why = "a step reads the weights once, whatever the number of sequences"
        share = small.weight_byte_share
        if share is not None:
            why += f"; they are {percent(share)} of the bytes at batch {few}"
        yield Fact(
            Topic.DECODE_BATCHES,
            True,
            f"Decode batches: {took}. {_capital(why)}.",
            Provenance.MEASURED,
        )
        return
    yield Fact(
        Topic.DECODE_BATCHES,
        False,
        f"Decode batches badly here: {took}, of {number(many / few)} that are possible. {_why_not(large)}",
        Provenance.MEASURED,
    )


def _why_not(large: PhaseFigures) -> str:
    """What stands in the way of a larger batch, by the figures of the largest one."""
    share = large.weight_byte_share
    if large.bound is Bound.COMPUTE:
        return "It is compute-bound at that batch already."
    if large.bound is Bound.BANDWIDTH and share is not None and share < 0.5:
        return f"{percent(1 - share)} of the bytes are keys and values at that batch, and each sequence reads its own."
    return f"At that batch it is bound by {large.bound.value}, and not by what all sequences share."


def _prefill_batches(by_batch: Mapping[int, Mapping[str, PhaseFigures]]) -> Iterator[Fact]:
    ends = _extremes(by_batch, Phase.PREFILL)
    if ends is None:
        return
    (few, small), (many, large) = ends
    before, after = small.prompt_tokens_per_s, large.prompt_tokens_per_s
    if not before or not after:
        return
    change = after / before - 1
    rates = f"{number(before)} prompt tokens/s at batch {few}, {number(after)} at batch {many}"
    if change <= _SAME:
        why = "a prompt alone has tokens enough to fill the device"
        if change < -_SAME:
            why = "a larger batch even costs: look at padding and at the memory that it takes"
        yield Fact(
            Topic.PREFILL_BATCHES,
            change >= -_SAME,
            f"Prefill does not batch: {rates}; {why}.",
            Provenance.MEASURED,
        )
        return
    yield Fact(
        Topic.PREFILL_BATCHES,
        False,
        f"Prefill batches as well here: {rates}. One prompt of {number(_tokens_each(small))} tokens does not fill the "
        "device.",
        Provenance.MEASURED,
    )


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


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
