"""A trace as tracks: what lies where, by constructed traces."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from traces import MS, START_NS, Timeline

from phaseprof.analyzers.viewing.viewer_tracks import (
    Point,
    Span,
    Track,
    TrackKind,
    rows_of,
    viewer_tracks,
)


def _on(timeline: Timeline, kind: TrackKind) -> dict[str, list[Span]]:
    """Spans by the name of their track."""
    found: dict[str, list[Span]] = {}
    names: dict[int, str] = {}
    for entry in viewer_tracks(timeline.trace()):
        if isinstance(entry, Track) and entry.kind is kind:
            names[entry.number] = entry.name
            found[entry.name] = []
        elif isinstance(entry, Span) and entry.track in names:
            found[names[entry.track]].append(entry)
    return found


def test_passes_lie_on_a_track_of_their_model_and_role() -> None:
    timeline = Timeline()
    timeline.add("prefill", 20, tokens=8)
    timeline.add("decode", 5, role="draft")
    timeline.add("decode", 10, gflop=0.5)
    found = _on(timeline, TrackKind.PASSES)
    assert list(found) == ["passes of m", "passes of m (draft)"]
    prefill, decode = found["passes of m"]
    assert (prefill.name, prefill.start_ns, prefill.end_ns) == (
        "prefill",
        START_NS,
        START_NS + 20 * MS,
    )
    assert dict(decode.details)["flops"] == 500_000_000
    assert "draft_tokens" in dict(prefill.details)
    assert "error" not in dict(prefill.details)


def test_requests_at_once_have_lanes() -> None:
    """Three requests of 40 ms at once, and one after them."""
    timeline = Timeline()
    timeline.add("decode", 1)
    for name, at in (("a", 0), ("b", 10), ("c", 20), ("d", 40)):
        begin = START_NS + at * MS
        timeline.request(
            name,
            arrival_ns=begin,
            queue_ns=5 * MS,
            first_token_ns=begin + 20 * MS,
            finished_ns=begin + 40 * MS,
        )
    found = _on(timeline, TrackKind.REQUESTS)
    placed = {title: [span.name for span in spans] for title, spans in found.items()}
    assert placed == {"requests": ["a", "d"], "requests (2)": ["b"], "requests (3)": ["c"]}
    (request, _) = found["requests"]
    assert [(s.name, (s.end_ns - s.start_ns) // MS) for s in request.inside] == [
        ("queue", 5),
        ("to first token", 15),
        ("later tokens", 20),
    ]


def test_a_request_without_an_end_is_on_no_track() -> None:
    timeline = Timeline()
    timeline.add("decode", 1)
    timeline.request("a", finished_ns=None)
    assert not _on(timeline, TrackKind.REQUESTS)


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), min_size=1, max_size=30),
)
def test_no_two_spans_of_a_lane_overlap(spans: list[tuple[int, int]]) -> None:
    timeline = Timeline()
    timeline.add("decode", 1)
    for number, (begin, length) in enumerate(spans):
        timeline.request(
            f"r{number}",
            arrival_ns=START_NS + begin,
            queue_ns=0,
            first_token_ns=None,
            finished_ns=START_NS + begin + length,
        )
    found = _on(timeline, TrackKind.REQUESTS)
    assert sum(map(len, found.values())) == len(spans)
    for lane in found.values():
        assert all(one.end_ns <= other.start_ns for one, other in pairwise(lane))
    # No more lanes than spans at once: those of no length take none.
    edges = {edge for begin, length in spans for edge in (begin, begin + length)}
    most = max(sum(b <= at < b + n or (n == 0 and b == at) for b, n in spans) for at in edges)
    assert len(found) <= max(most, 1)


def test_counters_hold_until_the_next_window() -> None:
    timeline = Timeline()
    timeline.add("decode", 1)
    trace = timeline.trace()
    rows = [
        {
            "rank": 0,
            "device": "GPU-1",
            "source": "nvml",
            "metric": "power_w",
            "start_ns": START_NS + begin * MS,
            "end_ns": START_NS + (begin + 10) * MS,
            "value": value,
        }
        for begin, value in ((0, 300.0), (10, 310.0))
    ]
    samples = trace.samples.from_pylist(rows, schema=trace.samples.schema)
    trace = replace(trace, samples=samples)
    entries = list(viewer_tracks(trace))
    (track,) = [e for e in entries if isinstance(e, Track) and e.kind is TrackKind.COUNTER]
    assert track.name == "power_w · GPU-1 (nvml)"
    points = [(e.at_ns, e.value) for e in entries if isinstance(e, Point)]
    assert points == [
        (START_NS, 300.0),
        (START_NS + 10 * MS, 310.0),
        (START_NS + 20 * MS, 310.0),
    ]
    assert rows_of(trace) == 3
