"""The clock: a pair of readings taken by constructed clocks."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseprof.clock import Clock, read_pair
from phaseprof.trace.meta import ClockPair

OFFSET = 1_700_000_000_000_000_000


class World:
    """A true time that moves only when somebody reads a clock; the clocks show it with their own zero."""

    def __init__(self, delays: list[int], offset: int = OFFSET) -> None:
        self.now = 1_000
        self.offset = offset
        self._delays = iter(delays)

    def monotonic(self) -> int:
        self.now += next(self._delays)
        return self.now

    def unix(self) -> int:
        self.now += next(self._delays)
        return self.now + self.offset


def test_the_middle_of_the_bracket_is_the_moment() -> None:
    """Each try takes three readings; the delays before them are (0, 40, 40)."""
    world = World([0, 40, 40] * 5)
    pair = read_pair(world.unix, world.monotonic)
    assert pair == ClockPair(unix_ns=OFFSET + 1_040, monotonic_ns=1_040)


def test_the_tightest_bracket_counts() -> None:
    """The thread is interrupted in four of five tries, in the first one not between both readings alike."""
    world = World([0, 5, 9_000, 7, 9_000, 5, 7, 10, 30, 7, 500, 500, 7, 900, 0])
    pair = read_pair(world.unix, world.monotonic)
    # The third try: 1_000 + 5 + 9_000 + 7 + 9_000 + 5 + 7 = 19_024, and Unix time 10 later.
    assert pair.monotonic_ns == 19_024 + 20
    assert pair.unix_ns == OFFSET + 19_024 + 10


def test_of_equal_brackets_the_first_counts() -> None:
    world = World([0, 10, 10] * 5)
    assert read_pair(world.unix, world.monotonic).monotonic_ns == 1_010


@given(
    delays=st.lists(st.integers(0, 10_000), min_size=15, max_size=15),
    offset=st.integers(-(2**62), 2**62),
)
def test_the_pair_is_off_by_half_its_bracket_at_most(delays: list[int], offset: int) -> None:
    world = World(delays, offset)
    pair = read_pair(world.unix, world.monotonic)
    # Of the three delays of a try, the last two lie between the monotonic readings.
    tightest = min(delays[n + 1] + delays[n + 2] for n in range(0, 15, 3))
    assert abs(Clock(pair).offset_ns - offset) <= (tightest + 1) // 2


def test_readings_are_placed_on_the_axis() -> None:
    clock = Clock(ClockPair(unix_ns=OFFSET + 500, monotonic_ns=200))
    assert clock.offset_ns == OFFSET + 300
    assert clock.unix_ns(200) == OFFSET + 500
    assert clock.unix_ns(1_200) == OFFSET + 1_500
    # A span keeps its length.
    assert clock.unix_ns(999) - clock.unix_ns(99) == 900


def test_a_clock_that_starts_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The axis stays where it was fixed, whatever is done to the Unix clock afterwards."""
    before = time.time_ns()
    clock = Clock.start()
    first = clock.now_unix_ns()
    after = time.time_ns()
    # Both clocks of this machine are read here; a minute is far beyond what a pair can be off.
    assert before - 60 * 10**9 <= first <= after + 60 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert clock.now_unix_ns() >= first
