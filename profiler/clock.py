"""One time axis: Unix nanoseconds, taken from a monotonic clock and one recorded pair.

A Unix clock may be set while a run lasts; the monotonic clock may not. So times are read from
`time.perf_counter_ns` (CLOCK_MONOTONIC on Linux, the same in every process of a machine) and placed on the Unix axis
by the pair of readings that the process took when it began.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from phaseprof.trace.meta import ClockPair

#: Readings of the pair; the one with the shortest bracket is kept.
_READINGS = 5


@dataclass(frozen=True, slots=True)
class Clock:
    """Places monotonic readings on the Unix axis.

    Attributes:
        pair: The pair that fixes the axis.
    """

    pair: ClockPair

    @classmethod
    def start(cls) -> Clock:
        """A clock fixed by a pair that is taken now."""
        return cls(read_pair())

    @property
    def offset_ns(self) -> int:
        """What to add to a monotonic reading to get Unix ns."""
        return self.pair.unix_ns - self.pair.monotonic_ns

    def unix_ns(self, monotonic_ns: int) -> int:
        """A monotonic reading on the Unix axis."""
        return monotonic_ns + self.offset_ns

    def now_unix_ns(self) -> int:
        """Now, on the axis."""
        return self.unix_ns(time.perf_counter_ns())


def read_pair(
    unix: Callable[[], int] = time.time_ns, monotonic: Callable[[], int] = time.perf_counter_ns
) -> ClockPair:
    """Read both clocks as closely together as a few tries allow.

    The Unix reading is taken between two monotonic ones; of several tries the tightest bracket wins, and its middle
    stands for the moment of the Unix reading.
    """
    best: tuple[int, ClockPair] | None = None
    for _ in range(_READINGS):
        before = monotonic()
        now = unix()
        after = monotonic()
        width = after - before
        if best is None or width < best[0]:
            best = (width, ClockPair(unix_ns=now, monotonic_ns=before + width // 2))
    assert best is not None
    return best[1]
