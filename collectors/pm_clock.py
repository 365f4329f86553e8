"""From timestamps of PM samples to the monotonic clock of the host.

CUPTI stamps samples with nanoseconds of its own clock, which starts elsewhere and drifts. Pairs of both clocks are read
all along the run, and a timestamp between two pairs is placed on the line through them.

That `cuptiGetTimestamp` is the clock of the samples is what other users of CUPTI rely on; it is checked here against
what must hold on any clock: no sample begins before sampling was started, and none ends after it was decoded. Where it
does not hold, those two bounds place the samples by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

#: Readings of a pair; the one with the shortest bracket is kept.
_READINGS = 7
#: How far beyond its bounds a sample may seem to lie before its clock is taken for another.
_SLACK_NS = 1_000_000
#: Two clocks of a machine differ in rate by some 1e-5. More than this is a jump.
_GREATEST_DRIFT = 1e-3
#: Half of the distance of the two bounds up to which samples are placed by them.
_GREATEST_UNCERTAINTY_NS = 5_000_000
#: What placing by the bounds is good for at best: a decode does not see the last interval.
_LEAST_UNCERTAINTY_NS = 200_000
#: Decodes of which the promptest makes a pair, where the bounds place the samples.
_DECODES_A_PAIR = 32


@dataclass(frozen=True, slots=True)
class TimePair:
    """One moment on both clocks.

    Attributes:
        device_ns: On the clock of the samples.
        host_ns: On the monotonic clock.
    """

    device_ns: int
    host_ns: int


def read_pair(
    device: Callable[[], int], monotonic: Callable[[], int] = time.perf_counter_ns
) -> TimePair:
    """Read both clocks: the device's between two readings of the host's; of several tries the tightest."""
    best: tuple[int, TimePair] | None = None
    for _ in range(_READINGS):
        before = monotonic()
        now = device()
        width = monotonic() - before
        if best is None or width < best[0]:
            best = (width, TimePair(now, before + width // 2))
    assert best is not None
    return best[1]


class SampleClock:
    """Places samples on the monotonic clock.

    Args:
        first: A pair that was read before sampling was started; None if CUPTI's clock cannot be read.
        started_ns: A monotonic reading from before sampling was started.

    Attributes:
        by_bounds: Whether the samples are on a clock that cannot be read, and are placed by their bounds.
        uncertainty_ns: How far a sample may lie from where it is placed, where that is not negligible.
    """

    def __init__(self, first: TimePair | None, started_ns: int) -> None:
        self.by_bounds = first is None
        self.uncertainty_ns = 0
        self._checked = False
        self._started_ns = started_ns
        self._before = first
        self._last = first
        self._lag_ns = 0
        self._least_ns: int | None = None
        self._greatest_ns: int | None = None
        self._promptest: TimePair | None = None
        self._decodes = 0

    def decoded(
        self, first_start_ns: int, newest_end_ns: int, pair: TimePair | None, after_ns: int
    ) -> bool:
        """Samples were decoded. To be called before they are placed.

        Args:
            first_start_ns, newest_end_ns: Of the samples.
            pair: A pair that was read after they were decoded; None if CUPTI's clock cannot be read.
            after_ns: A monotonic reading from after they were decoded.

        Returns:
            Whether they can be placed.
        """
        if pair is not None and not self.by_bounds:
            self._before, self._last = self._last, pair
        if not self._checked:
            self._checked = True
            if not self.by_bounds and not self._plausible(first_start_ns, newest_end_ns, after_ns):
                self.by_bounds = True
            if self.by_bounds and not self._bound(first_start_ns, newest_end_ns, after_ns):
                self._checked = False
                return False
        elif self.by_bounds:
            self._follow(newest_end_ns, after_ns)
        return True

    def place(self, device_ns: int) -> int:
        """The monotonic time of a timestamp.

        Raises:
            RuntimeError: Before anything was decoded.
        """
        before, last = self._before, self._last
        if last is None:
            raise RuntimeError("nothing was decoded")
        since_ns = device_ns - last.device_ns
        if before is not None and before.device_ns < last.device_ns:
            rate = (last.host_ns - before.host_ns) / (last.device_ns - before.device_ns)
            if abs(rate - 1.0) <= _GREATEST_DRIFT:
                return last.host_ns + round(since_ns * rate)
        return last.host_ns + since_ns

    def _plausible(self, first_start_ns: int, newest_end_ns: int, after_ns: int) -> bool:
        return (
            self.place(first_start_ns) >= self._started_ns - _SLACK_NS
            and self.place(newest_end_ns) <= after_ns + _SLACK_NS
        )

    def _bound(self, first_start_ns: int, newest_end_ns: int, after_ns: int) -> bool:
        """Place the samples in the middle of their bounds, if those are tight enough."""
        if self._least_ns is None or self._greatest_ns is None:
            self._least_ns = self._started_ns - first_start_ns
            self._greatest_ns = after_ns - newest_end_ns
        greatest = self._greatest_ns = min(self._greatest_ns, after_ns - newest_end_ns)
        least = self._least_ns
        # Bounds that cross by a little are those of clocks that drift.
        if not -_SLACK_NS <= greatest - least <= 2 * _GREATEST_UNCERTAINTY_NS:
            return False
        self.uncertainty_ns = max((greatest - least) // 2, _LEAST_UNCERTAINTY_NS)
        middle = (least + greatest) // 2
        self._lag_ns = greatest - middle
        self._before = None
        self._last = TimePair(newest_end_ns, newest_end_ns + middle)
        return True

    def _follow(self, newest_end_ns: int, after_ns: int) -> None:
        """Follow the drift: the promptest decode of several has the same lag as the first had."""
        now = TimePair(newest_end_ns, after_ns - self._lag_ns)
        best = self._promptest
        if best is None or now.host_ns - now.device_ns < best.host_ns - best.device_ns:
            self._promptest = now
        self._decodes += 1
        if self._decodes % _DECODES_A_PAIR == 0:
            self._before, self._last, self._promptest = self._last, self._promptest, None
