"""The state of a device while passes ran on it: clocks, what held them down, temperature, memory, energy."""

from __future__ import annotations

from collections.abc import Iterator
from operator import mul

import pyarrow as pa

from phaseprof.analyzers.counters.counter_results import (
    CounterFigure,
    CounterState,
    DeviceState,
    Spread,
    ThrottleShare,
)
from phaseprof.analyzers.counters.device_work import DeviceUse, DeviceWork
from phaseprof.analyzers.counters.energy import PowerOf, check_energy
from phaseprof.analyzers.counters.sampled import Series, series_of
from phaseprof.metrics import Metric

#: Share of a window that passes must have for it to show the device at work.
_AT_WORK = 0.5

#: Bits of NVML's clocks-event reasons (nvml.h, nvmlClocksEventReason*): name, and whether it slows a device at work.
_REASONS: tuple[tuple[int, str, bool], ...] = (
    (0x004, "software power cap", True),
    (0x008, "hardware slowdown", True),
    (0x040, "hardware thermal slowdown", True),
    (0x080, "hardware power brake", True),
    (0x020, "software thermal slowdown", True),
    (0x002, "application clocks", True),
    (0x010, "sync boost", True),
    (0x100, "display clocks", True),
    (0x001, "idle", False),
)


def state_of(
    samples: pa.Table, use: DeviceUse, work: DeviceWork, power: PowerOf | None
) -> DeviceState:
    """What was sampled of a device while passes ran.

    Args:
        samples: The `samples` table.
        use: The device. work: What ran on it.
        power: Its power by phase; None if not sampled.
    """
    found = {metric: series_of(samples, use.sampled_as, metric) for metric in _METRICS}
    used = _spread(found[Metric.MEMORY_USED], work)
    sources = {series.source for each in found.values() for series in each}
    idle = power.idle if power is not None else None
    return DeviceState(
        uuid=use.sampled_as,
        name=use.device.name,
        index=use.device.index,
        sm_clock_hz=_spread(found[Metric.SM_CLOCK], work),
        memory_clock_hz=_spread(found[Metric.MEMORY_CLOCK], work),
        temperature_c=_spread(found[Metric.TEMPERATURE], work),
        power_w=_spread(found[Metric.POWER], work),
        throttle=_throttle(found[Metric.THROTTLE], work),
        memory_used_bytes=None if used is None else round(used.greatest),
        idle_power_w=_known(idle),
        energy=check_energy(found[Metric.POWER], found[Metric.ENERGY]),
        windows=max((s.recorded for each in found.values() for s in each), default=0),
        source=", ".join(sorted(sources)),
    )


_METRICS = (
    Metric.SM_CLOCK,
    Metric.MEMORY_CLOCK,
    Metric.TEMPERATURE,
    Metric.POWER,
    Metric.THROTTLE,
    Metric.MEMORY_USED,
    Metric.ENERGY,
    Metric.SM_ACTIVE,
)


def _known(figure: CounterFigure | None) -> CounterFigure | None:
    return figure if figure is not None and figure.state is CounterState.SURE else None


def _at_work(series: tuple[Series, ...], work: DeviceWork) -> Iterator[tuple[float, float]]:
    """Length in ns and value of the windows in which passes ran most of the time."""
    for each in series[:1]:
        for (start, end), value, share in zip(
            each.windows, each.values, work.busy_shares(each.windows), strict=True
        ):
            if share >= _AT_WORK:
                yield end - start, value


def _spread(series: tuple[Series, ...], work: DeviceWork) -> Spread | None:
    values = sorted(value for _, value in _at_work(series, work))
    if not values:
        return None
    return Spread(values[0], values[len(values) // 2], values[-1])


def _throttle(series: tuple[Series, ...], work: DeviceWork) -> tuple[ThrottleShare, ...] | None:
    found = list(_at_work(series, work))
    if not found:
        return None
    lengths = [length for length, _ in found]
    shares = []
    for bit, name, slows in _REASONS:
        was = [float(int(value) & bit > 0) for _, value in found]
        share = sum(map(mul, was, lengths)) / sum(lengths)
        if share > 0:
            shares.append(ThrottleShare(name, share, slows))
    return tuple(sorted(shares, key=lambda each: -each.share))
