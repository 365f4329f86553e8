"""For how many positions a step of vLLM computes the head, and which of its tokens have an adapter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phaseprof.events import ModelSeen
from phaseprof.records import EngineStep, ForwardPass, Request
from phaseprof.settling.rows import PassRows
from phaseprof.settling.steps import Steps
from phaseprof.vllm.events import Sampled, StepRan
from phaseprof.work.cost import AdapterCost, AttentionCost, ModelCost

ATTENTION = AttentionCost(
    layers=1,
    query_heads=1,
    kv_heads=1,
    qk_head_dim=1,
    v_head_dim=1,
    window_tokens=None,
    kv_bytes_per_token=4,
)
MODEL = ModelCost(
    linear_flops_per_token=0,
    head_flops_per_token=0,
    attention=(ATTENTION,),
    body_weight_bytes=0,
    head_weight_bytes=0,
    lookup_bytes_per_token=0,
    parameter_bytes=0,
    parameters=0,
    dtype="float32",
    adapter=AdapterCost(
        flops_per_token=1_000,
        head_flops_per_token=1_000_000,
        body_bytes=10,
        head_bytes=100,
        lookup_bytes_per_token=10_000,
    ),
)


class Rows:
    """Keeps the passes that are put."""

    def __init__(self) -> None:
        self.passes: list[ForwardPass] = []

    def put_pass(self, row: ForwardPass) -> None:
        self.passes.append(row)

    def put_request(self, row: Request) -> None:
        raise AssertionError("workers make no requests")

    def put_step(self, row: EngineStep) -> None:
        raise AssertionError("workers make no steps of an engine")


def begins(
    name: str, prompt: int, *, v2: bool = False, scored: bool = False, adapter: int = 0
) -> Any:
    """What the scheduler sends of a new request."""
    return SimpleNamespace(
        req_id=name,
        prompt_len=prompt,
        num_computed_tokens=0,
        sampling_params=SimpleNamespace(max_tokens=50, prompt_logprobs=1 if scored else None),
        prefill_token_ids=[1] * prompt if v2 else None,
        lora_request=SimpleNamespace(lora_int_id=adapter) if adapter else None,
    )


def settle(
    *steps: tuple[dict[str, int], list[Any], dict[str, int], dict[str, int]],
) -> list[ForwardPass]:
    """Run steps, each given as tokens scheduled, requests that begin, what the others have computed, and drafts."""
    kept = Rows()
    rows = PassRows(kept, offset_ns=0, first_pass_id=0)
    rows.know(ModelSeen("model", MODEL, "float32"))
    handler = Steps(rows)
    for number, (scheduled, new, past, drafts) in enumerate(steps):
        told = Sampled(list(scheduled), [1] * len(scheduled), [[5]] * len(scheduled))
        handler.handle(
            StepRan(
                runner=1,
                step=number,
                model_id="model",
                thread_id=1,
                start_ns=number * 10,
                executed_ns=number * 10 + 5,
                sample_ns=None,
                span=None,
                padded=None,
                error=None,
                end_ns=number * 10 + 9,
                scheduled=scheduled,
                drafts=drafts or None,
                new=new,
                prompts=[one.prompt_len for one in new],
                tokens=None,
                cached=list(past),
                computed=list(past.values()),
                outputs=[1] * len(past),
                resumed=frozenset(),
                finished=frozenset(),
                sampled=told,
                awaited=False,
                ends="sample",
                graph=False,
                compiled=False,
                encodes=False,
                warmup=False,
                profiled=False,
            )
        )
    return kept.passes


@pytest.mark.parametrize("v2", [False, True])
def test_one_row_for_each_request_and_each_draft(v2: bool) -> None:
    first, second = settle(
        ({"a": 9, "b": 4}, [begins("a", 9, v2=v2), begins("b", 20, v2=v2)], {}, {}),
        ({"a": 4, "b": 16}, [], {"a": 9, "b": 4}, {"a": 3}),
    )
    # A chunk that is not the last of its prompt has a row as well, which nobody uses.
    assert (first.logits_tokens, second.logits_tokens) == (2, 2 + 3)


def test_log_probabilities_of_a_prompt_take_a_row_for_each_token_that_another_follows() -> None:
    new = [begins("a", 12, scored=True), begins("b", 5)]
    rows = settle(
        ({"a": 8, "b": 5}, new, {}, {}),
        ({"a": 4, "b": 1}, [], {"a": 8, "b": 5}, {}),
        ({"a": 1, "b": 1}, [], {"a": 12, "b": 6}, {}),
    )
    assert [row.logits_tokens for row in rows] == [2 + 8, 2 + 3, 2]


def test_the_v2_runner_then_computes_them_for_the_whole_step() -> None:
    new = [begins("a", 12, v2=True, scored=True), begins("b", 5, v2=True)]
    rows = settle(
        ({"a": 8, "b": 5}, new, {}, {}),
        ({"a": 4, "b": 1}, [], {"a": 8, "b": 5}, {}),
        ({"a": 1, "b": 1}, [], {"a": 12, "b": 6}, {}),
    )
    assert [row.logits_tokens for row in rows] == [2 + 13, 2 + 5, 2]


def test_tokens_of_requests_with_adapters() -> None:
    """Two requests have the same one, a third another, a fourth none."""
    new = [
        begins("a", 3, adapter=7),
        begins("b", 4, adapter=7),
        begins("c", 5, adapter=8),
        begins("d", 6),
    ]
    first, second = settle(
        ({"a": 3, "b": 4, "c": 5, "d": 6}, new, {}, {}),
        ({"a": 3, "d": 1}, [], {"a": 3, "d": 6}, {"a": 2}),
    )
    attention = 4 * (6 + 10 + 15 + 21)
    assert first.flops == attention + 12 * 1_000 + 3 * 1_000_000
    assert first.weight_bytes == 12 * 10_000 + 2 * (10 + 100)
    assert second.flops == 4 * (4 + 5 + 6 + 7) + 3 * 1_000 + 3 * 1_000_000
    assert second.weight_bytes == 3 * 10_000 + 10 + 100
