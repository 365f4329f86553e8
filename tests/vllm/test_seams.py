"""What is left of us on vLLM's classes, and what happens with a vLLM of another form: it runs, and the trace says why
it is not labelled."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import Recorded, generate, make_engine, prompts, sampling, tokens_of

from phaseprof.session import Session
from phaseprof.trace.reader import open_trace

Record = Callable[[Callable[[], Any]], Recorded]

STEPS = "the steps of vLLM's workers: they run without labels"


def attributes() -> dict[str, dict[str, Any]]:
    """All attributes of all classes of vLLM's engine and workers that are loaded."""
    return {
        f"{kind.__module__}.{kind.__qualname__}": dict(vars(kind))
        for name, module in tuple(sys.modules.items())
        if name.startswith("vllm.v1")
        for kind in tuple(vars(module).values())
        if isinstance(kind, type) and kind.__module__.startswith("vllm")
    }


def test_a_session_leaves_every_class_as_it_was(engine: Any, record: Record) -> None:
    before = attributes()
    recorded = record(lambda: generate(engine, prompts(5, first=161), sampling(2)))
    assert recorded.passes("phase") == [("prefill",), ("decode",)]
    after = attributes()
    for name, own in before.items():
        assert list(own) == [key for key in after[name] if key in own], name
        for key, value in own.items():
            # The abstract base classes keep caches of their own.
            assert after[name][key] is value or key.startswith("_abc_"), f"{name}.{key}"
        # copyreg keeps what it finds of a class that is copied.
        assert set(after[name]) - set(own) <= {"__slotnames__"}, name


def test_a_wrapper_that_stays_hands_calls_on(engine: Any, tmp_path: Path) -> None:
    """Somebody else has wrapped what we wrapped, and takes it off after we are gone."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.execute_model
    session = Session(tmp_path / "trace")
    session.start()
    ours = GPUModelRunner.execute_model

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    GPUModelRunner.execute_model = theirs
    try:
        session.stop()
        assert GPUModelRunner.execute_model is theirs
        assert len(tokens_of(generate(engine, prompts(5, first=171), sampling(2)))[0]) == 2
    finally:
        GPUModelRunner.execute_model = original


def lacks_a_method(patch: pytest.MonkeyPatch, kind: Any) -> str:
    patch.setattr(kind, "sample_tokens", None)
    return "GPUModelRunner has no sample_tokens"


def lacks_a_field(patch: pytest.MonkeyPatch, kind: Any) -> str:
    from vllm.v1.core.sched import output

    fields = dict(output.SchedulerOutput.__dataclass_fields__)
    del fields["num_scheduled_tokens"]
    patch.setattr(output.SchedulerOutput, "__dataclass_fields__", fields)
    return "SchedulerOutput has no num_scheduled_tokens"


def lacks_the_class(patch: pytest.MonkeyPatch, kind: Any) -> str:
    patch.delattr(sys.modules[kind.__module__], "GPUModelRunner")
    return "vllm.v1.worker.gpu_model_runner has no class GPUModelRunner"


@pytest.mark.parametrize("change", [lacks_a_method, lacks_a_field, lacks_the_class])
def test_a_runner_of_another_form_runs_without_labels(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[..., str]
) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    before = dict(vars(GPUModelRunner))
    with monkeypatch.context() as patch:
        why = change(patch, GPUModelRunner)
        session = Session(tmp_path / "trace")
        session.start()
        # The engine holds on to the real thing while it runs.
        patch.undo()
        assert dict(vars(GPUModelRunner)) == before
        answers = generate(engine, prompts(5, first=181), sampling(2))
        session.stop()
    assert len(tokens_of(answers)[0]) == 2
    (meta,) = open_trace(tmp_path / "trace").metas
    (note,) = [note for note in meta.not_measured if note.what == STEPS and why in note.why]
    assert sys.modules["vllm"].__version__ in note.why
    assert "0.32.0" in note.fix
    assert not list((tmp_path / "trace" / "passes").glob("**/*.parquet"))


def test_a_step_that_cannot_be_read_runs(
    engine: Any, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What we fail at is said once; the step goes on, and the next one is seen."""
    from phaseprof.vllm import worker

    real, failures = worker._Open, iter([True])

    def fails(*args: Any) -> Any:
        if next(failures, False):
            raise ZeroDivisionError("ours")
        return real(*args)

    monkeypatch.setattr(worker, "_Open", fails)
    recorded = record(lambda: generate(engine, prompts(5, first=191), sampling(3)))
    assert len(tokens_of(recorded.output)[0]) == 3
    assert recorded.passes("step") == [(1,), (2,)]
    (meta,) = recorded.trace.metas
    assert any("ZeroDivisionError: ours" in note.why for note in meta.not_measured)


def test_a_model_of_transformers_inside_vllm_is_one_pass(
    llama_folder: Path, record: Record
) -> None:
    """vLLM can run transformers' own modules: their calls are parts of its steps, and of its dummy runs."""
    made: list[Any] = []

    def run() -> Any:
        made.append(make_engine(llama_folder, model_impl="transformers"))
        return generate(made[0], prompts(9), sampling(3))

    recorded = record(run)
    assert recorded.short() == [
        "prefill | a: prefill 0+9",
        "decode | a: decode 9+1",
        "decode | a: decode 10+1",
    ]
    assert {model.engine for meta in recorded.trace.metas for model in meta.models} == {"vllm"}


def test_the_events_name_what_vllm_has() -> None:
    """The fields that are read are there, in the vLLM that is installed."""
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    from phaseprof.vllm import worker

    for kind, names in (
        (SchedulerOutput, worker._SCHEDULED),
        (NewRequestData, worker._NEW),
        (CachedRequestData, worker._CACHED),
        (ModelRunnerOutput, worker._OUTPUT),
    ):
        assert set(names) <= {field.name for field in dataclasses.fields(kind)}
