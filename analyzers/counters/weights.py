"""How much of each label sample windows hold, for any offset between their clock and that of the passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import mul
from typing import NamedTuple

from phaseprof.analyzers.counters.device_time import Timeline

#: Standard deviation of a window's edge around the time that it is recorded with: a counter is read by a call that
#: takes up to a millisecond or two, somewhere within.
EDGE_JITTER_NS = 1_500_000


class Window(NamedTuple):
    """A sample window, Unix ns."""

    start_ns: int
    end_ns: int


#: A coarse label, and one of its fine ones or None for all of them.
Unknown = tuple[int, int | None]
#: Shares of the coarse labels, and of the fine ones.
Shares = tuple[list[float], list[float]]


class Weights:
    """The shares of labels in windows. Those of an offset are worked out once, for all counters of the windows.

    Args:
        timeline: What ran when, in fine labels.
        groups: The fine labels that each coarse one is made of; the first two are `IDLE` and `BETWEEN`.
        windows: Each longer than nothing.
        jitter_ns: Standard deviation of their edges around the times that they are recorded with.
    """

    def __init__(
        self,
        timeline: Timeline,
        groups: Sequence[Sequence[int]],
        windows: Sequence[Window],
        *,
        jitter_ns: int = EDGE_JITTER_NS,
    ) -> None:
        self.jitter_ns = jitter_ns
        self.timeline = timeline
        self.groups = groups
        self.windows = windows
        self._fine: dict[int, list[list[float]]] = {}
        self._coarse: dict[int, list[list[float]]] = {}
        self._products: dict[
            tuple[int, tuple[Unknown, ...]], tuple[list[list[float]], list[list[float]]]
        ] = {}

    def fine(self, offset_ns: int) -> list[list[float]]:
        """One column a fine label; passes ran on the device at their times plus the offset, by the windows' clock."""
        if offset_ns not in self._fine:
            rows = [
                self.timeline.shares(start - offset_ns, end - offset_ns)
                for start, end in self.windows
            ]
            columns = [list(column) for column in zip(*rows, strict=True)]
            self._fine[offset_ns] = columns or [[] for _ in range(self.timeline.width)]
        return self._fine[offset_ns]

    def coarse(self, offset_ns: int) -> list[list[float]]:
        """One column a coarse label, likewise."""
        if offset_ns not in self._coarse:
            fine = self.fine(offset_ns)
            self._coarse[offset_ns] = [
                fine[group[0]]
                if len(group) == 1
                else [sum(parts) for parts in zip(*(fine[k] for k in group), strict=True)]
                for group in self.groups
            ]
        return self._coarse[offset_ns]

    def products(
        self, offset_ns: int, unknowns: tuple[Unknown, ...]
    ) -> tuple[list[list[float]], list[list[float]]]:
        """The columns of unknowns, and the products of each two of them."""
        key = offset_ns, unknowns
        if key not in self._products:
            coarse, fine = self.coarse(offset_ns), self.fine(offset_ns)
            columns = [coarse[label] if part is None else fine[part] for label, part in unknowns]
            n = len(columns)
            found = [[0.0] * n for _ in range(n)]
            for i in range(n):
                for j in range(i + 1):
                    found[i][j] = found[j][i] = sum(map(mul, columns[i], columns[j]))
            self._products[key] = columns, found
        return self._products[key]

    def edges(self, offset_ns: int) -> Iterator[tuple[float, Shares, Shares]]:
        """The length of each window in ns, and the shares around its begin and around its end, coarse and fine."""
        for start, end in self.windows:
            yield end - start, self._around(start - offset_ns), self._around(end - offset_ns)

    def _around(self, at_ns: float) -> Shares:
        reach = 2 * self.jitter_ns
        fine = self.timeline.shares(at_ns - reach, at_ns + reach)
        return [sum(fine[k] for k in group) for group in self.groups], fine
