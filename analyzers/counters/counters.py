"""Hardware counters per phase: from sample windows of 100 ms to what the device does in a decode step of 12.

Where passes ran on each sampled device comes from `device_work`, the solution from `unmixing`; here windows are chosen,
devices are put together, and it is said of each figure whether it may be built on. `docs/counters.md` explains it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.counters.counter_results import (
    CounterFigure,
    DeviceState,
    Method,
    PhaseCounters,
)
from phaseprof.analyzers.counters.device_state import state_of
from phaseprof.analyzers.counters.device_work import DeviceUse, DeviceWork, uses_of, work_of
from phaseprof.analyzers.counters.energy import PowerOf, Spread, phase_energy, solve_power
from phaseprof.analyzers.counters.sampled import Series, devices_of, seconds_of, series_of
from phaseprof.analyzers.counters.solved import SHARE, Scale, Solved
from phaseprof.analyzers.counters.sureness import figure_of, judged, over_devices
from phaseprof.analyzers.counters.unmixing import unmix
from phaseprof.analyzers.counters.weights import EDGE_JITTER_NS, Weights, Window
from phaseprof.analyzers.passes import Primary
from phaseprof.analyzers.results import PhaseFigures, Provenance
from phaseprof.analyzers.wording import count
from phaseprof.errors import NotMeasured
from phaseprof.metrics import Metric
from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings
from phaseprof.trace.reader import Trace

#: Offsets between the clocks of windows and passes that are tried, in ns.
_OFFSETS_NS = tuple(range(-6_000_000, 6_000_001, 1_000_000))
#: Where passes are placed by their calls, the device may be behind by what is queued.
_HOST_OFFSETS_NS = tuple(range(-6_000_000, 40_000_001, 2_000_000))
#: What of a pass that does not count keeps a window out.
_MARGIN_NS = 10_000_000
_HOST_MARGIN_NS = 50_000_000
#: Of more batches than a user would have asked for, the windows hold too little of each.
_MOST_BATCHES = 6

_SHARES = (
    Metric.SM_ACTIVE,
    Metric.SM_OCCUPANCY,
    Metric.TENSOR_ACTIVE,
    Metric.DRAM_ACTIVE,
)
_RATES = (Metric.DRAM_READ, Metric.DRAM_WRITE)
#: What is sampled beside them shows where a device was looked at.
_BESIDE = (Metric.SM_CLOCK, Metric.THROTTLE)
_ALL = (*_SHARES, *_RATES, Metric.POWER, *_BESIDE)

#: The windows of each counter of each device, by collector.
_Sampled = Mapping[DeviceUse, Mapping[Metric, Sequence[Series]]]


@dataclass(frozen=True, slots=True)
class Counters:
    """What the counters of a trace say.

    Attributes:
        phases: By phase value. by_batch: By number of sequences and phase value.
        devices: The state of each sampled device.
        provenance: Pairs of (figure, where it comes from).
    """

    phases: Mapping[str, PhaseCounters]
    by_batch: Mapping[int, Mapping[str, PhaseCounters]]
    devices: tuple[DeviceState, ...]
    provenance: tuple[tuple[str, str], ...]

    def beside(
        self,
        phases: Mapping[str, PhaseFigures],
        by_batch: Mapping[int, Mapping[str, PhaseFigures]],
    ) -> tuple[dict[str, PhaseFigures], dict[int, dict[str, PhaseFigures]]]:
        """The figures of phases, and by batch, with their counters."""
        batches = {
            batch: _with(figures, self.by_batch.get(batch, {}))
            for batch, figures in by_batch.items()
        }
        return _with(phases, self.phases), batches


def not_measured(trace: Trace) -> Iterator[NotMeasured]:
    """Devices that were sampled, and that no model is known to have run on."""
    sampled = devices_of(trace.samples)
    known = {use.sampled_as for use in uses_of(trace.metas, sampled)}
    for name in sampled:
        if name not in known and name != "cpu":
            yield NotMeasured(
                f"counters per phase on {name}",
                "it was sampled, but no model of this trace is known to have run on it",
            )


def _with(
    phases: Mapping[str, PhaseFigures], counters: Mapping[str, PhaseCounters]
) -> dict[str, PhaseFigures]:
    return {name: replace(figures, counters=counters.get(name)) for name, figures in phases.items()}


@dataclass(frozen=True, slots=True)
class Solution:
    """One counter of one device by one collector.

    Attributes:
        kept: Windows that count. by_label: The value of each coarse label of the work.
    """

    use: DeviceUse
    work: DeviceWork
    series: Series
    kept: int
    by_label: Mapping[int, Solved]

    def of(self, phase: Phase) -> Solved | None:
        """What was found for a phase."""
        return self.by_label.get(self.work.phases.get(phase, -1))

    def seconds(self, phase: Phase) -> float:
        """Time of a phase in the windows."""
        solved = self.of(phase)
        return 0.0 if solved is None else solved.seconds

    def figure(self, metric: Metric, phase: Phase) -> CounterFigure:
        """The figure of a phase, sure or not."""
        solved = self.of(phase)
        limit = thresholds.COUNTER_ERROR.value
        if metric in _RATES:
            limit = thresholds.RATE_ERROR.value * (0.0 if solved is None else solved.value)
        return figure_of(
            metric.value, solved, kept=self.kept, source=self.series.source, limit=limit
        )


def analyze_counters(
    trace: Trace,
    primary: Primary,
    phases: Mapping[str, PhaseFigures],
    by_batch: Mapping[int, Mapping[str, PhaseFigures]],
    groups: int,
) -> Counters | None:
    """Solve for every counter in every phase.

    Args:
        trace: The trace, with the rows of all ranks.
        primary: The model that the report is about.
        phases, by_batch: Its figures.
        groups: Groups of ranks that make each pass together.

    Returns:
        None for a trace without samples of a device that a model ran on.
    """
    uses = uses_of(trace.metas, devices_of(trace.samples))
    if not uses:
        return None
    seconds = seconds_of(trace.passes)
    sampled = {
        use: {metric: series_of(trace.samples, use.sampled_as, metric, seconds) for metric in _ALL}
        for use in uses
    }
    spread = Spread(
        sum(use.runs(primary.model_id) for use in uses) / max(groups, 1),
        _devices_of_model(trace, primary),
    )
    seen = _seen(trace, primary, sampled, None)
    found = _figures(trace, primary, seen, phases, spread)
    batches = by_batch if len(by_batch) <= _MOST_BATCHES else {}
    return Counters(
        phases=found,
        by_batch={
            batch: _figures(trace, primary, _seen(trace, primary, sampled, batch), figures, spread)
            for batch, figures in batches.items()
        },
        devices=tuple(
            state_of(trace.samples, use, each.work, each.power) for use, each in seen.items()
        ),
        provenance=tuple(_provenance(sampled)),
    )


# --- solving --------------------------------------------------------------------------------------


def _devices_of_model(trace: Trace, primary: Primary) -> int:
    """Devices of one process that the model's layers lie on."""
    return max(
        (
            model.devices
            for meta in trace.metas
            for model in meta.models
            if model.model_id == primary.model_id
        ),
        default=1,
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was solved for one device."""

    work: DeviceWork
    solutions: Mapping[Metric, Solution]
    power: PowerOf | None


def _seen(
    trace: Trace, primary: Primary, sampled: _Sampled, batch: int | None
) -> dict[DeviceUse, _Seen]:
    """Solve for each device; passes of other batches do not count."""
    found = {}
    for use, by_metric in sampled.items():
        windows = [w for each in by_metric.values() for series in each for w in series.windows]
        work = work_of(trace.passes, use, primary, windows, batch=batch)
        known: dict[tuple[Window, ...], Weights] = {}
        solutions = {}
        for metric in (*_SHARES, *_RATES):
            best = _best(solve(use, work, series, metric, known) for series in by_metric[metric])
            if best is not None:
                solutions[metric] = best
        power = [solve_power(work, series) for series in by_metric[Metric.POWER][:1]]
        found[use] = _Seen(work, solutions, power[0] if power else None)
    return found


def _figures(
    trace: Trace,
    primary: Primary,
    seen: Mapping[DeviceUse, _Seen],
    phases: Mapping[str, PhaseFigures],
    spread: Spread,
) -> dict[str, PhaseCounters]:
    seen = {use: each for use, each in seen.items() if use.runs(primary.model_id)}
    solutions = {
        metric: [each.solutions[metric] for each in seen.values() if metric in each.solutions]
        for metric in (*_SHARES, *_RATES)
    }
    power = [each.power for each in seen.values() if each.power is not None]
    result = {}
    for name, figures in phases.items():
        phase = figures.phase
        shares = {
            metric: _together(metric, phase, solutions[metric])
            for metric in _SHARES
            if solutions[metric]
        }
        energy = phase_energy(figures, power, spread)
        result[name] = PhaseCounters(
            sm_active=shares.get(Metric.SM_ACTIVE),
            sm_occupancy=shares.get(Metric.SM_OCCUPANCY),
            tensor_active=shares.get(Metric.TENSOR_ACTIVE),
            dram_active=shares.get(Metric.DRAM_ACTIVE),
            dram_bytes_per_s=_dram_rate(trace, phase, solutions, shares.get(Metric.DRAM_ACTIVE)),
            power_w=energy.power_w,
            energy_j=energy.energy_j,
            joules_per_token=energy.joules_per_token,
            sampled_s=_sampled_s(phase, solutions, power),
        )
    return result


def solve(
    use: DeviceUse,
    work: DeviceWork,
    series: Series,
    metric: Metric,
    known: dict[tuple[Window, ...], Weights],
) -> Solution:
    """Solve for one counter of one device by one collector.

    Args:
        use, work: The device, and what ran on it.
        series: The windows and their values. metric: What was sampled.
        known: Shares of windows that were worked out for other counters; those of these are added.
    """
    margin_ns = _HOST_MARGIN_NS if work.on_host else _MARGIN_NS
    kept = work.counted(series.windows, margin_ns)
    windows = tuple(w for w, keep in zip(series.windows, kept, strict=True) if keep)
    values = [v for v, keep in zip(series.values, kept, strict=True) if keep]
    # Without device times it is the passes that are placed by milliseconds.
    jitter_ns = EDGE_JITTER_NS if work.on_host else series.edges.jitter_ns
    weights = known.setdefault(
        windows, Weights(work.timeline, work.groups, windows, jitter_ns=jitter_ns)
    )
    scale = SHARE
    if metric in _RATES:
        largest = max(values, default=0.0) or 1.0
        scale = Scale(largest, math.inf, SHARE.idle, SHARE.between)
    offsets_ns = _HOST_OFFSETS_NS if work.on_host else _OFFSETS_NS
    solved = unmix(weights, values, scale, offsets_ns, gaps_known=not work.on_host)
    least = series.edges.least_error * scale.span
    solved = {label: replace(each, error=each.error + least) for label, each in solved.items()}
    return Solution(use, work, series, len(windows), solved)


def _best(found: Iterable[Solution]) -> Solution | None:
    """Of several collectors' solutions, the one with the least error over the phases."""
    return min(
        found,
        key=lambda each: max(
            (each.by_label[k].error for k in each.work.phases.values() if k in each.by_label),
            default=math.inf,
        ),
        default=None,
    )


def _together(metric: Metric, phase: Phase, solutions: Sequence[Solution]) -> CounterFigure:
    """One counter of one phase over all devices."""
    figures = [each.figure(metric, phase) for each in solutions]
    return over_devices(figures, [each.seconds(phase) for each in solutions])


def _sampled_s(
    phase: Phase, solutions: Mapping[Metric, Sequence[Solution]], power: Sequence[PowerOf]
) -> float:
    """Device time of a phase in windows, over all devices."""
    found = [sum(each.seconds(phase) for each in solved) for solved in solutions.values()]
    return max(*found, sum(each.seconds(phase) for each in power), 0.0)


def _dram_rate(
    trace: Trace,
    phase: Phase,
    solutions: Mapping[Metric, Sequence[Solution]],
    share: CounterFigure | None,
) -> CounterFigure | None:
    """Bytes/s to and from device memory: counted, or from the share of a known peak."""
    counted = [
        _together(metric, phase, solutions[metric]) for metric in _RATES if solutions[metric]
    ]
    if len(counted) == len(_RATES):
        value = sum(each.value or 0.0 for each in counted)
        error = sum(math.inf if each.error is None else each.error for each in counted)
        plain = replace(counted[0], metric="dram_bytes_per_s")
        # What is written is little beside what is read: it need not be sure by itself.
        return judged(replace(plain, value=value, error=error), thresholds.RATE_ERROR.value * value)
    peak = _interface_peak(trace, [each.use for each in solutions[Metric.DRAM_ACTIVE]])
    if share is None or peak is None:
        return None
    return replace(
        share,
        metric="dram_bytes_per_s",
        value=None if share.value is None else share.value * peak.bytes_per_s,
        error=None if share.error is None else share.error * peak.bytes_per_s,
        source=f"{share.source} x {peak.bytes_per_s / 1e9:,.0f} GB/s of the datasheet",
        method=Method.DERIVED,
        provenance=Provenance.DATASHEET,
    )


def _interface_peak(trace: Trace, uses: Sequence[DeviceUse]) -> Ceilings | None:
    """The peak of the memory interface, which the share is of; a measured roof is what a kernel reached of it."""
    keys = {use.device.key for use in uses}
    known = [
        roof
        for meta in trace.metas
        for roof in meta.ceilings
        if roof.device_key in keys and roof.source == "datasheet"
    ]
    return known[0] if known and len({roof.bytes_per_s for roof in known}) == 1 else None


# --- what stands beside ---------------------------------------------------------------------------


def _provenance(sampled: _Sampled) -> Iterator[tuple[str, str]]:
    for title, metrics in (("counters", (*_SHARES, *_RATES)), ("energy", (Metric.POWER,))):
        recorded: dict[str, int] = {}
        for by_metric in sampled.values():
            of_device: dict[str, int] = {}
            for metric in metrics:
                for series in by_metric[metric]:
                    of_device[series.source] = max(of_device.get(series.source, 0), series.recorded)
            for source, windows in of_device.items():
                recorded[source] = recorded.get(source, 0) + windows
        if recorded:
            of = " and ".join(
                f"{source} ({count(windows, 'window')})" for source, windows in recorded.items()
            )
            interval = "; ± is half of a 95 % interval" if title == "counters" else ""
            yield title, f"{of}, solved for the phases{interval}"
