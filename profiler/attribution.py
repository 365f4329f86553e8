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

    Operators without a thread are joined by time alone, where only one pass can be meant. Passes of one thread do not
    overlap.
    """
    in_order = sorted(windows, key=lambda window: window.start_ns)
    by_thread: dict[int, list[PassWindow]] = {}
    for window in in_order:
        by_thread.setdefault(window.thread_id, []).append(window)
    joined = []
    for operator in operators:
        if operator.thread_id is None:
            around = [window for window in in_order if _contains(window, operator)]
        else:
            listed = by_thread.get(operator.thread_id, [])
            place = bisect_right(listed, operator.start_ns, key=lambda window: window.start_ns)
            around = [w for w in listed[max(place - 1, 0) : place] if _contains(w, operator)]
        joined.append(replace(operator, pass_id=around[0].pass_id if len(around) == 1 else None))
    return tuple(joined)


def _contains(window: PassWindow, operator: Kernel) -> bool:
    return window.start_ns <= operator.start_ns and operator.end_ns <= window.end_ns
