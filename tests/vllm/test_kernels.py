"""The collector `kernels` around the steps of a real engine on the CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import generate, prompts, sampling

from phaseprof.session import Session
from phaseprof.trace.reader import Trace, open_trace


def operators_of(trace: Trace) -> Counter[int | None]:
    return Counter(trace.kernels.column("pass_id").to_pylist())


def steps_of(trace: Trace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = trace.passes.sort_by("pass_id").to_pylist()
    return rows


def test_windows_lie_around_whole_steps(engine: Any, tmp_path: Path) -> None:
    asked = sampling(8)
    alone = [generate(engine, prompts(9, 20, first=first), asked) for first in (201, 211)]
    session = Session(tmp_path / "trace", collect="kernels")
    session.start()
    try:
        # The engine keeps prefixes: the same prompts again would be computed but for their ends.
        engine.reset_prefix_cache()
        inside = [generate(engine, prompts(9, 20, first=first), asked) for first in (201, 211)]
    finally:
        session.stop()
    assert [[o.outputs[0].token_ids for o in out] for out in inside] == [
        [o.outputs[0].token_ids for o in out] for out in alone
    ]
    trace = open_trace(tmp_path / "trace")
    steps, counts = steps_of(trace), operators_of(trace)
    # The first step of each kind is a warm-up. Four of seven decode steps follow, and the second prefill.
    assert [place for place, step in enumerate(steps) if step["profiled"]] == [2, 3, 4, 5, 8]
    for step in steps:
        assert (counts[step["pass_id"]] > 0) == step["profiled"]
    names = Counter(
        row["name"] for row in trace.kernels.to_pylist() if row["pass_id"] == steps[2]["pass_id"]
    )
    # Two layers of four projections each, and the head.
    products = sum(count for name, count in names.items() if "mm" in name or "linear" in name)
    assert products == 2 * 4 + 1
    (meta,) = trace.metas
    assert meta.self_cost is not None
    assert [cost.passes for cost in meta.self_cost.collectors] == [5]


def test_a_look_flags_steps_and_requests(engine: Any, tmp_path: Path) -> None:
    session = Session(tmp_path / "trace", collect="none")
    session.start()
    try:
        generate(engine, prompts(7, first=221), sampling(3))
        session.begin_look()
        generate(engine, prompts(7, first=231), sampling(3))
        session.end_look()
    finally:
        session.stop()
    trace = open_trace(tmp_path / "trace")
    steps, counts = steps_of(trace), operators_of(trace)
    assert [step["profiled"] for step in steps] == [False] * 3 + [True] * 3
    assert all(counts[step["pass_id"]] for step in steps[3:])
    assert sorted(row["profiled"] for row in trace.requests.to_pylist()) == [False, True]


def test_a_step_that_raises_inside_of_a_window_ends_it(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise FloatingPointError("of the model")

    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    begun = SchedulerOutput.make_empty()
    begun.scheduled_new_reqs = [
        NewRequestData("y", [5] * 3, [], sampling(4), None, ([1],), 0, None)
    ]
    begun.scheduled_cached_reqs = CachedRequestData.make_empty()
    begun.num_scheduled_tokens, begun.total_num_scheduled_tokens = {"y": 3}, 3
    over = SchedulerOutput.make_empty()
    over.finished_req_ids = {"y"}
    session = Session(tmp_path / "trace", collect="none")
    session.start()
    try:
        generate(engine, prompts(7, first=241), sampling(2))
        session.begin_look()
        with monkeypatch.context() as patched:
            patched.setattr(runner, "_preprocess", fails)
            with pytest.raises(FloatingPointError, match="of the model"):
                runner.execute_model(begun)
        runner.execute_model(over)
        generate(engine, prompts(7, first=246), sampling(2))
        session.end_look()
    finally:
        session.stop()
    assert not torch.autograd.profiler._is_profiler_enabled
    trace = open_trace(tmp_path / "trace")
    steps, counts = steps_of(trace), operators_of(trace)
    assert [(step["error"], step["profiled"]) for step in steps] == [
        *[(None, False)] * 2,
        ("FloatingPointError", True),
        *[(None, True)] * 2,
    ]
    assert all(counts[step["pass_id"]] for step in steps if step["profiled"])
