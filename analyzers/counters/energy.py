"""Energy of each phase, from the power of its devices: solved like a counter, with idle power as an unknown of its own.

Boards measure power in their own way: some give the moment of the reading, some a mean over the last second, all with
a lag. How long the mean is and how late it comes is tried out: the response under which the readings fit best counts.
The energy counter of a board is not split over phases: it moves on every 10 to 100 ms. Over seconds it is what the
power is checked against.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.counters.counter_results import (
    CounterFigure,
    CounterState,
    EnergyCheck,
    Method,
)
from phaseprof.analyzers.counters.device_time import IDLE
from phaseprof.analyzers.counters.device_work import DeviceWork
from phaseprof.analyzers.counters.sampled import Series
from phaseprof.analyzers.counters.solved import Scale, Solved
from phaseprof.analyzers.counters.sureness import figure_of, judged, over_devices
from phaseprof.analyzers.counters.unmixing import unmix
from phaseprof.analyzers.counters.weights import Weights, Window
from phaseprof.analyzers.results import PhaseFigures
from phaseprof.analyzers.wording import duration, number
from phaseprof.metrics import Metric
from phaseprof.phases import Phase

#: Times that a reading may be the mean over; None: its sample window.
_MEANS_NS = (None, 25_000_000, 100_000_000, 1_000_000_000)
#: How late a reading may be.
_LAGS_NS = tuple(range(-10_000_000, 110_000_001, 10_000_000))
#: A reading is as old as the board's last update.
_JITTER_NS = 8_000_000
#: A passing pass that does not count is in a mean of a second for a second.
_MARGIN_NS = 1_000_000_000
_SHORT_MARGIN_NS = 100_000_000
#: What is expected, over the largest power: of a pause, a third on boards that wait, with room for those that sleep or
#: are shared; of the moments between passes, more.
_IDLE, _BETWEEN = (0.35, 0.2), (0.6, 0.25)

_SPREAD = "the model lies on {} devices of its process, of which one was sampled"

#: The energy counter moves on every 10 to 100 ms: stretches of at least twenty times that are compared.
_LONG_NS = 2_000_000_000
_UPDATE_S = 0.1
#: Sensors of boards are good to about this share.
_SENSOR = 0.05


@dataclass(frozen=True, slots=True)
class PowerOf:
    """The power of one device.

    Attributes:
        work: What ran on it. source: The collector.
        kept: Readings that count.
        by_label: Power of each coarse label, in W.
        mean_ns: What a reading turned out to be the mean over; None for its window.
    """

    work: DeviceWork
    source: str
    kept: int
    by_label: Mapping[int, Solved]
    mean_ns: int | None

    def of(self, phase: Phase) -> Solved | None:
        """The power in a phase."""
        return self.by_label.get(self.work.phases.get(phase, -1))

    def seconds(self, phase: Phase) -> float:
        """Time of a phase in the readings' windows."""
        solved = self.of(phase)
        return 0.0 if solved is None else solved.seconds

    @property
    def idle(self) -> CounterFigure:
        """The power of pauses."""
        solved = self.by_label.get(IDLE)
        return _power_figure(solved, self)


@dataclass(frozen=True, slots=True)
class PhaseEnergy:
    """Power and energy of one phase, over its devices."""

    power_w: CounterFigure | None = None
    energy_j: CounterFigure | None = None
    joules_per_token: CounterFigure | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """Over how many devices a model is spread.

    Attributes:
        sampled: Sampled devices that make each pass together, on average.
        of_process: Devices of one process that its layers lie on; of them only the first is sampled.
    """

    sampled: float = 1.0
    of_process: int = 1


def solve_power(work: DeviceWork, series: Series) -> PowerOf | None:
    """The power of a device in each phase. None without a reading."""
    largest = max(series.values, default=0.0)
    if largest <= 0:
        return None
    scale = Scale(largest, math.inf, _IDLE, _BETWEEN)
    best: PowerOf | None = None
    least = math.inf
    for mean_ns in _MEANS_NS:
        windows = [
            window if mean_ns is None else Window(window.end_ns - mean_ns, window.end_ns)
            for window in series.windows
        ]
        margin_ns = _MARGIN_NS if (mean_ns or 0) > _SHORT_MARGIN_NS else _SHORT_MARGIN_NS
        kept = work.counted(windows, margin_ns)
        weights = Weights(
            work.timeline,
            work.groups,
            [window for window, keep in zip(windows, kept, strict=True) if keep],
            jitter_ns=_JITTER_NS,
        )
        values = [value for value, keep in zip(series.values, kept, strict=True) if keep]
        solved = unmix(weights, values, scale, _LAGS_NS)
        residual = min((each.residual for each in solved.values()), default=math.inf)
        # A longer mean has to fit clearly better: it leaves out more of the run.
        if best is None or residual < least * 0.98:
            best = PowerOf(work, series.source, len(values), solved, mean_ns)
            least = residual
    return best


