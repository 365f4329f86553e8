"""How the latencies of requests are spread.

A histogram has bins of equal ratio where the values span more than a factor of eight, as latencies do that have a tail,
and of equal width otherwise.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import (
    column,
    named,
    names,
    percentiles_ms,
    plain,
    scalar,
    unsteady,
)
from phaseprof.analyzers.passes import Primary
from phaseprof.analyzers.results import Percentiles
from phaseprof.analyzers.viewing.tracks import view

_I64, _F64 = pa.int64(), pa.float64()
#: Bins of a histogram: the square root of the number of values, within these.
_FEWEST_BINS, _MOST_BINS = 6, 48
#: Values that span more than this factor are put into bins of equal ratio.
_SPAN = 8.0


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values lie in each bin.

    Attributes:
        edges_ms: Where the bins begin, and where the last one ends.
        counts: One a bin. A value on an edge is in the bin that begins there, the greatest in the last one.
        equal_ratio: Whether bins have equal ratios, else equal widths.
        zeros: Values of 0, which are in no bin: tokens that came together with the one before.
    """

    edges_ms: tuple[float, ...]
    counts: tuple[int, ...]
    equal_ratio: bool
    zeros: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """The spread of one latency.

    Attributes:
        metric: ``queue``, ``ttft``, ``tpot`` or ``itl``.
        histogram: Of all values. percentiles: The same as in the report.
        least_ms, greatest_ms: The ends of the values, zeros left out.
    """

    metric: str
    histogram: Histogram
    percentiles: Percentiles
    least_ms: float
    greatest_ms: float


def histogram(values_ns: pa.Array | pa.ChunkedArray) -> Histogram | None:
    """The spread of times in ns, nulls left out; None without a value above 0."""
    values = pc.drop_null(plain(values_ns))
    positive = values.filter(pc.greater(values, scalar(0, _I64)))
    zeros = len(values) - len(positive)
    if len(positive) == 0:
        return None
    ordered = positive.take(pc.sort_indices(positive))
    least, greatest = ordered[0].as_py() / 1e6, ordered[-1].as_py() / 1e6
    bins = min(max(math.isqrt(len(ordered)), _FEWEST_BINS), _MOST_BINS)
    if least == greatest:
        return Histogram((least, greatest), (len(ordered),), False, zeros)
    equal_ratio = greatest / least > _SPAN
    if equal_ratio:
        inner = [least * (greatest / least) ** (place / bins) for place in range(1, bins)]
    else:
        inner = [least + (greatest - least) * place / bins for place in range(1, bins)]
    ordered_ns = view(ordered)
    places = [0, *(bisect_left(ordered_ns, edge * 1e6) for edge in inner), len(ordered)]
    found = tuple(late - early for early, late in pairwise(places))
    return Histogram((least, *inner, greatest), found, equal_ratio, zeros)


def distribution(metric: str, values_ns: pa.Array | pa.ChunkedArray) -> Distribution | None:
    """The spread of one latency; None without values."""
    percentiles, found = percentiles_ms(values_ns), histogram(values_ns)
    if percentiles is None or found is None:
        return None
    return Distribution(metric, found, percentiles, found.edges_ms[0], found.edges_ms[-1])


def distributions(
    counted: pa.Table, requests: pa.Table, primary: Primary
) -> tuple[Distribution, ...]:
    """The spread of each latency that there is.

    Args:
        counted: `RequestAnalysis.counted`, so that the spread is of the same requests as the report's percentiles.
        requests: The `requests` table, for the queue of a serving engine.
        primary: Whose requests.
    """
    itl_ns = pa.chunked_array([chunk.flatten() for chunk in counted.column("itl_ns").chunks], _I64)
    columns = {
        "queue": _queue(requests, primary),
        "ttft": counted.column("ttft_ns"),
        "tpot": counted.column("tpot_ns"),
        "itl": itl_ns,
    }
    found = (distribution(metric, values) for metric, values in columns.items())
    return tuple(each for each in found if each is not None)


def _queue(requests: pa.Table, primary: Primary) -> pa.Array:
    rows = steady_requests(requests, primary)
    return column(rows, "queue_ns")


def steady_requests(requests: pa.Table, primary: Primary) -> pa.Table:
    """The requests of the model that count, or all of them for want of such."""
    mine = requests.filter(named(names(requests, "model_id"), primary.model_id))
    quiet = mine.filter(pc.invert(unsteady(mine)))
    return quiet if quiet.num_rows else mine
