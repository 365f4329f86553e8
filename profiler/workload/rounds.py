"""Rounds over the cells of a plan: as many as are asked for, or until they have taken long enough."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import count
from typing import NamedTuple

from phaseprof.workload.plan import Cell

_NONE: Set[int] = frozenset()


class Turn(NamedTuple):
    """One call that counts: of which cell, and its number among the calls of that cell, from 0."""

    cell: Cell
    repeat: int


class Rounds:
    """The calls that count, in order; a call is done when the next one is asked for.

    A round has every cell once. Rounds come in pairs: the second goes through the cells in the reverse order of the
    first, so that over a pair every cell has the same mean place in time and a clock that drifts steadily reaches all
    of them alike. The order of each pair but the first is drawn by lot, so that no cell always follows the same one.

    Args:
        cells: The cells of a round.
        repeats: Rounds at least.
        least_s: Seconds that they take at least; 0 for `repeats` rounds.
        now_s: A clock that only goes forward.
        done: Numbers of the calls of each cell that an earlier run has made: they are left out.
        spent_s: Seconds that those took.
        seed: Of the lots.

    Attributes:
        calls: Calls that are done. planned: Calls that there will be; where time decides, by that of those done.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        repeats: int,
        least_s: float = 0.0,
        now_s: Callable[[], float] = time.perf_counter,
        *,
        done: Mapping[Cell, Set[int]] | None = None,
        spent_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._cells = tuple(cells)
        self._repeats = repeats
        self._least_s = least_s
        self._now_s = now_s
        self._done = done or {}
        self._spent_s = spent_s
        self._seed = seed
        self.calls = 0
        self.planned = sum(len(self._due(round_)) for round_ in range(repeats))

    def __iter__(self) -> Iterator[Turn]:
        begun_s = self._now_s()
        for round_ in count():
            spent_s = self._spent_s + self._now_s() - begun_s
            if round_ >= self._repeats and spent_s >= self._least_s:
                break
            if round_ and self._least_s:
                self.planned = self._foreseen(round_, spent_s)
            for cell in self._due(round_):
                yield Turn(cell, round_)
                self.calls += 1
        self.planned = self.calls

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Those of which a call is still to be made in the rounds that are asked for, or that time may ask for."""
        if self._spent_s < self._least_s:
            return self._cells
        due = {cell for round_ in range(self._repeats) for cell in self._due(round_)}
        return tuple(cell for cell in self._cells if cell in due)

    def _foreseen(self, round_: int, spent_s: float) -> int:
        """The calls that there will be, if rounds go on taking as long as those before this one."""
        each_s = spent_s / round_
        known = each_s > 0 and math.isfinite(each_s)
        rounds = max(self._repeats, math.ceil(self._least_s / each_s) if known else 0, round_)
        return self.calls + sum(len(self._due(later)) for later in range(round_, rounds))

    def _due(self, round_: int) -> list[Cell]:
        """The cells of a round that are not done yet, in its order."""
        order = list(self._cells)
        if round_ > 1:
            random.Random(f"{self._seed} {round_ // 2}").shuffle(order)
        if round_ % 2:
            order.reverse()
        return [cell for cell in order if round_ not in self._done.get(cell, _NONE)]
