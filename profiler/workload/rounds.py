"""Rounds over the batch sizes of a plan: as many as are asked for, or until they have taken long enough."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence


class Rounds:
    """The batch size of each call that counts, in order; a call is done when the next one is asked for.

    Rounds mix the batch sizes, so that a clock that drifts reaches all of them alike.

    Args:
        batches: The batch sizes of a round.
        repeats: Rounds at least.
        least_s: Seconds that they take at least; 0 for `repeats` rounds.
        now_s: A clock that only goes forward.

    Attributes:
        calls: Calls that are done. planned: Calls that there will be; where time decides, by that of those done.
    """

    def __init__(
        self,
        batches: Sequence[int],
        repeats: int,
        least_s: float = 0.0,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._batches = batches
        self._repeats = repeats
        self._least_s = least_s
        self._now_s = now_s
        self.calls = 0
        self.planned = repeats * len(batches)

    def __iter__(self) -> Iterator[int]:
        begun_s = self._now_s()
        done = 0
        while done < self._repeats or self._now_s() - begun_s < self._least_s:
            for batch in self._batches:
                yield batch
                self.calls += 1
            done += 1
            each_s = (self._now_s() - begun_s) / done
            if each_s > 0 and math.isfinite(each_s):
                rounds = max(self._repeats, math.ceil(self._least_s / each_s), done)
                self.planned = rounds * len(self._batches)
        self.planned = self.calls
