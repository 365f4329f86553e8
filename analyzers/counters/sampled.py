"""Sample windows of one counter of one device, as the analyses take them: ascending, not too many, not too short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, named, names, nearest_ranks, scalar
from phaseprof.analyzers.counters.weights import EDGE_JITTER_NS, Window
from phaseprof.metrics import Metric

#: Windows that are looked at; of more, as many in blocks that are spread over the run. The error of thousands of
#: windows is that of the clocks, not of their number.
MOST_WINDOWS = 4_000
_BLOCKS = 40
_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Edges:
    """How well a collector knows when its windows begin and end.

    Attributes:
        jitter_ns: Standard deviation of an edge around the time that it is recorded with.
        shortest_ns: Shorter windows are joined to this length: below, it is the error of the edges that counts, or that
            the begin and the end of a pass are unlike its middle.
    """

    jitter_ns: int
    shortest_ns: int
    least_error: float = 0.0


#: Samples that the host asks for.
_ASKED = Edges(EDGE_JITTER_NS, 20_000_000)
#: By collector: the GPU takes those of `pm` by its own clock, which lies beside that of the host within microseconds.
#: What is left is where the passes are placed: a pass is called some microseconds before the device begins it.
_EDGES = {"pm": Edges(50_000, 1_000_000, least_error=0.005)}


@dataclass(frozen=True, slots=True)
class Series:
    """The windows of one counter by one collector, ascending, and the value of each.

    Attributes:
        recorded: Windows in the trace, before they were thinned out or joined.
    """

    source: str
    windows: tuple[Window, ...]
    values: tuple[float, ...]
    recorded: int

    @property
    def edges(self) -> Edges:
        """How well the windows' edges are known."""
        return _EDGES.get(self.source, _ASKED)


def devices_of(samples: pa.Table) -> tuple[str, ...]:
    """The devices that have samples."""
    if samples.num_rows == 0:
        return ()
    return tuple(sorted(str(name) for name in names(samples, "device").unique().to_pylist()))


def seconds_of(passes: pa.Table) -> pa.Array:
    """The whole seconds, Unix time, in which a pass begins or ends."""
    edges = pa.chunked_array([column(passes, "start_ns"), column(passes, "end_ns")])
    return pc.unique(pc.divide(edges, scalar(_SECOND_NS, pa.int64())))


def series_of(
    samples: pa.Table, device: str, metric: Metric, seconds: pa.Array | None = None
) -> tuple[Series, ...]:
    """The windows of a counter, by collector.

    Args:
        samples: The `samples` table.
        device: As `samples.device` has it.
        metric: Which counter.
        seconds: As `seconds_of` gives them: of more windows than are looked at, those that end in or right after one
            of them go first, for a server that waits most of the time.
    """
    if samples.num_rows == 0:
        return ()
    mine = pc.and_(
        named(names(samples, "device"), device), named(names(samples, "metric"), metric.value)
    )
    rows = samples.filter(pc.and_(mine, pc.less(samples["start_ns"], samples["end_ns"])))
    found = []
    sources = names(rows, "source")
    for source in sorted(str(each) for each in sources.unique().to_pylist()):
        found.append(_series(source, rows.filter(named(sources, source)), seconds))
    return tuple(found)


def _series(source: str, rows: pa.Table, seconds: pa.Array | None) -> Series:
    recorded = rows.num_rows
    if seconds is not None and recorded > MOST_WINDOWS:
        second = pc.divide(column(rows, "end_ns"), scalar(_SECOND_NS, pa.int64()))
        before = pc.subtract(second, scalar(1, pa.int64()))
        near = pc.or_(pc.is_in(second, value_set=seconds), pc.is_in(before, value_set=seconds))
        rows = rows.filter(near)
    order = pc.sort_indices(column(rows, "end_ns"))
    start, end = column(rows, "start_ns").take(order), column(rows, "end_ns").take(order)
    values = column(rows, "value").take(order)
    typical_ns = max(*nearest_ranks(pc.subtract(end, start), 0.5), 1.0)
    shortest_ns = _EDGES.get(source, _ASKED).shortest_ns
    joined = max(round(shortest_ns / typical_ns), 1) if typical_ns < 0.6 * shortest_ns else 1
    windows: list[Window] = []
    means: list[float] = []
    for begin, length in _blocks(rows.num_rows, MOST_WINDOWS * joined):
        part = [
            Window(*each)
            for each in zip(
                start.slice(begin, length).to_pylist(),
                end.slice(begin, length).to_pylist(),
                strict=True,
            )
        ]
        read = values.slice(begin, length).to_pylist()
        if joined > 1:
            part, read = _joined(part, read, joined)
        windows += part
        means += read
    return Series(source, tuple(windows), tuple(means), recorded)


def _blocks(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Begin and length of the blocks of rows that are looked at."""
    if count <= most:
        yield 0, count
        return
    length = most // _BLOCKS
    for block in range(_BLOCKS):
        yield block * (count - length) // (_BLOCKS - 1), length


def _joined(
    windows: Sequence[Window], values: Sequence[float], most: int
) -> tuple[list[Window], list[float]]:
    """Neighbouring windows as one, by the mean over their time; none is joined over a hole."""
    found: list[Window] = []
    means: list[float] = []
    group: list[int] = []

    def close() -> None:
        lengths = [windows[i].end_ns - windows[i].start_ns for i in group]
        found.append(Window(windows[group[0]].start_ns, windows[group[-1]].end_ns))
        means.append(sum(map(mul, lengths, (values[i] for i in group))) / sum(lengths))

    for i, window in enumerate(windows):
        if group:
            last = windows[group[-1]]
            hole = abs(window.start_ns - last.end_ns) > (last.end_ns - last.start_ns) // 4
            if hole or len(group) == most:
                close()
                group = []
        group.append(i)
    if group:
        close()
    return found, means
