"""The overhead and the load of engines, on constructed steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from traces import MS, START_NS, Timeline

from phaseprof.analyzers.engine import engine_figures
from phaseprof.analyzers.passes import Primary
from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.served import Served, serving_sentences
from phaseprof.analyzers.serving import EngineFigures, Interference

PRIMARY = Primary("m", ("target",), 0.0)


def figures(timeline: Timeline) -> EngineFigures | None:
    trace = timeline.trace()
    return engine_figures(trace.steps, trace.passes, trace.requests, PRIMARY)


def served(timeline: Timeline, begin_ms: float, end_ms: float | None, **columns: Any) -> None:
    """A request that is there from one time to another."""
    timeline.request(
        f"r{len(timeline.requests)}",
        arrival_ns=START_NS + round(begin_ms * MS),
        finished_ns=None if end_ms is None else START_NS + round(end_ms * MS),
        **columns,
    )


def passes(timeline: Timeline, **columns: Any) -> None:
    """A pass for each step."""
    for step in timeline.steps:
        timeline.add("decode", 8, step=step["step"], rank=step["rank"], **columns)


def test_one_step_after_the_other() -> None:
    """Three steps of 1 + 8 + 1 ms and 2 ms between them: 10 of 34 ms are not the model's."""
    timeline = Timeline()
    for at_ms in (0, 12, 24):
        timeline.step(at_ms)
    passes(timeline)
    served(timeline, 0, 34)
    found = figures(timeline)
    assert found is not None
    assert (found.engines, found.steps, found.busy_ms) == (1, 3, 34)
    assert found.overhead_share == pytest.approx(10 / 34)
    assert found.between_ms is not None
    assert (found.between_ms.count, found.between_ms.p50) == (2, 2)
    assert found.schedule_ms.p50 == 1
    assert found.update_ms is not None and found.update_ms.p50 == 1
    assert found.execute_ms is not None and found.execute_ms.p50 == 8


def test_time_without_a_request_is_no_overhead() -> None:
    """The first request ends with the first step, the next comes 100 ms later and is seen after 3 ms."""
    timeline = Timeline()
    timeline.step(0)
    timeline.step(113)
    passes(timeline)
    served(timeline, 0, 10)
    served(timeline, 110, 123)
    found = figures(timeline)
    assert found is not None
    assert found.busy_ms == 20
    assert found.overhead_share == pytest.approx(4 / 20)
    assert found.between_ms is None


def test_a_request_without_an_end_is_there_to_the_end() -> None:
    timeline = Timeline()
    timeline.step(0)
    timeline.step(50)
    passes(timeline)
    served(timeline, 0, None)
    found = figures(timeline)
    assert found is not None and found.between_ms is not None
    assert (found.busy_ms, found.between_ms.p50) == (60, 40)


def test_steps_that_overlap_hide_the_scheduler() -> None:
    """Each is decided while the one before executes: only what leads in and out is not the model's."""
    timeline = Timeline()
    for at_ms in (0, 8, 16):
        timeline.step(at_ms)
    passes(timeline)
    served(timeline, 0, 27)
    found = figures(timeline)
    assert found is not None
    assert found.busy_ms == 26
    assert found.overhead_share == pytest.approx(2 / 26)
    assert found.between_ms is None


def test_a_step_without_its_output() -> None:
    timeline = Timeline()
    timeline.step(0)
    timeline.step(10, execute_ns=None, update_ns=None)
    passes(timeline)
    served(timeline, 0, None)
    found = figures(timeline)
    assert found is not None and found.execute_ms is not None
    assert (found.steps, found.execute_ms.count) == (2, 1)


def test_warm_steps_do_not_count() -> None:
    timeline = Timeline()
    timeline.step(0, execute_ns=5_000 * MS, running=9, preempted=1)
    timeline.step(6_000)
    timeline.add("prefill", 5_000, step=0, warmup="first")
    timeline.add("decode", 8, step=1)
    served(timeline, 0, 6_010)
    found = figures(timeline)
    assert found is not None
    assert (found.steps, found.busy_ms, found.running_max) == (1, 10, 1)
    # What was preempted was, whatever the step was.
    assert found.preemptions == 1
    timeline.passes[1]["warmup"] = "requested"
    only = figures(timeline)
    assert only is not None and only.steps == 2


