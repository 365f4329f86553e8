"""What ranges of engines announce: every form against counts written by hand, and sums of given requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseprof.importing.annotations import steps_announced, steps_of_parts
from phaseprof.importing.forms import Span, StepWork
from phaseprof.importing.step_names import announced, phase_named
from phaseprof.phases import Phase, Role, TagSource

P, D, M, X = Phase.PREFILL, Phase.DECODE, Phase.MIXED, Phase.OTHER

#: phase, prefill sequences and tokens, decode sequences and tokens, context tokens, pairs.
FORMS: list[tuple[str, tuple[object, ...]]] = [
    # vLLM, plain.
    ("execute_context_2(14721)_generation_0(0)", (P, 2, 14721, 0, 0, None, None)),
    ("execute_context_0(0)_generation_1(1)", (D, 0, 0, 1, 1, None, None)),
    # The last chunk of a prompt is one token: its word is kept.
    ("execute_context_1(1)_generation_0(0)", (P, 1, 1, 0, 0, None, None)),
    ("execute_context_0(0)_generation_32(128)", (D, 0, 0, 32, 128, None, None)),
    ("execute_context_2(6144)_generation_3(3)", (M, 2, 6144, 3, 3, None, None)),
    ("execute_context_0(0)_generation_0(0)", (X, 0, 0, 0, 0, None, None)),
    ("execute_context_1(888_788544)_generation_0(0)", (P, 1, 888, 0, 0, None, None)),
    # With sums: one prompt of 4 on 0: 1 + 2 + 3 + 4 = 10 pairs.
    (
        "execute_4_context_1(sq4sk4sqsq16sqsk16)_generation_0(sq0sk0sqsq0sqsk0)",
        (P, 1, 4, 0, 0, 4, 10),
    ),
    # A chunk of 3 on 5: 6 + 7 + 8 = 21; two decodes at 10 and 20: 30.
    (
        "execute_5_context_1(sq3sk8sqsq9sqsk24)_generation_2(sq2sk30sqsq2sqsk30)",
        (M, 1, 3, 2, 2, 38, 51),
    ),
    (
        "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)",
        (D, 0, 0, 32, 32, 55086, 55086),
    ),
    # A verification of 3 drafts at a length of 10 with them: 7 + 8 + 9 + 10 = 34.
    (
        "execute_4_context_0(sq0sk0sqsq0sqsk0)_generation_1(sq4sk10sqsq16sqsk40)",
        (D, 0, 0, 1, 4, 10, 34),
    ),
    # Sums that nothing has.
    (
        "execute_4_context_1(sq4sk4sqsq15sqsk16)_generation_0(sq0sk0sqsq0sqsk0)",
        (P, 1, 4, 0, 0, 4, None),
    ),
    ("execute_new_2_cached_0", (P, 2, None, 0, 0, None, None)),
    ("execute_new_1_cached_7", (X, None, None, None, None, None, None)),
    ("capture_32_FULL", (X, None, None, None, None, None, None)),
    # SGLang.
    ("step[EXTEND bs=15 toks=15360]", (P, 15, 15360, 0, 0, None, None)),
    # 8 on 2: 3 + … + 10 = 52; 4 on 6: 7 + 8 + 9 + 10 = 34.
    (
        "step[EXTEND bs=2 toks=12 c_sqsq=80 c_sqsk=120 c_sk=20]",
        (P, 2, 12, 0, 0, 20, 86),
    ),
    ("step[SPLIT_PREFILL bs=3]", (P, 3, None, 0, 0, None, None)),
    ("step[DECODE bs=32]", (D, 0, 0, 32, 32, None, None)),
    ("step[DECODE bs=2 g_sqsq=2 g_sqsk=30 g_sk=30]", (D, 0, 0, 2, 2, 30, 30)),
    (
        "step[DECODE bs=64 g_sq=128 g_sqsq=256 g_sqsk=262144 g_sk=131072]",
        (D, 0, 0, 64, 128, None, None),
    ),
    ("step[MIXED bs=2]", (M, None, None, None, None, None, None)),
    # 5 on 3: 4 + 5 + 6 + 7 + 8 = 30, and one at 12.
    (
        "step[MIXED bs=2 c=1 g=1 c_sq=5 c_sk=8 c_sqsq=25 c_sqsk=40 g_sq=1 g_sk=12 g_sqsq=1 g_sqsk=12]",
        (M, 1, 5, 1, 1, 20, 42),
    ),
    (
        "step[MIXED bs=1 c=1 g=0 c_sq=3 c_sk=3 c_sqsq=9 c_sqsk=9 g_sq=0 g_sk=0 g_sqsq=0 g_sqsk=0]",
        (P, 1, 3, 0, 0, 3, 6),
    ),
    # All of one token, and mixed: one of them is a prompt.
    (
        "step[MIXED bs=2 c=0 g=2 c_sq=0 c_sk=0 c_sqsq=0 c_sqsk=0 g_sq=2 g_sk=9 g_sqsq=2 g_sqsk=9]",
        (M, None, None, None, None, 9, 9),
    ),
    ("step[TARGET_VERIFY bs=4]", (D, 0, 0, 4, None, None, None)),
    (
        "step[TARGET_VERIFY bs=4 g_sq=20 g_sqsq=100 g_sqsk=200 g_sk=40]",
        (D, 0, 0, 4, 20, None, None),
    ),
    ("step[DRAFT_EXTEND_V2 bs=4 c_sq=20 c_sqsq=1 c_sqsk=1 c_sk=1]", (D, 0, 0, 4, 20, None, None)),
    ("step[IDLE bs=0]", (X, None, None, None, None, None, None)),
    ("step[DLLM_EXTEND bs=2]", (X, None, None, None, None, None, None)),
    # ATOM.
    ("prefill[bs=2 tok=14721 ctx=[7803, 6918]]", (P, 2, 14721, 0, 0, None, None)),
    (
        "prefill[bs=1 tok=4 ctx=4 sqsq=16 sqsk=16 sk=4]",
        (P, 1, 4, 0, 0, 4, 10),
    ),
    ("decode[bs=117/128 tok=117 d=117]", (D, 0, 0, 117, 117, None, None)),
    ("eager_decode[bs=2 tok=2 ctx=[9, 7]]", (D, 0, 0, 2, 2, None, None)),
    ("decode[bs=128 tok=384 p=2 d=126]", (M, 2, None, 126, None, None, None)),
    # TensorRT-LLM.
    ("[Executor] _forward_step 12: 2 ctx reqs, 3 gen reqs", (M, 2, None, 3, None, None, None)),
    ("[Executor] _forward_step: 2 ctx reqs, 0 gen reqs", (P, 2, None, 0, 0, None, None)),
    ("_forward_step: 0 ctx reqs, 3 gen reqs", (D, 0, 0, 3, None, None, None)),
    (
        "[Executor] _forward_step 9: 1 ctx reqs, 50 ctx tokens, 0 gen reqs",
        (P, 1, 50, 0, 0, None, None),
    ),
]


def _counts(work: StepWork) -> tuple[object, ...]:
    return (
        work.phase,
        work.prefill_sequences,
        work.prefill_tokens,
        work.decode_sequences,
        work.decode_tokens,
        work.context_tokens,
        work.attention_pairs,
    )


@pytest.mark.parametrize(("name", "truth"), FORMS, ids=[name for name, _ in FORMS])
def test_form(name: str, truth: tuple[object, ...]) -> None:
    found = announced(name)
    assert found is not None
    assert _counts(found.work) == truth


@pytest.mark.parametrize(
    "name",
    [
        "ProfilerStep#6",
        "## Call CompiledFxGraph fud64 ##",
        "nccl:_all_gather_base",
        "gpu_model_runner: forward",
        "execute_context_1(2)",
        "execute_context_(2)_generation_0(0)",
        "step[extend bs=2]",
        "step[EXTEND bs=2",
        "[Executor] _update_requests",
        "execute_context_1(" + "9" * 5000 + ")_generation_0(0)",
        "",
    ],
)
def test_other_names_announce_nothing(name: str) -> None:
    assert announced(name) is None


def test_unknown_phase_has_its_reason() -> None:
    for name in ("execute_new_0_cached_3", "step[DLLM_EXTEND bs=2]"):
        found = announced(name)
        assert found is not None and found.work.unknown
    idle = announced("step[IDLE bs=0]")
    assert idle is not None and not idle.work.unknown


_requests = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 60)), max_size=6
)  # query tokens, tokens in the cache before


def _sums(requests: list[tuple[int, int]]) -> tuple[int, int, int, int]:
    return (
        sum(query for query, _ in requests),
        sum(past + query for query, past in requests),
        sum(query * query for query, _ in requests),
        sum(query * (past + query) for query, past in requests),
    )


def _pairs(requests: list[tuple[int, int]]) -> int:
    """Counted key by key."""
    return sum(past + place + 1 for query, past in requests for place in range(query))


@given(_requests, _requests)
def test_vllm_sums_give_the_requests_back(
    context: list[tuple[int, int]], generation: list[tuple[int, int]]
) -> None:
    groups = [
        f"{len(group)}(sq{{}}sk{{}}sqsq{{}}sqsk{{}})".format(*_sums(group))
        for group in (context, generation)
    ]
    total = _sums(context)[0] + _sums(generation)[0]
    found = announced(f"execute_{total}_context_{groups[0]}_generation_{groups[1]}")
    assert found is not None
    work = found.work
    assert (work.prefill_sequences, work.decode_sequences) == (len(context), len(generation))
    assert (work.prefill_tokens, work.decode_tokens) == (_sums(context)[0], _sums(generation)[0])
    assert work.context_tokens == _sums(context + generation)[1]
    assert work.attention_pairs == _pairs(context + generation)


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_vllm_counts_are_given_back(requests: int, tokens: int, others: int, theirs: int) -> None:
    found = announced(f"execute_context_{requests}({tokens})_generation_{others}({theirs})")
    assert found is not None
    assert _counts(found.work)[1:5] == (requests, tokens, others, theirs)


_noise = st.text(
    alphabet="execut_conxgra()[]0123456789=sqkSTEPDCOBM :.*?,\n\u00e9\ud800", max_size=80
)


@settings(max_examples=300)
@given(_noise | st.sampled_from([name for name, _ in FORMS]), _noise, st.integers(0, 90))
def test_no_name_raises(name: str, noise: str, place: int) -> None:
    text = name[:place] + noise + name[place:]
    found = announced(text)
    assert found is None or isinstance(found.work.phase, Phase)
    phase_named(text, {noise: P, f"{noise}*": D})


def test_users_names() -> None:
    named = {"decode*": D, "step[MINE]": P, "b?tch": M, "decode_prompt": P}
    assert phase_named("decode_12", named) is D
    assert phase_named("decode_prompt", named) is P  # exact goes first
    assert phase_named("step[MINE]", named) is P
    assert phase_named("stepM", named) is None
    assert phase_named("batch", named) is M
    assert phase_named("my decode", named) is None


def _span(name: str, start: int, end: int, thread: int = 1, process: int = 1) -> Span:
    return Span(name, start, end, thread, process)


def test_outermost_of_nested_ranges_is_the_step() -> None:
    steps = steps_announced(
        [
            _span("step[EXTEND bs=15 toks=15360]", 12, 90),
            _span("execute_context_15(15360)_generation_0(0)", 10, 100),
            _span("gpu_model_runner: forward", 20, 80),
            _span("execute_context_0(0)_generation_15(15)", 100, 120),
            _span("step[DECODE bs=15]", 50, 60, thread=2),
        ]
    )
    assert [(step.name[:12], step.start_ns, step.thread_id) for step in steps] == [
        ("execute_cont", 10, 1),
        ("step[DECODE ", 50, 2),
        ("execute_cont", 100, 1),
    ]
    assert {step.tag_source for step in steps} == {TagSource.ANNOTATION}


def test_a_step_that_reaches_into_the_next_by_rounding_is_cut() -> None:
    steps = steps_announced(
        [_span("step[DECODE bs=1]", 0, 101), _span("step[DECODE bs=2]", 100, 200)]
    )
    assert [(step.start_ns, step.end_ns) for step in steps] == [(0, 101), (101, 200)]


def test_users_names_go_before_what_names_say() -> None:
    spans = [
        _span("execute_context_0(0)_generation_4(16)", 0, 10),
        _span("execute_context_1(7)_generation_0(0)", 20, 30),
        _span("mine", 40, 90),
        _span("execute_context_1(9)_generation_0(0)", 50, 60),
    ]
    steps = steps_announced(spans, {"execute_context_0*": D, "execute_context_1(7)*": X, "mine": D})
    assert [(step.start_ns, step.work.phase) for step in steps] == [(0, D), (20, X), (40, D)]
    assert (
        steps[0].work.decode_tokens == 16
    )  # the counts of the name stand where the phase is the same
    assert steps[1].work.prefill_tokens is None


def test_steps_from_their_parts() -> None:
    names = ["preprocess", "forward", "postprocess", "sample", "bookkeep"]
    spans = [
        _span(f"gpu_model_runner: {name}", start + 10 * place, start + 10 * place + 8)
        for start in (0, 100)
        for place, name in enumerate(names)
    ]
    # One that began before the recording.
    spans.append(_span("gpu_model_runner: sample", -30, -20))
    steps = steps_of_parts(spans)
    assert [(step.start_ns, step.end_ns) for step in steps] == [(0, 48), (100, 148)]
    assert all(step.work.phase is X and step.work.unknown for step in steps)


def test_draft_model_of_a_speculative_server() -> None:
    names = [
        "step[EXTEND bs=1 toks=8]",
        "step[EXTEND bs=1 toks=8]",
        "step[DECODE bs=1]",
        "step[TARGET_VERIFY bs=1]",
        "step[DRAFT_EXTEND_V2 bs=1]",
        "step[EXTEND bs=1 toks=8]",
        "step[EXTEND bs=1 toks=8]",
    ]
    steps = steps_announced([_span(name, 10 * at, 10 * at + 9) for at, name in enumerate(names)])
    T, A = Role.TARGET, Role.DRAFT
    assert [step.role for step in steps] == [T, A, A, T, A, T, A]
    assert steps[2].work.decode_tokens is None
    # Without a verification, equal steps are steps.
    again = steps_announced(
        [_span(names[0], 0, 9), _span(names[0], 10, 19), _span(names[2], 20, 29)]
    )
    assert [step.role for step in again] == [T, T, T]
    assert again[2].work.decode_tokens == 1
