"""Steps by kernels alone, on constructed timelines, and which evidence is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from phaseprof.importing.forms import Marker, Span, Step, StepWork
from phaseprof.importing.inferred import settle_by_kernels, steps_of_kernels, wants_marker
from phaseprof.importing.steps import Evidence, choose
from phaseprof.phases import Phase, TagSource

_WRITE = "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, 0>(...)"
_STORE = "void (anonymous namespace)::store_kvcache<2048l, 4, false, long>((anon"
_SAMPLE = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ArgMaxOps<float>>>"
_DECODE = "void paged_attention_ll4mi_QKV_mfma16_kernel<...>"
_PREFILL = "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalVarSeqQ128Kv128PersistentContext"
_FLASH = "void flash_fwd_kernel<...>"


def _marker(name: str, at: int, tokens: int | None = None, launch: int = 0) -> Marker:
    grid = None if tokens is None else (tokens, 1, 1)
    return Marker(name, at, 7, 1000 + at, 1000 + at + 2, 0, 0, grid, launch)


def _step(
    start: int, tokens: int, attention: str = "", layers: int = 3, samples: int = 1
) -> list[Marker]:
    """Three layers, 10 ns each, then the sampler; launches of their own."""
    made = []
    for layer in range(layers):
        made.append(_marker(_WRITE, start + 10 * layer, tokens, launch=start + layer))
        if attention:
            made.append(_marker(attention, start + 10 * layer + 3))
    made += [_marker(_SAMPLE, start + 10 * layers + at) for at in range(samples)]
    return made


def _device_only(markers: Sequence[Marker]) -> list[Marker]:
    return [replace(each, launched_ns=None, thread_id=None, launch=0) for each in markers]


def test_kernels_that_are_wanted() -> None:
    assert all(map(wants_marker, (_WRITE, _STORE, _SAMPLE, _DECODE, _PREFILL)))
    assert wants_marker("void vllm::concat_and_cache_mla_kernel<...>")
    assert not any(map(wants_marker, (_FLASH, "ampere_bf16_gemm", "topkGatingSoftmax", "")))


def test_steps_end_with_their_sampler() -> None:
    found = steps_of_kernels([*_step(0, 100), *_step(1000, 4, samples=2), *_step(2000, 4)])
    assert [(step.start_ns, step.end_ns) for step in found.steps] == [
        (0, 31),
        (31, 1032),
        (1032, 2031),
    ]
    assert [step.name.rpartition(": ")[2] for step in found.steps] == [
        "100 tokens",
        "4 tokens",
        "4 tokens",
    ]
    # Neither tokens nor order tell prefill from decode.
    assert {step.work.phase for step in found.steps} == {Phase.OTHER}
    assert all(step.work.unknown and step.thread_id == 7 for step in found.steps)
    assert {step.tag_source for step in found.steps} == {TagSource.INFERRED}
    assert "sampler" in found.why


def test_attention_kernels_tell_the_phase() -> None:
    both = sorted(
        [*_step(2000, 60, _DECODE), *_step(2001, 60, _PREFILL)],
        key=lambda each: each.launched_ns or 0,
    )
    found = steps_of_kernels(
        [*_step(0, 100, _PREFILL), *_step(1000, 4, _DECODE), *both[:-1], *_step(3000, 9, _FLASH)]
    )
    assert [step.work.phase for step in found.steps] == [
        Phase.PREFILL,
        Phase.DECODE,
        Phase.MIXED,
        Phase.OTHER,
    ]
    assert found.steps[0].work.prefill_tokens == 100
    assert (found.steps[1].work.decode_tokens, found.steps[1].work.decode_sequences) == (4, None)


def test_tokens_of_a_draft_model_and_of_graphs() -> None:
    draft = [_marker(_WRITE, 29, 2, launch=99)]
    found = steps_of_kernels([*_step(0, 8, _DECODE, layers=2), *draft, *_step(100, 8, _DECODE)])
    assert found.steps[0].work.decode_tokens == 8
    # All of a graph's kernels have one launch: their grids are those of the capture.
    graph = [replace(each, launched_ns=500, launch=5) for each in _step(500, 8, _DECODE, samples=0)]
    found = steps_of_kernels([*graph, _marker(_SAMPLE, 600)])
    assert [(step.work.phase, step.work.decode_tokens) for step in found.steps] == [
        (Phase.DECODE, None)
    ]


def test_sglang_writes() -> None:
    def tokens(name: str) -> str:
        markers = [_marker(name, at, 15360, launch=at + 1) for at in range(3)]
        found = steps_of_kernels([*markers, _marker(_SAMPLE, 50)])
        return found.steps[0].name.rpartition(": ")[2]

    assert tokens(_STORE) == "15360 tokens"
    assert "tokens" not in tokens(_STORE.replace("4, false", "1, false"))


def test_without_a_sampler_gaps_divide_if_all_steps_are_alike() -> None:
    markers = [marker for at in range(4) for marker in _step(1000 * at, 5, samples=0)]
    found = steps_of_kernels(markers)
    assert [step.end_ns for step in found.steps] == [21, 1021, 2021, 3021]
    assert "gaps" in found.why
    # One of the inner steps with a layer fewer: where steps end cannot be seen.
    assert steps_of_kernels(markers[:4] + markers[5:]).steps == ()
    assert steps_of_kernels(markers[:3]).steps == ()


def test_routers_that_look_like_samplers_divide_nothing() -> None:
    layers = [
        kernel
        for at in range(6)
        for kernel in (_marker(_WRITE, 20 * at, 5), _marker(_SAMPLE, 20 * at + 5))
    ]
    found = steps_of_kernels(layers)
    assert found.steps == ()
    assert found.why


def test_recording_of_a_device_alone() -> None:
    markers = _device_only([*_step(0, 5, _DECODE), *_step(1000, 5, _DECODE)])
    other = [replace(each, device=1) for each in markers[:3]]
    found = steps_of_kernels([*markers, *other])
    assert [(step.start_ns, step.end_ns, step.thread_id) for step in found.steps] == [
        (1000, 1032, None),
        (2000, 2032, None),
    ]
    assert "on the device alone" in found.why


def test_nothing_to_go_by() -> None:
    assert steps_of_kernels([]).steps == ()
    assert steps_of_kernels([_marker(_SAMPLE, 1)]).steps == ()


def _unknown(start: int, end: int, thread: int | None = 7) -> Step:
    return Step(
        start, end, thread, TagSource.ANNOTATION, "call", StepWork(Phase.OTHER, unknown="?")
    )


def test_kernels_tell_the_phase_of_steps_that_are_known_otherwise() -> None:
    known = Step(3000, 3100, 7, TagSource.ANNOTATION, "said", StepWork(Phase.PREFILL))
    steps = [_unknown(0, 100), _unknown(0, 5000, thread=8), _unknown(1000, 1005), known]
    markers = [*_step(0, 4, _DECODE), *_step(1010, 4, _DECODE), *_step(3000, 4, _DECODE)]
    settled = settle_by_kernels(steps, markers)
    assert [step.work.phase for step in settled] == [
        Phase.DECODE,
        Phase.OTHER,
        Phase.OTHER,
        Phase.PREFILL,
    ]
    assert settled[0].tag_source is TagSource.INFERRED
    assert settled[1:] == tuple(steps[1:])


_CALL = "vllm/v1/worker/gpu_model_runner.py(2907): execute_model"


def _asked() -> Sequence[Marker]:
    raise AssertionError("kernels are asked only if nothing else helps")


def test_announced_steps_go_before_calls_and_differences_are_said() -> None:
    announced = [
        Span("execute_context_0(0)_generation_1(1)", 100 * at, 100 * at + 90, 1) for at in (1, 2, 9)
    ]
    calls = [Span(_CALL, 100 * at + 5, 100 * at + 80, 1) for at in (0, 1, 2)]
    chosen = choose(announced, calls, _asked, {})
    assert chosen.evidence is Evidence.ANNOTATIONS
    assert [step.start_ns for step in chosen.steps] == [100, 200, 900]
    assert chosen.unknown == {}
    assert [text[:6] for text in chosen.disagreements] == ["1 of 3", "1 of 3"]
    assert choose(announced, [], _asked, {}).disagreements == ()


def test_ranges_within_steps_then_calls_then_kernels() -> None:
    parts = [
        Span("gpu_model_runner: preprocess", 0, 5, 7),
        Span("gpu_model_runner: forward", 6, 95, 7),
    ]
    calls = [Span(_CALL, 0, 99, 7)]
    markers = _step(10, 4, _DECODE)
    for found, evidence in (
        (choose(parts, calls, lambda: markers, {}), Evidence.PARTS),
        (choose([], calls, lambda: markers, {}), Evidence.CALLS),
        (choose([], [], lambda: markers, {}), Evidence.KERNELS),
    ):
        assert found.evidence is evidence
        assert [step.work.phase for step in found.steps] == [Phase.DECODE]
        assert found.why
    assert choose([], calls, list, {}).unknown == {
        "a call of a function does not say what it computes": 1
    }
    assert choose([], [], list, {}).evidence is Evidence.NONE
    named = choose([Span("mine", 0, 9, 7)], calls, _asked, {"mi*": Phase.PREFILL})
    assert [step.work.phase for step in named.steps] == [Phase.PREFILL]


_markers = st.builds(
    Marker,
    st.sampled_from([_WRITE, _STORE, _SAMPLE, _DECODE, _PREFILL, _FLASH, "store_kvcache<", ""]),
    st.none() | st.integers(0, 50),
    st.none() | st.integers(0, 2),
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(0, 1),
    st.integers(0, 1),
    st.none() | st.tuples(st.integers(0, 4), st.just(1), st.just(1)),
    st.integers(0, 3),
)


@settings(max_examples=200)
@given(st.lists(_markers, max_size=25))
def test_no_kernels_raise_and_steps_of_a_thread_do_not_overlap(markers: list[Marker]) -> None:
    steps = steps_of_kernels(markers).steps
    for thread in {step.thread_id for step in steps}:
        if thread is None:
            continue
        own = [step for step in steps if step.thread_id == thread]
        assert all(before.end_ns <= after.start_ns for before, after in pairwise(own))
    assert all(step.start_ns < step.end_ns for step in steps)
    settle_by_kernels([_unknown(0, 20, 0), _unknown(5, 40, 1), _unknown(20, 50, None)], markers)
