"""The V2 runner, asynchronous scheduling, pipeline stages and graphs: steps put together by hand of vLLM's own classes.

They need a GPU, so the two methods of a runner do here what is written down. Inputs and outputs are the real ones.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_engines import Recorded
from vllm_steps import (
    Script,
    begins,
    make_runner,
    model_output,
    schedules,
    scripted,
    v1_output,
    v2_output,
)

from phaseprof.session import Session, current
from phaseprof.trace.reader import open_trace

Record = Callable[[Callable[[], Any]], Recorded]


@pytest.fixture(params=["V1", "V2"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kind(version: str) -> Any:
    """The class of the runner."""
    if version == "V1":
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1

        return V1
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2

    return V2


@pytest.fixture
def fetched(version: str) -> Callable[..., Any]:
    """Makes the output of a step whose tokens are fetched later."""
    return v1_output if version == "V1" else v2_output


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, kind: Any, script: Script) -> Iterator[Any]:
    with scripted(monkeypatch, kind, script) as made:
        yield made


def run_step(runner: Any, script: Script, output: Any, result: Any) -> Any:
    """A step that ends with `sample_tokens`."""
    script.execute.append(None)
    script.sample.append(result)
    assert runner.execute_model(output) is None
    assert runner.sample_tokens(None) is result
    return result


def test_drafts_under_asynchronous_scheduling(
    runner: Any, script: Script, fetched: Callable[..., Any], record: Record
) -> None:
    """Each step is scheduled before the tokens of the one before are known: the scheduler believes that every draft of
    that one is in the cache. Of two drafts one is accepted, then none, then both."""

    def run() -> None:
        first = run_step(
            runner, script, schedules({"r": 4}, new=[begins("r", 4)]), fetched({"r": [11]})
        )
        second = run_step(
            runner,
            script,
            schedules({"r": 3}, past={"r": 4}, drafts={"r": 2}),
            fetched({"r": [12, 13]}),
        )
        first.get_output()
        third = run_step(
            runner,
            script,
            schedules({"r": 3}, past={"r": 7}, drafts={"r": 2}),
            fetched({"r": [14]}),
        )
        # Another thread fetches, as in a worker process.
        threads = [threading.Thread(target=second.get_output)]
        threads[0].start()
        threads[0].join()
        fourth = run_step(
            runner,
            script,
            schedules({"r": 3}, past={"r": 9}, drafts={"r": 2}),
            fetched({"r": [15, 16, 17]}),
        )
        third.get_output()
        fourth.get_output()

    recorded = record(run)
    assert recorded.short() == [
        "prefill | a: prefill 0+4",
        "decode | a: decode 4+3",
        "decode | a: decode 6+3",
        "decode | a: decode 7+3",
    ]
    assert recorded.passes("step", "draft_tokens", "accepted_tokens", "logits_tokens") == [
        (0, 0, 0, 1),
        (1, 2, 1, 3),
        (2, 2, 0, 3),
        (3, 2, 2, 3),
    ]
    # 1 + 2 + 1 + 3 tokens.
    assert recorded.broken({"a": 7}, cached=0) == []
    assert recorded.sum("recomputed_tokens") == 0


def test_a_step_ends_when_its_tokens_are_fetched(
    runner: Any, script: Script, fetched: Callable[..., Any], record: Record
) -> None:
    def run() -> None:
        one = run_step(
            runner, script, schedules({"r": 4}, new=[begins("r", 4)]), fetched({"r": [1]})
        )
        two = run_step(runner, script, schedules({"r": 1}, past={"r": 4}), fetched({"r": [2]}))
        one.get_output()
        two.get_output()

    recorded = record(run)
    (start, end, host), (next_start, next_end, _) = recorded.passes("start_ns", "end_ns", "host_ns")
    assert start < next_start < end < next_end
    assert host == end - start


def test_a_request_that_had_ended_is_padding(
    runner: Any, script: Script, fetched: Callable[..., Any], record: Record
) -> None:
    """The step after the last token was scheduled before that was known: what it computes of the request is padding."""

    def run() -> None:
        one = run_step(
            runner,
            script,
            schedules({"r": 4, "s": 5}, new=[begins("r", 4, stop_token_ids=[99]), begins("s", 5)]),
            fetched({"s": [8], "r": [99]}),
        )
        two = run_step(
            runner,
            script,
            schedules({"r": 1, "s": 1}, past={"r": 4, "s": 5}),
            fetched({"r": [3], "s": [9]}),
        )
        one.get_output()
        three = run_step(
            runner, script, schedules({"s": 1}, past={"s": 6}, finished=["r"]), fetched({"s": [4]})
        )
        two.get_output()
        three.get_output()

    recorded = record(run)
    assert recorded.short() == [
        "prefill | a: prefill 0+4, b: prefill 0+5",
        "decode | a: other 4+0, b: decode 5+1",
        "decode | b: decode 6+1",
    ]
    assert recorded.passes("decode_tokens", "sequences") == [(0, 2), (1, 2), (1, 1)]
    assert recorded.broken({"a": 1, "b": 3}, cached=0) == []


def test_tokens_beyond_the_limit_serve_nobody(runner: Any, script: Script, record: Record) -> None:
    """Three drafts are right, and the limit is two tokens: one draft was of use."""

    def run() -> None:
        run_step(
            runner,
            script,
            schedules({"r": 4}, new=[begins("r", 4, limit=3)]),
            model_output({"r": [1]}),
        )
        run_step(
            runner,
            script,
            schedules({"r": 4}, past={"r": 4}, drafts={"r": 3}),
            model_output({"r": [2, 3, 4, 5]}),
        )

    recorded = record(run)
    assert recorded.passes("draft_tokens", "accepted_tokens") == [(0, 0), (3, 1)]
    assert recorded.broken({"a": 3}, cached=0) == []


def test_a_rank_whose_output_nobody_fetches(
    runner: Any, script: Script, fetched: Callable[..., Any], record: Record
) -> None:
    """Of the ranks of tensor parallelism one is asked for the tokens. The others cannot tell what was accepted."""

    def run() -> None:
        output = fetched({"r": [1]})
        run_step(runner, script, schedules({"r": 4}, new=[begins("r", 4)]), output)
        del output
        gc.collect()
        output = fetched({"r": [2, 3]})
        run_step(runner, script, schedules({"r": 3}, past={"r": 4}, drafts={"r": 2}), output)
        del output
        gc.collect()
        output = fetched({"r": [4]})
        run_step(runner, script, schedules({"r": 3}, past={"r": 6}, drafts={"r": 2}), output)
        del output
        gc.collect()

    recorded = record(run)
    assert recorded.short() == [
        "prefill | a: prefill 0+4",
        "decode | a: decode 4+3",
        "decode | a: decode 6+3",
    ]
    assert recorded.passes("draft_tokens", "accepted_tokens") == [(0, 0), (2, None), (2, None)]
    assert recorded.sum("recomputed_tokens") == 0


def test_a_stage_that_is_not_the_last_ends_with_its_tensors(
    runner: Any, script: Script, record: Record
) -> None:
    """`sample_tokens` is called there as well, to receive what the last stage sampled: it is no part of the step."""
    import torch
    from vllm.sequence import IntermediateTensors
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    tensors = IntermediateTensors({"hidden_states": torch.zeros(4, 2)})

    def run() -> None:
        for output in (
            schedules({"r": 4}, new=[begins("r", 4)]),
            schedules({"r": 1}, past={"r": 4}),
        ):
            script.execute.append(tensors)
            script.sample.append(EMPTY_MODEL_RUNNER_OUTPUT)
            assert runner.execute_model(output) is tensors
            runner.sample_tokens(None)

    recorded = record(run)
    assert recorded.short() == ["prefill | a: prefill 0+4", "decode | a: decode 4+1"]
    assert recorded.passes("logits_tokens", "step") == [(0, 0), (0, 1)]


def test_what_is_no_step(runner: Any, script: Script, version: str, record: Record) -> None:
    """Steps of no token, dummy runs and the warm-up of the kernels. What the first tells of the end of requests counts:
    an id that comes again is another request."""
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    def run() -> None:
        run_step(
            runner, script, schedules({"r": 4}, new=[begins("r", 4)]), model_output({"r": [1]})
        )
        script.execute.append(EMPTY_MODEL_RUNNER_OUTPUT)
        runner.execute_model(schedules({}, finished=["r"]))
        if version == "V2":
            script.execute.append(None)
            runner.execute_model(schedules({"_dummy": 8}), dummy_run=True)
            script.execute.append(None)
            runner.execute_model(schedules({"_dummy": 8}), None, True)
        run_step(
            runner, script, schedules({"r": 6}, new=[begins("r", 6)]), model_output({"r": [1]})
        )

    recorded = record(run)
    assert recorded.short() == ["prefill | a: prefill 0+4", "prefill | a: prefill 0+6"]
    assert recorded.passes("step", "recomputed_tokens", "cached_tokens") == [(0, 0, 0), (1, 0, 0)]


def test_steps_that_warm_up_a_worker_are_none(
    runner: Any, script: Script, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    def warm_up(worker: Any) -> str:
        run_step(
            runner,
            script,
            schedules({"_warmup_0_": 2}, new=[begins("_warmup_0_", 2)]),
            model_output({"_warmup_0_": [1]}),
        )
        return "warm"

    monkeypatch.setattr(Worker, "compile_or_warm_up_model", warm_up)

    def run() -> None:
        assert Worker.compile_or_warm_up_model(SimpleNamespace()) == "warm"
        run_step(
            runner, script, schedules({"r": 3}, new=[begins("r", 3)]), model_output({"r": [1]})
        )

    assert record(run).short() == ["prefill | a: prefill 0+3"]


@pytest.mark.parametrize("found", [0, 4, 8])
def test_a_request_that_resumes(
    runner: Any, script: Script, version: str, found: int, record: Record
) -> None:
    """Preempted after 6 of the 10 tokens of its prompt: of what it finds when it comes back, what is beyond those is
    cached, and what it computes below 6 is recomputed. V2 sends it as if it were new."""

    def run() -> None:
        run_step(
            runner, script, schedules({"r": 6}, new=[begins("r", 10)]), model_output({"r": []})
        )
        query = {"r": 10 - found}
        again = (
            schedules(query, new=[begins("r", 10, past=found)])
            if version == "V2"
            else schedules(query, past={"r": found}, got={"r": 0}, resumed=["r"])
        )
        run_step(runner, script, again, model_output({"r": [5]}))
        run_step(runner, script, schedules({"r": 1}, past={"r": 10}), model_output({"r": [6]}))

    recorded = record(run)
    assert recorded.passes("prefill_tokens", "recomputed_tokens", "cached_tokens") == [
        (6, 0, 0),
        (10 - found, max(6 - found, 0), max(found - 6, 0)),
        (0, 0, 0),
    ]
    assert recorded.broken({"a": 2}, cached=max(found - 6, 0)) == []


def test_tokens_that_were_thrown_away_come_again(
    runner: Any, script: Script, version: str, record: Record
) -> None:
    """A reset of the prefix cache preempts a request whose step is under way, and drops the token of that. The limit of
    three is reached by those that the request keeps."""

    def run() -> None:
        first = begins("r", 4, limit=3)
        run_step(runner, script, schedules({"r": 4}, new=[first]), model_output({"r": [1]}))
        run_step(
            runner,
            script,
            schedules({"r": 2}, past={"r": 4}, drafts={"r": 1}),
            model_output({"r": [8, 9]}),
        )
        again = begins("r", 4, limit=3)
        # V2 is sent all of its tokens: the prompt and the one that it has kept. In one process the list is the
        # scheduler's own, and grows.
        again.prefill_token_ids = [7, 7, 7, 7, 1]
        sent = (
            schedules({"r": 5}, new=[again])
            if version == "V2"
            else schedules({"r": 5}, past={"r": 0}, got={"r": 1}, resumed=["r"])
        )
        run_step(runner, script, sent, model_output({"r": [2]}))
        again.prefill_token_ids += [2, 3]
        run_step(runner, script, schedules({"r": 1}, past={"r": 5}), model_output({"r": [3]}))

    recorded = record(run)
    assert recorded.short()[2:] == ["prefill | a: prefill 0+5", "decode | a: decode 5+1"]
    assert recorded.passes("recomputed_tokens")[2:] == [(5,), (0,)]


def test_padding_and_graphs_of_the_v2_runner(
    monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    from vllm.v1.worker.gpu.async_utils import StepTimingCollector
    from vllm.v1.worker.gpu.model_runner import ExecuteModelState, GPUModelRunner

    def batch(tokens: int, padded: int, full: bool) -> Callable[[Any], None]:
        def execute(runner: Any) -> None:
            held = SimpleNamespace(
                num_tokens=tokens, num_tokens_after_padding=padded, num_reqs=1, req_ids=["r"]
            )
            runner.step_timing.record_batch(held, full)
            runner.step_timing.forward_start()
            runner.execute_model_state = ExecuteModelState(held, *[None] * 8, 0)

        return execute

    script = Script()
    with scripted(monkeypatch, GPUModelRunner, script) as runner:
        runner.step_timing = StepTimingCollector()

        def run() -> None:
            for output, execute in (
                (schedules({"r": 5}, new=[begins("r", 5)]), batch(5, 8, False)),
                (schedules({"r": 1}, past={"r": 5}), batch(1, 4, True)),
            ):
                script.execute.append(execute)
                script.sample.append(model_output({"r": [1]}))
                runner.execute_model(output)
                runner.sample_tokens(None)

        recorded = record(run)
    assert recorded.passes("padding_tokens", "graph") == [(3, False), (3, True)]


def test_padding_and_graphs_of_the_v1_runner(
    monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    chosen = [
        (CUDAGraphMode.PIECEWISE, BatchDescriptor(8)),
        (CUDAGraphMode.FULL, BatchDescriptor(2, 2)),
    ]
    script = Script()
    monkeypatch.setattr(
        GPUModelRunner,
        "_determine_batch_execution_and_padding",
        lambda runner: (*chosen.pop(0), False, None, None),
    )

    def execute(runner: Any) -> None:
        runner._determine_batch_execution_and_padding()

    with scripted(monkeypatch, GPUModelRunner, script) as runner:

        def run() -> None:
            for output in (
                schedules({"r": 5}, new=[begins("r", 5)]),
                schedules({"r": 1}, past={"r": 5}),
            ):
                script.execute.append(execute)
                script.sample.append(model_output({"r": [1]}))
                runner.execute_model(output)
                runner.sample_tokens(None)

        recorded = record(run)
    assert recorded.passes("padding_tokens", "graph") == [(3, False), (1, True)]


class _Stream:
    """A timer that writes down when it was asked."""

    failure = None

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin(self) -> str:
        self.seen.append("begin")
        return "mark"

    def end(self, mark: str) -> Any:
        self.seen.append("end")
        return SimpleNamespace(device_ns=1234, lost=False, captured=False)

    def finish(self) -> None:
        self.seen.append("finish")


def test_events_stand_before_the_forward_pass_and_after_sampling(
    kind: Any,
    version: str,
    script: Script,
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.worker.gpu.async_utils import StepTimingCollector

    timer = _Stream()
    monkeypatch.setattr("phaseprof.vllm.worker.timer_of", lambda device: timer)
    if version == "V1":
        monkeypatch.setattr(kind, "_model_forward", lambda runner: timer.seen.append("model"))

    def execute(runner: Any) -> None:
        timer.seen.append("inputs")
        if version == "V1":
            runner._model_forward()
        else:
            StepTimingCollector.forward_start(runner.step_timing)
            timer.seen.append("model")

    with scripted(monkeypatch, kind, script) as runner:
        runner.step_timing = StepTimingCollector()
        monkeypatch.setattr(script, "sample_tokens", _sampling(script, timer))

        def run() -> None:
            script.execute.append(execute)
            script.sample.append(model_output({"r": [1]}))
            runner.execute_model(schedules({"r": 5}, new=[begins("r", 5)]))
            runner.sample_tokens(None)

        recorded = record(run)
    assert timer.seen == ["inputs", "begin", "model", "sample", "end", "finish"]
    assert recorded.passes("device_ns") == [(1234,)]


def _sampling(script: Script, timer: _Stream) -> Callable[..., Any]:
    original = script.sample_tokens

    def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
        timer.seen.append("sample")
        return original(runner, *args, **kwargs)

    return sample_tokens


def test_two_engines_count_their_own_steps(
    runner: Any, kind: Any, script: Script, record: Record
) -> None:
    other = make_runner(kind)

    def run() -> None:
        for one, name in ((runner, "r"), (other, "s"), (runner, "t")):
            run_step(
                one, script, schedules({name: 3}, new=[begins(name, 3)]), model_output({name: [1]})
            )

    recorded = record(run)
    (first, *_), (second, *_), _ = rows = recorded.passes("model_id", "step")
    assert rows == [(first, 0), (second, 0), (first, 1)]
    assert first != second


def test_an_output_that_cannot_be_fetched_is_an_error(
    runner: Any,
    script: Script,
    fetched: Callable[..., Any],
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = fetched({"r": [1]})
    for name in ("copy_event", "async_copy_ready_event"):
        if hasattr(output, name):
            monkeypatch.delattr(output, name)

    def run() -> None:
        run_step(runner, script, schedules({"r": 4}, new=[begins("r", 4)]), output)
        with pytest.raises(AttributeError):
            output.get_output()

    assert record(run).passes("phase", "error") == [("prefill", "AttributeError")]


def test_a_forked_worker_writes_files_of_its_own(
    runner: Any, kind: Any, script: Script, tmp_path: Path
) -> None:
    """An engine's core and its workers may be forked off a process that records: the child begins anew, leaves the
    parent's files alone, and has none if it runs no step."""
    path = tmp_path / "trace"
    session = Session(path)
    session.start()
    run_step(runner, script, schedules({"r": 3}, new=[begins("r", 3)]), model_output({"r": [1]}))
    children = []
    for steps in (2, 0):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                mine = current()
                own = make_runner(kind)
                for n in range(steps):
                    name = f"s{n}"
                    run_step(
                        own,
                        script,
                        schedules({name: 5}, new=[begins(name, 5)]),
                        model_output({name: [1]}),
                    )
                assert mine is not None and mine is not session
                mine.stop()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    run_step(runner, script, schedules({"t": 4}, new=[begins("t", 4)]), model_output({"t": [1]}))
    session.stop()
    trace = open_trace(path)
    assert sorted(meta.pid for meta in trace.metas) == sorted([os.getpid(), children[0]])
    rows = trace.passes.sort_by("pass_id").to_pylist()
    ours = {s["request_id"]: row["step"] for row in rows for s in row["slices"]}
    assert ours == {"r": 0, "t": 1, "s0": 0, "s1": 1}
    assert len({row["pass_id"] for row in rows}) == 4
