"""What a setting would do to a measured run: new latencies, throughput and bound, each with its interval.

An outcome is worked out three times: with the likely, the best and the worst of what is not known. How a step changes
is in `phaseprof.analyzers.what_if.after`; here it becomes the latencies of requests and the throughput of the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from phaseprof.analyzers.bound import classify
from phaseprof.analyzers.results import Bound
from phaseprof.analyzers.what_if import explain, speculation
from phaseprof.analyzers.what_if.after import StepAfter, step_after
from phaseprof.analyzers.what_if.changes import Setting
from phaseprof.analyzers.what_if.conversions import Case
from phaseprof.analyzers.what_if.measured import Measured
from phaseprof.analyzers.what_if.memory import memory_bytes
from phaseprof.analyzers.what_if.results import Interval, Outcome
from phaseprof.analyzers.what_if.work import chunk_after, factors, roofs_of
from phaseprof.phases import Phase


def evaluate(measured: Measured, setting: Setting, title: str = "") -> Outcome:
    """What a setting would do.

    Args:
        measured: A run of which nothing is missing.
        setting: What is different. Whether it can be is a question for `phaseprof.analyzers.what_if.limits`.
        title: How to call it.
    """
    likely, best, worst = (_run(measured, setting, case) for case in Case)
    before = _run(measured, Setting(), Case.LIKELY)
    tokens = [run.tokens_per_s for run in (likely, best, worst)]
    most = _most_changed(likely.steps)
    size = memory_bytes(measured, setting)
    device = setting.device or measured.hardware
    return Outcome(
        title=title,
        ttft_ms=_interval([run.ttft_ms for run in (likely, best, worst)]),
        tpot_ms=_interval([run.tpot_ms for run in (likely, best, worst)]),
        itl_ms=_interval([run.itl_ms for run in (likely, best, worst)]),
        tokens_per_s=Interval.over(*tokens),
        gain=Interval.over(*(value / before.tokens_per_s for value in tokens)),
        phase=most.step.phase.value,
        bound=_bound(measured, setting, most),
        memory_bytes=size,
        fits=None if device.memory_bytes is None else size <= device.memory_bytes,
        terms=tuple(explain.terms(measured, setting, likely.steps, likely.yielded)),
        notes=tuple(explain.notes(measured, setting)),
    )


def _most_changed(steps: tuple[StepAfter, ...]) -> StepAfter:
    """The phase whose time changes most; of an unchanged run the one with the most time."""
    return max(steps, key=lambda each: abs(each.step_s - each.step.step_s) * each.step.passes)


def _interval(values: list[float | None]) -> Interval | None:
    known = [value for value in values if value is not None]
    return Interval.over(*known) if known else None


@dataclass(frozen=True, slots=True)
class Run:
    """A run under a setting, in one case.

    Attributes:
        steps: Its phases.
        ttft_ms, tpot_ms, itl_ms, tokens_per_s: As in `Outcome`.
        yielded: What a decode step yields for each sequence.
    """

    steps: tuple[StepAfter, ...]
    ttft_ms: float | None
    tpot_ms: float | None
    itl_ms: float | None
    tokens_per_s: float
    yielded: float


def _run(measured: Measured, setting: Setting, case: Case) -> Run:
    steps = tuple(step_after(measured, setting, step, case) for step in measured.steps)
    told = speculation.yielded(measured, setting, case.value)
    return Run(
        steps=steps,
        ttft_ms=_ttft_ms(measured, setting, steps),
        tpot_ms=_tpot_ms(measured, setting, steps, told, case),
        itl_ms=next(
            (
                (each.step_s + each.between_s) * 1e3
                for each in steps
                if each.step.phase is Phase.MIXED and setting.chunk_tokens is not None
            ),
            None,
        ),
        tokens_per_s=_tokens_per_s(measured, setting, steps, told, case),
        yielded=told,
    )


# --- a request, and the whole run -----------------------------------------------------------------


def _ttft_ms(measured: Measured, setting: Setting, steps: tuple[StepAfter, ...]) -> float | None:
    """What lies in steps that prefill changes as these do; waiting and the rest stay as they are."""
    ttft = measured.ttft_ms
    prefilling = [each for each in steps if each.step.prefill_tokens and each.step.step_s]
    whole = sum(each.step.prefill_tokens * each.step.passes for each in prefilling)
    if ttft is None or not whole:
        return ttft
    change = 0.0
    for each in prefilling:
        chunks = 1.0
        if each.step.phase is Phase.MIXED and setting.chunk_tokens is not None:
            chunks = each.step.prefill_tokens / chunk_after(measured, setting, each.step)
        share = each.step.prefill_tokens * each.step.passes / whole
        change += share * (chunks * each.step_s / each.step.step_s - 1)
    inside = ttft - min(measured.queue_ms, ttft)
    if len(prefilling) == 1 and prefilling[0].step.phase is Phase.PREFILL:
        inside = min(inside, prefilling[0].step.step_s * 1e3)
    return ttft + inside * change


def _passes(measured: Measured, setting: Setting, yielded: float) -> dict[Phase, float]:
    """Steps of each phase for the same prompts and the same output. Prompts decide how many mixed steps there are; what
    these do not decode is left to steps of decode alone."""
    before = speculation.yielded(measured, Setting(), Case.LIKELY.value)
    found: dict[Phase, float] = {}
    left = 0.0
    decode = measured.step(Phase.DECODE)
    if decode is not None:
        left = decode.passes * decode.sequences * before
    for step in measured.steps:
        sequences = factors(measured, setting, step).sequences
        found[step.phase] = step.passes / sequences
        if step.phase is Phase.MIXED and step.prefill_tokens and decode is not None:
            steps = step.passes * step.prefill_tokens / chunk_after(measured, setting, step)
            found[step.phase] = steps
            left += (step.passes - steps * sequences) * step.decode_tokens
    if decode is not None:
        sequences = factors(measured, setting, decode).sequences
        found[Phase.DECODE] = max(left, 0.0) / (decode.sequences * sequences * yielded)
    return found


def _tpot_ms(
    measured: Measured,
    setting: Setting,
    steps: tuple[StepAfter, ...],
    yielded: float,
    case: Case,
) -> float | None:
    """The mean step that a token waits for, over what it yields; what is measured beyond it stays."""
    tpot = measured.tpot_ms
    decoding = [each for each in steps if each.step.decode_tokens]
    if tpot is None or not decoding:
        return tpot
    yielded_before = speculation.yielded(measured, Setting(), Case.LIKELY.value)
    was = _mean_step_s(measured, Setting(), decoding, yielded_before, before=True) * 1e3
    then = _mean_step_s(measured, setting, decoding, yielded, before=False) * 1e3
    change = then - was
    whole = tpot * yielded_before
    if was > whole:
        # The median request had faster steps than the mean step.
        change *= whole / was
    change += speculation.draft_s(measured, setting, case.value) * 1e3
    return max(tpot + change / yielded_before, 0.0) * (yielded_before / yielded)


def _mean_step_s(
    measured: Measured,
    setting: Setting,
    decoding: list[StepAfter],
    yielded: float,
    *,
    before: bool,
) -> float:
    """The mean over the steps in which a sequence decodes."""
    passes = _passes(measured, setting, yielded)
    whole = sum(passes[each.step.phase] for each in decoding)
    return sum(
        passes[each.step.phase] / whole * (each.step.step_s if before else each.step_s)
        for each in decoding
    )


def _tokens_per_s(
    measured: Measured,
    setting: Setting,
    steps: tuple[StepAfter, ...],
    yielded: float,
    case: Case,
) -> float:
    """The tokens of the run over the time that it would take."""
    passes = _passes(measured, setting, yielded)
    before = speculation.yielded(measured, Setting(), Case.LIKELY.value)
    drafting = speculation.draft_s(measured, setting, case.value)
    seconds = output = prompt = 0.0
    for each in steps:
        step = each.step
        more = drafting if step.phase is Phase.DECODE else 0.0
        seconds += passes[step.phase] * max(each.step_s + each.between_s + more, 0.0)
        plain = step.phase is not Phase.DECODE
        output += step.passes * (step.decode_tokens if plain else step.sequences * before)
        prompt += step.passes * step.prefill_tokens
    tokens = output or prompt or float(sum(step.passes for step in measured.steps))
    return tokens / seconds if seconds else 0.0


def _bound(measured: Measured, setting: Setting, after: StepAfter) -> Bound:
    """The class by the rules of `bound`, of the step as it would be."""
    step = after.step
    now = (after.step_s, after.device_s, after.comm_s)
    if now == (step.step_s, step.device_s, step.comm_s):
        return step.bound
    roofs = roofs_of(measured, setting)
    # FLOPs at a narrower peak count as fewer, so that one pair of roofs says what both say.
    verdict = classify(
        time_s=after.step_s,
        flops=after.roofs.compute_s * roofs.flops_per_s,
        bytes=after.roofs.memory_s * roofs.bytes_per_s,
        ceilings=roofs,
        busy_share=None if after.idle_s is None else 1 - after.idle_s / after.step_s,
        exposed_comm_share=after.comm_s / after.step_s if after.comm_s else None,
        phase=step.phase,
    )
    return verdict.bound
