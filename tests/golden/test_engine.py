"""The sections on a serving engine, compared exactly: the figures are made up, the layout is what is under test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from phaseprof.analyzers.results import Percentiles
from phaseprof.analyzers.serving import (
    Cause,
    EngineFigures,
    Goodput,
    Interference,
    Load,
    Met,
    Objective,
    RequestLoss,
    SlowToken,
)
from phaseprof.cli.render.engine import (
    course,
    engine_section,
    goodput_section,
    interference_section,
)
from phaseprof.cli.render.layout import to_ascii

Golden = Callable[[str, str], None]

ENGINE = EngineFigures(
    engines=1,
    steps=1_204,
    busy_ms=18_210.0,
    overhead_share=0.117,
    schedule_ms=Percentiles(1_204, 0.213, 0.61, 1.9),
    update_ms=Percentiles(1_204, 0.11, 0.3, 0.9),
    execute_ms=Percentiles(1_204, 12.4, 41.0, 214.0),
    between_ms=Percentiles(1_180, 0.352, 0.8, 4.0),
    queue_ms=Percentiles(96, 1.24, 820.0, 1_312.0),
    running_p50=6,
    running_max=32,
    waiting_p50=0,
    waiting_max=12,
    kv_usage_p50=0.31,
    kv_usage_max=0.971,
    preemptions=3,
    over_time=tuple(
        Load(n * 758.0, min(4 + 2 * n, 32), max(n - 12, 0), min(n / 24, 0.95)) for n in range(24)
    ),
)
FEW = replace(
    ENGINE,
    engines=2,
    steps=1,
    update_ms=None,
    between_ms=None,
    queue_ms=None,
    kv_usage_p50=None,
    kv_usage_max=None,
    preemptions=1,
    over_time=ENGINE.over_time[:2],
)
INTERFERENCE = Interference(
    tokens=9_012,
    slowed=412,
    typical_ms=12.1,
    slowed_ms=Percentiles(412, 41.0, 88.0, 214.0),
    lost_ms=5_120.0,
    lost_share=0.113,
    requests=31,
    held=12,
    held_ms=1_204.0,
    worst=(
        RequestLoss("chatcmpl-a-0-9f3c11d0", "chatcmpl-a", 14, 512.0, 0.231),
        RequestLoss("7-11aa22bb", None, 1, 88.0, 0.031),
    ),
    slowest=(
        SlowToken(
            "chatcmpl-a-0-9f3c11d0",
            "chatcmpl-a",
            17,
            214.0,
            12.1,
            0,
            933,
            Cause.PREFILL,
            2_048,
            ("chatcmpl-b", "chatcmpl-c", "chatcmpl-d"),
        ),
        SlowToken("7-11aa22bb", None, 3, 100.0, 12.1, 0, 934, Cause.PREFILL, 512, ()),
        SlowToken("8-11aa22bb", "8", 40, 1_050.0, 12.1, 0, 940, Cause.HELD, 0, ()),
    ),
)
GOODPUT = Goodput(
    requests=120,
    good=98,
    share=98 / 120,
    per_s=3.14,
    tokens_per_s=412.0,
    left_out=3,
    each=(Met(Objective("ttft", 500.0), 0.9), Met(Objective("tpot", 50.0), 0.85)),
)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_sections_are_laid_out_as_before(width: int, golden: Golden) -> None:
    lines = [
        *engine_section(ENGINE, width),
        *interference_section(INTERFERENCE, width),
        *goodput_section(GOODPUT, width),
    ]
    plain = [line.plain.rstrip() for line in lines]
    assert max(map(len, plain)) <= width
    golden(f"engine-{width}.txt", "\n".join(plain))


def test_little_is_known(golden: Golden) -> None:
    lines = [
        *engine_section(FEW, 80),
        *interference_section(
            replace(INTERFERENCE, slowed=0, slowed_ms=None, held=1, worst=(), slowest=()), 80
        ),
        *goodput_section(
            replace(
                GOODPUT,
                requests=1,
                per_s=None,
                tokens_per_s=None,
                left_out=1,
                each=(Met(Objective("e2e", 2_000.0), 1.0),),
            ),
            80,
        ),
    ]
    golden("engine-few.txt", "\n".join(line.plain.rstrip() for line in lines))


def test_without_an_engine_there_is_no_section() -> None:
    assert engine_section(None, 80) == []
    assert interference_section(None, 80) == []
    assert interference_section(replace(INTERFERENCE, slowed=0, held=0), 80) == []
    assert goodput_section(None, 80) == []


def test_a_course_over_time() -> None:
    assert course([0, 1, 4, 7, 8, None, 3.9], 8) == "▁▂▅██ ▄"
    assert course([0, 0], 0) == "▁▁"
    assert to_ascii(course(range(9), 8)) == ".:-=+*#@@"
