"""Early exit: passes that draft with the first layers of a model are counted as those, the others as the whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.candidate_generator import EarlyExitCandidateGenerator

from phaseprof.work.count import Rows, count
from phaseprof.work.walk import model_cost

PROMPT = 12

pytestmark = pytest.mark.skipif(
    transformers.__version__.startswith("5.0."),
    reason="early exit of transformers 5.0 calls its own draft model with an argument too few",
)


def make_llama(layers: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def generate(model: Any) -> Any:
    ids = torch.arange(3, 3 + PROMPT)[None]
    return model.generate(ids, max_new_tokens=8, assistant_early_exit=1, do_sample=False)


def test_passes_that_draft_are_counted_as_the_layers_they_run(record: Callable[..., Any]) -> None:
    model = make_llama(3)
    plain = generate(model)
    recorded = record(lambda: generate(model))
    assert torch.equal(recorded.output, plain)
    assert model.config.num_hidden_layers == 3

    whole, first = model_cost(model), model_cost(make_llama(1))
    rows = recorded.passes("role", "flops", "weight_bytes", "kv_write_bytes", "logits_tokens",
                           "context_tokens", "attention_pairs")  # fmt: skip
    assert {row[0] for row in rows} == {"draft", "target"}
    for role, flops, weights, written, logits, context, pairs in rows:
        cost = first if role == "draft" else whole
        # Pairs and context of one sequence give the query: q past + q (q + 1) / 2 and past + q.
        query = next(
            q for q in range(1, context + 1) if q * (context - q) + q * (q + 1) // 2 == pairs
        )
        work = count(cost, [Rows(context - query, query, 1)], logits_tokens=logits, layout=None)
        assert (flops, weights, written) == (work.flops, work.weight_bytes, work.kv_write_bytes)
    ids = recorded.trace.passes.to_pylist()
    names = {row["role"]: row["model_id"] for row in ids}
    assert names["draft"] != names["target"]


def test_the_whole_model_is_back_after_the_call(record: Callable[..., Any]) -> None:
    model = make_llama(3)

    def both() -> None:
        generate(model)
        model(torch.arange(3, 9)[None])

    last = record(both).passes("flops", "model_id", "role")
    alone = record(lambda: model(torch.arange(3, 9)[None])).passes("flops")
    assert last[-1][0] == alone[0][0]
    assert last[-1][1] == next(model_id for _, model_id, role in last if role == "target")


# PEFT asks transformers for names that it has deprecated.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_with_adapters_exits_early_too(record: Callable[..., Any]) -> None:
    peft = pytest.importorskip("peft")
    model = make_llama(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, config).eval()
    ids = torch.arange(3, 3 + PROMPT)[None]
    recorded = record(
        lambda: wrapped.generate(
            input_ids=ids, max_new_tokens=8, assistant_early_exit=1, do_sample=False
        )
    )
    rows = recorded.passes("role", "model_id", "flops", "context_tokens", "logits_tokens")
    # 4 x (32 + 32) elements of an adapter a layer; the first draft reads the whole prompt.
    assert rows[0][0] == "draft" and rows[0][3] == PROMPT
    first = model_cost(make_llama(1))
    work = count(first, [Rows(0, PROMPT, 1)], logits_tokens=rows[0][4], layout=None)
    assert rows[0][2] == work.flops + PROMPT * 2 * 4 * (32 + 32)
    assert {role: model_id for role, model_id, *_ in rows}["target"] != rows[0][1]


def test_transformers_still_lowers_the_number_in_the_config() -> None:
    source = inspect.getsource(EarlyExitCandidateGenerator.get_candidates)
    assert "config.num_hidden_layers" in source