def phase_energy(figures: PhaseFigures, power: Sequence[PowerOf], spread: Spread) -> PhaseEnergy:
    """Power, energy and energy per token of a phase.

    Args:
        figures: The phase: its time and its tokens, each pass that several ranks make counted once.
        power: Of each sampled device. spread: Over how many devices the model is spread.
    """
    if not power:
        return PhaseEnergy()
    mean = over_devices(
        [_power_figure(each.of(figures.phase), each) for each in power],
        [each.seconds(figures.phase) for each in power],
    )
    if spread.of_process > 1:
        mean_of = replace(
            mean, state=CounterState.INSUFFICIENT, reason=_SPREAD.format(spread.of_process)
        )
    else:
        mean_of = mean
    seconds = figures.span_ms / 1e3 * spread.sampled
    energy = _scaled(mean_of, "energy_j", seconds)
    tokens = {
        Phase.PREFILL: figures.prefill_tokens,
        Phase.DECODE: figures.decode_tokens,
    }.get(figures.phase, figures.tokens)
    each = _scaled(mean_of, "joules_per_token", seconds / tokens) if tokens else None
    return PhaseEnergy(mean, energy, each)


def _power_figure(solved: Solved | None, power: PowerOf) -> CounterFigure:
    limit = thresholds.RATE_ERROR.value * (solved.value if solved is not None else 0.0)
    return figure_of(Metric.POWER.value, solved, kept=power.kept, source=power.source, limit=limit)


def _scaled(figure: CounterFigure, metric: str, factor: float) -> CounterFigure:
    value = None if figure.value is None else figure.value * factor
    error = None if figure.error is None else figure.error * factor
    derived = replace(
        figure,
        metric=metric,
        value=value,
        error=error,
        source=f"power by {figure.source}",
        method=Method.DERIVED,
    )
    return judged(derived, thresholds.RATE_ERROR.value * (value or 0.0))


def check_energy(power: Sequence[Series], energy: Sequence[Series]) -> EnergyCheck | None:
    """Hold the power of a device against its energy counter, over stretches that both saw without a hole.

    Args:
        power, energy: The windows of both, by collector.

    Returns:
        None where there is no such stretch of two seconds.
    """
    if not power or not energy:
        return None
    by_power = by_counter = seconds = 0.0
    stretches = 0
    for begin_ns, end_ns, joules in _stretches(energy[0]):
        mean = _mean(power[0], begin_ns, end_ns)
        if end_ns - begin_ns >= _LONG_NS and mean is not None:
            by_counter += joules
            by_power += mean * (end_ns - begin_ns) / 1e9
            seconds += (end_ns - begin_ns) / 1e9
            stretches += 1
    if not stretches or not seconds:
        return None
    allowed = _SENSOR * max(by_power, by_counter) + 2 * stretches * _UPDATE_S * by_power / seconds
    apart = by_power - by_counter
    consistent = abs(apart) <= allowed
    verdict = (
        "they agree" if consistent else "they disagree: energy per phase may be off by as much"
    )
    return EnergyCheck(
        by_power,
        by_counter,
        seconds,
        consistent,
        f"power adds up to {number(by_power)} J in {duration(seconds)}, the energy counter to "
        f"{number(by_counter)} J: {verdict}",
    )


def _stretches(energy: Series) -> list[tuple[int, int, float]]:
    """Windows without a hole between them, as one: begin, end, energy."""
    found: list[tuple[int, int, float]] = []
    for (start, end), joules in zip(energy.windows, energy.values, strict=True):
        if found and abs(start - found[-1][1]) < (end - start) // 4:
            found[-1] = (found[-1][0], end, found[-1][2] + joules)
        else:
            found.append((start, end, joules))
    return found


def _mean(power: Series, begin_ns: int, end_ns: int) -> float | None:
    """Mean power over a stretch; None if less than nine tenths of it were sampled."""
    weighted = covered = 0.0
    for (start, end), watts in zip(power.windows, power.values, strict=True):
        shared = min(end, end_ns) - max(start, begin_ns)
        if shared > 0:
            weighted += shared * watts
            covered += shared
    return weighted / covered if covered >= 0.9 * (end_ns - begin_ns) else None
