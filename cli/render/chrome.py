"""Tracks as a Chrome trace: JSON, for chrome://tracing, ui.perfetto.dev and whatever else reads that format.

Times are microseconds, as the format wants them, since the time that `baseTimeNanoseconds` says: a double holds no Unix
time to the nanosecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import IO, Any

from phaseprof.analyzers.viewing.viewer_tracks import Entry, Span, Track, TrackKind


def write_chrome(entries: Iterable[Entry], file: IO[bytes], base_ns: int) -> None:
    """Write the tracks, event by event.

    Args:
        entries: What `phaseprof.analyzers.viewing.viewer_tracks.viewer_tracks` gives.
        file: Where to.
        base_ns: The time that is 0 in the file.
    """
    file.write(f'{{"baseTimeNanoseconds": {base_ns},\n"traceEvents": [\n'.encode())
    first = True
    for event in _events(entries, base_ns):
        file.write(b"" if first else b",\n")
        file.write(json.dumps(event, ensure_ascii=False, allow_nan=False).encode())
        first = False
    file.write(b"\n]}\n")


def _events(entries: Iterable[Entry], base_ns: int) -> Iterator[dict[str, Any]]:
    on: dict[int, Track] = {}
    processes: set[int] = set()
    for entry in entries:
        if isinstance(entry, Track):
            on[entry.number] = entry
            if entry.rank not in processes:
                processes.add(entry.rank)
                yield _named("process_name", entry, entry.process)
            if entry.kind is not TrackKind.COUNTER:
                yield _named("thread_name", entry, entry.name)
        elif isinstance(entry, Span):
            yield from _span(entry, on[entry.track], base_ns)
        else:
            track = on[entry.track]
            at_us = (entry.at_ns - base_ns) / 1e3
            yield {
                "ph": "C",
                "name": track.name,
                "pid": track.rank,
                "ts": at_us,
                "args": {"value": entry.value},
            }


def _named(what: str, track: Track, name: str) -> dict[str, Any]:
    place = {"ph": "M", "name": what, "pid": track.rank}
    if what == "thread_name":
        place["tid"] = track.number
    return {**place, "args": {"name": name}}


def _span(span: Span, track: Track, base_ns: int) -> Iterator[dict[str, Any]]:
    event: dict[str, Any] = {
        "ph": "X",
        "cat": track.kind.value,
        "name": span.name,
        "pid": track.rank,
        "tid": track.number,
        "ts": (span.start_ns - base_ns) / 1e3,
        "dur": (span.end_ns - span.start_ns) / 1e3,
    }
    if span.details:
        event["args"] = dict(span.details)
    yield event
    for each in span.inside:
        yield from _span(each, track, base_ns)
