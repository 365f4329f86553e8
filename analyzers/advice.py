"""What to change, in words: the changes of a run that gain most, each with its interval, and what cannot help.

A line says what the largest phase gains by, and what limits it then. The first lever of the verdict comes first where
its gain is worth it, so that advice and verdict say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phaseprof.analyzers.results import Bound, Lever
from phaseprof.analyzers.what_if.measured import Measured
from phaseprof.analyzers.what_if.ranking import ranked
from phaseprof.analyzers.what_if.results import Interval, Outcome, Refused, WhatIf
from phaseprof.analyzers.wording import joined
from phaseprof.phases import Phase

#: Between the ends of an interval.
TO = "\N{EN DASH}"
#: Lines at most.
_LINES = 5
#: A change that gains less is not advised.
_WORTH = 1.05
#: Titles that act on a lever of the verdict begin so.
_LEVERS = {
    "batch": "batch",
    "fewer launches": "CUDA graphs",
    "fewer operators": "batch",
    "a smaller KV cache": "FP8 KV cache",
    "cheaper matmuls": "FP8 weights",
    "smaller prefill chunks": "chunks",
}
#: What is not advised of a run that nobody asked about: it is another model, or takes more devices.
_ASKED_ONLY = ("tensor parallel", "latent attention", "one KV head")
_EIGHT_BITS = ("FP8 weights", "INT8 weights")
#: A latency that grows by more is said with the gain.
_DEARER = 1.05
_COUNT_OF_HEADS = "KV heads"
#: Unlikely to be missed in the line of what cannot help.
_SELF_EVIDENT = ("a CPU has no CUDA graphs", "a CPU has no FP8 matmul that is known of")


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice of a report.

    Attributes:
        lines: At most five, the best first: each a sentence without capital and full stop, with its interval.
        cannot: What cannot help, in one sentence; empty if nothing was tried in vain.
        missing: Why there is no advice, as a clause; empty where there is some.
        about: What of a run it is for, as a clause; empty where it is for all of it.
        what_if: The figures behind the lines; None where there are none.
    """

    lines: tuple[str, ...]
    cannot: str = ""
    missing: str = ""
    what_if: WhatIf | None = None
    about: str = ""


def advise(measured: Measured, lever: Lever | None = None) -> Advice:
    """The advice for a run.

    Args:
        measured: The run.
        lever: The first lever of the phase with the most time, by its verdict.
    """
    if measured.missing:
        fix = f"; {measured.fix}" if measured.fix else ""
        return Advice((), missing=f"no change can be worked out: {measured.missing}{fix}")
    found = ranked(measured)
    worth = [each for each in found.outcomes if _is_worth(each)]
    return Advice(
        lines=tuple(_line(each, found) for each in _ordered(worth, lever)[:_LINES]),
        cannot=_cannot(found.hopeless),
        what_if=found,
        about=""
        if found.of_sweep is None
        else f"for batch {found.of_sweep:,}, the largest of the sweep",
    )


def _is_worth(outcome: Outcome) -> bool:
    asked_only = outcome.title.startswith(_ASKED_ONLY) or outcome.title.endswith(_COUNT_OF_HEADS)
    if outcome.itl_ms is not None:
        return not asked_only
    return outcome.gain.value >= _WORTH and not asked_only


def _ordered(outcomes: Sequence[Outcome], lever: Lever | None) -> list[Outcome]:
    """By gain; of the formats of 8 bits the better one alone. What acts on the first lever comes first."""
    kept: list[Outcome] = []
    for each in outcomes:
        eight = each.title in _EIGHT_BITS and any(other.title in _EIGHT_BITS for other in kept)
        if not eight:
            kept.append(each)
    first = "" if lever is None else _LEVERS.get(lever.name, "")
    if not first:
        return kept
    return sorted(kept, key=lambda each: not each.title.startswith(first))


def _line(outcome: Outcome, found: WhatIf) -> str:
    """``FP8 weights: TPOT 9.1 to 5.6 ms (4.9 to 6.8), 1.5x output tokens/s; decode is then bandwidth-bound``."""
    parts = list(_gains(outcome, found))
    return f"{outcome.title}: {', '.join(parts)}; {_then(outcome)}"


def _gains(outcome: Outcome, found: WhatIf) -> Iterator[str]:
    before = found.measured
    if outcome.itl_ms is not None:
        yield f"tokens beside a prompt wait {_latency(outcome.itl_ms)}"
        if before.ttft_ms is not None and outcome.ttft_ms is not None:
            yield f"TTFT {_change(before.ttft_ms.value, outcome.ttft_ms)}"
        return
    tpot = before.tpot_ms is not None and outcome.tpot_ms is not None
    if before.tpot_ms is not None and outcome.tpot_ms is not None:
        yield f"TPOT {_change(before.tpot_ms.value, outcome.tpot_ms)}"
    if before.ttft_ms is not None and outcome.ttft_ms is not None:
        longer = outcome.ttft_ms.value > before.ttft_ms.value * _DEARER
        if longer or not tpot or outcome.phase == Phase.PREFILL:
            yield f"TTFT {_change(before.ttft_ms.value, outcome.ttft_ms)}"
    noun = "output" if found.generates else "prompt"
    yield f"{_times(outcome.gain)} {noun} tokens/s"


def _times(gain: Interval) -> str:
    return f"{_factor(gain.value)}x ({_factor(gain.low)}{TO}{_factor(gain.high)})"


def _factor(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def _change(before_ms: float, after: Interval) -> str:
    """``9.1 → 5.6 ms (4.9 to 6.8)``, in the unit of the first."""
    unit, scale = _unit(before_ms)
    return f"{_plain(before_ms * scale)} → {_with_ends(after, unit, scale)}"


def _latency(value: Interval) -> str:
    """``5.6 ms (4.9 to 6.8)``."""
    return _with_ends(value, *_unit(value.value))


def _unit(ms: float) -> tuple[str, float]:
    if ms >= 9_999.5:
        return "s", 1e-3
    return ("ms", 1.0) if ms >= 0.9995 else ("µs", 1e3)


def _with_ends(value: Interval, unit: str, scale: float) -> str:
    low, high = _plain(value.low * scale), _plain(value.high * scale)
    return f"{_plain(value.value * scale)} {unit} ({low}{TO}{high})"


def _plain(value: float) -> str:
    """Three significant digits, all of them shown."""
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def _then(outcome: Outcome) -> str:
    return f"{outcome.phase} is then {bound_in_words(outcome.bound)}"


def bound_in_words(bound: Bound) -> str:
    """``bandwidth-bound``, ``bound by overhead or latency``."""
    if bound is Bound.UNKNOWN:
        return "bound by what is not known"
    return f"bound by {bound.value}" if " " in bound.value else f"{bound.value}-bound"


def _cannot(hopeless: Sequence[Refused]) -> str:
    """One sentence: those of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for each in hopeless:
        if each.why in _SELF_EVIDENT or each.title.startswith(_ASKED_ONLY):
            continue
        why = f"{each.why} ({each.fix})" if each.fix else each.why
        by_reason.setdefault(why, []).append(each.title)
    return "; ".join(f"{joined(titles)}: {why}" for why, titles in by_reason.items())
