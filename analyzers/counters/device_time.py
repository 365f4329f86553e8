"""Where passes ran on a device: its time as stretches, each with one label, and how much of each label a window holds.

A pass is timed on the host from its call to its return, and on the device from its first event to its last. The call of
an asynchronous engine returns before the device has done the work, so that a pass is placed as a stream runs it: it
begins when it was called or when the one before it on the same stream has ended, whichever is later, and takes its
device time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

#: The label of time in which no pass runs: pauses of the run.
IDLE = 0
#: The label of the short time between two passes: tokens are sampled, the host prepares the next pass.
BETWEEN = 1
#: The longest time between two passes that is no pause.
BETWEEN_NS = 5_000_000


class Stretch(NamedTuple):
    """Time that one pass took on a device, Unix ns, and its label (above `BETWEEN`)."""

    start_ns: int
    end_ns: int
    label: int


def placed(
    starts_ns: Sequence[int], ends_ns: Sequence[int], device_ns: Sequence[int | None]
) -> list[tuple[int, int]]:
    """Where the passes of one stream ran on its device.

    Args:
        starts_ns: Begins of the calls, in ascending order. ends_ns: Their ends.
        device_ns: Their times on the device; None places a pass by its call.

    Returns:
        Begin and end of each.
    """
    found = []
    free_ns = 0
    for start, end, device in zip(starts_ns, ends_ns, device_ns, strict=True):
        if device is None:
            begin, free_ns = start, max(free_ns, end)
            found.append((begin, end))
            continue
        begin = max(start, free_ns)
        free_ns = begin + device
        found.append((begin, free_ns))
    return found


@dataclass(frozen=True, slots=True)
class Timeline:
    """The time of a device, cut where what runs on it changes.

    Attributes:
        edges_ns: Where it changes, ascending.
        labels: What runs from each edge to the next; after the last edge nothing does.
        before_ns: Time of each label before each edge.
        width: Number of labels, those of no pass included.
    """

    edges_ns: list[int]
    labels: list[int]
    before_ns: list[tuple[int, ...]]
    width: int

    @classmethod
    def of(
        cls, stretches: Iterable[Stretch], width: int, several: int, *, over: int | None = None
    ) -> Timeline:
        """Lay stretches, which may overlap, on one axis.

        Args:
            stretches: Of all passes of the device.
            width: Number of labels, those of no pass included.
            several: The label of time in which passes of different labels run.
            over: A label that has time in which any other runs besides; None if there is none.
        """
        changes = sorted(
            change
            for start, end, label in stretches
            if end > start
            for change in ((start, 1, label), (end, -1, label))
        )
        running: dict[int, int] = {}
        edges: list[int] = []
        labels: list[int] = []
        for at, change, label in changes:
            left = running.get(label, 0) + change
            if left:
                running[label] = left
            else:
                del running[label]
            if len(running) < 2:
                now = next(iter(running), IDLE)
            else:
                now = several if over is None or over not in running else over
            if edges and at == edges[-1]:
                labels[-1] = now
            else:
                edges.append(at)
                labels.append(now)
        before, sums = [], [0] * width
        for place, (start, end) in enumerate(pairwise(edges)):
            if labels[place] == IDLE and end - start < BETWEEN_NS:
                labels[place] = BETWEEN
            before.append(tuple(sums))
            sums[labels[place]] += end - start
        before.append(tuple(sums))
        return cls(edges, labels, before[: len(edges)], width)

    def until(self, at_ns: float) -> list[float]:
        """Time of each label before a moment, ns. What of `IDLE` lies before the first edge is negative."""
        place = bisect_right(self.edges_ns, at_ns) - 1
        if place < 0:
            sums = [0.0] * self.width
            sums[IDLE] = at_ns - self.edges_ns[0] if self.edges_ns else at_ns
            return sums
        sums = list(self.before_ns[place])
        sums[self.labels[place]] += at_ns - self.edges_ns[place]
        return sums

    def shares(self, start_ns: float, end_ns: float) -> list[float]:
        """How much of a window each label has; the shares sum to 1."""
        length = end_ns - start_ns
        return [
            (late - early) / length
            for early, late in zip(self.until(start_ns), self.until(end_ns), strict=True)
        ]
