"""Whose time a mixed step is, and what another size of chunks would do: modelled, each with an interval.

A mixed step of time T reads the weights once for the tokens of prefill and those of decode, so that no part of T is
either's alone. Two figures bound what is decode's: what decode would take in a step of its own, D, and what it adds to
a step of prefill, T - P. Which one is fair is a matter of who is thought to come first; their mean counts both orders
alike (the value of Shapley, 1953, for two). The interval spans both, and the error of the fit.

P and D are those of `step_fit`, which is fitted to the steps of the run, scaled so that it gives this step its T.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from phaseprof.analyzers.steps.pass_rows import PassRows
from phaseprof.analyzers.steps.step_fit import StepFit, fit_steps
from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings
from phaseprof.work.cost import ModelCost
from phaseprof.work.count import Rows

#: Mixed steps from which on they are split.
_ENOUGH = 3
#: Chunks that are modelled, as parts of the present one.
_FACTORS = (0.25, 0.5, 1.0, 2.0)
_LEAST_CHUNK = 16


@dataclass(frozen=True, slots=True)
class ChunkEffect:
    """What chunks of one size do, modelled.

    Attributes:
        chunk_tokens: Tokens of a chunk.
        present: Whether this is the size that the run had.
        itl_ms: Time of a step with such a chunk beside the typical decode: the inter-token latency of those that decode
            meanwhile. itl_low_ms, itl_high_ms: Its 90 % interval.
        ttft_ms: Time of the steps that a typical prompt takes, one after the other, without waiting.
        ttft_low_ms, ttft_high_ms: Its 90 % interval.
    """

    chunk_tokens: int
    present: bool
    itl_ms: float
    itl_low_ms: float
    itl_high_ms: float
    ttft_ms: float
    ttft_low_ms: float
    ttft_high_ms: float


@dataclass(frozen=True, slots=True)
class MixedSplit:
    """The time of mixed steps, split between the tokens of prefill and those of decode.

    Attributes:
        steps: Mixed steps that were split.
        step_ms: Time of one of them, mean.
        decode_ms: What of it is decode's, mean; the rest is prefill's.
        decode_low_ms, decode_high_ms: Its 90 % interval.
        prefill_tokens, decode_tokens: Of a step, mean.
        error: Relative error that 90 % of the fitted passes stay within.
        fitted: Passes that the model was fitted to.
        prompt_tokens: The prompt that `chunks` are worked out for: the median of those in mixed steps.
        chunks: The effect of other sizes of chunks, by size; empty where no prompt was in several chunks or could be.
    """

    steps: int
    step_ms: float
    decode_ms: float
    decode_low_ms: float
    decode_high_ms: float
    prefill_tokens: float
    decode_tokens: float
    error: float
    fitted: int
    prompt_tokens: int
    chunks: tuple[ChunkEffect, ...]

    @property
    def prefill_ms(self) -> float:
        """What of a step is prefill's."""
        return self.step_ms - self.decode_ms


@dataclass(frozen=True, slots=True)
class Part:
    """What of one step's seconds is decode's, and the interval of it."""

    decode_s: float
    low_s: float
    high_s: float


def split_mixed(
    rows: Mapping[Phase, Sequence[PassRows]],
    cost: ModelCost | None,
    ceilings: Ceilings | None,
) -> MixedSplit | None:
    """Split the mixed steps of a run; None where there are too few, or too few steps to fit a model to.

    Args:
        rows: Passes by phase.
        cost, ceilings: Structure and roofs, if they are known.
    """
    mixed = [each for each in rows.get(Phase.MIXED, ()) if each.prefill and each.decode]
    if len(mixed) < _ENOUGH:
        return None
    every = [each for phase in _FITTED for each in rows.get(phase, ())]
    fit = fit_steps(every, cost, ceilings)
    if fit is None:
        return None
    parts = [split_step(fit, each) for each in mixed]
    number = len(mixed)

    def mean_ms(values: Iterator[float]) -> float:
        return sum(values) / number * 1e3

    prompts = [prompt for each in mixed for prompt in each.prompts]
    prompt = round(median(prompts)) if prompts else 0
    return MixedSplit(
        steps=number,
        step_ms=mean_ms(each.span_ns / 1e9 for each in mixed),
        decode_ms=mean_ms(part.decode_s for part in parts),
        decode_low_ms=mean_ms(part.low_s for part in parts),
        decode_high_ms=mean_ms(part.high_s for part in parts),
        prefill_tokens=sum(each.prefill_tokens for each in mixed) / number,
        decode_tokens=sum(each.decode_tokens for each in mixed) / number,
        error=fit.error,
        fitted=fit.passes,
        prompt_tokens=prompt,
        chunks=tuple(_chunks(fit, mixed, prompt)),
    )


_FITTED = (Phase.PREFILL, Phase.DECODE, Phase.MIXED)


def split_step(fit: StepFit, step: PassRows) -> Part:
    """What of a mixed step's time is decode's.

    Args:
        fit: The model of the run's steps.
        step: A step with rows of both kinds.
    """
    whole_s = step.span_ns / 1e9
    modelled_s = fit.time_s(step.prefill, step.decode)
    scale = whole_s / modelled_s if modelled_s else 0.0
    alone_s = scale * fit.time_s((), step.decode)
    added_s = whole_s - scale * fit.time_s(step.prefill, ())
    slack_s = fit.error * whole_s / 2
    low, high = sorted((alone_s, added_s))
    return Part(
        decode_s=_within((low + high) / 2, whole_s),
        low_s=_within(low - slack_s, whole_s),
        high_s=_within(high + slack_s, whole_s),
    )


def _within(value: float, most: float) -> float:
    return min(max(value, 0.0), most)


def _chunks(fit: StepFit, mixed: Sequence[PassRows], prompt: int) -> Iterator[ChunkEffect]:
    present = max(each.prefill_tokens for each in mixed)
    if prompt < 2 * _LEAST_CHUNK or present < _LEAST_CHUNK:
        return
    # Beside the decode of the step that has the median of decode tokens.
    ordered = sorted(mixed, key=lambda each: each.decode_tokens)
    decode = ordered[len(ordered) // 2].decode
    for factor in _FACTORS:
        chunk = round(present * factor)
        if chunk < _LEAST_CHUNK or (factor > 1 and present >= prompt):
            continue
        steps = [fit.time_s((row,), decode) for row in _in_chunks(prompt, chunk)]
        itl_ms, ttft_ms = max(steps) * 1e3, sum(steps) * 1e3
        yield ChunkEffect(
            chunk_tokens=chunk,
            present=factor == 1.0,
            itl_ms=itl_ms,
            itl_low_ms=itl_ms * (1 - fit.error),
            itl_high_ms=itl_ms * (1 + fit.error),
            ttft_ms=ttft_ms,
            ttft_low_ms=ttft_ms * (1 - fit.error),
            ttft_high_ms=ttft_ms * (1 + fit.error),
        )


def _in_chunks(prompt: int, chunk: int) -> Iterator[Rows]:
    for past in range(0, prompt, chunk):
        yield Rows(past, min(chunk, prompt - past), 1)
