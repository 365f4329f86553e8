"""A trace as tracks: what a timeline viewer shows. Spans on tracks, counters over time, a process for each rank.

Viewers want spans of a track to nest. What overlaps without nesting (requests, passes of several threads, kernels of
several streams) is laid on lanes: each span on the first lane that is free when it begins.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import int_column
from phaseprof.trace.reader import Trace

#: Rows that are turned into Python objects at a time.
_ROWS = 16_384

Value = int | float | str


class TrackKind(enum.StrEnum):
    """What lies on a track."""

    PASSES = "passes"
    REQUESTS = "requests"
    STEPS = "scheduler"
    KERNELS = "kernels"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True)
class Track:
    """A line of a timeline.

    Attributes:
        number: Unique, from 1.
        rank: The process that it belongs to. process: What that is called.
        kind: What lies on it.
        name: What it is called.
    """

    number: int
    rank: int
    process: str
    kind: TrackKind
    name: str


@dataclass(frozen=True, slots=True)
class Span:
    """Something that takes time.

    Attributes:
        track: Number of its track.
        name: What it is called.
        start_ns, end_ns: Unix ns; equal for something without a length.
        details: Figures, with units in their names.
        inside: Spans that lie within, on the same track.
    """

    track: int
    name: str
    start_ns: int
    end_ns: int
    details: tuple[tuple[str, Value], ...] = ()
    inside: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Point:
    """The value of a counter from one time on, until its next point."""

    track: int
    at_ns: int
    value: float


Entry = Track | Span | Point
#: Names the line that a row lies on.
_Line = Callable[[Mapping[str, Any]], str]
#: Makes the span of a row.
_ToSpan = Callable[[Mapping[str, Any]], Span]


def viewer_tracks(trace: Trace) -> Iterator[Entry]:
    """The tracks of a trace, each before what lies on it; the spans of a track by their begin.

    Args:
        trace: A trace, read whole.
    """
    layout = _Layout(_process_names(trace))
    yield from layout.lanes(trace.passes, TrackKind.PASSES, _pass_line, _pass)
    yield from layout.lanes(trace.steps, TrackKind.STEPS, _step_line, _step)
    requests = trace.requests.filter(pc.is_valid(trace.requests.column("finished_ns")))
    yield from layout.lanes(requests, TrackKind.REQUESTS, _request_line, _request)
    yield from layout.lanes(trace.kernels, TrackKind.KERNELS, _kernel_line, _kernel)
    yield from layout.counters(trace.samples)


def rows_of(trace: Trace) -> int:
    """How many rows `viewer_tracks` goes through."""
    tables = (trace.passes, trace.steps, trace.requests, trace.kernels, trace.samples)
    return sum(table.num_rows for table in tables)


def _process_names(trace: Trace) -> dict[int, str]:
    names = {}
    for meta in trace.metas:
        where = f", {meta.host.name}" if meta.host is not None and meta.host.name else ""
        names[meta.rank] = f"rank {meta.rank}{where}"
    return names


class _Layout:
    """Gives tracks their numbers."""

    def __init__(self, processes: Mapping[int, str]) -> None:
        self._processes = processes
        self._number = 0

    def _track(self, rank: int, kind: TrackKind, name: str) -> Track:
        self._number += 1
        process = self._processes.get(rank, f"rank {rank}")
        return Track(self._number, rank, process, kind, name)

    def lanes(
        self, table: pa.Table, kind: TrackKind, line: _Line, make: _ToSpan
    ) -> Iterator[Entry]:
        """The rows of a table as spans, each line of it on as many lanes as it needs."""
        found: dict[tuple[int, str], _Lanes] = {}
        by = "arrival_ns" if "arrival_ns" in table.column_names else "start_ns"
        for row in _rows(table, by):
            rank, name = int(row["rank"]), line(row)
            lanes = found.setdefault((rank, name), _Lanes())
            span = make(row)
            lane = lanes.place(span.start_ns, span.end_ns)
            if lane == len(lanes.tracks):
                track = self._track(rank, kind, name if lane == 0 else f"{name} ({lane + 1})")
                lanes.tracks.append(track.number)
                yield track
            yield _placed(span, lanes.tracks[lane])

    def counters(self, samples: pa.Table) -> Iterator[Entry]:
        """Each metric of a device: the value of a window from its begin on, the last one until its end."""
        found: dict[tuple[int, str, str, str], int] = {}
        last: dict[int, Point] = {}
        for row in _rows(samples, "start_ns"):
            key = (int(row["rank"]), row["device"], row["source"], row["metric"])
            number = found.get(key)
            if number is None:
                name = f"{row['metric']} · {row['device']} ({row['source']})"
                track = self._track(key[0], TrackKind.COUNTER, name)
                number = found[key] = track.number
                yield track
            yield Point(number, row["start_ns"], row["value"])
            last[number] = Point(number, row["end_ns"], row["value"])
        yield from last.values()


def _placed(span: Span, track: int) -> Span:
    inside = tuple(replace(each, track=track) for each in span.inside)
    return replace(span, track=track, inside=inside)


class _Lanes:
    """The lanes of a line: which is free from when on."""

    def __init__(self) -> None:
        self.tracks: list[int] = []
        self._busy: list[tuple[int, int]] = []
        self._free: list[int] = []
        self._made = 0

    def place(self, start_ns: int, end_ns: int) -> int:
        """The lane for a span; spans come by their begin."""
        while self._busy and self._busy[0][0] <= start_ns:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if self._free:
            lane = heapq.heappop(self._free)
        else:
            lane, self._made = self._made, self._made + 1
        heapq.heappush(self._busy, (end_ns, lane))
        return lane


def _rows(table: pa.Table, by: str) -> Iterator[Mapping[str, Any]]:
    """The rows by a time, a part at a time."""
    order = pc.sort_indices(int_column(table, by))
    for begin in range(0, table.num_rows, _ROWS):
        yield from table.take(order.slice(begin, _ROWS)).to_pylist()


def _details(row: Mapping[str, Any], names: Sequence[str]) -> tuple[tuple[str, Value], ...]:
    return tuple((name, row[name]) for name in names if row.get(name) is not None)


_PASS = (
    *("pass_id", "step", "tag_source", "sequences", "prefill_tokens", "decode_tokens"),
    *("draft_tokens", "accepted_tokens", "cached_tokens", "recomputed_tokens", "padding_tokens"),
    *("context_tokens", "device_ns", "flops", "weight_bytes", "kv_read_bytes", "kv_write_bytes"),
    *("dtype", "warmup", "profiled", "graph", "error"),
)


def _pass_line(row: Mapping[str, Any]) -> str:
    role = "" if row["role"] == "target" else f" ({row['role']})"
    return f"passes of {row['model_id']}{role}"


def _pass(row: Mapping[str, Any]) -> Span:
    return Span(0, row["phase"], row["start_ns"], row["end_ns"], _details(row, _PASS))


_STEP = ("step", "running", "waiting", "preempted", "scheduled_tokens", "kv_usage")


def _step_line(row: Mapping[str, Any]) -> str:
    return f"scheduler {row['engine']}"


def _step(row: Mapping[str, Any]) -> Span:
    inside = []
    at_ns = row["start_ns"]
    for name in ("schedule", "execute", "update"):
        took_ns = row[f"{name}_ns"]
        if took_ns is None:
            break
        inside.append(Span(0, name, at_ns, at_ns + took_ns))
        at_ns += took_ns
    details = _details(row, _STEP)
    return Span(0, f"step {row['step']}", row["start_ns"], at_ns, details, tuple(inside))


_REQUEST = (
    *("request_id", "client_id", "sequences", "prompt_tokens", "cached_tokens", "output_tokens"),
    *("queue_ns", "ttft_ns", "tpot_ns", "finish", "preemptions", "warmup"),
)


def _request_line(row: Mapping[str, Any]) -> str:
    return "requests"


def _request(row: Mapping[str, Any]) -> Span:
    start_ns, end_ns = row["arrival_ns"], max(row["finished_ns"], row["arrival_ns"])
    inside = []
    begun_ns = start_ns
    if row["queue_ns"]:
        begun_ns = min(start_ns + row["queue_ns"], end_ns)
        inside.append(Span(0, "queue", start_ns, begun_ns))
    first_ns = row["first_token_ns"]
    if first_ns is not None and begun_ns <= first_ns <= end_ns:
        inside.append(Span(0, "to first token", begun_ns, first_ns))
        inside.append(Span(0, "later tokens", first_ns, end_ns))
    name = str(row["client_id"] or row["request_id"])
    return Span(0, name, start_ns, end_ns, _details(row, _REQUEST), tuple(inside))


def _kernel_line(row: Mapping[str, Any]) -> str:
    device, stream = str(row["device"]), row["stream"]
    if stream is None:
        return device
    return f"{device} thread {stream}" if device.startswith("cpu") else f"{device} stream {stream}"


def _kernel(row: Mapping[str, Any]) -> Span:
    details = _details(row, ("pass_id", "source", "launched_ns"))
    return Span(0, row["name"], row["start_ns"], row["end_ns"], details)
