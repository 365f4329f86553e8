"""The answer first: what an engineer would say of a run, in a few sentences.

Each line of the answer stands alone. A figure in it is measured or counted unless the sentence says "modelled".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.passes import SortedPasses, Status
from phaseprof.analyzers.phases import Basis
from phaseprof.analyzers.requests import RequestAnalysis
from phaseprof.analyzers.results import Bound, Confidence, PhaseFigures, RunFacts
from phaseprof.analyzers.roofline import batch_cost_ratio
from phaseprof.analyzers.served import Served, serving_sentences
from phaseprof.analyzers.wording import (
    byte_rate,
    count,
    data,
    duration,
    flop_rate,
    in_words,
    joined,
    number,
    pass_noun,
    percent,
    roof_origin,
    sentence,
)
from phaseprof.phases import Phase

#: Batch factors that the modelled sentence tries, the boldest first.
_BATCH_FACTORS = (8, 4, 2)
#: Phases that are left out of the sentences when they take little of the time.
_MINOR = (Phase.OTHER, Phase.EXTEND, Phase.ENCODE)


@dataclass(frozen=True, slots=True)
class Findings:
    """All that the sentences draw on.

    Attributes:
        facts: What was profiled.
        phases, by_batch: As in `Report`.
        requests: Latencies, and what has to be said of them.
        passes: What counts and what does not.
        basis: Cost and roofs.
        other_share: Share of the time of all passes in other models.
        served: How a serving engine served its requests; None if that was not looked at.
    """

    facts: RunFacts
    phases: Mapping[str, PhaseFigures]
    by_batch: Mapping[int, Mapping[str, PhaseFigures]]
    requests: RequestAnalysis
    passes: SortedPasses
    basis: Basis
    other_share: float
    served: Served | None = None


def answer(findings: Findings) -> tuple[str, ...]:
    """The lines of the answer, most important first: verdicts by share of the time, lever, then what to be wary of."""
    if not findings.phases:
        return (_nothing_steady(findings), *_notes(findings))
    told = sorted(
        (f for f in findings.phases.values() if not _is_minor(f)),
        key=lambda f: f.share,
        reverse=True,
    )
    lines = [_verdict(figures, findings.basis) for figures in told]
    if told:
        lines.append(_time_and_lever(told[0], findings))
    return (
        *lines,
        *_missing_phases(findings),
        *_mixed(findings),
        *serving_sentences(findings.served),
        *_notes(findings),
    )


def _is_minor(figures: PhaseFigures) -> bool:
    return figures.phase in _MINOR and figures.share < thresholds.OTHER_MODELS.value


# --- one phase ------------------------------------------------------------------------------------


def _verdict(figures: PhaseFigures, basis: Basis) -> str:
    """The class of one phase and the figures that show it."""
    name = figures.phase.value.capitalize()
    verdict = figures.verdict
    if verdict.ruling:
        text = f"{name} takes {_takes(figures, article=True)} and is {figures.bound}-bound."
        return " ".join(filter(None, [text, sentence(verdict.ruling), verdict.excess]))
    tell = {
        Bound.COMPUTE: _compute,
        Bound.BANDWIDTH: _bandwidth,
        Bound.OVERHEAD: _overhead,
        Bound.LATENCY: _latency,
        Bound.COMMUNICATION: _communication,
        Bound.OVERHEAD_OR_LATENCY: _overhead_or_latency,
        Bound.UNKNOWN: _unknown,
    }[figures.bound]
    return " ".join(filter(None, [f"{name} {tell(figures, basis)}", figures.verdict.excess]))


def _compute(figures: PhaseFigures, basis: Basis) -> str:
    roofs = basis.ceilings
    assert roofs is not None and figures.tflops is not None and figures.mfu is not None
    tokens = number(round(figures.tokens / figures.passes))
    noun = pass_noun(figures.phase)
    kind = "prompt tokens" if figures.phase is Phase.PREFILL else "tokens"
    if figures.passes == 1:
        passes = f"A {noun} of {tokens} {kind} runs"
    else:
        passes = f"{'Passes' if noun == 'pass' else 'Steps'} of {tokens} {kind} run"
    return (
        f"is compute-bound. {passes} at {flop_rate(figures.tflops * 1e12)}: {percent(figures.mfu)} of the "
        f"{flop_rate(roofs.flops_per_s)} {roof_origin(roofs)}."
    )


def _bandwidth(figures: PhaseFigures, basis: Basis) -> str:
    roofs = basis.ceilings
    assert roofs is not None and figures.gb_per_s is not None and figures.mbu is not None
    moved = figures.gb_per_s * 1e9 * _pass_s(figures)
    weights = figures.weight_byte_share
    of_it = "" if weights is None else f" ({percent(weights)} of it weights)"
    return (
        f"is bandwidth-bound. Each {pass_noun(figures.phase)} moves {data(moved)}{of_it} at "
        f"{byte_rate(figures.gb_per_s * 1e9)}: {percent(figures.mbu)} of the {byte_rate(roofs.bytes_per_s)} "
        f"{roof_origin(roofs)}."
    )


def _overhead(figures: PhaseFigures, basis: Basis) -> str:
    rest = (
        ", Python and the framework the rest"
        if basis.device_kind == "cpu"
        else " and waits for the host the rest"
    )
    text = f"is overhead-bound. {_works(figures, basis)}{rest}"
    return text + _roof_clause(figures, "; the nearer roof ({roof}) needs {need}.", ".")


def _latency(figures: PhaseFigures, basis: Basis) -> str:
    return f"is latency-bound. {_works(figures, basis)}" + _roof_clause(
        figures,
        ", but the nearer roof ({roof}) explains only {share}: its kernels are small or inefficient.",
        ".",
    )


def _works(figures: PhaseFigures, basis: Basis) -> str:
    """How much of a pass the device works; on a CPU, how much of it operators run."""
    busy = 0.0 if figures.busy_ms is None else figures.busy_ms / figures.span_ms
    who = "Operators run" if basis.device_kind == "cpu" else "The device works"
    return f"{who} {percent(busy)} of a {_takes(figures)}"


def _overhead_or_latency(figures: PhaseFigures, basis: Basis) -> str:
    return (
        "is bound by overhead or latency."
        + _roof_clause(figures, " The nearer roof ({roof}) explains only {share} of a ", " A ")
        + f"{_takes(figures)}; whether the device idles in the rest (overhead) or runs slow kernels (latency) was not "
        "measured."
    )


def _communication(figures: PhaseFigures, basis: Basis) -> str:
    text = f"is communication-bound. Exposed collectives take more of a {_takes(figures)}"
    return text + _roof_clause(
        figures, " than the nearer roof ({roof}, {share}).", " than the roofs."
    )


def _unknown(figures: PhaseFigures, basis: Basis) -> str:
    rates = []
    if figures.prompt_tokens_per_s is not None:
        rates.append(f"{number(figures.prompt_tokens_per_s)} prompt tokens/s")
    if figures.output_tokens_per_s is not None:
        rates.append(f"{number(figures.output_tokens_per_s)} output tokens/s")
    speed = f", {joined(rates)}" if rates else ""
    reason = figures.verdict.evidence[0].text if figures.verdict.evidence else ""
    reason = reason[:1].lower() + reason[1:] if not reason[1:2].isupper() else reason
    return f"takes {_takes(figures, article=True)}{speed}. What bounds it is not known: {reason}"


def _pass_s(figures: PhaseFigures) -> float:
    return figures.span_ms / figures.passes / 1e3


def _takes(figures: PhaseFigures, *, article: bool = False) -> str:
    noun = pass_noun(figures.phase)
    time = duration(_pass_s(figures))
    return f"{time} a {noun}" if article else f"{noun} of {time}"


def _roof_clause(figures: PhaseFigures, known: str, unknown: str) -> str:
    verdict = figures.verdict
    if verdict.nearest_roof is None or verdict.explained is None:
        return unknown
    return known.format(
        roof=verdict.nearest_roof.value,
        share=percent(verdict.explained),
        need=duration(verdict.explained * _pass_s(figures)),
    )


# --- where the time goes, and what to do ----------------------------------------------------------


def _time_and_lever(largest: PhaseFigures, findings: Findings) -> str:
    phase = largest.phase.value
    if largest.share >= 1:
        text = f"All of the time is {phase}."
    else:
        text = f"{sentence(percent(largest.share))[:-1]} of the time is {phase}."
    first = largest.verdict.lever
    if first is None or largest.bound is Bound.UNKNOWN:
        return text
    how = sentence(first.how)
    if first.name == "batch":
        how = _measured_batch(findings) or _modelled_batch(largest, findings) or how
    return f"{text} First lever: {first.name}. {how}"


def _measured_batch(findings: Findings) -> str:
    """What larger batches did in this very run, where it had several."""
    sizes = [n for n, phases in findings.by_batch.items() if Phase.DECODE in phases]
    if len(sizes) < 2:
        return ""
    small, large = min(sizes), max(sizes)
    before = findings.by_batch[small][Phase.DECODE]
    after = findings.by_batch[large][Phase.DECODE]
    if not before.output_tokens_per_s or not after.output_tokens_per_s:
        return ""
    dearer = after.pass_ms_p50 / before.pass_ms_p50
    faster = after.output_tokens_per_s / before.output_tokens_per_s
    return (
        f"A step of {in_words(large)} sequences took {number(_two_digits(dearer))}x the time of a step of "
        f"{in_words(small)}, at {number(_two_digits(faster))}x the output tokens/s (measured)."
    )


def _modelled_batch(decode: PhaseFigures, findings: Findings) -> str:
    """What a larger batch would cost by the roofs; empty where the model does not hold or the gain is small."""
    cost, roofs = findings.basis.cost, findings.basis.ceilings
    moved = (decode.weight_bytes, decode.kv_read_bytes, decode.kv_write_bytes)
    sound = (
        decode.phase is Phase.DECODE
        and cost is not None
        and cost.covered
        and roofs is not None
        and decode.flops is not None
        and decode.gb_per_s is not None
        and None not in moved
        # Where the roofs do not hold, or several batches are pooled, they cannot foretell another batch.
        and (decode.verdict.explained or 0.0) <= 1
        and not findings.by_batch
    )
    if not sound:
        return ""
    assert cost is not None and roofs is not None
    assert decode.flops is not None and decode.gb_per_s is not None
    per_step = decode.gb_per_s * 1e9 * _pass_s(decode)
    fixed = float(cost.body_weight_bytes + cost.head_weight_bytes)
    if fixed > per_step:
        return ""
    now = max(round(decode.sequences_per_pass), 1)
    for factor in _BATCH_FACTORS:
        ratio = batch_cost_ratio(
            flops=decode.flops / decode.passes,
            fixed_bytes=fixed,
            per_sequence_bytes=per_step - fixed,
            factor=factor,
            ceilings=roofs,
        )
        if factor / ratio >= thresholds.BATCH_GAIN.value:
            instead = "" if now == 1 else f" in place of {in_words(now)}"
            return sentence(
                f"{in_words(now * factor)} sequences{instead} would read the same weights once and cost about "
                f"{number(_two_digits(ratio))}x a step (modelled)"
            )
    return ""


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


# --- what to be wary of ---------------------------------------------------------------------------


def _missing_phases(findings: Findings) -> Iterator[str]:
    """Say why prefill or decode has no row."""
    present = findings.phases
    if Phase.MIXED in present:
        return
    requests = findings.requests.figures
    for phase in (Phase.DECODE, Phase.PREFILL):
        other = Phase.PREFILL if phase is Phase.DECODE else Phase.DECODE
        if phase in present or other not in present:
            continue
        noun = pass_noun(phase)
        seen = findings.passes.seen.get(phase, 0)
        if seen:
            yield (
                f"No steady {phase} {noun} is left: {count(seen, noun)} of it were warm-up, profiled or failed, "
                "and are set aside."
            )
        elif phase is Phase.PREFILL:
            yield "No prefill pass was seen: recording began after it, or the prompts were wholly in the cache."
        elif requests.count and requests.tpot_ms is None and requests.unfinished == 0:
            yield "There is no decode: every request ended with its first token."
        else:
            yield "No decode step was seen."


def _mixed(findings: Findings) -> Iterator[str]:
    """What mixed steps do to decode."""
    mixed, decode = findings.phases.get(Phase.MIXED), findings.phases.get(Phase.DECODE)
    if mixed is None:
        return
    again = mixed.recomputed_tokens / mixed.tokens if mixed.tokens else 0.0
    if again >= thresholds.DOMINANT.value:
        yield (
            f"{percent(again)} of the tokens in mixed steps are computed again: the run had no KV cache, or its "
            "requests were preempted."
        )
    elif decode is not None:
        yield (
            f"A token that is decoded in a mixed step waits {duration(mixed.pass_ms_p50 / 1e3)}, against "
            f"{duration(decode.pass_ms_p50 / 1e3)} in a step of decode alone."
        )


def _notes(findings: Findings) -> Iterator[str]:
    """What the reader has to know before believing the figures."""
    doubts: dict[str, list[str]] = {}
    for figures in findings.phases.values():
        verdict = figures.verdict
        if verdict.confidence is Confidence.LOW and verdict.doubt and not _is_minor(figures):
            doubts.setdefault(verdict.doubt, []).append(figures.phase.value)
    for doubt, phases in doubts.items():
        yield f"Low confidence in what bounds {joined(phases)}: {doubt[:1].lower()}{doubt[1:]}"
    if findings.passes.failed:
        failed = sum(s.passes for s in findings.passes.set_aside if s.reason == Status.ERROR.reason)
        verb = "was" if failed == 1 else "were"
        yield (
            f"{count(failed, 'pass')} {verb} ended by an error ({', '.join(findings.passes.failed)}), not counted here."
        )
    facts = findings.facts
    if facts.incomplete:
        yield (
            f"The end of {facts.incomplete} of {count(facts.processes, 'process')} is not in the trace: cut off, or "
            "still running. At most the last second before it is missing."
        )
    if findings.other_share >= thresholds.OTHER_MODELS.value:
        names = f" ({', '.join(facts.models)})" if facts.models else ""
        yield f"{percent(findings.other_share)} of the time of all passes is in other models{names}, not counted here."
    if findings.requests.unsteady:
        yield f"All requests {findings.requests.unsteady}; their latencies are shown for want of others."


def _nothing_steady(findings: Findings) -> str:
    aside = findings.passes.set_aside
    parts = [f"{count(s.passes, 'pass')} {_reason(s.reason)}" for s in aside]
    what = f": {joined(parts)}" if parts else ""
    return f"No steady pass was recorded{what}. Run longer, or without warm-up, to see what bounds this model."


def _reason(reason: str) -> str:
    return {
        Status.REQUESTED.reason: "of requested warm-up",
        Status.FIRST.reason: "of cold start",
        Status.COMPILE.reason: "with compilation",
        Status.PROFILED.reason: "under a collector",
        Status.ERROR.reason: "with an error",
    }[reason]
