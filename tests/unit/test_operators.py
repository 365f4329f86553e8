"""Outermost operators and the busy time of a window, on constructed timelines."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from phaseprof.collectors.operators import OperatorEvent, busy_ns, outermost


def _event(start_ns: int, end_ns: int, thread_id: int = 1, name: str = "aten::mm") -> OperatorEvent:
    return OperatorEvent(name, start_ns, end_ns, thread_id)


def test_an_operator_inside_another_is_dropped() -> None:
    linear = _event(10, 100, name="aten::linear")
    addmm = _event(20, 90, name="aten::addmm")
    copy = _event(30, 40, name="aten::copy_")
    after = _event(100, 110, name="aten::gelu")
    assert outermost([copy, addmm, after, linear]) == (linear, after)


def test_same_begin_keeps_the_longer() -> None:
    outer, inner = _event(10, 100), _event(10, 50)
    assert outermost([inner, outer]) == (outer,)


def test_threads_do_not_hide_each_other() -> None:
    first, second = _event(10, 100, thread_id=1), _event(20, 30, thread_id=2)
    assert outermost([first, second]) == (first, second)


def test_a_child_whose_end_rounds_past_its_parent_is_still_a_child() -> None:
    parent, child = _event(10, 100), _event(50, 101)
    assert outermost([parent, child]) == (parent,)


def test_busy_counts_gaps_out() -> None:
    assert busy_ns([_event(0, 10), _event(20, 25)], 0, 100) == 15


def test_busy_is_clipped_to_the_window() -> None:
    events = [_event(0, 15), _event(18, 22), _event(95, 200), _event(300, 400)]
    assert busy_ns(events, 10, 100) == 5 + 4 + 5


def test_overlapping_threads_count_once() -> None:
    events = [_event(0, 50, thread_id=1), _event(30, 80, thread_id=2), _event(40, 45, thread_id=3)]
    assert busy_ns(events, 0, 100) == 80


def test_no_event_no_busy_time() -> None:
    assert busy_ns([], 0, 100) == 0


_INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20), st.integers(1, 3)), max_size=12
)


@given(_INTERVALS, st.integers(0, 60), st.integers(0, 40))
def test_busy_equals_the_nanoseconds_counted_one_by_one(
    intervals: list[tuple[int, int, int]], window_start: int, window_length: int
) -> None:
    events = [_event(start, start + length, thread) for start, length, thread in intervals]
    window = range(window_start, window_start + window_length)
    covered = {ns for event in events for ns in range(event.start_ns, event.end_ns)}
    assert busy_ns(events, window.start, window.stop) == len(covered & set(window))


@given(_INTERVALS)
def test_outermost_events_of_a_thread_never_overlap(intervals: list[tuple[int, int, int]]) -> None:
    events = [_event(start, start + length, thread) for start, length, thread in intervals]
    for thread in (1, 2, 3):
        kept = [event for event in outermost(events) if event.thread_id == thread]
        for before, after in itertools.pairwise(kept):
            assert before.end_ns <= after.start_ns
