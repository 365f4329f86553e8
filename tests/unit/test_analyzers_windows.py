"""What windows of a profiler cost, on constructed passes."""

from __future__ import annotations

from typing import Any

import pytest
from rows import forward_pass

from phaseprof.analyzers.windows import WindowsCost, windows_cost
from phaseprof.phases import Phase
from phaseprof.records import ForwardPass, Warmup
from phaseprof.schema import PASSES
from phaseprof.trace.meta import CollectorCost, SelfCost
from phaseprof.trace.writer import to_arrow

COST = CollectorCost("kernels", 3, 7, 2_000_000, 5_000_000, 9_000_000, 1_000)


def cost_of(passes: list[ForwardPass], *costs: CollectorCost) -> WindowsCost | None:
    return windows_cost([SelfCost(1, 1, 1, 1, costs)], to_arrow(passes, PASSES.arrow))


def passes_of(*lengths_us: int, **changes: Any) -> list[ForwardPass]:
    return [forward_pass(i, host_ns=us * 1000, **changes) for i, us in enumerate(lengths_us)]


def test_without_windows_there_is_nothing_to_say() -> None:
    assert cost_of(passes_of(900, 1_800, profiled=True)) is None


def test_windows_of_all_processes_add_up() -> None:
    found = windows_cost(
        [SelfCost(1, 1, 1, 1, (COST,)), SelfCost(1, 1, 1), SelfCost(1, 1, 1, 1, (COST,))],
        to_arrow(passes_of(900), PASSES.arrow),
    )
    assert found == WindowsCost(6, 14, between_ms=14.0, read_ms=18.0, slowdown=None)


def test_passes_inside_are_held_against_those_that_are_alike() -> None:
    prefill: dict[str, Any] = {"phase": Phase.PREFILL, "decode_tokens": 0}
    passes = [
        *passes_of(100, 100, 100),
        *passes_of(150, profiled=True),
        # A long prompt outside does not make the short one inside fast.
        *passes_of(9_000, **prefill, prefill_tokens=512),
        *passes_of(1_000, **prefill, prefill_tokens=64),
        *passes_of(3_000, profiled=True, **prefill, prefill_tokens=64),
        # Neither a warm-up nor a pass that failed says anything.
        *passes_of(7_000, warmup=Warmup.FIRST),
        *passes_of(1, error="ValueError"),
    ]
    found = cost_of(passes, COST)
    assert found is not None
    assert found.slowdown == pytest.approx((1.5 + 3.0) / 2)
