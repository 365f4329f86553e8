"""Steps by calls of Python functions, on constructed timelines."""

from __future__ import annotations

import pytest

from phaseprof.importing.forms import Span, Step
from phaseprof.importing.stacks import Lookup, settle_by_lookups, steps_of_calls, wants_function
from phaseprof.phases import Phase, TagSource

_QWEN = "transformers/models/qwen2/modeling_qwen2.py"
_UTILS = "transformers/generation/utils.py"


def _span(name: str, start: int, end: int, thread: int = 1) -> Span:
    return Span(name, start, end, thread, 1)


@pytest.mark.parametrize(
    "name",
    [
        "vllm/v1/worker/gpu_model_runner.py(2907): execute_model",
        "/usr/lib/python3/dist-packages/vllm/v1/worker/gpu_model_runner.py(99): _dummy_run",
        "vllm/v1/worker/cpu_model_runner.py(12): execute_model",
        "vllm/v1/worker/gpu/model_runner.py(700): execute_model",
        "/sgl/python/sglang/srt/managers/scheduler.py(1): run_batch",
        "sglang/srt/managers/tp_worker.py(1): forward_batch_generation",
        "sglang/srt/model_executor/model_runner.py(2): forward",
        f"{_QWEN}(503): forward",
        "nn.Module: GptOssForCausalLM_0",
        f"{_UTILS}(10): _sample",
        f"{_UTILS}(10): _prefill",
    ],
)
def test_functions_that_are_wanted(name: str) -> None:
    assert wants_function(name)


@pytest.mark.parametrize(
    "name",
    [
        "vllm/v1/worker/gpu_model_runner.py(2907): _prepare_inputs",
        "vllm/v1/worker/gpu_worker.py(1): execute_model",
        "nn.Module: Linear_3",
        "torch/nn/modules/module.py(1747): forward",
        "sglang/srt/model_executor/forward_batch_info.py(133): is_decode",
        f"{_UTILS}(10): generate",
        "execute_model",
        "",
    ],
)
def test_functions_that_are_not(name: str) -> None:
    assert not wants_function(name)


def test_engine_calls_are_steps_and_models_within_them_are_not() -> None:
    steps = steps_of_calls(
        [
            _span("nn.Module: GptOssForCausalLM_0", 20, 80),
            _span("vllm/v1/worker/gpu_model_runner.py(2907): execute_model", 10, 90),
            _span("vllm/v1/worker/gpu_model_runner.py(4000): _dummy_run", 100, 190),
        ]
    )
    assert [(step.start_ns, step.end_ns, step.work.phase) for step in steps] == [
        (10, 90, Phase.OTHER),
        (100, 190, Phase.OTHER),
    ]
    # What a call computes is not known; of a dummy run it is: nothing of a request.
    assert steps[0].work.unknown and not steps[1].work.unknown
    assert {step.tag_source for step in steps} == {TagSource.INFERRED}


def test_the_call_that_launches_is_the_step_in_sglang() -> None:
    scheduler = _span("sglang/srt/managers/scheduler.py(1): run_batch", 0, 5, thread=1)
    worker = _span(
        "sglang/srt/managers/tp_worker.py(1): forward_batch_generation", 10, 90, thread=2
    )
    runner = _span("sglang/srt/model_executor/model_runner.py(2): forward", 20, 70, thread=2)
    assert [step.start_ns for step in steps_of_calls([scheduler, runner, worker])] == [10]
    assert [step.start_ns for step in steps_of_calls([scheduler, runner])] == [20]
    assert [step.start_ns for step in steps_of_calls([scheduler])] == [0]


def _generate(start: int, prefill: bool, passes: int) -> list[Span]:
    """A loop of transformers of 100 ns a pass; the first one is in `_prefill` or directly in the loop."""
    spans = [_span(f"{_UTILS}(3123): _sample", start, start + 100 * passes)]
    for at in range(passes):
        begin = start + 100 * at
        spans.append(_span(f"{_QWEN}(503): forward", begin + 10, begin + 90))
        spans.append(_span(f"{_QWEN}(218): forward", begin + 20, begin + 30))
        if prefill and at == 0:
            spans.append(_span(f"{_UTILS}(4283): _prefill", begin + 5, begin + 95))
    return spans


def test_prefill_and_decode_in_generate() -> None:
    outside = _span(f"{_QWEN}(503): forward", 2000, 2090)
    steps = steps_of_calls([*_generate(0, True, 3), *_generate(1000, False, 2), outside])
    assert [(step.start_ns, step.work.phase) for step in steps] == [
        (10, Phase.PREFILL),
        (110, Phase.DECODE),
        (210, Phase.DECODE),
        (1010, Phase.OTHER),
        (1110, Phase.OTHER),
        (2000, Phase.OTHER),
    ]
    assert "in the prefill of generate" in steps[0].name


def test_shapes_of_look_ups() -> None:
    spans = [_span(f"{_QWEN}(503): forward", 100 * at, 100 * at + 90) for at in range(7)]
    lookups = [
        Lookup(10, 1, (16, 559)),
        Lookup(20, 1, (2, 1)),  # a second one in the same step
        Lookup(110, 1, (4, 1)),
        Lookup(210, 1, (888,)),  # packed
        Lookup(310, 2, (1, 5)),  # another thread
        Lookup(410, 1, (1, 5)),
        Lookup(495, 1, (1, 1)),  # between steps
        Lookup(510, 1, (0, 5)),
    ]
    steps = settle_by_lookups(steps_of_calls(spans), lookups)
    told = [
        (step.work.phase, step.work.prefill_sequences, step.work.prefill_tokens) for step in steps
    ]
    unknown = (Phase.OTHER, None, None)
    assert told == [
        (Phase.PREFILL, 16, None),  # padding may be among 16 x 559
        (Phase.DECODE, 0, 0),
        unknown,
        unknown,
        (Phase.PREFILL, 1, 5),
        unknown,
        unknown,
    ]
    assert (steps[1].work.decode_sequences, steps[1].work.decode_tokens) == (4, 4)


def test_what_is_known_is_kept() -> None:
    known = steps_of_calls(_generate(0, True, 1))
    settled: tuple[Step, ...] = settle_by_lookups(known, [Lookup(15, 1, (1, 1))])
    assert settled == known
