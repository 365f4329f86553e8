"""Where passes ran on a device, and what a window holds of them: timelines by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseprof.analyzers.counters.device_time import BETWEEN, IDLE, Stretch, Timeline, placed

MS = 1_000_000
PREFILL, DECODE, SEVERAL = 2, 3, 4


def timeline(*stretches: tuple[int, int, int]) -> Timeline:
    """Stretches in ms."""
    return Timeline.of([Stretch(a * MS, b * MS, label) for a, b, label in stretches], 5, SEVERAL)


def test_a_pass_begins_when_the_one_before_it_has_ended() -> None:
    # Called at 0, 2 and 50; the first takes 30 on the device, though its call returned after 1.
    assert placed([0, 2, 50], [1, 3, 51], [30, 10, 5]) == [(0, 30), (30, 40), (50, 55)]


def test_a_pass_without_device_time_is_where_its_call_was() -> None:
    assert placed([0, 10], [8, 20], [None, 4]) == [(0, 8), (10, 14)]


def test_a_window_holds_what_ran_in_it() -> None:
    line = timeline((0, 80, PREFILL), (80, 92, DECODE), (93, 105, DECODE))

    assert line.shares(50 * MS, 100 * MS) == pytest.approx([0, 0.02, 0.6, 0.38, 0])


def test_a_long_time_without_passes_is_a_pause_and_a_short_one_is_between_them() -> None:
    line = timeline((0, 10, DECODE), (14, 20, DECODE), (30, 40, DECODE))

    shares = line.shares(0, 40 * MS)

    assert shares[BETWEEN] == pytest.approx(0.1)
    assert shares[IDLE] == pytest.approx(0.25)


def test_before_and_after_the_run_the_device_is_idle() -> None:
    line = timeline((100, 200, PREFILL))

    assert line.shares(0, 300 * MS) == pytest.approx([2 / 3, 0, 1 / 3, 0, 0])
    assert line.shares(0, 50 * MS) == pytest.approx([1, 0, 0, 0, 0])


def test_passes_of_different_phases_at_once_are_neither() -> None:
    line = timeline((0, 50, PREFILL), (30, 80, DECODE), (60, 70, DECODE))

    assert line.shares(0, 80 * MS) == pytest.approx([0, 0, 30 / 80, 30 / 80, 20 / 80])


def test_time_that_does_not_count_has_its_label_whatever_runs_beside_it() -> None:
    stretches = [Stretch(0, 50, PREFILL), Stretch(30, 80, 4)]

    line = Timeline.of(stretches, 5, several=3, over=4)

    assert line.shares(0, 80) == pytest.approx([0, 0, 30 / 80, 0, 50 / 80])


def test_nothing_ran() -> None:
    assert timeline().shares(0, 10) == pytest.approx([1, 0, 0, 0, 0])


@given(
    stretches=st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 100), st.sampled_from([PREFILL, DECODE])),
        max_size=12,
    ),
    start=st.integers(-50, 500),
    length=st.integers(1, 300),
)
def test_shares_are_those_of_each_moment(
    stretches: list[tuple[int, int, int]], start: int, length: int
) -> None:
    line = timeline(*((at, at + long, label) for at, long, label in stretches))

    def runs(at: float) -> set[int]:
        return {label for begin, long, label in stretches if begin <= at < begin + long}

    counts = {PREFILL: 0, DECODE: 0, SEVERAL: 0}
    for ms in range(start, start + length):
        labels = runs(ms + 0.5)
        if labels:
            counts[SEVERAL if len(labels) > 1 else labels.pop()] += 1
    shares = line.shares(start * MS, (start + length) * MS)

    assert sum(shares) == pytest.approx(1)
    for label, ms in counts.items():
        assert shares[label] == pytest.approx(ms / length)
