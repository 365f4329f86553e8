"""Whether a solved counter may be built on, and if not, why: the one place that decides it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.counters.counter_results import CounterFigure, CounterState, Method
from phaseprof.analyzers.counters.solved import Solved

#: Below this share of its own variation a phase has hardly any that others do not share.
_TOGETHER = 0.05


def figure_of(
    metric: str, solved: Solved | None, *, kept: int, source: str, limit: float
) -> CounterFigure:
    """A solved value as a figure.

    Args:
        metric: Its name.
        solved: The value; None if no window holds the phase.
        kept: Windows that count.
        source: The collector.
        limit: The largest error with which it is sure, in its unit.
    """
    if solved is None:
        reason = "no window holds any of it" if kept else _NO_WINDOWS
        return CounterFigure(metric, None, None, CounterState.INSUFFICIENT, reason, 0, source)
    reason = why_insufficient(solved, limit)
    known = math.isfinite(solved.error)
    return CounterFigure(
        metric=metric,
        value=solved.value,
        error=solved.error if known else None,
        state=CounterState.INSUFFICIENT if reason else CounterState.SURE,
        reason=reason,
        windows=solved.windows,
        source=source,
        method=Method.DIRECT if solved.direct else Method.SOLVED,
    )


_TOO_FEW = "its windows are too few for how much they differ"
_NO_WINDOWS = "every sample window holds warm-up, profiled or failed passes, or none at all"


def why_insufficient(solved: Solved, limit: float) -> str:
    """Why a value may not be built on, as a clause; empty if it may."""
    fewest = round(thresholds.COUNTER_WINDOWS.value)
    if solved.windows < fewest:
        held = f"only {solved.windows}" if solved.windows else "none"
        return f"{held} of the sample windows {'hold' if solved.windows != 1 else 'holds'} enough of it"
    if solved.apart < _TOGETHER and not solved.error <= limit:
        return "it shares its windows with other work in the same proportion throughout"
    if solved.blocks < thresholds.COUNTER_BLOCKS.value:
        return "it was sampled at too few moments of the run"
    if solved.error <= limit:
        return ""
    parts = solved.parts
    if math.isinf(parts.jitter):
        return "its share of the windows varies less than their edges are known"
    causes = {
        _TOO_FEW: parts.noise,
        "nothing tells it apart from the time between passes": parts.open,
        "the clocks of windows and passes do not agree well enough": parts.offset + parts.jitter,
        "its short and its long passes are too unlike": parts.unlike,
        "the solution lies outside of what is possible": parts.moved,
        "the begin or the end of its passes is unlike the rest of them": parts.apart,
    }
    return max(causes, key=causes.__getitem__)


def judged(figure: CounterFigure, limit: float) -> CounterFigure:
    """A derived figure with its state from its error."""
    error = figure.error if figure.error is not None else math.inf
    known = replace(figure, error=error if math.isfinite(error) else None)
    if error <= limit and figure.state is CounterState.SURE:
        return replace(known, reason="")
    reason = figure.reason or _TOO_FEW
    return replace(known, state=CounterState.INSUFFICIENT, reason=reason)


def over_devices(figures: Sequence[CounterFigure], seconds: Sequence[float]) -> CounterFigure:
    """The mean of one figure over devices, by their time; of those that are sure, if any is."""
    if len(figures) == 1:
        return figures[0]
    sure = [
        (figure, time)
        for figure, time in zip(figures, seconds, strict=True)
        if figure.state is CounterState.SURE
    ]
    whole = sum(time for _, time in sure)
    if not sure or not whole:
        return min(figures, key=lambda f: f.error if f.error is not None else math.inf)
    first = sure[0][0]
    source = first.source
    if len(sure) < len(figures):
        source += f", {len(sure)} of {len(figures)} devices"
    # Devices of one run err alike, by their clocks: the errors are not taken to cancel.
    return replace(
        first,
        value=sum((f.value or 0.0) * time for f, time in sure) / whole,
        error=sum((f.error or 0.0) * time for f, time in sure) / whole,
        windows=sum(f.windows for f, _ in sure),
        source=source,
    )
