"""Steps by calls of Python functions, on constructed timelines."""

from __future__ import annotations

import pytest

from phaseprof.importing.forms import Span
from phaseprof.importing.stacks import NO_CACHE, PACKED, function_kind, steps_of_calls
from phaseprof.phases import Phase, TagSource

_QWEN = "transformers/models/qwen2/modeling_qwen2.py"
_UTILS = "transformers/generation/utils.py"
_CACHE = "transformers/cache_utils.py(1062)"


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
        f"{_CACHE}: get_seq_length",
    ],
)
def test_functions_that_are_wanted(name: str) -> None:
    assert function_kind(name)


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
    assert not function_kind(name)


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


def _generate(start: int, prefill: bool, passes: int, cache: bool = True) -> list[Span]:
    """A loop of transformers of 100 ns a pass; the first one is in `_prefill` or directly in the loop."""
    spans = [_span(f"{_UTILS}(3123): _sample", start, start + 100 * passes)]
    for at in range(passes):
        begin = start + 100 * at
        spans.append(_span(f"{_QWEN}(503): forward", begin + 10, begin + 90))
        spans.append(_span(f"{_QWEN}(218): forward", begin + 20, begin + 30))
        if cache:
            spans.append(_span(f"{_CACHE}: get_seq_length", begin + 11, begin + 12))
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


def test_a_loop_without_a_call_of_a_cache_is_not_decode() -> None:
    made = _span(f"{_CACHE}: __init__", 990, 995)
    first, second = _generate(0, True, 2, cache=False), _generate(1000, True, 2, cache=False)
    third = _generate(2000, True, 2, cache=False)
    steps = steps_of_calls([*first, made, *second, *third])
    assert [step.work.phase for step in steps] == [
        *(Phase.PREFILL, Phase.OTHER),
        *(Phase.PREFILL, Phase.DECODE),
        *(Phase.PREFILL, Phase.OTHER),
    ]
    assert steps[1].work.unknown == steps[5].work.unknown == NO_CACHE
    # Another thread's cache says nothing.
    elsewhere = _span(f"{_CACHE}: get_seq_length", 120, 125, thread=2)
    assert steps_of_calls([*first, elsewhere])[1].work.unknown == NO_CACHE


def test_continuous_batching_is_neither() -> None:
    file = "transformers/generation/continuous_batching"
    spans = [
        _span(f"{file}/model_runner.py(181): _forward_process_and_sample", 0, 100),
        _span(f"{_QWEN}(503): forward", 10, 90),
        _span(f"{file}/continuous_api.py(635): _generation_step", 200, 300),
        _span(f"{_QWEN}(503): forward", 210, 290),
    ]
    assert all(function_kind(span.name) for span in spans)
    assert [step.work.unknown for step in steps_of_calls(spans)] == [PACKED, PACKED]
