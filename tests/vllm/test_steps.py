"""The steps of a real engine: mixed steps, chunks, cached prefixes, children, aborts, and what is left of us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm_engines import Recorded, generate, prompts, sampling, tokens_of

Record = Callable[[Callable[[], Any]], Recorded]


def test_two_prompts_and_their_tokens(engine: Any, record: Record) -> None:
    recorded = record(lambda: generate(engine, prompts(9, 20, first=11), sampling(3)))
    assert recorded.short() == [
        "prefill | a: prefill 0+9, b: prefill 0+20",
        "decode | a: decode 9+1, b: decode 20+1",
        "decode | a: decode 10+1, b: decode 21+1",
    ]
    assert set(recorded.passes("role", "tag_source", "compiled", "graph", "error")) == {
        ("target", "scheduler", False, False, None)
    }
    assert recorded.passes("step", "sequences", "logits_tokens", "padding_tokens") == [
        (recorded.passes("step")[0][0] + n, 2, 2, 0) for n in range(3)
    ]
    assert recorded.passes("context_tokens", "attention_pairs") == [
        (29, 9 * 10 // 2 + 20 * 21 // 2),
        (31, 31),
        (33, 33),
    ]
    assert recorded.broken({"a": 3, "b": 3}, cached=0) == []
    (meta,) = recorded.trace.metas
    (model,) = meta.models
    assert (model.class_name, model.engine, model.tensor_ranks) == ("LlamaForCausalLM", "vllm", ())
    assert meta.versions["vllm"] == __import__("vllm").__version__
    assert any(label.startswith("vllm 0.") for label in meta.hooks)
    assert not {what for what in recorded.notes() if "vLLM" in what or "passes" in what}


def test_the_engines_ids_are_the_requests(engine: Any, record: Record) -> None:
    """What the client knows is the id without its suffix."""
    recorded = record(lambda: generate(engine, prompts(4, 5, first=23), sampling(1)))
    ((slices,),) = recorded.passes("slices")
    assert [one["request_id"].rpartition("-")[0] for one in slices] == [
        output.request_id for output in recorded.output
    ]


def test_outputs_are_the_same_with_and_without(engine: Any, record: Record) -> None:
    inputs = prompts(7, 40, 21, 1, first=31)
    plain = tokens_of(generate(engine, inputs, sampling(6, logprobs=2)))
    engine.reset_prefix_cache()
    recorded = record(lambda: generate(engine, inputs, sampling(6, logprobs=2)))
    assert tokens_of(recorded.output) == plain


def test_a_long_prompt_is_mixed_with_what_decodes(engine: Any, record: Record) -> None:
    """32 tokens a step: the prompt of 70 takes what the request that decodes leaves, and ends with one of 8 tokens."""
    engine.reset_prefix_cache()
    first, second = prompts(5, 70, first=41)
    recorded = record(lambda: generate(engine, [first, second], sampling(5)))
    assert recorded.short() == [
        "prefill | a: prefill 0+5, b: prefill 0+27",
        "mixed | a: decode 5+1, b: prefill 27+31",
        "mixed | a: decode 6+1, b: prefill 58+12",
        "decode | a: decode 7+1, b: decode 70+1",
        "decode | a: decode 8+1, b: decode 71+1",
        "decode | b: decode 72+1",
        "decode | b: decode 73+1",
    ]
    assert recorded.passes("prefill_tokens", "decode_tokens")[:3] == [(32, 0), (31, 1), (12, 1)]
    # A chunk that is not the last has its last position computed by the head as well, for nobody.
    assert recorded.passes("logits_tokens")[:2] == [(2,), (2,)]
    assert recorded.broken({"a": 5, "b": 5}, cached=0) == []


def test_a_last_chunk_of_one_token_is_prefill(engine: Any, record: Record) -> None:
    engine.reset_prefix_cache()
    recorded = record(lambda: generate(engine, prompts(33, first=51), sampling(2)))
    assert recorded.short() == [
        "prefill | a: prefill 0+32",
        "prefill | a: prefill 32+1",
        "decode | a: decode 33+1",
    ]


def test_a_prompt_of_one_token_is_prefill(engine: Any, record: Record) -> None:
    recorded = record(lambda: generate(engine, prompts(1, 1, first=61), sampling(2)))
    assert recorded.short() == [
        "prefill | a: prefill 0+1, b: prefill 0+1",
        "decode | a: decode 1+1, b: decode 1+1",
    ]
    assert recorded.broken({"a": 2, "b": 2}, cached=0) == []


def test_one_output_token_has_no_decode(engine: Any, record: Record) -> None:
    recorded = record(lambda: generate(engine, prompts(6, first=71), sampling(1)))
    assert recorded.short() == ["prefill | a: prefill 0+6"]


def test_a_cached_prefix_leaves_one_token(engine: Any, record: Record) -> None:
    """A block is of 32 tokens: of 33 one is left, and it is prefill."""
    engine.reset_prefix_cache()
    inputs = prompts(33, first=81)
    recorded = record(
        lambda: [generate(engine, inputs, sampling(2)), generate(engine, inputs, sampling(2))]
    )
    assert recorded.short() == [
        "prefill | a: prefill 0+32",
        "prefill | a: prefill 32+1",
        "decode | a: decode 33+1",
        "prefill | b: prefill 32+1",
        "decode | b: decode 33+1",
    ]
    assert recorded.passes("cached_tokens") == [(0,), (0,), (0,), (32,), (0,)]
    assert [[s["cached"] for s in row] for (row,) in recorded.passes("slices")] == [
        *([0], [0], [0], [32], [0])
    ]
    assert recorded.broken({"a": 2, "b": 2}, cached=32) == []


def test_several_answers_are_requests_of_their_own(engine: Any, record: Record) -> None:
    """n = 3: each computes its prompt, or finds what another has computed of it, by whole blocks."""
    engine.reset_prefix_cache()
    recorded = record(
        lambda: generate(engine, prompts(10, first=91), sampling(3, n=3, temperature=1.0))
    )
    assert len(tokens_of(recorded.output)) == 3
    assert recorded.short() == [
        "prefill | a: prefill 0+10, b: prefill 0+10, c: prefill 0+10",
        "decode | a: decode 10+1, b: decode 10+1, c: decode 10+1",
        "decode | a: decode 11+1, b: decode 11+1, c: decode 11+1",
    ]
    assert recorded.broken({"a": 3, "b": 3, "c": 3}, cached=0) == []


def test_a_request_that_is_aborted_leaves_the_steps_of_the_others(
    engine: Any, record: Record
) -> None:
    core = engine.llm_engine

    def run() -> None:
        for name, prompt in zip(("x", "y"), prompts(6, 8, first=101), strict=True):
            core.add_request(name, prompt, sampling(8))
        core.step()
        core.step()
        core.abort_request(["x"])
        while core.has_unfinished_requests():
            core.step()

    recorded = record(run)
    assert recorded.short() == [
        "prefill | a: prefill 0+6, b: prefill 0+8",
        "decode | a: decode 6+1, b: decode 8+1",
        *[f"decode | b: decode {past}+1" for past in range(9, 15)],
    ]


def test_an_end_token_ends_a_request(engine: Any, record: Record) -> None:
    """A stop token that comes: nothing is computed after it."""
    inputs = prompts(12, first=111)
    (answer,) = tokens_of(generate(engine, inputs, sampling(10)))
    stop = answer[3]
    engine.reset_prefix_cache()
    recorded = record(lambda: generate(engine, inputs, sampling(10, stop_token_ids=[stop])))
    (got,) = tokens_of(recorded.output)
    assert got == answer[: answer.index(stop) + 1]
    assert len(recorded.passes("phase")) == len(got)
    assert recorded.broken({"a": len(got)}, cached=0) == []


def test_a_session_that_begins_midway(engine: Any, record: Record) -> None:
    """What a request came with is told by where it stands."""
    core = engine.llm_engine
    for name, prompt in zip(("p", "q"), prompts(6, 60, first=121), strict=True):
        core.add_request(name, prompt, sampling(6))
    core.step()

    def run() -> None:
        while core.has_unfinished_requests():
            core.step()

    recorded = record(run)
    assert recorded.short() == [
        "mixed | a: decode 6+1, b: prefill 26+31",
        "mixed | a: decode 7+1, b: prefill 57+3",
        *["decode | a: decode 8+1, b: decode 60+1", "decode | a: decode 9+1, b: decode 61+1"],
        "decode | a: decode 10+1, b: decode 62+1",
        *["decode | b: decode 63+1", "decode | b: decode 64+1"],
    ]


def test_warmup_and_profiled_are_taken_over(engine: Any, record: Record) -> None:
    import phaseprof
    from phaseprof.session import profiled_passes

    def run() -> None:
        with phaseprof.warmup():
            generate(engine, prompts(4, first=131), sampling(1))
        with profiled_passes():
            generate(engine, prompts(4, first=141), sampling(1))

    recorded = record(run)
    assert recorded.passes("warmup", "profiled") == [("requested", False), (None, True)]


def test_a_step_that_fails_is_an_error_and_nothing_of_ours_is_in_the_way(
    engine: Any, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise FloatingPointError("of the model")

    def run() -> None:
        output = _scheduled_of(runner, ("z", 3))
        monkeypatch.setattr(runner, "_preprocess", fails)
        with pytest.raises(FloatingPointError, match="of the model"):
            runner.execute_model(output)
        monkeypatch.undo()

    recorded = record(run)
    assert recorded.passes("phase", "error", "prefill_tokens") == [
        ("prefill", "FloatingPointError", 3)
    ]
    # The engine goes on: what it was told of the request is taken back.
    from vllm.v1.core.sched.output import SchedulerOutput

    gone = SchedulerOutput.make_empty()
    gone.finished_req_ids = {"z"}
    runner.execute_model(gone)
    assert len(tokens_of(generate(engine, prompts(4, first=151), sampling(2)))[0]) == 2


def _scheduled_of(runner: Any, *requests: tuple[str, int]) -> Any:
    """A step that begins requests of prompts of these lengths."""
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    return SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData(name, [5] * n, [], sampling(4), None, ([1],), 0, None)
            for name, n in requests
        ],
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        num_scheduled_tokens=dict(requests),
        total_num_scheduled_tokens=sum(n for _, n in requests),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
    )


def test_worker_and_scheduler_count_the_same_steps(engine: Any, record: Record) -> None:
    """A pass is joined to the step that scheduled it by its number, also where a session begins with requests under
    way and steps of no token lie between."""
    core = engine.llm_engine
    for name, prompt in zip(("j", "k"), prompts(6, 40, first=201), strict=True):
        core.add_request(name, prompt, sampling(4))
    core.step()

    def run() -> None:
        while core.has_unfinished_requests():
            core.step()
        # Told that they have ended, the worker has nothing to compute.
        core.step()
        generate(engine, prompts(5, first=211), sampling(2))

    recorded = record(run)
    steps = recorded.trace.steps.sort_by("step").to_pylist()
    assert [row["step"] for row in steps] == list(range(len(recorded.passes("step"))))
    for row, (step, tokens, start, end) in zip(
        steps, recorded.passes("step", "slices", "start_ns", "end_ns"), strict=True
    ):
        assert row["step"] == step
        assert row["scheduled_tokens"] == sum(one["query"] for one in tokens)
        assert row["start_ns"] < start < end
