"""Operators that real models run on a CPU: each has a class, and products, attention and experts are counted right."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from phaseprof.analyzers.kernels.kernel_classes import classify
from phaseprof.analyzers.kernels.kernel_results import KernelClass

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
#: `at::RecordScope::FUNCTION`: an operator, no annotation.
_OPERATOR_SCOPE = 0


def model_of(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**_SMALL, **changes})
    return AutoModelForCausalLM.from_config(config).eval()


def outermost(model: Any, **changes: Any) -> list[str]:
    """The operators of a call of ``generate`` with three steps that no other operator calls."""
    ids = torch.randint(1, 99, (2, 9))
    options: dict[str, Any] = {
        "max_new_tokens": 3,
        "attention_mask": torch.ones_like(ids),
        **changes,
    }
    with torch.no_grad():
        model.generate(ids, **options)
        with profile(activities=[ProfilerActivity.CPU]) as session:
            model.generate(ids, **options)
    results: Any = session.profiler.kineto_results
    events = [
        event
        for event in results.events()
        if event.scope() == _OPERATOR_SCOPE and "::" in event.name()
    ]
    kept, until = [], 0
    for event in sorted(events, key=lambda event: (event.start_ns(), -event.end_ns())):
        if event.start_ns() >= until:
            kept.append(event.name())
            until = event.end_ns()
    return kept


def classes_of(names: list[str]) -> Counter[KernelClass]:
    return Counter(classify(name, on_cpu=True).kernel_class for name in names)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("gemma3_text", {"head_dim": 8}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
        ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}),
        ("bloom", {"n_layer": 2, "n_head": 4}),
    ],
)
def test_every_operator_has_a_class(kind: str, changes: dict[str, Any]) -> None:
    names = outermost(
        model_of(kind, **changes), do_sample=True, top_k=20, top_p=0.9, repetition_penalty=1.1
    )
    without = {
        name for name in names if classify(name, on_cpu=True).kernel_class is KernelClass.OTHER
    }
    assert without == set()
    assert {name for name in names if classify(name, on_cpu=True).by_word} == set()


def test_products_and_attention_of_a_dense_model_are_those_of_its_layers() -> None:
    """Three passes of two layers: four projections, three of the MLP, and the head; one attention a layer."""
    names = outermost(model_of("llama"), do_sample=False)
    found = classes_of(names)
    assert names.count("aten::linear") == 3 * (2 * 7 + 1)
    # The angles of the rotary embedding are one more product in each pass of some versions.
    assert found[KernelClass.GEMM] - 3 * (2 * 7 + 1) in (0, 3)
    assert found[KernelClass.ATTENTION] == 3 * 2
    assert found[KernelClass.EMBEDDING] == 3
    assert found[KernelClass.ACTIVATION] == 3 * 2
    assert found[KernelClass.SAMPLING] == 3


def test_experts_are_told_from_dense_products() -> None:
    names = outermost(
        model_of("mixtral", num_local_experts=4, num_experts_per_tok=2), do_sample=False
    )
    grouped = [name for name in names if "grouped_mm" in name]
    if not grouped:
        pytest.skip("this version of transformers loops over the experts of a model on a CPU")
    # Two in each layer of a pass; older versions loop in passes of few tokens.
    assert len(grouped) in (2 * 2, 3 * 2 * 2)
    assert set(classes_of(grouped)) == {KernelClass.MOE}
