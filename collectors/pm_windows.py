"""PM samples of microseconds become windows of about a millisecond: what a table can hold for a whole run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from phaseprof.collectors.cupti import RawSample

#: A sample that begins later than this share of its length after the one before does not follow it.
_GAP_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Window:
    """Samples that followed one another.

    Attributes:
        start_ns, end_ns: Begin of the first and end of the last, on the clock of the samples.
        values: For each counter the mean over the time, the samples weighted by their length; NaN without one.
    """

    start_ns: int
    end_ns: int
    values: tuple[float, ...]


class Windows:
    """Joins samples to windows.

    Args:
        length_ns: A window ends with the first sample that makes it at least this long.

    Attributes:
        gaps, lost_ns: Where samples did not follow one another, and how much time lay between, all in all.
    """

    def __init__(self, length_ns: int) -> None:
        self.gaps = 0
        self.lost_ns = 0
        self._length_ns = length_ns
        self._open: list[RawSample] = []
        self._end_ns: int | None = None

    def add(self, samples: Sequence[RawSample]) -> Iterator[Window]:
        """Take samples in their order; give the windows that they complete."""
        for sample in samples:
            length = sample.end_ns - sample.start_ns
            if length <= 0:
                continue
            if self._end_ns is not None:
                missing = sample.start_ns - self._end_ns
                if missing < 0:
                    # It overlaps what was counted already.
                    continue
                if missing > length * _GAP_SHARE:
                    self.gaps += 1
                    self.lost_ns += missing
                    yield from self.flush()
            self._open.append(sample)
            self._end_ns = sample.end_ns
            if sample.end_ns - self._open[0].start_ns >= self._length_ns:
                yield from self.flush()

    def flush(self) -> Iterator[Window]:
        """The window that is open, if there is one."""
        samples, self._open = self._open, []
        if samples:
            yield Window(
                samples[0].start_ns,
                samples[-1].end_ns,
                tuple(_mean(samples, index) for index in range(len(samples[0].values))),
            )

    def pause(self) -> None:
        """Sampling was stopped on purpose: what is missing now is not lost."""
        self._end_ns = None


def _mean(samples: Sequence[RawSample], index: int) -> float:
    total = weight = 0.0
    for sample in samples:
        value = sample.values[index]
        if math.isfinite(value):
            length = sample.end_ns - sample.start_ns
            total += value * length
            weight += length
    return total / weight if weight else math.nan


class Bursts:
    """When to sample in a long run: all of the first minute, then a part of each period.

    The rows of a run, and what decoding costs, stay bounded by hour.

    Args:
        whole_s: How long everything is sampled at first.
        burst_s, period_s: Afterwards: so many seconds of each period.
        now_s: A clock of seconds.
    """

    def __init__(
        self, now_s: Callable[[], float], *, whole_s: float, burst_s: float, period_s: float
    ) -> None:
        self._now_s = now_s
        self._whole_s = whole_s
        self._burst_s = burst_s
        self._period_s = period_s
        self._begun_s = now_s()

    @property
    def whole(self) -> bool:
        """Whether nothing was left out so far."""
        return self._now_s() - self._begun_s < self._whole_s

    @property
    def on(self) -> bool:
        """Whether to sample now."""
        since_s = self._now_s() - self._begun_s - self._whole_s
        return since_s < 0 or since_s % self._period_s < self._burst_s
