"""Running requests of a known size: the passes that follow, the prompts that are drawn, and early ends."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from phaseprof.errors import ModelError
from phaseprof.process import this_host
from phaseprof.session import Session
from phaseprof.trace.reader import Trace, open_trace
from phaseprof.trace.writer import meta_path
from phaseprof.workload.generate import run_few_tokens, run_workload
from phaseprof.workload.load import choose_placement, random_model
from phaseprof.workload.plan import WorkloadOutcome, WorkloadPlan
from phaseprof.workload.resume import progressed

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
    "pad_token_id": 3,
}


def tiny(**changes: object) -> Any:
    return random_model({**TINY, **changes}, choose_placement("cpu"), name="tiny")


def record(model: Any, plan: WorkloadPlan, folder: Path) -> tuple[WorkloadOutcome, Trace]:
    session = Session(folder, model=model)
    session.start()
    try:
        outcome = run_workload(model, plan)
    finally:
        session.stop()
    return outcome, open_trace(folder)


def shapes(trace: Trace) -> Counter[tuple[str, int, int, int, str | None]]:
    """How many passes there are of (phase, sequences, prefill tokens, decode tokens, warm-up)."""
    columns = ["phase", "sequences", "prefill_tokens", "decode_tokens", "warmup"]
    return Counter(tuple(row[c] for c in columns) for row in trace.passes.to_pylist())


class Watched:
    """Keeps the input ids of every pass of a model."""

    def __init__(self, model: Any) -> None:
        self.inputs: list[torch.Tensor] = []
        self._handle = model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.inputs.append(kwargs["input_ids"].clone())

    @property
    def prompts(self) -> list[torch.Tensor]:
        return [ids for ids in self.inputs if ids.shape[1] > 1]


def test_every_pass_of_a_plan(tmp_path: Path) -> None:
    plan = WorkloadPlan(prompt_tokens=(9,), new_tokens=(6,), batches=(1, 3), warmup=1, repeats=2)
    outcome, trace = record(tiny(), plan, tmp_path / "t")
    assert outcome == WorkloadOutcome(calls=4, planned=4, interrupted=False)
    # A request of N new tokens is one prefill pass and N - 1 decode passes; a warm-up request has 4 new tokens.
    assert shapes(trace) == {
        ("prefill", 1, 9, 0, "requested"): 1,
        ("decode", 1, 0, 1, "requested"): 3,
        ("prefill", 3, 27, 0, "requested"): 1,
        ("decode", 3, 0, 3, "requested"): 3,
        ("prefill", 1, 9, 0, None): 2,
        ("decode", 1, 0, 1, None): 10,
        ("prefill", 3, 27, 0, None): 2,
        ("decode", 3, 0, 3, None): 10,
    }
    requests = [r for r in trace.requests.to_pylist() if r["warmup"] is None]
    assert len(requests) == 2 * (1 + 3)
    assert {(r["prompt_tokens"], r["output_tokens"]) for r in requests} == {(9, 6)}


def test_an_end_token_does_not_end_a_request_early(tmp_path: Path) -> None:
    model = tiny(eos_token_id=0)
    # All logits are equal: greedy decoding picks the first token that is allowed, and 0 is the end token.
    torch.nn.init.zeros_(model.lm_head.weight)
    plan = WorkloadPlan(prompt_tokens=(4,), new_tokens=(5,), warmup=0, repeats=1)
    _, trace = record(model, plan, tmp_path / "t")
    assert [r["output_tokens"] for r in trace.requests.to_pylist()] == [5]


def test_a_static_cache_is_used_and_warmed_up_at_full_length(tmp_path: Path) -> None:
    plan = WorkloadPlan(
        prompt_tokens=(4,), new_tokens=(8,), repeats=1, cache_implementation="static"
    )
    _, trace = record(tiny(), plan, tmp_path / "t")
    assert [model.cache_class for model in trace.metas[0].models] == ["StaticCache"]
    assert shapes(trace)["decode", 1, 0, 1, "requested"] == 7


def test_prompts_are_plain_tokens_of_the_exact_length_and_follow_the_seed() -> None:
    plan = WorkloadPlan(
        prompt_tokens=(33,), new_tokens=(1,), batches=(2,), warmup=0, repeats=3, seed=5
    )
    drawn = []
    for seed in (5, 5, 6):
        model = tiny()
        watched = Watched(model)
        run_workload(model, WorkloadPlan(**{**_fields(plan), "seed": seed}))
        drawn.append(torch.cat(watched.prompts))
    assert drawn[0].shape == (6, 33)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    # 198 draws from the 36 tokens that are neither begin (1), end (2, 7) nor padding (3) of a vocabulary of 40.
    seen = set(drawn[0].flatten().tolist())
    assert seen <= set(range(40)) - {1, 2, 3, 7}
    assert len(seen) > 30
    assert len({tuple(row.tolist()) for row in drawn[0]}) == 6


def _fields(plan: WorkloadPlan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__slots__}


def test_few_tokens_are_one_short_call_a_batch_size() -> None:
    model = tiny()
    watched = Watched(model)
    run_few_tokens(
        model, WorkloadPlan(prompt_tokens=(5,), new_tokens=(50,), batches=(1, 2), repeats=9)
    )
    assert [tuple(ids.shape) for ids in watched.inputs] == [
        *[(1, 5), (1, 1), (1, 1), (1, 1)],
        *[(2, 5), (2, 1), (2, 1), (2, 1)],
    ]


def calls_of(trace: Trace) -> list[tuple[str, int, int, int, int]]:
    names = ["kind", "prompt_tokens", "new_tokens", "sequences", "repeat"]
    return [tuple(row[name] for name in names) for row in trace.calls.to_pylist()]


def test_every_pass_lies_in_the_call_of_its_cell(tmp_path: Path) -> None:
    plan = WorkloadPlan(prompt_tokens=(5, 9), new_tokens=(3,), batches=(1, 2), repeats=2)
    _, trace = record(tiny(), plan, tmp_path / "t")
    kinds = Counter(call[0] for call in calls_of(trace))
    assert kinds == {"warmup": 4, "counted": 8}
    assert {call[1:] for call in calls_of(trace) if call[0] == "counted"} == {
        (prompt, 3, batch, repeat) for prompt in (5, 9) for batch in (1, 2) for repeat in (0, 1)
    }
    passes = trace.passes.to_pylist()
    for call in trace.calls.to_pylist():
        inside = [row for row in passes if call["start_ns"] <= row["start_ns"] <= call["end_ns"]]
        assert [row["phase"] for row in inside] == ["prefill", "decode", "decode"]
        assert {row["sequences"] for row in inside} == {call["sequences"]}
        assert inside[0]["prefill_tokens"] == call["prompt_tokens"] * call["sequences"]


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    plan = WorkloadPlan(prompt_tokens=(4, 6), new_tokens=(3,), batches=(1, 2), repeats=2)
    whole = tiny()
    uninterrupted = Watched(whole)
    run_workload(whole, plan)
    folder = tmp_path / "t"
    model = tiny()
    watched = Watched(model)
    # A warm-up call and a counted one have three passes each: the third counted one is cut in its second pass.
    raise_at_pass(model, 4 * 3 + 2 * 3 + 2, KeyboardInterrupt())
    session = Session(folder, workload=plan.facts())
    session.start()
    outcome = run_workload(model, plan)
    session.stop()
    assert outcome == WorkloadOutcome(calls=2, planned=8, interrupted=True)

    # The process that goes on has another id.
    here = this_host().token
    for meta in folder.glob("meta/*.json"):
        meta.write_text(meta.read_text().replace(f'"pid": {os.getpid()}', '"pid": 4194304'))
        meta.rename(meta_path(folder, 0, 4194304, here))
    done = progressed(folder, plan.facts())
    assert sum(map(len, done.calls.values())) == 2
    assert done.rounds(plan).planned == 6
    model = tiny()
    rest = Watched(model)
    outcome = run_workload(model, plan, done=done)
    assert outcome == WorkloadOutcome(calls=6, planned=6, interrupted=False)
    # What it runs is what was left, to the token.
    counted = uninterrupted.prompts[4:]
    assert all(
        torch.equal(*pair)
        for pair in zip([*watched.prompts[4:6], *rest.prompts[4:]], counted, strict=True)
    )


def test_an_encoder_decoder_runs_too(tmp_path: Path) -> None:
    config = {"model_type": "t5", "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2}
    config |= {"num_layers": 1, "vocab_size": 50, "decoder_start_token_id": 0}
    model: Any = random_model(config, choose_placement("cpu"), name="t5")
    plan = WorkloadPlan(prompt_tokens=(6,), new_tokens=(3,), warmup=0, repeats=1)
    outcome, trace = record(model, plan, tmp_path / "t")
    assert outcome.calls == 1
    assert trace.passes.num_rows >= 3


def raise_at_pass(model: Any, number: int, error: BaseException) -> None:
    seen = 0

    def hook(module: Any, args: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            raise error

    model.register_forward_pre_hook(hook)


def test_ctrl_c_keeps_what_was_recorded(tmp_path: Path) -> None:
    model = tiny()
    raise_at_pass(model, 8, KeyboardInterrupt())
    plan = WorkloadPlan(prompt_tokens=(4,), new_tokens=(5,), warmup=0, repeats=3)
    outcome, trace = record(model, plan, tmp_path / "t")
    assert outcome == WorkloadOutcome(calls=1, planned=3, interrupted=True)
    whole = [row for row in trace.passes.to_pylist() if row["error"] is None]
    assert [row["phase"] for row in whole] == ["prefill", *["decode"] * 4, "prefill", "decode"]


def test_a_failing_model_is_said_in_one_line(tmp_path: Path) -> None:
    model = tiny()
    raise_at_pass(model, 3, ValueError("first line\nsecond line"))
    plan = WorkloadPlan(prompt_tokens=(4,), new_tokens=(5,), warmup=0, repeats=1)
    with pytest.raises(ModelError) as caught:
        record(model, plan, tmp_path / "t")
    assert caught.value.message == "The model failed at batch 1: ValueError: first line."
    assert open_trace(tmp_path / "t").passes.num_rows >= 2


def test_memory_that_does_not_suffice_is_said() -> None:
    model = tiny()
    torch_error = None
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:  # what torch really raises on this machine
        torch_error = error
    assert torch_error is not None
    raise_at_pass(model, 1, torch_error)
    with pytest.raises(ModelError, match="memory does not hold batch 2 with 9 tokens a sequence"):
        run_workload(
            model,
            WorkloadPlan(prompt_tokens=(4,), new_tokens=(5,), batches=(2,), warmup=0, repeats=1),
        )


def test_progress_counts_the_calls() -> None:
    said: list[tuple[str, int, int]] = []

    def progress(text: str, done: int = 0, total: int = 0) -> None:
        said.append((text, done, total))

    plan = WorkloadPlan(prompt_tokens=(4,), new_tokens=(2,), batches=(1, 2), warmup=1, repeats=2)
    run_workload(tiny(), plan, progress=progress)
    assert said == [
        ("Warm-up, batch 1", 0, 2),
        ("Warm-up, batch 2", 1, 2),
        ("Generating, batch 1", 0, 4),
        ("Generating, batch 2", 1, 4),
        ("Generating, batch 2", 2, 4),
        ("Generating, batch 1", 3, 4),
        ("Generating", 4, 4),
    ]