def test_engines_side_by_side_are_summed() -> None:
    """Two ranks at the same time: 20 ms of busy time, and one request each."""
    timeline = Timeline()
    timeline.step(0, rank=0, step=0)
    timeline.step(0, rank=2, step=0)
    passes(timeline)
    served(timeline, 0, 10, queue_ns=1 * MS)
    served(timeline, 0, 10, queue_ns=3 * MS, rank=2)
    found = figures(timeline)
    assert found is not None and found.queue_ms is not None
    assert (found.engines, found.steps, found.busy_ms) == (2, 2, 20)
    assert (found.queue_ms.count, found.queue_ms.p50, found.queue_ms.p99) == (2, 1, 3)


def test_the_load() -> None:
    timeline = Timeline()
    for number in range(48):
        timeline.step(
            number * 10,
            running=2 if number < 24 else 6,
            waiting=0 if number < 47 else 5,
            kv_usage=number / 100,
        )
    passes(timeline)
    served(timeline, 0, 480)
    found = figures(timeline)
    assert found is not None
    assert (found.running_p50, found.running_max) == (2, 6)
    assert (found.waiting_p50, found.waiting_max) == (0, 5)
    assert (found.kv_usage_p50, found.kv_usage_max) == (0.23, 0.47)
    assert len(found.over_time) == 24
    first, last = found.over_time[0], found.over_time[-1]
    assert (first.start_ms, first.running, first.waiting) == (0, 2, 0)
    assert first.kv_usage == pytest.approx((0 + 0.01) / 2)
    assert (last.running, last.waiting) == (6, 2.5)
    assert last.start_ms == pytest.approx(23 * 470 / 24, abs=0.001)


def test_an_unknown_cache_has_no_usage() -> None:
    timeline = Timeline()
    timeline.step(0, kv_usage=None)
    passes(timeline)
    served(timeline, 0, 10)
    found = figures(timeline)
    assert found is not None
    assert (found.kv_usage_p50, found.kv_usage_max) == (None, None)
    assert found.over_time[0].kv_usage is None


def test_no_steps_no_figures() -> None:
    timeline = Timeline()
    timeline.add("decode", 8)
    assert figures(timeline) is None
    timeline.step(0, model_id="another")
    assert figures(timeline) is None


INTERFERENCE = Interference(
    tokens=100,
    slowed=10,
    typical_ms=10.0,
    slowed_ms=None,
    lost_ms=120.0,
    lost_share=0.12,
    requests=3,
    held=0,
    held_ms=0.0,
    worst=(),
    slowest=(),
)


def sentences(
    found: EngineFigures | None, interference: Interference | None = None
) -> tuple[str, ...]:
    return tuple(serving_sentences(Served(found, interference, None, ())))


def test_the_answer_names_what_an_engine_loses() -> None:
    timeline = Timeline()
    for at_ms in (0, 12, 24):
        timeline.step(at_ms, waiting=3, kv_usage=0.96, preempted=1)
    passes(timeline)
    served(timeline, 0, 34)
    found = figures(timeline)
    assert found is not None
    assert sentences(found, INTERFERENCE) == (
        "In 29 % of the time no step executes though a request is there: the scheduler, and what lies between steps, "
        "take it.",
        "Requests wait for the KV cache: in half of the steps 96 % of it is in use, and after 3 preemptions tokens "
        "were computed again.",
        "12 % of the decode time of requests is lost to the prompts of others (modelled): a smaller token budget a "
        "step would bound what a token waits for them.",
    )
    assert sentences(found)[0] in build_report(timeline.trace()).answer
    quiet = replace(found, overhead_share=0.14, preemptions=0)
    assert sentences(quiet, replace(INTERFERENCE, lost_share=0.09)) == (
        "Requests wait for the KV cache: in half of the steps 96 % of it is in use.",
    )
    assert sentences(replace(quiet, waiting_p50=0)) == ()
    assert sentences(replace(quiet, kv_usage_p50=None)) == ()
    assert sentences(None, INTERFERENCE) == ()
    assert tuple(serving_sentences(None)) == ()
