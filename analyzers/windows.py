"""What the windows of a profiler cost: between passes, and inside of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, int_column
from phaseprof.trace.meta import SelfCost

#: Passes are alike where these are.
_ALIKE = ["phase", "sequences", "prefill_tokens"]


@dataclass(frozen=True, slots=True)
class WindowsCost:
    """What windows took. None of it is in timing figures: passes inside are kept out of them.

    Attributes:
        windows: How many there were.
        passes: Passes inside.
        between_ms: Time to open and to close them, between passes.
        read_ms: CPU time to read what they held, on another thread.
        slowdown: How much longer a pass took inside: the ratio of medians of passes that are alike; None if there are
            none outside.
    """

    windows: int
    passes: int
    between_ms: float
    read_ms: float
    slowdown: float | None


def windows_cost(costs: Sequence[SelfCost], passes: pa.Table) -> WindowsCost | None:
    """The cost of all windows of a trace; None if there were none.

    Args:
        costs: Of its processes.
        passes: The `passes` table.
    """
    told = [each for cost in costs for each in cost.collectors]
    if not told:
        return None
    return WindowsCost(
        windows=sum(cost.windows for cost in told),
        passes=sum(cost.passes for cost in told),
        between_ms=sum(cost.start_ns + cost.stop_ns for cost in told) / 1e6,
        read_ms=sum(cost.read_ns for cost in told) / 1e6,
        slowdown=_slowdown(passes),
    )


def _slowdown(passes: pa.Table) -> float | None:
    """The ratio of each group of like passes, weighted by its passes inside."""
    table = pa.table(
        {
            "phase": column(passes, "phase"),
            "sequences": int_column(passes, "sequences"),
            "prefill_tokens": int_column(passes, "prefill_tokens"),
            "profiled": column(passes, "profiled"),
            "host_ns": int_column(passes, "host_ns"),
        }
    ).filter(pc.and_(pc.is_null(passes["warmup"]), pc.is_null(passes["error"])))
    found = table.group_by([*_ALIKE, "profiled"]).aggregate(
        [("host_ns", "approximate_median"), ("host_ns", "count")]
    )
    medians: dict[tuple[object, ...], dict[bool, tuple[float, int]]] = {}
    for row in found.to_pylist():
        key = tuple(row[name] for name in _ALIKE)
        medians.setdefault(key, {})[row["profiled"]] = (
            row["host_ns_approximate_median"],
            row["host_ns_count"],
        )
    weighted, weight = 0.0, 0
    for group in medians.values():
        if len(group) == 2 and group[False][0]:
            weighted += group[True][0] / group[False][0] * group[True][1]
            weight += group[True][1]
    return weighted / weight if weight else None
