"""What reports on GPU runs with counters say: agreement, idle time that only they tell, and a GPU that is held down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from witnessed import DECODE, Kind, run

from phaseprof.analyzers.report import build_report
from phaseprof.cli.render.terminal import render
from phaseprof.trace.reader import Trace

Golden = Callable[[str, str], None]

RUNS: dict[str, Callable[[], Trace]] = {
    "counters-agree": run,
    "counters-idle": lambda: run(decode=replace(DECODE, ms=15, sm=0.26, tensor=0.02, dram=0.27)),
    "counters-throttled": lambda: run(
        Kind(ms=90, tflop=32.2, gb=16, sm=0.97, tensor=0.595, dram=0.14), ghz=1.2, throttle=0x4
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_counters_is_laid_out_as_before(name: str, golden: Golden) -> None:
    golden(f"{name}.txt", "\n".join(_why(render(build_report(RUNS[name]()), width=100))))


def _why(text: str) -> Iterator[str]:
    """The answer and the reasons: what the counters have a say in."""
    blocks = text.split("\n\n")
    yield blocks[1]
    yield ""
    yield next(block for block in blocks if block.startswith("  Why"))
