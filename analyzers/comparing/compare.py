"""Compare two traces: every figure with its interval, then what changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from phaseprof.analyzers.comparing.environment import Surroundings, surroundings
from phaseprof.analyzers.comparing.metrics import catalogue, figures
from phaseprof.analyzers.comparing.resampling import DRAWS, half_width
from phaseprof.analyzers.comparing.results import (
    Better,
    BoundChange,
    Call,
    Comparison,
    Delta,
    Figure,
    KernelChange,
    Method,
    Metric,
)
from phaseprof.analyzers.comparing.rules import Rule, judge
from phaseprof.analyzers.comparing.sample import Sample
from phaseprof.analyzers.comparing.units import UnitKind
from phaseprof.analyzers.comparing.verdict import verdict
from phaseprof.analyzers.results import Confidence, PhaseFigures, Report
from phaseprof.analyzers.wording import count, joined, percent, sentence

#: Standard deviation by which whole runs of the same thing differ beyond what one run shows of itself: where its pages
#: lie, what else the machine does, how warm it is. `benchmarks/compare_repeats.py` measures it.
RUN_NOISE_CPU = 0.035
RUN_NOISE_GPU = 0.005
#: A change below this is none worth a word, however sure.
NEGLIGIBLE = 0.01
#: An interval that lies within this on both sides says that nothing changed.
UNCHANGED = 0.10
#: Units below which a reader is told that there are few.
_FEW = 5
#: Times below a microsecond are nothing that a ratio could be taken of.
_LEAST_MS = 1e-3


def compare(
    a: Sample, b: Sample, *, rules: Sequence[Rule] = (), run_noise: float | None = None
) -> Comparison:
    """Compare two traces.

    Args:
        a: The trace that is the base. b: The other one.
        rules: What must not happen.
        run_noise: Standard deviation, as a fraction, by which whole runs of the same thing differ; None for what is
            usual on the device.
    """
    around = surroundings(a, b)
    noise = usual_noise(a.report, b.report) if run_noise is None else run_noise
    deltas = tuple(_deltas(a, b, around, noise))
    bounds = tuple(_bounds(a.report, b.report))
    kernels = tuple(_kernels(a.report, b.report)) if not around.other_model else ()
    return Comparison(
        a=a.report.facts.trace_path,
        b=b.report.facts.trace_path,
        level=around.level,
        reasons=around.reasons,
        verdict=verdict(deltas, bounds, kernels, around),
        differences=around.differences,
        deltas=deltas,
        bounds=bounds,
        kernels=kernels,
        judged=tuple(judge(rule, deltas, noise) for rule in rules),
        notes=tuple(sentence(note) for note in _notes(a, b)),
        method=_method(a, b, noise),
    )


def usual_noise(*reports: Report) -> float:
    """How far whole runs differ on the devices of these reports; the larger one."""
    gpus = [each.facts.device is not None and each.facts.device.kind != "cpu" for each in reports]
    return RUN_NOISE_GPU if all(gpus) else RUN_NOISE_CPU


# --- figures --------------------------------------------------------------------------------------


def _deltas(a: Sample, b: Sample, around: Surroundings, noise: float) -> Iterator[Delta]:
    for metric in catalogue(a, b):
        one, other = figures(a, b, metric)
        if one.value is not None or other.value is not None:
            if around.other_work(metric):
                metric = replace(metric, better=Better.NEITHER)
            yield delta(metric, one, other, noise, around.why_not(metric))


def delta(metric: Metric, a: Figure, b: Figure, noise: float, why_not: str = "") -> Delta:
    """The change of one figure.

    Args:
        metric: Which. a, b: The figures.
        noise: As `compare` takes it.
        why_not: Why the two do not compare; empty if they do.
    """
    if a.value is None or b.value is None:
        missing = "the first trace" if a.value is None else "the second trace"
        why = a.lacking if a.value is None else b.lacking
        return Delta(
            metric, a, b, None, None, None, Call.NOT_COMPARED, f"{missing} lacks it: {why}"
        )
    if why_not:
        return Delta(metric, a, b, None, None, None, Call.NOT_COMPARED, why_not)
    least = _LEAST_MS if metric.unit == "ms" else 0.0
    if a.value <= least or b.value <= least:
        why = "too little to take a ratio of"
        same = a.value <= least and b.value <= least
        return Delta(metric, a, b, None, None, None, Call.UNCHANGED if same else Call.UNSURE, why)
    change = b.value / a.value - 1
    if a.error is None or b.error is None:
        lacking = a.lacking or b.lacking
        return Delta(metric, a, b, change, None, None, Call.UNSURE, lacking)
    half = half_width((a.error, a.freedom), (b.error, b.freedom), (math.sqrt(2) * noise, math.inf))
    low, high = (b.value / a.value * math.exp(sign * half) - 1 for sign in (-1, 1))
    call = _call(metric, change, low, high)
    why = "" if call is not Call.UNSURE else _why_unsure(a, b)
    return Delta(metric, a, b, change, low, high, call, why)


def _call(metric: Metric, change: float, low: float, high: float) -> Call:
    if low <= 0 <= high or abs(change) < NEGLIGIBLE:
        return Call.UNCHANGED if max(abs(low), abs(high)) <= UNCHANGED else Call.UNSURE
    if metric.better is Better.NEITHER:
        return Call.CHANGED
    return Call.BETTER if (change < 0) == (metric.better is Better.LOWER) else Call.WORSE


def _why_unsure(a: Figure, b: Figure) -> str:
    fewest = min((each.blocks for each in (a, b) if each.blocks), default=0)
    if 0 < fewest < _FEW:
        return f"it rests on {count(fewest, 'repeat')} of one trace"
    return "the noise is larger than the change"


# --- classes, kernels -----------------------------------------------------------------------------


def _bounds(a: Report, b: Report) -> Iterator[BoundChange]:
    for phase, one in a.phases.items():
        other = b.phases.get(phase)
        if other is not None:
            confident = Confidence.LOW not in (one.verdict.confidence, other.verdict.confidence)
            yield BoundChange(
                phase,
                one.bound,
                other.bound,
                confident,
                one.verdict.explained,
                other.verdict.explained,
            )


def _kernels(a: Report, b: Report) -> Iterator[KernelChange]:
    for phase, one in a.phases.items():
        if phase in b.phases:
            yield from _kernels_of(phase, one, b.phases[phase])


def _kernels_of(phase: str, a: PhaseFigures, b: PhaseFigures) -> Iterator[KernelChange]:
    if a.kernels is None or b.kernels is None or not (a.kernels.passes and b.kernels.passes):
        return
    one, other = (
        {e.kernel_class.value: e.busy_ms / found.passes for e in found.classes}
        for found in (a.kernels, b.kernels)
    )
    moved = {name: other.get(name, 0.0) - one.get(name, 0.0) for name in {*one, *other}}
    grown = sum(ms for ms in moved.values() if ms > 0)
    shrunk = sum(ms for ms in moved.values() if ms < 0)
    for name in sorted(moved, key=lambda name: (-abs(moved[name]), name)):
        whole = grown if moved[name] > 0 else shrunk
        yield KernelChange(
            phase=phase,
            kernel_class=name,
            a_ms=one.get(name, 0.0),
            b_ms=other.get(name, 0.0),
            part=moved[name] / whole if whole else 0.0,
            a_passes=a.kernels.passes,
            b_passes=b.kernels.passes,
        )


# --- what has to be said --------------------------------------------------------------------------


def _notes(a: Sample, b: Sample) -> Iterator[str]:
    for name, sample in (("first", a), ("second", b)):
        if sample.report.damage:
            yield f"the {name} trace is not whole: {sample.report.damage[0]}"
        if sample.report.facts.incomplete:
            yield f"the {name} trace has no end: its process was killed or still runs"
        if sample.units.kind is UnitKind.REPEATS and sample.units.repeats < _FEW:
            yield (
                f"the {name} trace has {count(sample.units.repeats, 'repeat')}: intervals are wide, and more repeats "
                "narrow them"
            )
        if sample.units.kind is UnitKind.STRETCHES and sample.units.repeats == 1:
            yield (
                f"the {name} trace never pauses between requests or holds a single one: its noise is taken from "
                "stretches of its time"
            )
    for phase, one in a.phases.items():
        other = b.phases.get(phase)
        if other is None or not one.sequences.value or not other.sequences.value:
            continue
        if abs(math.log(other.sequences.value / one.sequences.value)) > 0.05:
            means = f"{one.sequences.value:.3g} to {other.sequences.value:.3g}"
            yield (
                f"the mean batch of {phase} went from {means}, so that its passes are not of the same size; same_batch "
                "compares those that are"
            )


def _method(a: Sample, b: Sample, noise: float) -> Method:
    units = [f"{len(each.units.starts_ns)} {each.units.kind.value}" for each in (a, b)]
    drawn = units[0] if units[0] == units[1] else joined(units)
    text = (
        f"95 % intervals by a block bootstrap ({DRAWS} draws of whole blocks of {drawn}; Student's t for few blocks), "
        f"with {percent(noise)} added for each run: whole runs of the same thing differ by that (one standard "
        "deviation), which no single run shows."
    )
    return Method(units[0], units[1], noise, DRAWS, text)
