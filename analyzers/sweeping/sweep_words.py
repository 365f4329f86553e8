"""A sweep in words: where batching stops helping and why, what prefill does, and what was not run. Pure.

Only what the repeats make sure is said: a knee whose interval is wide is said to be open, and a class is that of the
verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from phaseprof.analyzers.results import Bound
from phaseprof.analyzers.sweeping.sweep_results import (
    CellFigures,
    DecodeRoofs,
    DecodeSeries,
    Knee,
    Place,
    PrefillSeries,
)
from phaseprof.analyzers.sweeping.sweep_stats import LEAST_SIZES
from phaseprof.analyzers.wording import count, duration, joined, number, percent, sentence

#: A part explains a time where it is so much of it.
_MOST = 0.5
#: Repeats from which the interval of a median holds it with 90 %.
_SURE_REPEATS = 5
#: Times that differ by less are the same.
_SAME = 0.03
#: Repeats that scatter more come from a busy machine.
_SCATTERED = 0.15
#: A rate that is lower by more has fallen.
_FALLEN = 0.9


def conclude(
    decode: Sequence[DecodeSeries], prefill: PrefillSeries | None, cells: Sequence[CellFigures]
) -> tuple[str, ...]:
    """Two sentences: on batching, and on prefill; fewer where one of them was not run.

    Args:
        decode: One series a length.
        prefill: Over all lengths and batches.
        cells: For the classes at the largest sizes.
    """
    said = []
    if decode:
        said.append(sentence(_batching(decode)))
    if prefill is not None:
        said.append(sentence(_prefill(prefill, cells)))
    return tuple(said)


# --- batching -------------------------------------------------------------------------------------


def _batching(decode: Sequence[DecodeSeries]) -> str:
    told = [series for series in decode if series.knee is not None]
    if not told:
        return _too_few(max(decode, key=lambda series: len(series.batches)))
    series = told[0]
    text = _knee_of(series, at_length=len(decode) > 1)
    others = [f"{_at(other)} {_briefly(other)}" for other in told[1:]]
    return f"{text}; {joined(others)}" if others else text


def _too_few(series: DecodeSeries) -> str:
    least, most = series.batches[0], series.batches[-1]
    if least == most:
        return f"where batching stops helping is not known: all steps were of batch {least}"
    return f"{_growth(series)}; where batching stops helping takes {LEAST_SIZES} batch sizes or more to tell"


def _growth(series: DecodeSeries) -> str:
    return (
        f"batch {series.batches[-1]} decodes {number(series.gain)} times the tokens/s of batch {series.batches[0]} "
        f"in steps that take {_times(series.slowdown)}"
    )


def _times(factor: float) -> str:
    return "as long" if abs(factor - 1) < _SAME else f"{number(factor)} times as long"


def _at(series: DecodeSeries) -> str:
    return f"at {series.prompt_tokens:,} prompt + {series.new_tokens:,} new tokens"


def _knee_of(series: DecodeSeries, *, at_length: bool) -> str:
    knee = series.knee
    assert knee is not None
    where = f"{_at(series)}, " if at_length else ""
    most = series.batches[-1]
    if knee.place is Place.OPEN:
        return (
            f"{where}where batching stops helping cannot be told: {_open(knee)}; {_growth(series)}"
        )
    if knee.place in (Place.BEYOND, Place.NOWHERE):
        text = f"{where}batching still helps at batch {most}, the largest that was run"
        if series.bounds[-1] is not Bound.UNKNOWN:
            text += f", where decode is {_named(series.bounds[-1])}"
        text += f": {_growth(series)}"
        if knee.place is Place.BEYOND and knee.at is not None:
            text += f", and would stop at about {size(knee.at)}{_interval(knee)} if it went on so"
        return text + _crossing(series.roofs)
    if knee.place is Place.BELOW:
        return (
            f"{where}batching hardly helps, from batch {series.batches[0]} on: {_growth(series)}, {_adds(series)}"
            f"{_crossing(series.roofs)}"
        )
    assert knee.at is not None
    text = f"{where}batching stops paying at about batch {size(knee.at)}{_interval(knee)}"
    if not knee.by_line:
        return f"{text}: up to there steps hardly take longer, beyond it nearly in proportion{_crossing(series.roofs)}"
    return (
        f"{text}, with half of the {number(1e3 / knee.each_ms)} tokens/s that more of them tend to: up to there "
        f"{_shared(series)}, beyond it {_adds(series)}{_crossing(series.roofs)}"
    )


def _briefly(series: DecodeSeries) -> str:
    knee = series.knee
    assert knee is not None
    if knee.place is Place.INSIDE and knee.at is not None:
        return f"at about {size(knee.at)}{_interval(knee)}"
    return {
        Place.BELOW: "hardly at all",
        Place.OPEN: f"it cannot be told ({_open(knee)})",
    }.get(knee.place, f"not up to batch {series.batches[-1]}")


def _shared(series: DecodeSeries) -> str:
    """What more sequences share: the fixed cost of a step, and how much of it is reading the weights."""
    knee, roofs = series.knee, series.roofs
    assert knee is not None
    fixed = f"they share the {duration(knee.fixed_ms / 1e3)} that any step takes"
    if roofs is None or knee.fixed_ms <= 0:
        return fixed
    if roofs.weights_ms >= _MOST * knee.fixed_ms:
        return f"{fixed} ({duration(roofs.weights_ms / 1e3)} to read the weights at the roof)"
    return (
        f"{fixed} (only {duration(roofs.weights_ms / 1e3)} of it to read the weights at the roof)"
    )


def _adds(series: DecodeSeries) -> str:
    """What each sequence adds, and what that is."""
    knee, roofs = series.knee, series.roofs
    assert knee is not None
    adds = f"each adds its own {duration(knee.each_ms / 1e3)}"
    if roofs is None or knee.each_ms <= 0:
        return adds
    own_ms = max(roofs.kv_ms, roofs.compute_ms)
    what = "to compute" if roofs.compute_ms >= roofs.kv_ms else "to read its KV"
    only = "" if own_ms >= _MOST * knee.each_ms else "only "
    return f"{adds} ({only}{duration(own_ms / 1e3)} {what} at the roof)"


def _crossing(roofs: DecodeRoofs | None) -> str:
    if roofs is None:
        return ""
    if roofs.ridge is not None:
        return f"; the roofs cross at batch {size(roofs.ridge)}"
    return (
        "; by the roofs, KV reads keep it bandwidth-bound at any batch, and weigh as much as the weights at batch "
        f"{size(roofs.knee)}"
    )


# --- prefill --------------------------------------------------------------------------------------


def _prefill(series: PrefillSeries, cells: Sequence[CellFigures]) -> str:
    bound = _bound(_largest(cells))
    least, most = series.tokens[0], series.tokens[-1]
    best = f"{number(series.best_tokens_per_s)} tokens/s"
    knee = series.knee
    ridge = "" if series.ridge is None else f" (the roofs cross at {size(series.ridge)})"
    if knee is None:
        if least == most:
            return f"prefill computes {best} in passes of {least:,} tokens, {bound}"
        return (
            f"prefill computes up to {best}, {bound} at {most:,} tokens; from where on it takes time in proportion "
            f"takes {LEAST_SIZES} sizes or more to tell"
        )
    if knee.place is Place.BELOW:
        return (
            f"prefill is {bound} and computes {best}{_fall(series, cells)}: from {least:,} tokens a pass on{ridge} "
            "more of them take in proportion longer, so that prompts gain nothing from being batched"
        )
    if knee.place is Place.INSIDE and knee.at is not None:
        text = (
            f"prefill reaches {best}{_fall(series, cells)} and is {bound} at {most:,} tokens a pass: from about "
            f"{size(knee.at)} tokens{_interval(knee)} on{ridge} more of them take in proportion longer"
        )
        if not knee.by_line:
            return text
        return f"{text}, and below that the {duration(knee.fixed_ms / 1e3)} that any pass takes weigh more"
    if knee.place is Place.OPEN:
        return (
            f"prefill reaches {best} and is {bound} at {most:,} tokens a pass; from where on more of them take in "
            f"proportion longer cannot be told: {_open(knee)}"
        )
    return (
        f"prefill still gains from more tokens a pass at {most:,}, the most that were run, with {best}, and is "
        f"{bound} there{ridge}"
    )


def _fall(series: PrefillSeries, cells: Sequence[CellFigures]) -> str:
    """That the rate has fallen again at the largest size."""
    last = _largest(cells).prefill
    if last is None or last.tokens_per_s >= _FALLEN * series.best_tokens_per_s:
        return ""
    return f" at {series.best_tokens:,} tokens ({number(last.tokens_per_s)} at {last.tokens:,})"


def _largest(cells: Sequence[CellFigures]) -> CellFigures:
    """The cell with the most prompt tokens a pass."""
    return max(
        (cell for cell in cells if cell.prefill is not None),
        key=lambda cell: (cell.batch * cell.prompt_tokens, cell.prompt_tokens),
    )


def _bound(cell: CellFigures) -> str:
    assert cell.prefill is not None
    return _named(cell.prefill.bound)


def _named(bound: Bound) -> str:
    if bound is Bound.UNKNOWN:
        return "of unknown class"
    return f"bound by {bound}" if bound is Bound.OVERHEAD_OR_LATENCY else f"{bound}-bound"


# --- both -----------------------------------------------------------------------------------------


def size(value: float) -> str:
    """A batch or a number of tokens that is between whole ones: ``8.4``, ``12``, ``1,240``."""
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def _interval(knee: Knee) -> str:
    if knee.low is None or knee.high is None:
        return ""
    return f" (90 %: {size(knee.low)} to {size(knee.high)})"


def _open(knee: Knee) -> str:
    """Why a knee is open."""
    if knee.low is None:
        return "a cell with one repeat shows no spread"
    if knee.high is None:
        return f"the repeats leave it above {size(knee.low)}"
    return f"the repeats leave it between {size(knee.low)} and {size(knee.high)}"


def lacking(
    cells: Sequence[CellFigures],
    decode: Sequence[DecodeSeries],
    prefill: PrefillSeries | None,
    workload: Mapping[str, object],
) -> Iterator[str]:
    """What would have to be run to say more, a sentence each.

    Args:
        cells: Those that were run.
        decode, prefill: What was found.
        workload: What was to be run.
    """
    planned = [_sizes(workload.get(name)) for name in ("prompt_tokens", "new_tokens", "batch")]
    wanted = {(p, n, b) for p in planned[0] for n in planned[1] for b in planned[2]}
    run = {(cell.prompt_tokens, cell.new_tokens, cell.batch) for cell in cells}
    absent = len(wanted - run)
    short = [cell for cell in cells if cell.repeats < cell.planned]
    if absent or short:
        calls = sum(cell.planned - cell.repeats for cell in short)
        calls += absent * max((cell.planned for cell in cells), default=0)
        yield f"{count(calls, 'call')} of the plan are missing: --resume goes on with them."
    fewest = min(cell.repeats for cell in cells)
    if fewest < _SURE_REPEATS:
        yield (
            f"Intervals are ranges, as there are cells with {count(fewest, 'repeat')}: {_SURE_REPEATS} give 90 %."
        )
    scatter = [
        phase.time_ms.scatter
        for cell in cells
        for phase in (cell.decode, cell.prefill)
        if phase is not None
    ]
    if max(scatter, default=0.0) > _SCATTERED:
        yield (
            f"The repeats of a cell scatter by {percent(max(scatter))} (1.48 MAD): something else used the machine. "
            "Run it alone, or with more --repeats."
        )
    for series in decode:
        if series.knee is not None and series.knee.place in (Place.BEYOND, Place.NOWHERE):
            yield f"Larger batches would show where batching stops helping: --batch …,{2 * series.batches[-1]}."
            break
    if any(series.knee is None for series in decode):
        yield f"A knee takes {LEAST_SIZES} batch sizes or more, for example --batch 1,2,4,8."
    if prefill is not None and prefill.knee is None:
        yield f"The knee of prefill takes {LEAST_SIZES} sizes or more, of --prompt-tokens or --batch."
    lines = [series.knee for series in decode if series.knee is not None]
    if any(not knee.by_line for knee in lines):
        worst = max(knee.misfit for knee in lines)
        yield (
            f"The step time is no straight line over the batch (it misses a cell by {percent(worst)}): the knee is "
            "that of the cells themselves, docs/sweep.md."
        )


def _sizes(value: object) -> list[int]:
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, int)]
