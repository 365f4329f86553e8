"""Join operators of a CPU to the pass that ran them: same thread, and inside its time.

On a CPU an operator runs where it is called, so containment on its thread is exact. It is not for kernels of a GPU:
those run later than the call that launched them, and are joined by launch correlation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from phaseprof.records import Kernel


@dataclass(frozen=True, slots=True)
class PassWindow:
    """When a pass ran, Unix ns, and on which thread."""

    pass_id: int
    thread_id: int
    start_ns: int
    end_ns: int


def join_operators(
    operators: Iterable[Kernel], windows: Sequence[PassWindow]
) -> tuple[Kernel, ...]:
    """Give each operator the pass that contains it; one that no pass contains keeps ``pass_id`` None.

    Operators without a thread are joined by time alone.
    """
    by_thread: dict[int | None, list[PassWindow]] = {None: list(windows)}
    for window in windows:
        by_thread.setdefault(window.thread_id, []).append(window)
    starts: dict[int | None, list[int]] = {}
    for thread, listed in by_thread.items():
        listed.sort(key=lambda window: window.start_ns)
        starts[thread] = [window.start_ns for window in listed]
    joined = []
    for operator in operators:
        listed = by_thread.get(operator.thread_id, [])
        place = bisect_right(starts.get(operator.thread_id, []), operator.start_ns) - 1
        inside = place >= 0 and operator.end_ns <= listed[place].end_ns
        joined.append(replace(operator, pass_id=listed[place].pass_id if inside else None))
    return tuple(joined)
