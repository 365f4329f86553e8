"""Assisted generation on real models, with drafts whose fate is known beforehand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from phaseprof.phases import RequestTokens, check_invariants

IDS = torch.arange(3, 12).reshape(1, 9)
NEW_TOKENS = 8


@pytest.fixture
def target(llama: LlamaForCausalLM) -> LlamaForCausalLM:
    """Never draws an end token, so that the number of tokens is that which was asked for."""
    model = copy.deepcopy(llama)
    model.generation_config.eos_token_id = None
    return model


def drafting(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Proposes three tokens each round, whatever it thinks of them."""
    model.generation_config.num_assistant_tokens = 3
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def test_a_twin_drafts_and_every_draft_is_accepted(target: LlamaForCausalLM, record: Any) -> None:
    """The draft model is the target's twin: greedy, it proposes what the target would say.

    Prompt 9, eight new tokens. Round one: the twin reads the prompt and drafts three; the target reads prompt and
    drafts at once, accepts three and adds one. Round two: the twin is fed its last draft and the target's token, then
    drafts; the target verifies its own last token and three drafts. That makes eight.
    """
    assistant = drafting(copy.deepcopy(target))

    def run() -> Any:
        return target.generate(
            IDS, max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=assistant
        )

    alone = run()
    recorded = record(run)
    assert torch.equal(alone, recorded.output)
    assert alone.shape[1] == 9 + NEW_TOKENS
    columns = (
        "role",
        "phase",
        "prefill_tokens",
        "decode_tokens",
        "draft_tokens",
        "accepted_tokens",
    )
    assert recorded.passes(*columns)[:7] == [
        ("draft", "prefill", 9, 0, 0, 0),
        ("draft", "decode", 0, 1, 0, 0),
        ("draft", "decode", 0, 1, 0, 0),
        ("target", "mixed", 9, 3, 3, 3),
        ("draft", "decode", 0, 2, 0, 0),
        ("draft", "decode", 0, 1, 0, 0),
        ("draft", "decode", 0, 1, 0, 0),
    ]
    assert recorded.passes(*columns)[7:] == [("target", "decode", 0, 4, 3, 3)]
    (request,) = recorded.trace.requests.to_pylist()
    assert (request["prompt_tokens"], request["output_tokens"]) == (9, NEW_TOKENS)


@pytest.mark.parametrize("mode", ["assistant", "prompt lookup"])
def test_the_invariants_hold_whatever_is_accepted(
    target: LlamaForCausalLM, record: Any, mode: str
) -> None:
    """A draft model that knows nothing, and drafts copied from the prompt: most are rejected."""
    torch.manual_seed(5)
    other = drafting(LlamaForCausalLM(copy.deepcopy(target.config)).eval())
    other.generation_config.eos_token_id = None
    settings: dict[str, Any] = (
        {"assistant_model": other} if mode == "assistant" else {"prompt_lookup_num_tokens": 3}
    )

    def run() -> Any:
        return target.generate(IDS, max_new_tokens=NEW_TOKENS, do_sample=False, **settings)

    alone = run()
    recorded = record(run)
    assert torch.equal(alone, recorded.output)
    target_rows = [row for row in recorded.trace.passes.to_pylist() if row["role"] == "target"]
    (request,) = recorded.trace.requests.to_pylist()
    assert request["output_tokens"] == NEW_TOKENS
    drafted = sum(row["draft_tokens"] for row in target_rows)
    accepted = sum(row["accepted_tokens"] for row in target_rows)
    assert drafted > accepted
    assert (
        check_invariants(
            [
                RequestTokens(
                    request_id=request["request_id"],
                    sequences=1,
                    prompt_tokens=request["prompt_tokens"],
                    cached_tokens=request["cached_tokens"],
                    recomputed_tokens=sum(row["recomputed_tokens"] for row in target_rows),
                    prefill_tokens=sum(row["prefill_tokens"] for row in target_rows),
                    decode_tokens=sum(row["decode_tokens"] for row in target_rows),
                    rejected_tokens=drafted - accepted,
                    output_tokens=NEW_TOKENS,
                )
            ]
        )
        == []
    )
