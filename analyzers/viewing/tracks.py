"""Counters of a run over time, in bins: the mean over time, the least and the greatest value of each.

Levels go from few long bins to many short ones, as those of `timeline`. A bin that no sample window reaches into has no
value.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, counts, named, names, plain, scalar
from phaseprof.metrics import Metric
from phaseprof.trace.columns import to_column

#: Bins of the last level; of a counter with few windows fewer, as nothing is lost by it.
_COUNTER_BINS, _FEW_BINS = 16_384, 4_096
_FEW_WINDOWS = 1_000
#: A level has so many times the bins of the one before; the first has at most `COARSEST_BINS`.
FACTOR = 4
COARSEST_BINS = 1_024
#: Counters that are shown.
_MOST_COUNTERS = 8

#: What is shown of the counters, the most telling first. What "some kernel ran" says is left out.
_SHOWN = (
    Metric.SM_ACTIVE,
    Metric.TENSOR_ACTIVE,
    Metric.DRAM_ACTIVE,
    Metric.POWER,
    Metric.SM_CLOCK,
    Metric.DRAM_READ,
    Metric.DRAM_WRITE,
    Metric.MEMORY_USED,
    Metric.TEMPERATURE,
    Metric.HOST_CPU,
    Metric.PROCESS_CPU,
    Metric.PROCESS_MEMORY,
)

_I64, _F64 = pa.int64(), pa.float64()
_US = 1_000
#: Bytes of a number.
_WIDTH = 8


@dataclass(frozen=True, slots=True)
class CounterLevel:
    """A counter in bins of equal length; None where nothing was sampled.

    Attributes:
        bin_us: Their length.
        mean, least, greatest: Of each bin, by time.
    """

    bin_us: float
    mean: tuple[float | None, ...]
    least: tuple[float | None, ...]
    greatest: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class CounterTrack:
    """A counter over time.

    Attributes:
        metric: A `phaseprof.metrics.Metric`, or what is counted: ``prefill_tokens_per_s``, ``decode_tokens_per_s``.
        device: Its name; empty for what is counted. source: The collector.
        windows: Sample windows; passes for what is counted.
        mean: Over the sampled time of the run. least, greatest: Of all bins.
        levels: From few long bins to many short ones.
    """

    metric: str
    device: str
    source: str
    windows: int
    mean: float
    least: float
    greatest: float
    levels: tuple[CounterLevel, ...]


@dataclass(frozen=True, slots=True)
class Windows:
    """What was counted in windows that follow each other, by their begin.

    Attributes:
        starts_us, ends_us: The windows.
        values: Of each.
        sums: Of value x length of the windows before each; lengths_us: Of the lengths.
    """

    starts_us: memoryview[Any]
    ends_us: memoryview[Any]
    values: memoryview[Any]
    sums: memoryview[Any]
    lengths_us: memoryview[Any]

    @classmethod
    def of(cls, start_us: pa.Array, end_us: pa.Array, values: pa.Array) -> Windows:
        """Windows by their begin."""
        length = pc.subtract(end_us, start_us)
        weighted = pc.multiply(values, pc.cast(length, _F64))
        return cls(view(start_us), view(end_us), view(values), running(weighted), running(length))

    def before(self, edge_us: int) -> tuple[float, int]:
        """Value x length, and length, of what lies before a moment."""
        place = bisect_right(self.starts_us, edge_us) - 1
        if place < 0:
            return 0.0, 0
        inside = min(edge_us, self.ends_us[place]) - self.starts_us[place]
        return self.sums[place] + self.values[place] * inside, self.lengths_us[place] + inside

    def within(self, early_us: int, late_us: int) -> memoryview[Any]:
        """The values of the windows that reach into a stretch."""
        begin = bisect_right(self.ends_us, early_us)
        return self.values[begin : max(bisect_left(self.starts_us, late_us), begin)]


def track_of(
    metric: str, device: str, source: str, windows: Windows, span_us: int, *, over_all: bool
) -> CounterTrack | None:
    """A counter in bins; None where no window lies in the run.

    Args:
        over_all: A bin's mean is over all of its time, whether a window covers it or not.
    """
    bins = _COUNTER_BINS if len(windows.values) > _FEW_WINDOWS else _FEW_BINS
    edges = edges_of(span_us, bins)
    sums = [windows.before(edge) for edge in edges]
    weights: list[float] = []
    amounts: list[float] = []
    least: list[float | None] = []
    greatest: list[float | None] = []
    for ((amount, covered), (next_amount, next_covered)), (early, late) in zip(
        pairwise(sums), pairwise(edges), strict=True
    ):
        amounts.append(next_amount - amount)
        weights.append(late - early if over_all else next_covered - covered)
        values = () if over_all else windows.within(early, late)
        mean = amounts[-1] / weights[-1] if weights[-1] else None
        # A window may reach into a bin by less than a us.
        least.append(min(values, default=mean) if mean is not None else None)
        greatest.append(max(values, default=mean) if mean is not None else None)
    if not any(weights):
        return None
    found = []
    while True:
        mean_of = [
            amount / weight if weight else None
            for amount, weight in zip(amounts, weights, strict=True)
        ]
        found.append(CounterLevel(span_us / bins, tuple(mean_of), tuple(least), tuple(greatest)))
        if bins <= COARSEST_BINS:
            break
        bins //= FACTOR
        amounts, weights = _summed(amounts), _summed(weights)
        least, greatest = _extreme(least, min), _extreme(greatest, max)
    return CounterTrack(
        metric=metric,
        device=device,
        source=source,
        windows=len(windows.values),
        mean=sum(amounts) / sum(weights),
        least=min(each for each in least if each is not None),
        greatest=max(each for each in greatest if each is not None),
        levels=tuple(reversed(found)),
    )


def _summed(values: Sequence[float]) -> list[float]:
    return [sum(values[place : place + FACTOR]) for place in range(0, len(values), FACTOR)]


def _extreme(
    values: Sequence[float | None], pick: Callable[[list[float]], float]
) -> list[float | None]:
    found: list[float | None] = []
    for place in range(0, len(values), FACTOR):
        known = [each for each in values[place : place + FACTOR] if each is not None]
        found.append(pick(known) if known else None)
    return found


def sampled_tracks(
    samples: pa.Table, start_us: int, span_us: int, devices: dict[str, str]
) -> tuple[tuple[CounterTrack, ...], tuple[str, ...]]:
    """What was sampled, as far as there is room, and what is left out."""
    if samples.num_rows == 0:
        return (), ()
    tracks: list[CounterTrack] = []
    left_out: list[str] = []
    device_names, metrics = names(samples, "device"), names(samples, "metric")
    for metric in _SHOWN:
        of_metric = named(metrics, metric.value)
        for device in sorted(str(name) for name in device_names.dictionary.to_pylist()):
            rows = samples.filter(pc.and_(of_metric, named(device_names, device)))
            if rows.num_rows == 0:
                continue
            shown_as = devices.get(device, device)
            if len(tracks) == _MOST_COUNTERS:
                left_out.append(f"{metric.value} of {shown_as}")
                continue
            by_source = counts(names(rows, "source"))
            source = max(sorted(by_source), key=by_source.__getitem__)
            windows = _windows(rows.filter(named(names(rows, "source"), source)), start_us)
            track = track_of(metric.value, shown_as, source, windows, span_us, over_all=False)
            if track is not None:
                tracks.append(track)
    return tuple(tracks), tuple(left_out)


def _windows(rows: pa.Table, start_us: int) -> Windows:
    unit, first = scalar(_US, _I64), scalar(start_us, _I64)
    rows = rows.filter(pc.is_finite(column(rows, "value")))
    order = pc.sort_indices(column(rows, "start_ns"))
    begin, end = (
        pc.subtract(pc.divide(column(rows, name), unit), first).take(order)
        for name in ("start_ns", "end_ns")
    )
    # A moment (a window without length) counts as one us.
    end = pc.max_element_wise(end, pc.add(begin, scalar(1, _I64)))
    return Windows.of(begin, end, column(rows, "value").take(order))


def edges_of(span_us: int, bins: int) -> list[int]:
    """Where the bins begin and end; the last moment belongs to the last bin."""
    edges = [span_us * place // bins for place in range(bins)]
    return [*edges, span_us + 1]


def running(values: pa.Array) -> memoryview[Any]:
    """Sums of the first 0, 1, 2, … values."""
    head = to_column([0], values.type)
    return view(pa.concat_arrays([head, pc.cumulative_sum(values)]))


def view(values: pa.Array) -> memoryview[Any]:
    """The numbers of an int64 or float64 array without nulls, as they lie in memory where it is contiguous."""
    flat = plain(values)
    code: Literal["d", "q"] = "d" if pa.types.is_floating(flat.type) else "q"
    if len(flat) == 0:
        return memoryview(array(code))
    begin, end = flat.offset * _WIDTH, (flat.offset + len(flat)) * _WIDTH
    return memoryview(flat.buffers()[1]).cast("B")[begin:end].cast(code)
